"""Which recipes of many to judge with, so that everything meets everything with few of them.

Two options that are right alone may be wrong together, and an option may be wrong in one kind of
structure only. So every option meets every kind of structure, and every two kinds of structure
meet, at least once; and each kind of mask, bias, distribution and size is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

import numpy as np

from npattn.arrays import Array
from npattn.testing.cases.recipe import Recipe

__all__ = ["BY_SAMPLE", "OPTIONS", "covering", "kinds", "options_on", "traits"]

OPTIONS = ("mask", "causal", "window", "bias", "scale", "softcap", "score_mod", "sinks", "dropout")
"""The fields of a recipe that are options."""
BY_SAMPLE = ("padding", "left padding", "prefix", "documents")
"""Masks that differ by sample and not by head, as batches have them."""
STEEP = ("huge logits", "saturated")
"""Distributions in which one key takes all, so that what is subtracted from scores matters."""
CROWD = 4  # options on at once; a mistake in one hides behind more
_options = attrgetter(*OPTIONS)  # at once: it is asked of thousands
OFF = _options(Recipe())


def covering(plan: Sequence[Recipe], draws: Sequence[Recipe]) -> Iterator[Recipe]:
    """Those of the draws that show a pair of traits, or a kind, that is in none before; always the
    one with most of them.

    Parameters
    ----------
    plan : sequence of Recipe
        What is judged with anyway.
    draws : sequence of Recipe
        To choose from. What is in none of them is not asked for, so that nothing needs to know
        what a space excludes.
    """
    recipes = [*plan, *(r for r in draws if len(options_on(r)) <= CROWD)]
    has, shows = _table(recipes, traits), _table(recipes, kinds)
    old = np.arange(len(recipes)) < len(plan)
    pairs = (has.T @ has > 0) & ~(has[old].T @ has[old] > 0)
    single = ~shows[old].any(0)
    left = np.arange(len(recipes))  # of the rest each shows what was shown
    while pairs.any() or single.any():
        new = (has[left] @ pairs * has[left]).sum(-1) / 2 + shows[left] @ single
        best = left[np.argmax(new)]
        pairs &= np.outer(has[best], has[best]) == 0
        single &= shows[best] == 0
        left = left[new > 0]
        yield recipes[best]


def options_on(recipe: Recipe) -> list[str]:
    """Its options that are not at their default."""
    return [n for n, on, off in zip(OPTIONS, _options(recipe), OFF, strict=True) if on != off]


def traits(recipe: Recipe) -> list[str]:
    """What must meet in pairs: options, and kinds of structure. None where there is nothing."""
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
    """What must be there once: each kind of an option and of arrays, each size."""
    fields = ("distribution", *OPTIONS, "T", "S", "D", "E")
    sizes = [f"B = {n}" for n in (recipe.lead or ())[:1]] + [f"H = {recipe.H} = {recipe.K} G"]
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
        beside = (("H", "T"), ("K", "S"), ("T", "D"), ("S", "D"), ("S", "E"))
        found += [f"{a} = {b}" for a, b in beside if getattr(recipe, a) == getattr(recipe, b) > 1]
    several = max(lead, default=1) > 1 and recipe.H > 1
    return found + (["by sample"] if several and recipe.mask in BY_SAMPLE else [])


def _table(recipes: Sequence[Recipe], names: Callable[[Recipe], list[str]]) -> Array:
    """Which recipe (rows) has which name (columns), 1.0 or 0.0."""
    of = [names(recipe) for recipe in recipes]
    columns = {name: n for n, name in enumerate(dict.fromkeys(chain.from_iterable(of)))}
    table = np.zeros((len(recipes), len(columns)), np.float32)
    for row, found in zip(table, of, strict=True):
        row[[columns[name] for name in found]] = 1
    return table
