"""Recipes of the sizes that models have, which are too large to sample as often as small ones.

A kernel is compiled for its head sizes, groups and lengths, and may be wrong for one of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from npattn.options import OPTIONS
from npattn.testing.cases.options import OFFSETS
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools

__all__ = ["SHAPES", "find_obstacle", "model_recipes"]

SHAPES: tuple[Mapping[str, int], ...] = (
    *({"D": size, "E": size} for size in (24, 48, 72, 80, 96, 112, 160, 192, 256)),
    {"D": 192, "E": 128},
    {"D": 576, "E": 512},
    {"H": 16, "K": 2},
    {"H": 32, "K": 2},
    {"H": 32, "K": 32},
    {"B": 9},
    {"T": 640, "S": 650},
    {"T": 700, "S": 700},
    {"T": 513, "S": 513},
    {"T": 20, "S": 2100},
    {"T": 1, "S": 8192},
)
"""Sizes by letter, one problem each; the other letters are small."""
SMALL: Mapping[str, tuple[int, ...]] = {
    "B": (1, 2),
    "T": (13, 7, 19),
    "S": (37, 23, 41),
    "D": (16, 8, 32),
    "E": (16, 24, 32),
}
SHARE = 5
"""Examples of other rules that cost about as much as one of these problems."""
MANY = 2**12
"""Number of scores of a head from which options are left out that need the costly form of the
bound."""
MOST = 2**22
"""Number of scores beyond which a shape is left out: heads or samples of the user are many."""
NONE = frozenset[str]()
COSTLY = frozenset(n for n, option in OPTIONS.items() if "row_norms" in option.refusable)
HIDING = frozenset({"causal", "window"})
"""Options that may hide all but a few of many keys, and with them a mistake in the others."""
WIDE = 7
"""Keys to the left of a query, from which a window shows mistakes."""
DRAWS = 32
"""Draws of options for a shape, until one is not skipped."""


def model_recipes(
    space: Space,
    seed: int,
    examples: int,
    skips: Callable[[Recipe], bool] = lambda recipe: False,
) -> list[Recipe]:
    """Return recipes of the `SHAPES` that a space allows, with options drawn from the seed.

    Parameters
    ----------
    space : Space
        Sizes that it restricts are kept; a shape that it does not allow is left out.
    seed : int
    examples : int
        A fifth of it is the number of recipes, at least 1; 100 give all of them.
    skips : callable
        Recipe → True if other options must be drawn.
    """
    rng = np.random.default_rng([seed, 23])
    pools = {forbid: _pools(space, forbid) for forbid in (NONE, COSTLY, COSTLY | HIDING)}
    if not all(pools[NONE].lists.values()):
        return []  # sizes of 0 only
    shapes = [SHAPES[n] for n in rng.permutation(len(SHAPES))]
    recipes: list[Recipe] = []
    for sizes in (_sizes(space, shape, rng) for shape in shapes):
        # Odd seeds: a mistake in one size hides behind many options.
        odd = (2 * rng.integers(2**31, size=DRAWS) + 1).tolist()
        if sizes is None or len(recipes) == max(1, examples // SHARE):
            continue
        chosen = pools[_forbidden(sizes["T"], sizes["S"])]
        drawn = (replace(chosen.recipe(n), **sizes) for n in odd)
        recipes += list(islice((r for r in drawn if _shows(r) and not skips(r)), 1))
    return recipes


def _shows(recipe: Recipe) -> bool:
    """Return True if a mistake in one size shows: many keys are visible, and differ."""
    left, right = recipe.window or (None, None)
    wide = left is None or (right is None and not recipe.causal) or left >= WIDE
    dense = recipe.S < MANY // 8 or {recipe.mask, recipe.bias} <= {None, "matrix", "full", "heads"}
    exact = recipe.scale != 0 and recipe.bias not in OFFSETS
    return wide and dense and exact and recipe.mask != "single key"


def _pools(space: Space, forbid: frozenset[str]) -> Pools:
    force = {"distribution": ("normal",), "broadcast": False, "rank": space.ranks[0]}
    return Pools(space, force=force, forbid=forbid & space.features, nonempty=True)


def _forbidden(T: int, S: int) -> frozenset[str]:
    """Return the options that a problem with these lengths leaves out."""
    if T * S <= MANY:
        return NONE
    return COSTLY if 2 * T > S else COSTLY | HIDING


def find_obstacle(space: Space, shape: Mapping[str, int]) -> str:
    """Say why a space does not allow one of the `SHAPES`; "" if it does."""
    if not all(any(space.sizes.get(letter, SMALL[letter])) for letter in SMALL):
        return "sizes of 0 only"
    return _find_obstacle(space, shape, _fill(space, shape, np.random.default_rng(0)))


def _sizes(
    space: Space, shape: Mapping[str, int], rng: np.random.Generator
) -> dict[str, Any] | None:
    """Return the sizes of a recipe that has those of a shape, or None if a space forbids it."""
    sizes: dict[str, Any] = _fill(space, shape, rng)
    if _find_obstacle(space, shape, sizes):
        return None
    B = sizes.pop("B")
    leads = {"rank 2": None, "rank 3": (), "rank 4": (B,), "rank 5": (B, 1)}
    return {"lead": leads[space.ranks[0]], **sizes}


def _fill(space: Space, shape: Mapping[str, int], rng: np.random.Generator) -> dict[str, int]:
    """Return the sizes of a shape and, for the other letters, small ones that a space has."""
    structure, own = space.structure, space.sizes
    small = {
        letter: int(rng.choice([n for n in own.get(letter, sizes) if n]))
        for letter, sizes in SMALL.items()
    }
    few = 4
    if "S" in shape:
        few, small["B"] = 2, min(own.get("B", (1,)))
    pairs = [pair for pair in space.heads if pair[0] <= few] or space.heads[:1]
    H, K = pairs[int(rng.integers(len(pairs)))]
    sizes = {**small, "H": H, "K": K, **shape}
    if "T != S" not in structure and "S" not in shape:
        sizes["S"] = sizes["T"]
    if "E != D" not in structure and "E" not in shape:
        sizes["E"] = sizes["D"]
    if space.ranks[0] == "rank 2" and not {"H", "K"} & set(shape):
        sizes |= {"H": 1, "K": 1}
    return sizes


def _find_obstacle(space: Space, shape: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """Say what these sizes have that a space does not; "" if it has all."""
    rank = space.ranks[0]
    if ("B" in shape and rank not in ("rank 4", "rank 5")) or (
        rank == "rank 2" and sizes["H"] != 1
    ):
        return f"q, k and v have {rank}"
    outside = [n for n, size in sizes.items() if size not in space.sizes.get(n, (size,))]
    if outside:
        return f"sizes= restricts {', '.join(outside)}"
    unequal = {"T != S": ("T", "S"), "E != D": ("D", "E"), "K < H": ("K", "H")}
    needs = [name for name, (a, b) in unequal.items() if sizes[a] != sizes[b]]
    needs += ["T > S"] if sizes["T"] > sizes["S"] else []
    missing = [name.replace("!=", "≠") for name in needs if name not in space.structure]
    if missing:
        return f"no {' and '.join(missing)}"
    if sizes["B"] * sizes["H"] * sizes["T"] * sizes["S"] > MOST:
        return f"more than {MOST} scores"
    return ""
