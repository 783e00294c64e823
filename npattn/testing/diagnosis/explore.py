"""Problems around a failing one, each with the first quantity that is wrong on it, if any is.

One thing is changed at a time: an option off, another in its place, each size, the heads, the
contents. A place is learned from them, and tried on others.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from npattn.errors import NpattnError
from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.options import BIASES, GATES
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.diagnosis.evidence import Evidence, observe, problem_size, sizes_of
from npattn.testing.diagnosis.locate import Fault, locate, visible_keys
from npattn.testing.diagnosis.place import Sample
from npattn.testing.report.cause import STEPS
from npattn.testing.trial import Trial

PLAIN = Recipe()
VALUES: dict[str, tuple[Any, ...]] = {
    "mask": ("matrix", "first tile", "padding"),
    "causal": (True,),
    "window": ((1, 0), (0, 1), (3, None)),
    "bias": ("full", "matrix", "-inf padding"),
    "scale": (0.5, -0.75, 0.0),
    "softcap": (2.0,),
    "score_mod": ("distance",),
    "sinks": (True,),
    "dropout": (0.5,),
    "gate": tuple(GATES)[:1],
}
"""Values of each option that are tried in place of another."""
HEADS = ((1, 1), (4, 2), (2, 2), (2, 1), (10, 2), (4, 4), (6, 3), (8, 2), (5, 1), (14, 2))
"""Pairs H, K to which the heads of a failing problem are changed."""
EXTREME = tuple(name for name in BIASES if re.search("1e|large|least|inf", name))
"""Kinds of bias with numbers that are no normal ones."""
OF_SEVERAL_KEYS = ("s", "p", "dp", "delta", "ds", "dq")
"""Steps that rows of one key say nothing of."""
OFF: dict[str, Any] = {"mask": None, "causal": False, "window": None, "bias": None}
HIDING = {*OFF}
"""Options that hide keys: with them, only hidden keys can take weight that they should not."""
READ_TOGETHER = ({"s", "visible", "p"}, {"dp", "delta", "ds"})
"""Steps that are told apart by the form of what is wrong in P, and in dS."""
LARGE = 2**16
"""Scores of the largest problem that is tried: its quantities, kept for each, take some 5 MB."""
KEYS_TO_A_COLUMN = 64
"""Keys to each column of v from which P can be read in few calls."""
MOST = 40
"""Problems around a failing one."""
SECONDS = 1.5
"""Processor time for them, once `LEAST` were tried."""
LEAST = 16


@dataclass(frozen=True, eq=False)
class Point:
    """A problem that was tried: what failed on it, and where."""

    recipe: Recipe
    evidence: Evidence
    fault: Fault | None


def scores_of(recipe: Recipe) -> int:
    """Return the number of scores of the problem of a recipe."""
    return math.prod((*(recipe.lead or ()), recipe.H, recipe.T, recipe.S))


def try_recipe(trial: Trial, recipe: Recipe, weights: bool = False) -> Point | None:
    """Return what an implementation does on a recipe; None if it does not take it.

    With `weights`, gradients come back from the weights too.
    """
    if not trial.space.takes(recipe) or trial.refuses_recipe(recipe):
        return None
    trial.memo.clear()
    try:
        problem = trial.problem(recipe)
        if trial.skips_empty_rows and trial.empty(problem).any():
            return None
        evidence = observe(trial, problem, trial.cotangents(recipe, problem, weights), recipe.view)
        return Point(recipe, evidence, locate(evidence))
    except (ImplementationError, NpattnError):
        return None


def enlarge(trial: Trial, recipe: Recipe) -> Recipe:
    """Return the recipe with rows of several numbers, which a shrunk one lacks.

    P is read E keys at a time: many keys get more columns.
    """
    least = {"D": 5, "E": max(7, -(-recipe.S // KEYS_TO_A_COLUMN))}
    changes: dict[str, Any] = {
        x: n for x, n in least.items() if getattr(recipe, x) < n and x not in trial.space.sizes
    }
    if changes and "E != D" not in trial.space.structure:
        changes = dict.fromkeys("DE", max(recipe.D, recipe.E, *least.values()))
    return fit(trial.space, replace(recipe, **changes), recipe)


def tame(recipe: Recipe) -> Recipe:
    """Return the recipe with normal numbers, and a bias of normal numbers."""
    bias = "full" if recipe.bias in EXTREME else recipe.bias
    return replace(recipe, distribution="normal", bias=bias)


def fit(space: Space, recipe: Recipe, base: Recipe) -> Recipe:
    """Return a recipe with the equal sizes and multiples of 8 that a space asks for.

    Of two sizes that must be equal, the one that differs from the base decides.
    """
    sizes: dict[str, Any] = {x: getattr(recipe, x) for x in "TSDE"}
    for name, a, b in (("T != S", "T", "S"), ("E != D", "D", "E")):
        if name not in space.structure and sizes[a] != sizes[b]:
            sizes[a] = sizes[b] = sizes[b] if sizes[b] != getattr(base, b) else sizes[a]
    if "T > S" not in space.structure and sizes["T"] > sizes["S"]:
        sizes["T"], sizes["S"] = sizes["S"], sizes["T"]
    if "D % 8" not in space.structure:
        sizes |= {x: -(-sizes[x] // 8) * 8 for x in "DE"}
    return replace(recipe, **sizes)


def around(trial: Trial, base: Recipe) -> Iterator[Recipe]:
    """Yield recipes around a failing one, those first that tell most."""
    for recipe in _vary(trial, base):
        yield fit(trial.space, recipe, base)


def _vary(trial: Trial, base: Recipe) -> Iterator[Recipe]:
    """Yield recipes near the base: other seeds, options, sizes and heads, then random sizes."""
    if trial.space.few_shapes:
        for n in range(1, 3):
            yield replace(base, seed=base.seed + 4 * n)
        yield from _options(base)
        return
    yield replace(base, seed=base.seed + 4)
    kinds = zip_longest(_options(base), _lengths(base), _heads_and_widths(base))
    yield from (recipe for several in kinds for recipe in several if recipe is not None)
    rng = np.random.default_rng([base.seed, 23])
    for _ in range(12):
        changes: dict[str, Any] = {x: int(rng.integers(1, 100)) for x in "TS"}
        changes |= {x: int(rng.integers(4, 40)) for x in "DE"}
        h, k = ((1, 1), (4, 2), (6, 3), (3, 3))[int(rng.integers(4))]
        if base.lead is not None and not {"H", "K"} & set(trial.space.sizes):
            changes |= {"H": h, "K": k}
        changes["seed"] = base.seed + 4 * int(rng.integers(1, 2**16))
        yield replace(base, **changes)


def _lengths(base: Recipe) -> Iterator[Recipe]:
    """Yield the base with other numbers of queries and keys."""
    T, S = base.T, base.S
    for n in (61, 109):  # where last tiles of 8, 16, 32 and 64 begin is not the same
        yield replace(base, T=n)
        yield replace(base, S=n)
    for t, s in ((67, 83), (T, 2 * S + 3), (2 * T + 3, S), (T, T), (S, S), (1, S)):
        yield replace(base, T=t, S=s)
    for s in (S - 1, S + 1, S // 2, -(-S // 16) * 16, 16 * (S // 16), S + 16, 24, 40, 5):
        yield replace(base, S=max(s, 2))
    for t in (T - 1, T + 1, T // 2, -(-T // 16) * 16, T + 16, 3):
        yield replace(base, T=max(t, 1))


def _heads_and_widths(base: Recipe) -> Iterator[Recipe]:
    """Yield the base with other heads, samples and numbers of columns."""
    H, K = base.H, base.K
    if base.lead is not None:
        for lead in ((3,), (5,), (1,)):
            yield replace(base, lead=lead)
        for h, k in (*HEADS, (2 * H, 2 * K), (2 * H, K)):
            if (h, k) != (H, K):
                yield replace(base, H=h, K=k)
    for d in (8, 16, 24, 33, 64, 72, 2 * base.D):
        yield replace(base, D=d)
        yield replace(base, E=d)
        yield replace(base, D=d, E=d)


def _options(base: Recipe) -> Iterator[Recipe]:
    """Yield the base without each option, with others in its place, and with one more."""
    on = options_on(base)
    if base.distribution != "normal":
        yield replace(base, distribution="normal")
    for name in on:
        yield replace(base, **{name: getattr(PLAIN, name)})
        for value in VALUES[name]:
            if value not in EXTREME or base.bias in EXTREME:
                yield replace(base, **{name: value})
    plain = replace(base, **{name: getattr(PLAIN, name) for name in on})
    if len(on) > 1:
        yield plain
    for name, values in VALUES.items():
        if name not in on:
            yield replace(plain, **{name: values[0]})
            yield replace(base, **{name: values[0]})


def explore(trial: Trial, base: Recipe, weights: bool = False) -> list[Point]:
    """Try the recipes around a failing one, as long as there is time."""
    end = time.process_time() + SECONDS
    points: list[Point] = []
    seen = {base}
    for n, recipe in enumerate(around(trial, base)):
        if recipe.seed == base.seed and options_on(recipe) == options_on(base):
            recipe = replace(recipe, seed=base.seed + 4 * n)  # other numbers, and sinks alike
        if recipe in seen or scores_of(recipe) > LARGE:
            continue
        seen.add(recipe)
        late = time.process_time() - end
        enough = len(points) >= MOST or (late > 0 and len(points) >= LEAST)
        if enough or late > SECONDS:
            break
        point = try_recipe(trial, recipe, weights)
        if point is not None:
            points.append(point)
    return points


def _is_later(fault: Fault, like: Fault) -> bool:
    """Return True if a fault is of a quantity that is computed later than another's."""
    if like.step in ("nan", "layout", "state", "") or fault.step in ("nan", "layout", "state", ""):
        return False
    if any({like.step, fault.step} <= steps for steps in READ_TOGETHER):
        return False
    order = [(x.step[:1] == "d" or x.backward, STEPS.index(x.step)) for x in (like, fault)]
    return order[0] < order[1]


def sample_of(point: Point, like: Fault) -> Sample | None:
    """Return the elements of a point for learning; None if it has another fault."""
    fault, problem, axes = point.fault, point.evidence.problem, like.axes
    trial = point.evidence.trial
    if fault is not None and _is_later(fault, like):
        fault = None  # all before it was right
    if fault is None:
        letters = {x: problem_size(problem, x.upper()) for x in axes}
        if axes[0:2] == "bh" and like.quantity.name in ("dk", "dv"):
            letters["h"] = problem_size(problem, "K")
        shape = tuple(letters[x] for x in axes)
        wrong, known = np.zeros(shape, bool), np.ones(shape, bool)
    elif (fault.step, fault.backward, fault.axes) == (like.step, like.backward, like.axes):
        wrong, known = fault.wrong, fault.known | fault.wrong
    else:
        return None
    if like.step in OF_SEVERAL_KEYS and axes[:3] == "bht":
        several = trial.visible(problem).sum(-1) > 1
        several = several.reshape(wrong.shape[:3] + (1,) * len(axes[3:]))
        known = known & several | wrong  # a row of one key has weight 1 and dS = 0, whatever it is
    return sample(trial, point.recipe, problem, axes, wrong, known)


def narrow(elements: Sample, point: Point, like: Fault, shared: Set[str]) -> Sample:
    """Return the elements that a wrong mask can show in, if a problem hides any keys.

    `shared` are options that all failing problems have: what others hide too is right.
    """
    if like.step != "visible" or not HIDING & {*options_on(point.recipe)}:
        return elements
    trial, problem = point.evidence.trial, point.evidence.problem
    shows = shown_in(visible_keys(trial, problem).reshape(elements.known.shape), like)
    if like.facts.get("kinds") == ["extra"] and shared:
        without = problem.replace(**{x: OFF[x] for x in shared})
        shows &= visible_keys(trial, without).reshape(elements.known.shape) | elements.wrong
    return replace(elements, known=elements.known & shows)


def shown_in(visible: Array, fault: Fault) -> Array:
    """Return the keys in which a wrong mask shows: visible ones, hidden ones with weight, or all.

    `visible` are the keys that a row must see.
    """
    kinds = fault.facts.get("kinds", ())
    return np.asarray(visible ^ ("extra" in kinds)) if len(kinds) < 2 else visible | True


def sample(
    trial: Trial, recipe: Recipe, problem: Problem, axes: str, wrong: Array, known: Array
) -> Sample:
    """Return elements of a problem, or with axes "" a problem, for learning."""
    sizes = sizes_of(problem)
    empty = np.asarray(trial.empty(problem)).reshape(tuple(sizes[x] for x in "BHT"))
    return Sample(sizes, frozenset(options_on(recipe)), axes, wrong, known, empty)
