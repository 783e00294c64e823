"""Arithmetic for identities: results of the implementation, and how far each may be off.

Correct results are within the tolerance of exact ones, and exact ones satisfy the identity. So both
of its sides are computed from `Estimate`s, and differ by no more than the errors of both together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from npattn.problem.arrays import Array, finfo
from npattn.testing.bounds.rounding import unit_roundoff
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.comparison import Comparison, compare_arrays
from npattn.testing.trial import Evaluation, Trial

U = unit_roundoff(np.float64)


class Estimate(NamedTuple):
    """A value computed from results of the implementation, and a bound on its error."""

    value: Array  # float64
    error: Array  # inf if nothing is required; then value is 0

    @classmethod
    def of(cls, evaluation: Evaluation, name: str) -> Estimate | None:
        """Estimate of a result; None if it is missing, or has the wrong shape or kind."""
        result, exact = evaluation.results.get(name), evaluation.exact.get(name)
        if result is None or exact is None:
            return None
        if result.shape != exact.shape or result.dtype.kind in "biuc":
            return None
        value, error = result.astype(np.float64), evaluation.tolerance[name] + half_ulp(result)
        # Nothing is required if the dtype may overflow, or a convention leaves it undefined.
        beyond = abs(exact) + evaluation.tolerance[name] > float(finfo(result.dtype).max)
        free = ~np.isfinite(exact) | (~np.isfinite(value) & beyond)
        return cls(value, error).where(~free)

    def where(self, here: Array) -> Estimate:
        """Require nothing elsewhere."""
        return Estimate(np.where(here, self.value, 0), np.where(here, self.error, np.inf))

    @np.errstate(all="ignore")  # a wrong implementation may give anything
    def times(self, factor: Array | float) -> Estimate:
        value = self.value * factor
        # 0 times an unknown value is 0.
        error = np.where(factor == 0, 0, self.error * abs(factor))
        return Estimate(value, error + _roundoff(value))

    @np.errstate(all="ignore")
    def plus(self, other: Estimate) -> Estimate:
        value = self.value + other.value
        return Estimate(value, self.error + other.error + _roundoff(value))

    def minus(self, other: Estimate) -> Estimate:
        return self.plus(Estimate(-other.value, other.error))

    @np.errstate(all="ignore")
    def over(self, add: Callable[[Array], Array]) -> Estimate:
        """Apply `add`, which sums elements, or leaves some out."""
        value = add(self.value)
        terms = self.value.size / max(value.size, 1)
        return Estimate(value, add(self.error) + terms * add(_roundoff(self.value)))


def _roundoff(value: Array) -> Array:
    """Rounding error of one operation in float64."""
    return U * np.where(np.isfinite(value), abs(value), 0)


def exact(value: Array | float) -> Estimate:
    """Estimate without error."""
    array = np.asarray(value, np.float64)
    return Estimate(array, np.zeros_like(array))


def agree(name: str, first: Estimate, second: Estimate) -> Comparison:
    """Compare the two sides of an identity, within the errors of both together."""
    # If nothing is required values are 0, so that whatever is not finite is wrong on either side.
    finite = np.isfinite(second.value)
    value, reference = np.where(finite, first.value, np.nan), np.where(finite, second.value, 0)
    tolerance = np.broadcast_to(first.error + second.error, value.shape)
    return compare_arrays(name, value, np.broadcast_to(reference, value.shape), tolerance)


def agree_all(
    first: Evaluation, second: Evaluation, across: Mapping[str, Callable[[Array], Array]]
) -> list[Comparison]:
    """Compare the results of `second` with those of `first`, carried across by name."""
    comparisons = []
    for name, carry in across.items():
        here, there = Estimate.of(first, name), Estimate.of(second, name)
        if here is not None and there is not None:
            comparisons.append(agree(name, there, here.over(carry)))
    return comparisons


def forward_only(trial: Trial) -> Trial:
    """Return the same trial without gradients."""
    return replace(trial, gradients=frozenset())


def round_to_grid(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Round x and y to multiples of one power of two; return them and their sum, which is exact."""
    limits, dtype = finfo(x.dtype), x.dtype
    most = float(limits.max) / 2
    wide = [np.clip(a.astype(np.float64), -most, most) for a in (x, y)]
    top = max(float(abs(a).max(initial=0)) for a in wide)
    # Multiples of the grid below 2 ** (nmant + 1) of them are numbers of the dtype.
    grid = 2.0 ** (math.ceil(math.log2(top or 1)) - limits.nmant)
    grid = max(grid, float(limits.smallest_subnormal))
    a, b = (np.trunc(a / grid) * grid for a in wide)
    return a.astype(dtype), b.astype(dtype), (a + b).astype(dtype)
