"""Problems that are tried, each with the first quantity that is wrong on it, if any is.

A place is learned from their elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Set
from dataclasses import dataclass, replace
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
from npattn.testing.diagnosis.evidence import Evidence, observe, sizes_of
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
    "scale": (0.3, -0.75, 0.0),  # not 1 / √D for any D
    "softcap": (2.0,),
    "score_mod": ("distance",),
    "sinks": (True,),
    "dropout": (0.5,),
    "gate": tuple(GATES)[:1],
}
"""Values of each option that are tried in place of another."""
EXTREME = tuple(name for name in BIASES if re.search("1e|large|least|inf", name))
"""Kinds of bias with numbers that are no normal ones."""
OF_SEVERAL_KEYS = ("s", "p", "dp", "delta", "ds", "dq", "dk", "dbias")
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


@dataclass(frozen=True, eq=False)
class Point:
    """A problem that was tried: what failed on it, and where."""

    recipe: Recipe
    evidence: Evidence
    fault: Fault | None


def scores_of(recipe: Recipe) -> int:
    """Return the number of scores of the problem of a recipe."""
    return math.prod((*(recipe.lead or ()), recipe.H, recipe.T, recipe.S))


def observe_recipe(trial: Trial, recipe: Recipe, weights: bool = False) -> Evidence | None:
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
        return observe(trial, problem, trial.cotangents(recipe, problem, weights), recipe.view)
    except (ImplementationError, NpattnError):
        return None


def try_recipe(trial: Trial, recipe: Recipe, weights: bool = False) -> Point | None:
    """Return what is wrong first on a recipe; None if an implementation does not take it."""
    evidence = observe_recipe(trial, recipe, weights)
    return None if evidence is None else Point(recipe, evidence, locate(evidence))


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


def _is_later(fault: Fault, like: Fault) -> bool:
    """Return True if a fault is of a quantity that is computed later than another's."""
    if like.step in ("nan", "layout", "state", "") or fault.step in ("nan", "layout", "state", ""):
        return False
    if any({like.step, fault.step} <= steps for steps in READ_TOGETHER):
        return False
    order = [(x.step[:1] == "d" or x.backward, STEPS.index(x.step)) for x in (like, fault)]
    return order[0] < order[1]


def shape_of(fault: Fault, problem: Problem) -> tuple[int, ...]:
    """Return the shape of the elements that a fault would have in another problem."""
    sizes = sizes_of(problem)
    if fault.axes[:2] == "bh" and fault.quantity.name in ("dk", "dv"):
        sizes["H"] = sizes["K"]
    return tuple(sizes[x.upper()] for x in fault.axes)


def sample_of(point: Point, like: Fault) -> Sample | None:
    """Return the elements of a point for learning; None if it has another fault."""
    fault, problem, axes = point.fault, point.evidence.problem, like.axes
    trial = point.evidence.trial
    if fault is not None and _is_later(fault, like):
        fault = None  # all before it was right
    if fault is None:
        shape = shape_of(like, problem)
        wrong, known = np.zeros(shape, bool), np.ones(shape, bool)
    elif (fault.step, fault.backward, fault.axes) == (like.step, like.backward, like.axes):
        wrong, known = fault.wrong, fault.known | fault.wrong
    else:
        return None
    several = trial.visible(problem).sum(-1) > 1
    of_rows = axes[:3] == "bht" and math.prod(wrong.shape[:3]) == several.size
    if like.step in OF_SEVERAL_KEYS and of_rows:
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
