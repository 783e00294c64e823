"""Distance of two results of the same exact value, in units of the tolerance and in ulps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npattn.problem.arrays import Array, finfo
from npattn.testing.bounds.rounding import Units
from npattn.testing.bounds.ulp import half_ulp, real
from npattn.testing.trial import Trial


class Judged(NamedTuple):
    """One result of one implementation: what it returned, the exact value and the tolerance."""

    array: Array
    exact: Array
    tolerance: Array

    @property
    def errors(self) -> Array:
        """Errors in units of the tolerance; 0 for what is no number, none for another shape."""
        if self.array.shape != self.exact.shape:
            return np.zeros(0)
        with np.errstate(all="ignore"):
            errors = (real(self.array).astype(np.float64) - self.exact) / self.tolerance
        return np.where(np.isfinite(errors), errors, 0)


def bits_differ(a: Array, b: Array) -> Array:
    """Return where two arrays of one shape have other bits; NaN is NaN, whatever its payload."""
    if a.dtype != b.dtype:
        return np.ones(a.shape, bool)
    a, b = (np.where(np.isnan(x), np.array(np.nan, x.dtype), x) for x in (a, b))
    kind = f"u{a.dtype.itemsize}"
    return np.asarray(np.ascontiguousarray(a).view(kind) != np.ascontiguousarray(b).view(kind))


def mean_same(a: Judged, b: Judged, trial: Trial) -> Array:
    """Return where the exact values of both are the same, but for errors of the oracle.

    Elsewhere their conventions differ, and the results are not compared.
    """
    unit = Units.of(trial.rounding, trial.space.dtype).u
    share = float(np.finfo(np.float64).eps) / 2 / unit  # of the tolerance: the oracle's own error
    with np.errstate(invalid="ignore"):
        near = abs(a.exact - b.exact) <= share * (a.tolerance + b.tolerance)
    both = np.isnan(a.exact) & np.isnan(b.exact)
    return np.asarray((a.exact == b.exact) | both | near)


def ratios(a: Judged, b: Judged) -> Array:
    """Return the differences in units of the larger tolerance, element by element.

    Rounding the results to their dtype costs nothing, as in a verdict. inf where one is a number
    and the other is not.
    """
    x, y = real(a.array), real(b.array)
    wide, other = x.astype(np.float64), y.astype(np.float64)
    tolerance = np.fmax(a.tolerance, b.tolerance)
    with np.errstate(all="ignore"):
        gap = np.maximum(abs(wide - other) - half_ulp(x) - half_ulp(y), 0)
        ratio = np.where(gap == 0, 0, gap / tolerance)
        top = min(float(finfo(z.dtype).max) for z in (x, y))
        beyond = abs(a.exact) + tolerance > top  # either may overflow there
    one = np.isfinite(wide) != np.isfinite(other)
    neither = ~np.isfinite(wide) & ~np.isfinite(other)
    ratio = np.where(one & ~beyond, np.inf, np.where(neither | beyond, 0, ratio))
    return np.where(np.isposinf(tolerance), 0, ratio)


def ulps(name: str, a: Array, b: Array, exact: Array) -> Array:
    """Return the differences in ulps of the wider spaced dtype, element by element.

    a, b and exact have one shape. An ulp is the gap between numbers at the largest element of the
    row, since small elements of a row are differences of large terms; at 1 or more for an lse,
    which is a logarithm.
    """
    dtype = max(a.dtype, b.dtype, key=lambda x: float(finfo(x).eps))
    wide, other = real(a).astype(np.float64), real(b).astype(np.float64)
    sizes = [np.where(np.isfinite(x), abs(x), 0) for x in (wide, other, exact)]
    size = np.minimum(np.maximum.reduce(sizes), float(finfo(dtype).max))
    if name == "lse":
        size = np.maximum(size, 1)
    elif size.size:
        size = np.broadcast_to(size.max(-1, keepdims=True), exact.shape)
    with np.errstate(all="ignore"):
        steps = np.where(wide == other, 0, abs(wide - other) / (2 * half_ulp(size.astype(dtype))))
    one = np.isfinite(wide) != np.isfinite(other)
    return np.where(one, np.inf, np.nan_to_num(steps, nan=0.0, posinf=np.inf))


def farthest(
    name: str, a: Judged, b: Judged, where: Array | bool = True
) -> tuple[float, float, tuple[int, ...]]:
    """Return the largest ratio of two results of one shape, the ulps there, and the place."""
    ratio, steps = ratios(a, b), ulps(name, a.array, b.array, a.exact)
    ratio, steps = (np.where(where, x, 0) for x in (ratio, steps))
    if not ratio.size:
        return 0.0, 0.0, ()
    place = np.unravel_index(int(np.lexsort((steps.ravel(), ratio.ravel()))[-1]), ratio.shape)
    return float(ratio[place]), float(steps[place]), tuple(map(int, place))
