"""Rule about masks that look like another option, or like none [5, 6]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.shapes import PLAIN_SHAPE, SHAPES
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules.register import rule
from npattn.testing.rules.requirements import needs
from npattn.testing.trial import Trial

LOOK_ALIKES = ("causal corners", "causal counts", "all visible", "one hidden pair")
LENGTHS = ((5, 5), (16, 16), (33, 33), (64, 64), (7, 19), (1, 13))
"""T and S: square and round, for which kernels have fast paths, and others."""


def _recipes(trial: Trial, seed: int, examples: int) -> list[Recipe]:
    """Return a recipe for every mask and length, and another with causal where there is such."""
    recipes = [
        Pools(trial.space, **_sample(trial, T, S, name)).recipe(2 * (2 * seed + turn) + 1)
        for turn in (0, 1)
        for T, S in _lengths(trial.space)
        for name in LOOK_ALIKES
    ]
    ambiguous, each = _ambiguous_shapes(trial, seed), len(LOOK_ALIKES)
    recipes = [*recipes[:each], *ambiguous, *recipes[each:]]
    shown = [recipe for recipe in recipes if not trial.skips(recipe, "look-alike-masks")]
    return shown[: max(each + len(ambiguous), examples // 6)]


def _ambiguous_shapes(trial: Trial, seed: int) -> list[Recipe]:
    """Return recipes of masks (H, T, S) where B = H, and (T, S) where B = T."""
    space = trial.space
    if "rank 4" not in space.structure or not space.sizes.keys().isdisjoint("BHKT"):
        return []
    plain = PLAIN_SHAPE  # has B = H
    H, T, S = (plain.B, plain.T, plain.S) if space.few_shapes else (3, 5, 16)
    recipes = []
    for name, lengths, changes in (
        ("heads", (T, S), {"lead": (H,), "H": H, "K": H}),
        ("matrix", (5, 16), {"lead": (5,)}),
    ):
        recipe = Pools(space, **_sample(trial, *lengths, name)).recipe(2 * seed + 1)
        recipes.append(replace(recipe, broadcast=False, **changes))
    return [r for r in recipes if "T != S" in space.structure and not trial.refuses_recipe(r)]


def _lengths(space: Space) -> list[tuple[int, int]]:
    """Return the lengths that the user's sizes allow."""
    sizes = space.sizes
    lengths = [(s.T, s.S) for s in SHAPES[1::-1]] if space.few_shapes else LENGTHS
    allowed = [
        (T, S) for T, S in lengths if T in sizes.get("T", (T,)) and S in sizes.get("S", (S,))
    ]
    return allowed or [(sizes.get("T", (16,))[0], sizes.get("S", sizes.get("T", (16,)))[0])]


def _sample(trial: Trial, T: int, S: int, name: str) -> dict[str, Any]:
    """Return arguments of `Pools`: mask and lengths, and nothing else that could hide them."""
    heads = [pair for pair in trial.space.heads if pair[0] <= 4] or trial.space.heads[:1]
    return {
        "force": {"mask": name, "T": T, "S": S, "heads": tuple(heads), "distribution": "normal"},
        "forbid": trial.space.features - {"mask", "causal"},
        "nonempty": True,
    }


@rule("look-alike-masks", "5, 6", unless=needs("mask"), recipes=_recipes)
def look_alike_masks(trial: Trial, recipe: Recipe) -> float:
    """A mask is read element by element, whatever it looks like from afar.

    The four corners of a causal mask without its triangle; as many visible keys a row as causal
    has, elsewhere; all True; all True but one; (H, T, S) where B = H, and (T, S) where B = T.
    Broken by kernels that take a mask for causal by its corners or its counts, by those that skip a
    mask when a sample or the sum of it says that nothing is hidden, and by those that take its
    first axis for the batch's.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    return trial.check(trial.against_oracle(problem, cotangents), problem, cotangents)
