"""Compare an implementation with itself: results of one problem, carried over to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np

from npattn.arrays import Array, finfo
from npattn.testing.bounds.ulp import excess, half_ulp
from npattn.testing.compare import Comparison, compare_arrays
from npattn.testing.trial import Evaluation, Violation

Across = Mapping[str, Callable[[Array], Array]]
Side = Literal["first", "second"]


def relate(
    first: Evaluation,
    second: Evaluation,
    across: Across,
    shift: Mapping[str, Array] | None = None,
    *,
    side: Side = "first",
) -> float:
    """Return the largest ratio between results of `second` and those of `first`, carried across.

    Parameters
    ----------
    first, second : Evaluation
    across : mapping
        Name of a result → how an array of `first` becomes that of `second`: linear, and with no
        negative factor, for tolerances are carried likewise. Names that either does not have, or
        not in its right shape, are left out.
    shift : mapping, optional
        Added to results of `first`, by name.
    side : {"first", "second"}
        Side whose tolerance is tried before the sum of both: best one that other rules need too.

    Raises
    ------
    Violation
        If a result of `second` differs by more than both tolerances together.

    Notes
    -----
    Both are within tolerance of exact results for which the relation holds, so they differ by no
    more than both tolerances together, and the rounding of the first on delivery. Tolerances are
    costly: none is computed if the results are the same, and one if they differ by less than it.
    """
    shift = shift or {}
    if _are_same(first, second, across, shift):
        return 0.0
    both = ("first", "second")
    for sides in ((side,), both):
        comparisons = list(_compare(first, second, across, shift, sides))
        if all(c.passed for c in comparisons):
            return max((c.ratio for c in comparisons), default=0.0)
    # One of the two is beyond its tolerance; that is the one to show.
    wrong = sorted((c for c in comparisons if not c.passed), key=lambda c: -c.ratio)
    culprit = second if is_wrong(second) else first
    raise Violation(
        "\n".join(map(str, wrong)),
        culprit.problem,
        culprit.cotangents,
        ratio=wrong[0].ratio,
        related=frozenset(c.name for c in wrong),
        comparisons=tuple(wrong),
    )


def _pairs(
    first: Evaluation, second: Evaluation, across: Across
) -> Iterator[tuple[str, Array, Array]]:
    """Yield the results that both have, in their right shapes."""
    for name in across:
        if name not in first.exact or name not in second.exact:
            continue
        here, there = first.results.get(name), second.results.get(name)
        if here is None or here.shape != first.exact[name].shape:
            continue
        if there is None or there.shape != second.exact[name].shape:
            continue
        if here.dtype.kind in "biuc" or there.dtype.kind in "biuc":
            continue  # the business of shape-dtype
        yield name, here, there


def _are_same(
    first: Evaluation, second: Evaluation, across: Across, shift: Mapping[str, Array]
) -> bool:
    """Return True if nothing differs by more than rounding on delivery: then the ratio is 0."""
    return not any(
        excess(there, across[name](here.astype(np.float64)) + shift.get(name, 0.0)).any()
        for name, here, there in _pairs(first, second, across)
    )


def _compare(
    first: Evaluation,
    second: Evaluation,
    across: Across,
    shift: Mapping[str, Array],
    sides: tuple[str, ...],
) -> Iterator[Comparison]:
    """Compare within the tolerance of these sides."""
    for name, here, there in _pairs(first, second, across):
        carry, own = across[name], half_ulp(here)
        if "first" in sides:
            # Where the first may overflow, it says nothing about the second.
            top = float(finfo(here.dtype).max)
            over = ~np.isfinite(here.astype(np.float64))
            over = over & (abs(first.exact[name]) + first.tolerance[name] > top)
            here = np.where(over, np.zeros_like(here), here)
            own = np.where(over, np.inf, first.tolerance[name] + half_ulp(here))
        expected = carry(here.astype(np.float64)) + shift.get(name, 0.0)
        tolerance = carry(own) + (second.tolerance[name] if "second" in sides else 0.0)
        yield compare_arrays(name, there, expected, tolerance)


def is_wrong(evaluation: Evaluation) -> bool:
    """Return True if a result is outside its tolerance."""
    return any(
        not compare_arrays(name, x, evaluation.exact[name], evaluation.tolerance[name]).passed
        for name, x in evaluation.results.items()
        if name in evaluation.exact and x.shape == evaluation.exact[name].shape
    )
