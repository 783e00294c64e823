"""Two problems whose exact results are the same numbers, perhaps in other places.

One answer of the implementation is compared with the other: no reference is needed. `Pick` selects
or reorders entries along an axis, of every array that has it.

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, finfo
from npattn.testing.adapters.base import Results
from npattn.testing.bounds.ulp import excess, half_ulp
from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import Comparison, compare_arrays
from npattn.testing.trial import GRADIENTS, Evaluation, Trial, Violation

Across = Mapping[str, Callable[[Array], Array]]
Side = Literal["first", "second"]


@np.errstate(invalid="ignore")  # a wrong result may have both infinities
def relate(first: Evaluation, second: Evaluation, across: Across, *, side: Side = "first") -> float:
    """Return the largest ratio between results of `second` and those of `first`, carried across.

    `across` says by the name of a result how an array of `first` becomes that of `second`:
    linearly, and with no negative factor, for tolerances are carried likewise. Names that either
    does not have, or not in its right shape, are left out. Both are within tolerance of exact
    results for which the relation holds, so they differ by no more than both tolerances together,
    and the rounding of the first on delivery. Tolerances are costly: none is computed if the
    results are the same, and that of `side` alone if they differ by less than it, best one that
    other rules need too.
    """
    pairs = _pairs(first, second, across)
    if not any(excess(y, across[n](x.astype(np.float64))).any() for n, x, y in pairs):
        return 0.0  # but for rounding on delivery
    comparisons = list(_compare(first, second, across, (side,)))
    if not all(c.passed for c in comparisons):
        comparisons = list(_compare(first, second, across, ("first", "second")))
    return settle(comparisons, second, first, related=True) or 0.0


def settle(
    comparisons: Iterable[Comparison], *evaluations: Evaluation, related: bool = False
) -> float | None:
    """Return the worst ratio, None if nothing was compared; raise Violation if it is above 1.

    The violation shows the first problem whose results are themselves out of tolerance: there must
    be one, or the identity would hold. `related` says that results of two calls were compared, by
    their names.
    """
    comparisons = [c for c in comparisons if c.size]
    worst = max((c.ratio for c in comparisons), default=None)
    if worst is None or worst <= 1:
        return worst
    wrong = sorted((c for c in comparisons if not c.passed), key=lambda c: -c.ratio)
    shown = next((x for x in evaluations if is_wrong(x)), evaluations[0])
    text = "\n".join(map(str, wrong))
    names = frozenset(c.name for c in wrong) if related else frozenset[str]()
    raise Violation(
        text, shown.problem, shown.cotangents, ratio=worst, related=names, comparisons=tuple(wrong)
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


def _compare(
    first: Evaluation, second: Evaluation, across: Across, sides: tuple[str, ...]
) -> Iterator[Comparison]:
    """Compare within the tolerance of these sides."""
    for name, here, there in _pairs(first, second, across):
        carry, here_tolerance = across[name], half_ulp(here)
        if "first" in sides:
            # Where the first may overflow, it says nothing about the second.
            top = float(finfo(here.dtype).max)
            over = ~np.isfinite(here.astype(np.float64))
            over = over & (abs(first.exact[name]) + first.tolerance[name] > top)
            here = np.where(over, np.zeros_like(here), here)
            here_tolerance = np.where(over, np.inf, first.tolerance[name] + half_ulp(here))
        expected = carry(here.astype(np.float64))
        tolerance = carry(here_tolerance) + (second.tolerance[name] if "second" in sides else 0.0)
        yield compare_arrays(name, there, expected, tolerance)


def compare_results(
    results: Results, exact: Mapping[str, Array], allowed: Mapping[str, Array]
) -> list[Comparison]:
    """Compare all results that have the shape of exact ones."""
    return [
        compare_arrays(name, result, exact[name], allowed[name])
        for name, result in results.pairs
        if name in exact and result.shape == exact[name].shape
    ]


def is_wrong(evaluation: Evaluation) -> bool:
    """Return True if a result is outside its tolerance."""
    results = Results(tuple(evaluation.results.items()))
    compared = compare_results(results, evaluation.exact, evaluation.tolerance)
    return not all(c.passed for c in compared)


INPUTS = ("q", "k", "v", "mask", "bias", "dropout_mask", "sinks", "gate")
FORWARD = ("o", "lse", "weights", "max_score")
RESULTS = (*FORWARD, *GRADIENTS)

# Axes of keys, queries and heads, from the end. A gradient has those of its input.
KEYS = {"k": -2, "v": -2, "mask": -1, "bias": -1, "dropout_mask": -1, "weights": -1}
QUERIES = {"q": -2, "mask": -2, "bias": -2, "dropout_mask": -2, "gate": -2}
QUERIES |= {"o": -2, "lse": -1, "weights": -2, "max_score": -1}
HEADS = {n: axis - 1 for n, axis in QUERIES.items()} | {"sinks": -1}
SHARED = {"k": -3, "v": -3}


# --- entries along an axis ---


class Pick(NamedTuple):
    """Some entries along an axis, in some order.

    An array that lacks the axis, or broadcasts along it, stays as it is.
    """

    axes: Mapping[str, int]  # by the name of the array
    order: Array
    size: int  # of the axis


def pick_keys(problem: Problem, order: Array) -> Pick:
    return Pick(KEYS, order, problem.S)


def pick_queries(problem: Problem, order: Array) -> Pick:
    return Pick(QUERIES, order, problem.T)


def pick_heads(problem: Problem, order: Array, shared_order: Array) -> list[Pick]:
    """Pick query heads, and key/value heads."""
    return [Pick(HEADS, order, problem.H), Pick(SHARED, shared_order, problem.K)]


def pick_samples(problem: Problem, order: Array) -> Pick:
    """Pick along the first of the leading axes."""
    axis = -3 - len(problem.lead)
    names = ("q", "k", "v", "mask", "bias", "dropout_mask", "gate", "o", "weights")
    rows = dict.fromkeys(("lse", "max_score"), axis + 1)
    return Pick(dict.fromkeys(names, axis) | rows, order, problem.lead[0])


def pick(name: str, x: Array, picks: Sequence[Pick]) -> Array:
    """Apply picks to the array of this name."""
    array_name = name[1:] if name in GRADIENTS else name
    for axes, order, size in picks:
        axis = axes.get(array_name, 0)
        if axis and x.ndim >= -axis and x.shape[axis] == size:
            x = np.take(x, order, axis)
    return x


def put_back(name: str, x: Array, picks: Sequence[Pick], shape: tuple[int, ...]) -> Array:
    """Put x back into zeros of this shape, from which it was picked."""
    places = pick(name, np.arange(math.prod(shape)).reshape(shape), picks)
    full = np.zeros(math.prod(shape), x.dtype)
    full[places] = x
    return full.reshape(shape)


def pick_problem(problem: Problem, picks: Sequence[Pick]) -> Problem:
    arrays = {name: getattr(problem, name) for name in INPUTS}
    return problem.replace(**{n: pick(n, x, picks) for n, x in arrays.items() if x is not None})


def pick_cotangents(cotangents: Cotangents, picks: Sequence[Pick]) -> Cotangents:
    return _map_cotangents(cotangents, partial(pick, picks=picks))


def put_back_cotangents(
    cotangents: Cotangents, picks: Sequence[Pick], problem: Problem
) -> Cotangents:
    """Extend cotangents of a part to the whole problem, by 0."""
    rows = (*problem.lead, *(() if problem.headless else (problem.H,)), problem.T)
    shapes = {"o": (*rows, problem.E), "lse": rows, "weights": (*rows, problem.S)}
    return _map_cotangents(cotangents, lambda name, x: put_back(name, x, picks, shapes[name]))


def _map_cotangents(cotangents: Cotangents, change: Callable[[str, Array], Array]) -> Cotangents:
    more = {"lse": cotangents.dlse, "weights": cotangents.dweights}
    return Cotangents(
        change("o", cotangents.dout),
        *(None if x is None else change(name, x) for name, x in more.items()),
    )


# --- comparisons ---


def identity(x: Array) -> Array:
    """Carry a result across as it is."""
    return x


SAME: Across = dict.fromkeys(RESULTS, identity)


def relate_reordered(trial: Trial, recipe: Recipe, picks: Sequence[Pick]) -> float:
    """Compare the recipe's problem with the one whose entries are picked in another order."""
    plain = trial.evaluation(recipe)
    across = {name: partial(pick, name, picks=picks) for name in RESULTS}
    problem = pick_problem(plain.problem, picks)
    cotangents = pick_cotangents(plain.cotangents, picks)
    return _relate_exact(trial, plain, problem, cotangents, across)


def relate_restated(trial: Trial, recipe: Recipe, other: Problem) -> float:
    """Compare the recipe's problem with another statement of the same problem."""
    plain = trial.evaluation(recipe)
    return _relate_exact(trial, plain, other, plain.cotangents, SAME)


def _relate_exact(
    trial: Trial, plain: Evaluation, problem: Problem, cotangents: Cotangents, across: Across
) -> float:
    """Compare with a problem whose exact results are those of `plain`, carried across.

    So are its bounds, which depend on the inputs as the results do, but for the factor of o in 8
    bits: that is another call's.
    """
    results = dict(trial.results(problem, cotangents))

    def carry(arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {n: across[n](x) for n, x in arrays.items() if n in across}

    exact = carry(plain.exact)

    def bound() -> Mapping[str, Array]:
        if trial.implementation.output is not None:
            return trial.tolerance(problem, cotangents, exact)
        return carry(plain.tolerance)

    return relate(plain, Evaluation(problem, cotangents, results, exact, bound), across)


def relate_part(
    trial: Trial,
    together: Evaluation,
    part: Evaluation,
    picks: Sequence[Pick],
    zero_elsewhere: Sequence[str] = GRADIENTS,
    *,
    part_is_plain: bool = False,
) -> float:
    """Compare the results of a part with those of the whole, some of which are 0 elsewhere.

    The tolerance of the whole is tried first, or that of the part if it is the plain problem.
    """
    cut = {n: partial(pick, n, picks=picks) for n in FORWARD}
    back = {
        name: partial(put_back, name, picks=picks, shape=together.exact[name].shape)
        for name in zero_elsewhere
        if name in together.exact
    }
    sides: tuple[Side, Side] = ("second", "first") if part_is_plain else ("first", "second")
    return max(
        relate(together, part, cut, side=sides[0]), relate(part, together, back, side=sides[1])
    )


# --- chance ---


def generator(recipe: Recipe) -> np.random.Generator:
    """Random numbers of a rule, from the recipe's seed."""
    return np.random.default_rng([recipe.seed, 12])


def another_order(rng: np.random.Generator, n: int) -> Array:
    """Permute 0, ..., n − 1; not the identity, if there is a choice."""
    order = rng.permutation(n)
    return order if (order != np.arange(n)).any() else order[::-1]
