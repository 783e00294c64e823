"""Choose few recipes of many in which every pair of options and structure occurs.

Two options that are right alone may be wrong together, and an option may be wrong in one kind of
structure only. So every option meets every kind of structure, and every two kinds of structure
meet, at least once; and each kind of mask, bias, distribution and size is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.cases.recipe import OPTION_FIELDS, Recipe

BY_SAMPLE = ("padding", "left padding", "prefix", "documents")
"""Masks that differ by sample and not by head."""
STEEP = ("huge logits", "saturated")
"""Distributions in which one key takes all weight, so that the row maximum matters."""
CROWD = 4  # options on at once; a mistake in one hides behind more
_options = attrgetter(*OPTION_FIELDS)  # at once: it is called by the thousand
OFF = _options(Recipe())


def covering(plan: Sequence[Recipe], draws: Sequence[Recipe]) -> Iterator[Recipe]:
    """Yield samples until every pair of traits and every kind among them has occurred.

    Parameters
    ----------
    plan : sequence of Recipe
        Recipes that are used anyway.
    draws : sequence of Recipe
        Samples to choose from, each time the one with most that is new. Pairs that occur in none
        of them are not asked for, so that nothing needs to know what a space excludes.
    """
    recipes = [*plan, *(r for r in draws if len(options_on(r)) <= CROWD)]
    has, shows = _table(recipes, traits), _table(recipes, kinds)
    old = np.arange(len(recipes)) < len(plan)
    pairs = (has.T @ has > 0) & ~(has[old].T @ has[old] > 0)
    single = ~shows[old].any(0)
    left = np.arange(len(recipes))  # the rest shows nothing new
    while pairs.any() or single.any():
        new = (has[left] @ pairs * has[left]).sum(-1) / 2 + shows[left] @ single
        best = left[np.argmax(new)]
        pairs &= np.outer(has[best], has[best]) == 0
        single &= shows[best] == 0
        left = left[new > 0]
        yield recipes[best]


def options_on(recipe: Recipe) -> list[str]:
    """Return its options that are not at their default."""
    return [n for n, on, off in zip(OPTION_FIELDS, _options(recipe), OFF, strict=True) if on != off]


def traits(recipe: Recipe) -> list[str]:
    """Return the options and kinds of structure that should occur in pairs; none at sizes of 0."""
    lead = recipe.lead
    if 0 in (*(lead or ()), recipe.H, recipe.T, recipe.S, recipe.D, recipe.E):
        return []
    found = options_on(recipe)
    found += ["rank 2" if lead is None else f"rank {3 + len(lead)}"]
    found += ["K = H" if recipe.K == recipe.H else "K = 1" if recipe.K == 1 else "1 < K < H"]
    found += ["E = D" if recipe.E == recipe.D else "E != D"]
    found += ["T = S" if recipe.T == recipe.S else "T < S" if recipe.T < recipe.S else "T > S"]
    found += ["T = 1"] if recipe.T == 1 < recipe.S else []
    found += ["D % 8" if recipe.D % 8 else "D = 8 n"]
    found += ["broadcast"] if recipe.broadcast else []
    found += ["scale < 0"] if (recipe.scale or 0) < 0 else []
    found += ["steep"] if recipe.distribution in STEEP else []
    found += ["B = H"] if lead is not None and lead[:1] == (recipe.H,) != (1,) else []
    return found


def kinds(recipe: Recipe) -> list[str]:
    """Return the values of options, the distribution and the sizes, which should each occur."""
    fields = ("distribution", *OPTION_FIELDS, "T", "S", "D", "E")
    sizes = [f"B = {n}" for n in (recipe.lead or ())[:1]]
    if traits(recipe):  # at sizes of 0 a group shows nothing
        sizes += [f"K = {recipe.K}", f"G = {recipe.H // recipe.K}"]
    sizes += ["H = 0"] if recipe.H == 0 else []
    found = [f"{name} = {getattr(recipe, name)}" for name in fields] + sizes
    found += ["S > 128, D > 64"] if recipe.S > 128 and recipe.D > 64 else []
    lead = recipe.lead or ()
    few = len(options_on(recipe)) <= 2  # with more, rows may see nothing
    if few and recipe.broadcast and len(lead) > 1:
        kept = zip(lead, recipe.shared_lead, strict=True)
        found += [f"broadcast {['1' if n == 1 else 'kept' if n == m else 'not' for n, m in kept]}"]
    if few and lead[:1] == (recipe.H,) != (1,):  # axes that are swapped go unnoticed by shape
        found += [f"B = H, {n} by heads" for n in ("mask", "bias") if getattr(recipe, n) == "heads"]
    hides = recipe.mask is not None or recipe.window is not None or recipe.causal
    if few and lead and not recipe.broadcast and not hides:  # nor are these
        neighbours = (("H", "T"), ("K", "S"), ("T", "D"), ("S", "D"), ("S", "E"))
        found += [
            f"{a} = {b}" for a, b in neighbours if getattr(recipe, a) == getattr(recipe, b) > 1
        ]
    several = max(lead, default=1) > 1 and recipe.H > 1
    return found + (["by sample"] if several and recipe.mask in BY_SAMPLE else [])


def _table(recipes: Sequence[Recipe], names: Callable[[Recipe], list[str]]) -> Array:
    """Return a table of 1.0 if a recipe (row) has a name (column), else 0.0."""
    lists = [names(recipe) for recipe in recipes]
    columns = {name: n for n, name in enumerate(dict.fromkeys(chain.from_iterable(lists)))}
    table = np.zeros((len(recipes), len(columns)), np.float32)
    for row, present in zip(table, lists, strict=True):
        row[[columns[name] for name in present]] = 1
    return table
