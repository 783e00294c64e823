"""Errors of queries and keys that enter their product as integers, with factors of their own.

docs/tolerance.md §3 derives them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.bounds.rounding import Integers, Units


class IntegerErrors(NamedTuple):
    """How far each element of q and k is from the integer that stands for it, times its factor."""

    q: Array  # (..., T, 1) largest error of an element
    k: Array  # (..., S, 1)
    keys: Array  # (..., S, D) the keys that were rounded
    far: Array  # (..., 1, 1) how far those may be from the keys that an implementation rounds

    def of_scores(self, q: Array, u: float) -> Array:
        """Return the largest error of each q kᵀ, its float32 operations included."""
        q, D = abs(q), q.shape[-1]
        keys = abs(self.keys) + self.far
        q_sum, k_sum = q.sum(-1, keepdims=True), keys.sum(-1, keepdims=True)
        error = self.q * k_sum.swapaxes(-1, -2) + (q_sum + D * self.q) * self.k.swapaxes(-1, -2)
        return error + (D + 6) * u * (q @ keys.swapaxes(-1, -2))

    def variance(self, q: Array) -> Array:
        """Return the variance of the same: an integer errs evenly within its half step."""
        D = q.shape[-1]
        var_q, var_k = self.q**2 / 3, self.k.swapaxes(-1, -2) ** 2 / 3
        k2 = (self.keys**2).sum(-1, keepdims=True).swapaxes(-1, -2)
        q2 = (q**2).sum(-1, keepdims=True)
        return var_q * k2 + (q2 + D * var_q) * var_k


def integer_errors(integers: Integers, q: Array, keys: Array, unit: Units) -> IntegerErrors:
    """Return the errors of the integers for finite q (..., T, D) and keys (..., S, D)."""
    far = np.zeros((1, 1))
    mean_rounding = 0.0  # of keys less their mean, which are stored
    if integers.centred and keys.shape[-2]:
        S = keys.shape[-2]
        size = abs(keys).max(axis=(-2, -1), keepdims=True, initial=0)
        far, mean_rounding = (2 * unit.low.u + (S + 2) * unit.u) * size, unit.low.u
        keys = keys - keys.mean(-2, keepdims=True)
    half = 0.5 / integers.largest + 4 * unit.u
    return IntegerErrors(
        half * _block_maxima(abs(q), integers.q_rows),
        (half + mean_rounding) * (_block_maxima(abs(keys), integers.k_rows) + far),
        keys,
        far,
    )


def _block_maxima(x: Array, rows: int | None) -> Array:
    """Return for each row the largest number of its block of rows, (..., T, 1)."""
    top = x.max(-1, initial=0)
    n = top.shape[-1]
    if n == 0:
        return top[..., None]
    starts = np.arange(0, n, rows or n)
    blocks = np.maximum.reduceat(top, starts, axis=-1)
    return np.repeat(blocks, np.diff(starts, append=n), axis=-1)[..., None]
