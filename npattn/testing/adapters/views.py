"""Lay arrays out in memory: transposed, stepped, reversed, repeated, or packed into one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array


def lay_out(array: Array, view: str, swap: bool) -> Array:
    """Return a copy of `array`, of any shape, in the memory layout of one of `VIEWS` of a recipe.

    "expanded" needs a first axis that repeats one value, and otherwise gives a plain copy.
    "shifted" is contiguous, one element behind the start of its buffer. `swap` exchanges axes -2
    and -3.
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
    if view == "shifted":
        buffer = np.empty(array.size + 1, array.dtype)[1:].reshape(array.shape)
        buffer[...] = array
        return buffer
    if view == "reversed":
        return array[..., ::-1, :].copy()[..., ::-1, :]
    repeats = array.ndim > 2 and len(array) > 1 and (array == array[:1]).all()
    if view == "expanded" and repeats:  # a stride of 0 can hold it
        return np.broadcast_to(array[:1].copy(), array.shape)
    return array.copy()


def pack(q: Array, k: Array, v: Array, by_head: bool = False) -> Array:
    """Pack q, k, v of one length and size into one buffer, as a fused projection does.

    From q (..., H, T, D) and k, v (..., K, T, D) it is (..., T, H + 2K, D), [Q | K | V]; by head,
    for K = H, (..., T, 3H, D), [q|k|v] head by head; from (T, D) each it is (T, 3, D).
    """
    if q.ndim == 2:
        return np.stack([q, k, v], axis=1)
    heads_last = [x.swapaxes(-2, -3) for x in (q, k, v)]
    if not by_head:
        return np.concatenate(heads_last, axis=-2)
    *lead, H, D = heads_last[0].shape
    return np.stack(heads_last, axis=-2).reshape(*lead, 3 * H, D)


def unpack(packed: Any, problem: Problem, by_head: bool, swap: bool) -> tuple[Any, Any, Any]:
    """Return q, k, v as slices of a buffer of any framework that `pack` has filled.

    `swap` leaves the heads behind the queries, (..., T, H, D).
    """
    H, K = problem.H, problem.K
    if problem.headless:
        return packed[:, 0], packed[:, 1], packed[:, 2]
    ends = (slice(0, H), slice(H, H + K), slice(H + K, H + 2 * K))
    if by_head:
        ends = (slice(0, None, 3), slice(1, None, 3), slice(2, None, 3))
    parts = [packed[..., heads, :] for heads in ends]
    q, k, v = parts if swap else (x.swapaxes(-2, -3) for x in parts)
    return q, k, v
