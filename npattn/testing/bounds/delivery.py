"""Error of o that is returned in 8 bits, with a factor that the caller gives.

y = o / f        L the largest number of the format        docs/tolerance.md, (51)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.problem.arrays import Array, finfo
from npattn.quantization import largest
from npattn.testing.bounds.rounding import Rounding, Units


def delivery_error(
    o: Array, allowed: Array, factor: Array, dtype: Any, rounding: Rounding, computed: Any
) -> Array:
    """Return the allowed error of o as 8 bits times its factor.

    Parameters
    ----------
    o : float64 array (..., H, T, E)
        Exact values.
    allowed : float64 array (..., H, T, E)
        Allowed error before o is divided by its factor.
    factor : array
        What the numbers of 8 bits are multiplied by; it broadcasts against o.
    dtype : dtype
        Format of 8 bits.
    computed : dtype
        The dtype of q, k, v that the rounding model is of.

    Returns
    -------
    float64 array (..., H, T, E)
        inf where o is not finite and the format has no NaN.
    """
    unit, top = Units.of(rounding, computed), largest(dtype)
    # The factor, its reciprocal and the product are rounded; o itself is, if it is an array.
    apart = 3 * unit.u / (1 - 3 * unit.u) + (unit.low.u if rounding.scores == "input" else 0)
    size = abs(o)
    with np.errstate(invalid="ignore"):
        before = allowed + apart * (size + allowed)
        stored = np.minimum((size + before) / factor, top)
        beyond = np.maximum(size / factor - top, 0)
        error = before + factor * (half_gap(stored, dtype) + beyond)
    lost = np.dtype(dtype) == np.int8
    return np.where(np.isfinite(o) | (not lost), error, np.inf)


def half_gap(size: Array, dtype: Any) -> Array:
    """Return half the gap between the numbers of a format of 8 bits at each size ≥ 0."""
    if np.dtype(dtype) == np.int8:
        return np.full(np.shape(size), 0.5)
    info = finfo(dtype)
    with np.errstate(divide="ignore"):
        binade = np.exp2(np.floor(np.log2(size)))
    return np.asarray(np.maximum(binade * float(info.eps), float(info.smallest_subnormal)) / 2)
