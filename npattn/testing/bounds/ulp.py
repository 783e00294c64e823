"""Distances in units of rounding: how far a stored number may be from the number before storage."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from npattn.problem.arrays import Array, finfo


def excess(got: Array, exact: Array) -> Array:
    """Return the distance from `exact` to the interval of reals that round to `got`.

    Rounding is monotone: an implementation that computed some x within t of `exact`, and returned x
    rounded to the dtype of `got`, has an excess of at most t. 0 where both are non-finite; inf
    where only one is.
    """
    got = real(got)
    with np.errstate(all="ignore"):
        wide = got.astype(np.float64)
        return excess_of(got, wide, exact, exact - wide)


def excess_of(got: Array, wide: Array, exact: Array, over: Array) -> Array:
    """Return `excess`, from `wide` (got in float64) and `over` (exact − wide), of one shape.

    `over` is exact where it is small, so no midpoint has to be a float64 number.
    """
    top = largest(got.dtype)
    rise = np.nextafter(got, top).astype(np.float64) - wide
    fall = wide - np.nextafter(got, -top).astype(np.float64)
    if not (rise.all() and fall.all()):
        # The largest number has no next one: what rounds to it lies as far above as below.
        rise, fall = np.where(rise > 0, rise, fall), np.where(fall > 0, fall, rise)
    gap = np.maximum(np.maximum(over - rise / 2, -over - fall / 2), 0)
    if np.isfinite(over).all():
        return np.asarray(gap)
    gap = np.where(np.isfinite(wide), gap, np.inf)
    return np.where(np.isfinite(exact), gap, np.where(np.isfinite(wide), np.inf, 0))


@cache
def largest(dtype: np.dtype[Any]) -> Array:
    """Return the largest finite number of a dtype, in that dtype."""
    return np.array(finfo(dtype).max, dtype)


def half_ulp(got: Array) -> Array:
    """Return half the larger gap beside each number: the largest error of rounding to it."""
    got = real(got)
    with np.errstate(all="ignore"):
        size, top = abs(got), largest(got.dtype)
        wide = size.astype(np.float64)
        gap = np.nextafter(size, top).astype(np.float64) - wide  # the larger is away from 0
        if not gap.all():
            gap = np.maximum(gap, wide - np.nextafter(size, -top).astype(np.float64))
    return np.asarray(
        gap / 2 if np.isfinite(wide).all() else np.where(np.isfinite(wide), gap / 2, 0.0)
    )


def real(got: Array) -> Array:
    """Return `got` as a real floating array; numbers with an imaginary part become NaN."""
    if np.iscomplexobj(got):
        return np.where(got.imag == 0, got.real, np.nan)
    kind = got.dtype.kind
    return got.astype(np.float64) if kind in "biu" else got
