"""Measure how far two implementations are apart on problems that both accept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.bounds.ulp import half_ulp, real
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.comparison import compare_arrays
from npattn.testing.diagnosis.evidence import Evidence, group
from npattn.testing.difference.distance import Judged, bits_differ, mean_same, ratios, ulps
from npattn.testing.difference.record import Place, ResultDifference
from npattn.testing.power import Power, find_unseen
from npattn.testing.reference.sides import Sides, share_cotangents
from npattn.testing.trial import Trial


@dataclass(frozen=True)
class Answer:
    """Results of one implementation for one problem, each with its exact value and tolerance."""

    problem: Problem
    cotangents: Cotangents
    results: Results
    judged: dict[str, Judged]


@dataclass
class Tally:
    """One result on all problems so far."""

    elements: int = 0
    same: int = 0
    by_convention: int = 0
    ratio: float = 0.0
    ulps: float = 0.0
    place: Place | None = None
    at: tuple[float, float] = (-1.0, 0.0)
    worst: list[float] = field(default_factory=lambda: [0.0, 0.0])
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0])
    counted: int = 0
    powers: list[Power] = field(default_factory=list)
    unseen: list[str] | None = None

    def summarise(self, name: str) -> ResultDifference:
        """Return the totals of all problems as the difference of one result."""
        a_rms, b_rms = (float(np.sqrt(x / max(self.counted, 1))) for x in self.squares)
        return ResultDifference(
            name=name,
            elements=self.elements,
            same=self.same,
            ratio=self.ratio,
            ulps=self.ulps,
            place=self.place if self.same < self.elements else None,
            a_ratio=self.worst[0],
            b_ratio=self.worst[1],
            a_rms=a_rms,
            b_rms=b_rms,
            by_convention=self.by_convention,
            power=Power.union(self.powers),
            defects=tuple(self.unseen or ()),
        )


@dataclass
class Measurement:
    """Differences of two implementations over problems."""

    problems: int = 0  # number of problems that both answered
    tallies: dict[str, Tally] = field(default_factory=dict)  # by result
    # problems on which a result of A, or of B, is wrong
    evidence: tuple[list[Evidence], list[Evidence]] = field(default_factory=lambda: ([], []))
    # problems that one of them did not answer, a line each
    lost: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    def results(self) -> tuple[ResultDifference, ...]:
        return tuple(tally.summarise(name) for name, tally in self.tallies.items())


def sample_recipes(sides: Sides, seed: int, examples: int) -> list[Recipe]:
    """Sample problems of every option that both take, as rules do."""
    cases = sides.a.cases(Pools(sides.a.space), seed, examples)
    taken = (r for r in cases if not (sides.a.refuses_recipe(r) or sides.b.refuses_recipe(r)))
    return list(islice(taken, examples))


def measure(sides: Sides, recipes: Iterable[Recipe]) -> Measurement:
    """Ask both for the results of each problem, and compare them element by element."""
    measured = Measurement()
    for recipe in recipes:
        answers = [_try(i, sides, recipe, measured) for i in range(2)]
        if answers[0] is None or answers[1] is None:
            continue
        measured.problems += 1
        _add(measured, sides, recipe, answers[0], answers[1])
        for side, trial, found in zip(answers, (sides.a, sides.b), measured.evidence, strict=True):
            assert side is not None
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
        results = trial.results(problem, cotangents)
    exact = trial.exact(problem, cotangents)
    allowed = trial.tolerance(problem, cotangents, exact)
    judged = {
        name: Judged(results[name], exact[name], allowed[name])
        for name in exact
        if name in results and results[name].dtype.kind not in "biuc"
    }
    return Answer(problem, cotangents, results, judged)


def _find_wrong(trial: Trial, side: Answer) -> Evidence | None:
    """Return evidence if a result is out of tolerance."""
    exact = {name: x.exact for name, x in side.judged.items()}
    observed = {name: x for name, x in group(side.results).items() if name in exact}
    evidence = Evidence(trial, side.problem, side.cotangents, "contiguous", observed, exact)
    return evidence if evidence.wrong else None


def _add(measured: Measurement, sides: Sides, recipe: Recipe, a: Answer, b: Answer) -> None:
    for name in a.judged:
        if name in b.judged:
            tally = measured.tallies.setdefault(name, Tally())
            pair = a.judged[name], b.judged[name]
            _compare(tally, name, sides, recipe, *pair)
            if tally.unseen is None and tally.ratio <= 1:
                tally.unseen = _find_unseen(name, sides, recipe, *pair)


def _compare(tally: Tally, name: str, sides: Sides, recipe: Recipe, a: Judged, b: Judged) -> None:
    """Add one result of one problem to its tally."""
    for side, judged in enumerate((a, b)):
        shaped = judged.array.shape == judged.exact.shape
        error = compare_arrays(name, *judged).ratio if shaped else np.inf
        tally.worst[side] = max(tally.worst[side], error)
    if not a.array.shape == b.array.shape == a.exact.shape == b.exact.shape:
        tally.elements, tally.ratio, tally.ulps = tally.elements + a.exact.size, np.inf, np.inf
        return
    here = mean_same(a, b, sides.a)
    tally.by_convention += int((~here).sum())
    tally.elements += int(here.sum())
    tally.same += int((here & ~bits_differ(a.array, b.array)).sum())
    if not here.any():
        return
    ratio = np.where(here, ratios(a, b), 0)
    steps = np.where(here, ulps(name, a.array, b.array, a.exact), 0)
    place = np.unravel_index(int(np.lexsort((steps.ravel(), ratio.ravel()))[-1]), ratio.shape)
    at = float(ratio[place]), float(steps[place])
    if at > tally.at:
        index = tuple(map(int, place))
        here_a, here_b, want = (float(real(x)[place]) for x in (a.array, b.array, a.exact))
        line = f"{sides.a.translate(recipe)!r}.problem()"
        tally.place, tally.at = Place(index, here_a, here_b, want, line), at
    if tally.ratio < np.inf:
        tally.ratio, tally.ulps = tally.at
    tally.powers.append(Power.of(a.exact[here], _allow(a, b)[here], b.array.dtype))
    _add_squares(tally, here, (a, b))


def _allow(a: Judged, b: Judged) -> Array:
    """Return the distance from A that passes, before the result of B is rounded."""
    return np.asarray(np.fmax(a.tolerance, b.tolerance) + half_ulp(real(a.array)))


def _find_unseen(name: str, sides: Sides, recipe: Recipe, a: Judged, b: Judged) -> list[str]:
    """Return changes of B's result that are not found beside A's: [] unless npattn errs."""

    def fails(changed: Array) -> bool:
        tally = Tally()
        _compare(tally, name, sides, recipe, a, b._replace(array=changed))
        return not tally.ratio <= 1

    allowed = np.where(mean_same(a, b, sides.a), _allow(a, b), np.inf)
    return find_unseen(real(b.array), real(a.array).astype(np.float64), allowed, fails)


def _add_squares(tally: Tally, here: Array, sides: tuple[Judged, Judged]) -> None:
    """Add the squares of the errors of both, in units of the tolerance."""
    errors = []
    for judged in sides:
        with np.errstate(all="ignore"):
            errors.append((real(judged.array).astype(np.float64) - judged.exact) / judged.tolerance)
    counted = here & np.logical_and(*map(np.isfinite, errors))
    tally.counted += int(counted.sum())
    for side, error in enumerate(errors):
        tally.squares[side] += float((error[counted] ** 2).sum())
