"""Factors that leave the exact results as they are, one at a time: how far each moves the results.

    B batch   T queries   S keys

A kernel that sums in another order for another shape, split or place gives other roundings, and so
training and inference disagree though both are right.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.recipe import Recipe
from npattn.testing.difference.measure import Answer, Judged, answer, farthest
from npattn.testing.difference.record import Change, Move
from npattn.testing.reference.sides import Sides, share_cotangents
from npattn.testing.rules.relate import (
    RESULTS,
    Pick,
    pick,
    pick_cotangents,
    pick_keys,
    pick_problem,
    pick_queries,
    pick_samples,
)
from npattn.testing.rules.split_merge import merge
from npattn.testing.rules.systematic_error import plain_recipes
from npattn.testing.rules.terms import translate_mask
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

    @property
    def moves(self) -> Moved:
        return {name: (x, x.array) for name, x in self.answer.judged.items()}

    @property
    def able(self) -> set[str]:
        """Options and structure that it takes, and results that it returns."""
        batch = {"batch"} if self.answer.problem.lead[:1] > (1,) else set()
        space = self.trial.space
        return {*space.features, *space.structure, *self.answer.judged, *batch}


def answer_plain(sides: Sides, recipe: Recipe) -> tuple[Plain, Plain]:
    """Ask both for a plain problem, of normal inputs without options.

    Raises ImplementationError if one of them raises.
    """
    cotangents = share_cotangents(sides, recipe)
    one, other = (
        Plain(trial, recipe, answer(trial, trial.problem(recipe), cotangents))
        for trial in (sides.a, sides.b)
    )
    return one, other


def change_factors(sides: Sides, plain: tuple[Plain, Plain], seed: int) -> Iterator[Change]:
    """Yield how far each factor moves the results of either, and the two from each other."""
    one, other = plain
    yield Change(PLAIN, (0.0, 0.0), (0.0, 0.0), _apart(one.moves, other.moves))
    for name, (needs, factor) in FACTORS.items():
        a, b = (_try(needs, factor, side) for side in plain)
        yield Change(name, _largest(a), _largest(b), _apart(a, b))
    longest = max(plain_recipes(sides.a.space, seed), key=lambda r: r.S)
    if longest.S > one.recipe.S:
        with suppress(ImplementationError):
            a, b = (side.moves for side in answer_plain(sides, longest))
            yield Change(f"{longest.S} keys", "", "", _apart(a, b))


def _try(needs: str, factor: Callable[[Plain], Moved], side: Plain) -> Moved | str:
    """Return what a factor changes; words if it cannot be tried."""
    for name in needs.split(", ") if needs else ():
        if name not in side.able:
            return f"{'returns' if name == 'lse' else 'takes'} no {name}"
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
    return farthest(name, judged, judged._replace(array=other))[:2]


# --- the factors ----------------------------------------------------------------------------------


def _ask(side: Plain, problem: Problem, cotangents: Cotangents) -> dict[str, Array]:
    results = side.trial.results(problem, cotangents)
    return {name: results[name] for name in side.answer.judged}


def _part(side: Plain, picked: Pick | None = None, names: Container[str] = RESULTS) -> Moved:
    """Compare with a call for a part of the problem, or for its entries in another order."""
    picks = [] if picked is None else [picked]
    problem = pick_problem(side.answer.problem, picks)
    results = _ask(side, problem, pick_cotangents(side.answer.cotangents, picks))
    return {
        n: (Judged(*(pick(n, array, picks) for array in x)), results[n])
        for n, x in side.answer.judged.items()
        if n in names
    }


def _split(side: Plain) -> Moved:
    """Merge two parts of the keys by their lse, as split-KV decoding does."""
    problem, cotangents, judged = side.answer.problem, side.answer.cotangents, side.answer.judged
    trial = replace(side.trial, gradients=frozenset())
    picks = [[pick_keys(problem, keys)] for keys in np.array_split(np.arange(problem.S), 2)]
    parts = [
        trial.evaluate(pick_problem(problem, x), pick_cotangents(cotangents, x)) for x in picks
    ]
    empty = np.zeros((2, *judged["lse"].exact.shape), bool)
    merged, _ = merge(trial.conventions, parts, empty)
    return {n: (judged[n], x.astype(judged[n].array.dtype)) for n, x in merged.items()}


def _pad(side: Plain) -> Moved:
    """Add keys that the mask hides."""
    problem = side.answer.problem
    there = np.arange(problem.S + PADDING) < problem.S
    keys = np.where(there, np.arange(there.size), 0)
    padded = pick_problem(problem, [pick_keys(problem, keys)])
    mask = translate_mask(side.trial, np.broadcast_to(there, (problem.T, there.size)).copy())
    results = _ask(side, padded.replace(mask=mask), side.answer.cotangents)
    back = [pick_keys(padded, np.flatnonzero(there))]
    return {n: (x, pick(n, results[n], back)) for n, x in side.answer.judged.items()}


def _continue(side: Plain) -> Moved:
    """Ask for half of the queries of a causal call, as a prompt is read in parts."""
    trial, problem = side.trial, side.answer.problem
    causal = problem.replace(causal=True, alignment=trial.conventions.alignment)
    continued = replace(side, answer=answer(trial, causal, side.answer.cotangents))
    last = trial.conventions.causal == "bottom_right"  # aligned with the same keys
    half = np.arange(problem.T // 2)
    order = half + (problem.T - half.size if last else 0)
    return _part(continued, pick_queries(problem, order), ROWS)


def _picks(pick: Callable[[Problem], Pick], *names: str) -> Callable[[Plain], Moved]:
    """Return the factor that asks for some entries, and the named results that it moves."""
    return lambda side: _part(side, pick(side.answer.problem), names)


def _last_queries(problem: Problem, count: int) -> Pick:
    return pick_queries(problem, np.arange(problem.T - count, problem.T))


FACTORS: dict[str, tuple[str, Callable[[Plain], Moved]]] = {
    "the same call again": ("", _part),
    REORDERED: (
        "",
        _picks(lambda p: pick_keys(p, np.random.default_rng(31).permutation(p.S)), *RESULTS),
    ),
    "keys in two parts (merged by lse)": ("lse, T != S", _split),
    f"{PADDING} hidden keys more": ("mask, T != S", _pad),
    "a sample alone": (
        "batch",
        _picks(lambda p: pick_samples(p, np.array([p.lead[0] - 1])), *ROWS, "dk", "dv"),
    ),
    "one query alone": ("T != S", _picks(lambda p: _last_queries(p, 1), *ROWS)),
    "half of the queries": ("T != S", _picks(lambda p: _last_queries(p, p.T // 2), *ROWS)),
    "half of the queries (causal)": ("causal, T != S", _continue),
}
"""Factor → what it needs, and what it changes."""
