"""Measure how far two implementations are apart on problems that both accept."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.bounds.ulp import half_ulp, real
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.comparison import compare_result
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.difference.distance import Judged, bits_differ, farthest, mean_same
from npattn.testing.difference.record import Place, ResultDifference
from npattn.testing.power import Power, find_unseen
from npattn.testing.reference.sides import Sides, share_cotangents
from npattn.testing.trial import Trial


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
