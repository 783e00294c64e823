"""Factors that leave the exact results as they are, one at a time: how far each moves the results.

    B batch   T queries   S keys

A kernel that sums in another order for another shape, split or place gives other roundings, and so
training and inference disagree though both are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.recipe import Recipe
from npattn.testing.difference.distance import Judged, ratios, ulps
from npattn.testing.difference.measure import Answer, answer
from npattn.testing.difference.record import Change, Move
from npattn.testing.reference.sides import Sides, share_cotangents
from npattn.testing.rules.relate import (
    Pick,
    pick,
    pick_cotangents,
    pick_keys,
    pick_problem,
    pick_queries,
    pick_samples,
)
from npattn.testing.rules.systematic_error import plain_recipes
from npattn.testing.rules.terms import lse_unit, translate_mask
from npattn.testing.trial import Trial

PLAIN = "nothing"
REORDERED = "keys in another order"
PADDING = 31
"""Keys that are added and hidden."""
ROWS = ("o", "lse", "weights", "max_score", "dq")
Moved = Mapping[str, tuple[Judged, Array]]
"""Result → its part of the whole, and the same computed otherwise."""


@dataclass(frozen=True)
class Plain:
    """One side's answer to a plain problem, from which each factor changes one thing."""

    trial: Trial
    recipe: Recipe
    answer: Answer


def answer_plain(sides: Sides, seed: int) -> tuple[Plain, Plain]:
    """Ask both for a plain problem, of normal inputs without options.

    Raises ImplementationError if one of them raises.
    """
    recipe = plain_recipes(sides.a.space, seed)[0]
    cotangents = share_cotangents(sides, recipe)
    one, other = (
        Plain(trial, recipe, answer(trial, trial.problem(recipe), cotangents))
        for trial in (sides.a, sides.b)
    )
    return one, other


def change_factors(sides: Sides, plain: tuple[Plain, Plain], seed: int) -> Iterator[Change]:
    """Yield how far each factor moves the results of either, and the two from each other."""
    unchanged = [_as_it_is(side.answer) for side in plain]
    yield Change(PLAIN, (0.0, 0.0), (0.0, 0.0), _apart(unchanged[0], unchanged[1]))
    for name, factor in FACTORS.items():
        a, b = (_try(factor, side) for side in plain)
        yield Change(name, _largest(a), _largest(b), _apart(a, b))
    yield from _more_keys(sides, seed)


def _as_it_is(answer: Answer) -> Moved:
    return {name: (x, x.array) for name, x in answer.judged.items()}


def _try(factor: Callable[[Plain], Moved | str], side: Plain) -> Moved | str:
    """Return what a factor changes; words if it cannot be tried."""
    with side.trial.implementation.framework.one_thread():
        try:
            return factor(side)
        except ImplementationError as err:
            return str(err)


def _largest(moved: Moved | str) -> Move | str:
    """Return the largest distance between what was computed in two ways."""
    if isinstance(moved, str):
        return moved
    moves = [_distance(name, judged, other) for name, (judged, other) in moved.items()]
    return max(moves, default=(0.0, 0.0))


def _apart(a: Moved | str, b: Moved | str) -> Move | str:
    """Return the largest distance between A as it was and B as it was changed."""
    if isinstance(a, str) or isinstance(b, str):
        return ""
    both = [n for n in a if n in b and np.array_equal(a[n][0].exact, b[n][0].exact)]
    return max((_distance(n, a[n][0], b[n][1]) for n in both), default="other rows")


def _distance(name: str, judged: Judged, other: Array) -> Move:
    if judged.array.shape != other.shape:
        return np.inf, np.inf
    if not other.size:
        return 0.0, 0.0
    ratio = ratios(judged, judged._replace(array=other)).ravel()
    steps = ulps(name, judged.array, other, judged.exact).ravel()
    place = int(np.lexsort((steps, ratio))[-1])
    return float(ratio[place]), float(steps[place])


# --- the factors ----------------------------------------------------------------------------------


def _ask(side: Plain, problem: Problem, cotangents: Cotangents) -> dict[str, Array]:
    results = side.trial.results(problem, cotangents)
    return {name: results[name] for name in side.answer.judged}


def _cut(side: Plain, names: tuple[str, ...], picks: list[Pick]) -> dict[str, Judged]:
    """Return parts of the results, with their exact values and tolerances."""
    judged = {name: x for name, x in side.answer.judged.items() if name in names}
    take = partial(pick, picks=picks)
    return {n: Judged(*(take(n, array) for array in x)) for n, x in judged.items()}


def _part(side: Plain, names: tuple[str, ...], picks: list[Pick]) -> Moved:
    """Compare with a call for a part of the problem, or for its entries in another order."""
    judged = _cut(side, names, picks)
    problem = pick_problem(side.answer.problem, picks)
    results = _ask(side, problem, pick_cotangents(side.answer.cotangents, picks))
    return {name: (x, results[name]) for name, x in judged.items()}


def _again(side: Plain) -> Moved:
    results = _ask(side, side.answer.problem, side.answer.cotangents)
    return {name: (x, results[name]) for name, x in side.answer.judged.items()}


def _reorder(side: Plain) -> Moved:
    S = side.answer.problem.S
    order = np.random.default_rng([side.recipe.seed, 31]).permutation(S)
    return _part(side, tuple(side.answer.judged), [pick_keys(side.answer.problem, order)])


def _split(side: Plain) -> Moved | str:
    """Merge two parts of the keys by their lse, as split-KV decoding does."""
    if "lse" not in side.answer.judged:
        return "returns no lse"
    if "T != S" not in side.trial.space.structure:
        return "takes no T ≠ S"
    problem, cotangents = side.answer.problem, side.answer.cotangents
    trial = replace(side.trial, gradients=frozenset())
    parts = []
    for keys in np.array_split(np.arange(problem.S), 2):
        picks = [pick_keys(problem, keys)]
        parts.append(
            trial.results(pick_problem(problem, picks), pick_cotangents(cotangents, picks))
        )
    unit = lse_unit(trial.conventions)
    lse = np.stack([x["lse"].astype(np.float64) for x in parts]) * unit
    total = np.logaddexp(lse[0], lse[1])
    o = sum(
        np.exp(one - total)[..., None] * x["o"].astype(np.float64)
        for one, x in zip(lse, parts, strict=True)
    )
    judged = side.answer.judged
    merged = {"o": np.asarray(o), "lse": total / unit}
    return {n: (judged[n], x.astype(judged[n].array.dtype)) for n, x in merged.items()}


def _alone(side: Plain) -> Moved | str:
    problem = side.answer.problem
    if not problem.lead or problem.lead[0] < 2:
        return "takes no batch"
    picks = [pick_samples(problem, np.array([problem.lead[0] - 1]))]
    return _part(side, (*ROWS, "dk", "dv"), picks)


def _one_query(side: Plain) -> Moved | str:
    return _queries(side, 1)


def _half_the_queries(side: Plain) -> Moved | str:
    return _queries(side, side.answer.problem.T // 2)


def _queries(side: Plain, count: int) -> Moved | str:
    """Ask for the last queries alone."""
    if "T != S" not in side.trial.space.structure:
        return "takes no T ≠ S"
    order = np.arange(side.answer.problem.T)[-count:]
    return _part(side, ROWS, [pick_queries(side.answer.problem, order)])


def _pad(side: Plain) -> Moved | str:
    """Add keys that the mask hides."""
    trial, problem = side.trial, side.answer.problem
    if "mask" not in trial.space.features:
        return "takes no mask"
    if "T != S" not in trial.space.structure:
        return "takes no T ≠ S"
    there = np.arange(problem.S + PADDING) < problem.S
    keys = np.where(there, np.arange(there.size), 0)
    padded = pick_problem(problem, [pick_keys(problem, keys)])
    mask = np.broadcast_to(there, (problem.T, there.size)).copy()
    results = _ask(side, padded.replace(mask=translate_mask(trial, mask)), side.answer.cotangents)
    back = [pick_keys(padded, np.flatnonzero(there))]
    return {n: (x, pick(n, results[n], back)) for n, x in side.answer.judged.items()}


def _continue(side: Plain) -> Moved | str:
    """Ask for half of the queries of a causal call, as a prompt is read in parts."""
    trial, problem = side.trial, side.answer.problem
    if "causal" not in trial.space.features:
        return "takes no causal"
    if "T != S" not in trial.space.structure:
        return "takes no T ≠ S"
    causal = problem.replace(causal=True, alignment=trial.conventions.alignment)
    continued = Plain(trial, side.recipe, answer(trial, causal, side.answer.cotangents))
    last = trial.conventions.causal == "bottom_right"  # aligned with the same keys
    half = np.arange(problem.T // 2)
    order = half + (problem.T - half.size if last else 0)
    return _part(continued, ROWS, [pick_queries(problem, order)])


FACTORS: dict[str, Callable[[Plain], Moved | str]] = {
    "the same call again": _again,
    REORDERED: _reorder,
    "keys in two parts (merged by lse)": _split,
    f"{PADDING} hidden keys more": _pad,
    "a sample alone": _alone,
    "one query alone": _one_query,
    "half of the queries": _half_the_queries,
    "half of the queries (causal)": _continue,
}


def _more_keys(sides: Sides, seed: int) -> Iterator[Change]:
    """Yield how far the two are apart on the longest plain problem."""
    recipe = max(plain_recipes(sides.a.space, seed), key=lambda r: r.S)
    if recipe.S == plain_recipes(sides.a.space, seed)[0].S:
        return
    cotangents = share_cotangents(sides, recipe)
    try:
        a, b = (answer(trial, trial.problem(recipe), cotangents) for trial in (sides.a, sides.b))
    except ImplementationError:
        return
    yield Change(f"{recipe.S} keys", "", "", _apart(_as_it_is(a), _as_it_is(b)))
