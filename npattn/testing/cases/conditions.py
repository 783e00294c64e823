"""Sizes and options of a recipe by their letters and names, for conditions on them."""

from __future__ import annotations

from typing import Any

from npattn.testing.cases.recipe import OPTION_FIELDS, Recipe

SIZES = ("B", "K", "G", "T", "S", "D", "E")
"""Letters of the sizes of a sample; H = K · G."""
_PLAIN = Recipe()


def letters_of(recipe: Recipe) -> dict[str, Any]:
    """Return the sizes of a recipe, and whether each option is on, by name."""
    sizes = {letter: getattr(recipe, letter) for letter in "KTSDE"}
    sizes |= {"B": recipe.lead[0] if recipe.lead else 1, "G": recipe.H // max(recipe.K, 1)}
    on = {name: getattr(recipe, name) != getattr(_PLAIN, name) for name in OPTION_FIELDS}
    return {letter: sizes[letter] for letter in SIZES} | on
