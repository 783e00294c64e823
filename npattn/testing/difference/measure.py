"""Measure how far two implementations are apart, in units of the tolerance and in ulps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, finfo
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.bounds.rounding import Units
from npattn.testing.bounds.ulp import half_ulp, real
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.comparison import compare_result
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.difference.record import Place, ResultDifference
from npattn.testing.power import Power, find_unseen
from npattn.testing.reference.sides import Sides, share_cotangents
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


@dataclass(frozen=True)
class Answer:
    """Results of one implementation for one problem, each with its exact value and tolerance."""

    problem: Problem
    cotangents: Cotangents
    judged: dict[str, Judged]


@dataclass
class Measurement:
    """Differences of two implementations over problems."""

    problems: int = 0  # number of problems that both answered
    parts: dict[str, list[ResultDifference]] = field(default_factory=dict)  # by result
    # problems on which a result of A, or of B, is wrong
    evidence: tuple[list[Evidence], list[Evidence]] = field(default_factory=lambda: ([], []))
    # problems that one of them did not answer, a line each
    lost: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    def results(self) -> tuple[ResultDifference, ...]:
        return tuple(map(ResultDifference.union, self.parts.values()))


def sample_recipes(sides: Sides, seed: int, examples: int) -> list[Recipe]:
    """Sample problems of every option that both take, as rules do."""
    cases = sides.a.cases(Pools(sides.a.space), seed, examples)
    taken = (r for r in cases if not (sides.a.refuses_recipe(r) or sides.b.refuses_recipe(r)))
    return list(islice(taken, examples))


def measure(sides: Sides, recipes: Iterable[Recipe]) -> Measurement:
    """Ask both for the results of each problem, and compare them element by element."""
    measured = Measurement()
    for recipe in recipes:
        a, b = (_try(i, sides, recipe, measured) for i in range(2))
        if a is None or b is None:
            continue
        measured.problems += 1
        for name in [n for n in a.judged if n in b.judged]:
            parts = measured.parts.setdefault(name, [])
            one = compare(name, sides.a, recipe, a.judged[name], b.judged[name])
            if not parts and one.ratio <= 1:
                unseen = _find_unseen(name, sides.a, recipe, a.judged[name], b.judged[name])
                one = replace(one, defects=tuple(unseen))
            parts.append(one)
        for side, trial, found in zip((a, b), (sides.a, sides.b), measured.evidence, strict=True):
            if evidence := _find_wrong(trial, side):
                found.append(evidence)
    return measured


def _try(side: int, sides: Sides, recipe: Recipe, measured: Measurement) -> Answer | None:
    """Return the answer of one side; note why there is none."""
    trial = (sides.a, sides.b)[side]
    problem = trial.problem(recipe)
    try:
        return answer(trial, problem, share_cotangents(sides, recipe))
    except ImplementationError as err:
        measured.lost[side].append(f"{err} on {trial.translate(recipe)!r}")
        return None


def answer(trial: Trial, problem: Problem, cotangents: Cotangents) -> Answer:
    """Ask one implementation, and judge each result that has the right shape."""
    with trial.implementation.framework.one_thread():
        e = trial.evaluate(problem, cotangents)
    judged = {
        n: Judged(e.results[n], e.exact[n], e.tolerance[n]) for n in e.exact if n in e.results
    }
    return Answer(problem, cotangents, judged)


def _find_wrong(trial: Trial, side: Answer) -> Evidence | None:
    """Return evidence if a result is out of tolerance."""
    exact = {name: x.exact for name, x in side.judged.items()}
    observed = {name: [x.array] for name, x in side.judged.items()}
    evidence = Evidence(trial, side.problem, side.cotangents, "contiguous", observed, exact)
    return evidence if evidence.wrong else None


def compare(name: str, trial: Trial, recipe: Recipe, a: Judged, b: Judged) -> ResultDifference:
    """Compare one result of both on one problem."""
    a_ratio, b_ratio = (compare_result(name, *x).ratio for x in (a, b))
    if not a.array.shape == b.array.shape == a.exact.shape == b.exact.shape:
        size, inf = a.exact.size, math.inf
        return ResultDifference(name, size, 0, inf, inf, None, a_ratio, b_ratio, 0.0, 0.0)
    here = mean_same(a, b, trial)
    elements, same = int(here.sum()), int((here & ~bits_differ(a.array, b.array)).sum())
    ratio, steps, index = farthest(name, a, b, here)
    place = None
    if same < elements:
        got_a, got_b, want = (float(real(x)[index]) for x in (a.array, b.array, a.exact))
        place = Place(index, got_a, got_b, want, f"{trial.translate(recipe)!r}.problem()")
    squares = (np.square(x.errors[here]).sum() for x in (a, b))
    a_rms, b_rms = (math.sqrt(x / max(elements, 1)) for x in squares)
    return ResultDifference(
        name,
        elements,
        same,
        ratio,
        steps,
        place,
        a_ratio,
        b_ratio,
        a_rms,
        b_rms,
        by_convention=here.size - elements,
        power=Power.of(a.exact[here], _allow(a, b)[here], b.array.dtype),
    )


def _allow(a: Judged, b: Judged) -> Array:
    """Return the distance from A that passes, before the result of B is rounded."""
    return np.asarray(np.fmax(a.tolerance, b.tolerance) + half_ulp(real(a.array)))


def _find_unseen(name: str, trial: Trial, recipe: Recipe, a: Judged, b: Judged) -> list[str]:
    """Return changes of B's result that are not found beside A's: [] unless npattn errs."""

    def fails(changed: Array) -> bool:
        return not compare(name, trial, recipe, a, b._replace(array=changed)).ratio <= 1

    allowed = np.where(mean_same(a, b, trial), _allow(a, b), np.inf)
    return find_unseen(real(b.array), real(a.array).astype(np.float64), allowed, fails)
