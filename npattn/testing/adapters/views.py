"""Lay arrays out in memory: transposed, stepped, reversed, or repeated by a stride of 0."""

from __future__ import annotations

import numpy as np

from npattn.arrays import Array

__all__ = ["lay_out"]


def lay_out(array: Array, view: str, swap: bool) -> Array:
    """Return a copy of `array` in the memory layout of a view.

    Parameters
    ----------
    array : array
    view : str
        One of `npattn.testing.cases.recipe.VIEWS`; "expanded" needs a first axis that repeats one
        value, and otherwise gives a plain copy.
    swap : bool
        Swap axes -2 and -3.
    """
    if swap:
        array = np.ascontiguousarray(array.swapaxes(-2, -3))
    if view == "transposed" and array.ndim > 2:
        return array.swapaxes(-2, -3).copy().swapaxes(-2, -3)
    if view == "transposed":
        return array.copy("F")
    if view == "stepped":
        buffer = np.zeros(
            (*array.shape[:-2], 2 * array.shape[-2], 2 * array.shape[-1]), array.dtype
        )
        buffer[..., ::2, ::2] = array
        return buffer[..., ::2, ::2]
    if view == "reversed":
        return array[..., ::-1, :].copy()[..., ::-1, :]
    if view == "expanded" and array.ndim > 2 and array.shape[0] > 1 and _is_constant(array):
        return np.broadcast_to(array[:1].copy(), array.shape)
    return array.copy()


def _is_constant(array: Array) -> bool:
    """Return True if the first axis repeats one value, so that a stride of 0 can hold it."""
    return bool((array == array[:1]).all())
