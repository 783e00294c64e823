"""Evidence for a diagnosis: a failing problem, what the implementation returned, what is right.

Also what may explain it as a whole, conventions, layouts, precision: each `Candidate` predicts
every result of a problem, right ones included, and is tried on problems that pass as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from npattn.conventions import Conventions
from npattn.errors import NpattnError
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.bounds.rounding import Units
from npattn.testing.bounds.ulp import excess, half_ulp, real
from npattn.testing.cases.recipe import Recipe, describe_changed
from npattn.testing.comparison import compare_arrays, compare_result
from npattn.testing.levels import REQUIRED
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules.second_order import SECOND
from npattn.testing.trial import Trial

Arrays = Mapping[str, Sequence[Array]]
"""Results by name, each as often as the implementation was called for it."""
CLOSER = 4
"""A prediction has to come this many times closer to a wrong result than the exact values do."""


def rounding_of(trial: Trial, problem: Problem) -> float:
    """Relative rounding error of the longest sums."""
    unit = Units.of(trial.rounding, problem.q.dtype)
    return float((problem.D + problem.E + problem.S + problem.T) * unit.u)


@dataclass(frozen=True, eq=False)
class Evidence:
    """One problem, the results of the implementation under test, and the exact ones."""

    trial: Trial
    problem: Problem
    cotangents: Cotangents
    view: str  # memory layout of the arrays
    observed: Arrays  # results of the implementation under test
    exact: Mapping[str, Array]  # by the same names, float64
    # the failed one; None for a problem that is only asked for comparison
    outcome: Outcome | None = None

    @cached_property
    def wrong(self) -> dict[str, float]:
        """Largest error / tolerance of each result that is out of tolerance."""
        ratios = {
            name: max(self._ratio(name, array) for array in arrays)
            for name, arrays in self.observed.items()
        }
        return {name: ratio for name, ratio in ratios.items() if ratio > 1}

    def _ratio(self, name: str, array: Array) -> float:
        exact = self.exact[name]
        if array.shape != exact.shape:
            return math.inf
        if not excess(array, exact).any():
            return 0.0  # whatever the tolerance is
        return compare_arrays(name, array, exact, self.tolerance[name]).ratio

    def is_right(self, name: str, call: int) -> bool:
        """Return True if a result is within its tolerance in one of the calls for it."""
        return self._ratio(name, self.observed[name][call]) <= 1

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of the failing problem; with its sizes and options where its rule has changed it.

        None if it has none, or if its numbers are no longer finite.
        """
        outcome, problem = self.outcome, self.problem
        sampled = None if outcome is None else outcome.sampled
        if outcome is None or sampled is None or "then changed" not in outcome.recipe:
            return sampled
        if not all(
            np.isfinite(np.asarray(x, float)).all() for x in (problem.q, problem.k, problem.v)
        ):
            return None
        return describe_changed(sampled, problem)

    @cached_property
    def tolerance(self) -> Mapping[str, Array]:
        """Tolerances by name; computed when first needed."""
        return self.trial.tolerance(self.problem, self.cotangents, self.exact)

    @property
    def rounding(self) -> float:
        """Relative rounding error of the longest sums."""
        return rounding_of(self.trial, self.problem)

    @property
    def size(self) -> int:
        """Number of scores."""
        return math.prod(scores_shape(self.problem))

    @property
    def rank(self) -> tuple[bool, int]:
        """Sort key that puts small problems of required rules first."""
        return self.outcome is not None and self.outcome.level not in REQUIRED, self.size

    def without(self, names: Container[str]) -> Evidence:
        """Return the evidence without results of these names."""
        observed = {name: x for name, x in self.observed.items() if name not in names}
        return replace(self, observed=observed) if len(observed) < len(self.observed) else self

    def equals(self, other: Evidence) -> bool:
        """Return True if another call returned the same results, bit for bit and as many times."""
        for name, arrays in other.observed.items():
            own = self.observed.get(name, ())
            if len(own) != len(arrays):  # it returned the result once more, or no longer
                return False
            pairs = zip(own, arrays, strict=True)
            if not all(np.array_equal(x, y, equal_nan=True) for x, y in pairs):
                return False
        return True

    def is_within(self, exact: Mapping[str, Array], tolerance: Mapping[str, Array]) -> bool:
        """Return True if all results are within a tolerance of others."""
        return all(
            compare_result(name, x, exact[name], tolerance[name]).passed
            for name, arrays in self.observed.items()
            for x in arrays
        )

    def reproduced_by(self, predicted: Mapping[str, Array | list[Array]]) -> bool:
        """Return True if predicted results are those observed, the right ones as well."""
        each = {name: x if isinstance(x, list) else [x] for name, x in predicted.items()}
        return self.observed.keys() <= each.keys() and all(
            self.reproduces(name, each[name]) for name in self.observed
        )

    def reproduces(self, name: str, predicted: Sequence[Array]) -> bool:
        """Return True if predicted arrays, of the result's shape, are those observed.

        Of several calls those may be right that take another path than the wrong ones, as where a
        kernel falls back to another to give the gradient of the bias too.
        """
        observed = self.observed[name]
        if name in self.wrong and len(predicted) == 1 < len(observed):
            observed = [array for array in observed if self._ratio(name, array) > 1]
        if len(observed) != len(predicted):
            predicted = [predicted[0]] * len(observed)
        for got, want in zip(observed, predicted, strict=True):
            wrong = name in self.wrong and self._ratio(name, got) > 1
            error, of_exact = _errors(got, want, self, name)
            if error > (min(1.0, of_exact / CLOSER) if wrong else 1.0):
                return False
        return name not in self.wrong or any(self._ratio(name, x) > 1 for x in predicted)


def _errors(got: Array, predicted: Array, evidence: Evidence, name: str) -> tuple[float, float]:
    """Return the largest distances of a result from a predicted and from the exact one.

    In units of a tolerance: that of the exact result where it has that shape, wider as the
    predicted one is larger, and at least one rounding for each term of its sums. Where it is much
    wider, what is predicted may be within it, and yet no closer than the exact result.
    """
    exact = evidence.exact[name]
    if got.shape != predicted.shape:
        return math.inf, math.inf
    got, predicted = real(got), real(predicted)
    if "nan" in evidence.trial.conventions.empty_results and predicted.shape == exact.shape:
        # A row that is NaN by convention tells nothing of a mistake.
        got, predicted = got.copy(), predicted.copy()  # maybe of other dtypes
        got[np.isnan(exact)] = predicted[np.isnan(exact)] = 0
    with np.errstate(all="ignore"):
        if np.array_equal(got, predicted.astype(got.dtype), equal_nan=True):
            return 0.0, math.inf
        wide = predicted.astype(np.float64)
        size = _top(wide)
        allowed = np.full(got.shape, evidence.rounding * size)
        if got.shape == exact.shape:  # else no element has a tolerance of its own
            growth = max(1.0, size / max(_top(exact), np.finfo(float).tiny))
            allowed = np.fmax(evidence.tolerance[name] * growth, allowed)
        allowed = allowed + half_ulp(predicted)
    own, of_exact = (compare_result(name, got, x, allowed).ratio for x in (wide, exact))
    return own, of_exact


def _top(x: Array) -> float:
    return float(np.max(abs(x), initial=0.0, where=np.isfinite(x)))


def scores_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape of the scores of a problem: (*lead, H, T, S), without H if it has none."""
    return (*problem.lead, *(() if problem.headless else (problem.H,)), problem.T, problem.S)


def sizes_of(problem: Problem) -> dict[str, int]:
    """Return the sizes of a problem by their letters; B counts all samples."""
    sizes = {x: int(getattr(problem, x)) for x in "HKTSDE"}
    return {"B": math.prod(problem.lead), **sizes, "G": problem.H // max(problem.K, 1)}


# --- gathering it ---------------------------------------------------------------------------------


def collect(trial: Trial, outcome: Outcome) -> Evidence | None:
    """Run the implementation again on the failing problem of an outcome.

    Returns None if the outcome has no problem, the implementation raised or raises, or a call of
    its own is right: then what came before is the cause. Also if second derivatives failed,
    which are no results of one call.
    """
    if outcome.problem is None or outcome.kind in ("raised", "after"):
        return None
    cotangents = outcome.cotangents
    if cotangents is None and outcome.sampled is not None:
        cotangents = trial.cotangents(outcome.sampled, outcome.problem, weights=True)
    if cotangents is None:
        return None
    try:
        evidence = observe(trial, outcome.problem, cotangents, outcome.view, outcome)
    except ImplementationError:
        return None
    names = [comparison.name for comparison in outcome.comparisons]
    return None if names and all(name.startswith(SECOND) for name in names) else evidence


def observe(
    trial: Trial,
    problem: Problem,
    cotangents: Cotangents,
    view: str = "contiguous",
    outcome: Outcome | None = None,
) -> Evidence:
    """Run the implementation on a problem, and compute what is right; what it raises is raised."""
    observed = group(trial.results(problem, cotangents, view))
    exact = trial.exact(problem, cotangents)
    known = {name: arrays for name, arrays in observed.items() if name in exact}
    return Evidence(trial, problem, cotangents, view, known, exact, outcome)


def group(results: Results) -> dict[str, list[Array]]:
    """Group results by name."""
    grouped: dict[str, list[Array]] = {}
    for name, array in results.pairs:
        grouped.setdefault(name, []).append(array)
    return grouped


def sample(trial: Trial, recipes: Iterable[Recipe]) -> Iterator[Evidence]:
    """Yield evidence of problems on which nothing has failed yet, leaving out what raises."""
    for recipe in recipes:
        try:
            problem = trial.problem(recipe)
            yield observe(trial, problem, trial.cotangents(recipe, problem), recipe.view)
        except (ImplementationError, NpattnError):
            continue


@dataclass(frozen=True, eq=False)
class Candidate:
    """Possible cause of failures."""

    name: str  # unique among the candidates
    text: str  # the cause in words, for the user who made the mistake
    explains: Callable[[Evidence], bool]  # evidence → True if it reproduces what was observed
    step: str  # as of a `Cause`
    where: str = "everywhere"
    conventions: Conventions | None = None  # Conventions under which the results would be right
    # number of fields that differ from the declared conventions; a single one is preferred
    changes: int = 1


Found = list[tuple[Candidate, list[Evidence]]]
"""Candidates, each with what it explains."""
