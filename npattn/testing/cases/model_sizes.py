"""Recipes of the sizes that models have, which are too large to sample as often as small ones.

A kernel is compiled for its head sizes, groups, lengths and windows, and may be wrong for one of
them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from npattn.problem.options import OPTIONS
from npattn.testing.cases.classes import classes_of_recipe
from npattn.testing.cases.options import OFFSETS
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools

MODEL_HEADS: Mapping[str, tuple[int, int]] = {
    "Qwen2-7B": (28, 4),
    "Qwen2.5-14B": (40, 8),
    "Falcon-7B": (71, 1),
    "GPT-2": (12, 12),
    "Llama-3.2-3B": (24, 8),
    "Mixtral-8x22B": (48, 8),
    "Qwen3-235B-A22B": (64, 4),
    "Llama-3-8B": (32, 8),
    "Qwen2-0.5B": (14, 2),
    "Qwen2.5-3B": (16, 2),
    "Qwen2-1.5B": (12, 2),
    "Yi-34B": (56, 8),
    "StarCoder2-7B": (36, 4),
    "Mistral-Large-2407": (96, 8),
    "StarCoder": (48, 1),
    "ChatGLM2-6B": (32, 2),
    "Llama-2-7B": (32, 32),
    "Falcon-180B": (232, 8),
}
"""H and K of models, as their published config.json has them."""
HEADS = tuple({"H": H, "K": K, "T": T} for H, K in MODEL_HEADS.values() for T in (1, 5))
SHAPES: tuple[Mapping[str, int], ...] = (
    *({"D": size, "E": size} for size in (24, 48, 72, 80, 96, 112, 160, 192, 256)),
    {"D": 192, "E": 128},
    {"D": 576, "E": 512},
    *HEADS[:12:3],
    {"B": 9},
    # More (sample, head) pairs than a GPU has processors, and q, k, v of more than 2¹⁶ numbers.
    {"B": 3, "H": 128, "K": 128, "T": 13, "S": 17, "D": 16},
    {"T": 128, "S": 128},
    {"T": 257, "S": 514},
    {"T": 1025, "S": 1025},
    {"T": 20, "S": 2100},
    {"T": 1, "S": 8192},
    # Windows within a tile and wider, with whole tiles before them.
    {"T": 1, "S": 300, "left": 7},
    {"T": 70, "S": 270, "left": 129},
)
"""Sizes by letter, one problem each; other sizes are small. `left` is the left side of a window."""
MORE_SHAPES: tuple[Mapping[str, int], ...] = (
    {"D": 32, "E": 32},
    {"D": 129, "E": 127},
    *(shape for shape in HEADS if shape not in SHAPES),
    # Lengths that are a multiple of a tile, or differ from one by 1; the other length is short.
    {"T": 32, "S": 64},
    {"T": 7, "S": 512},
    {"T": 4, "S": 256},
    {"T": 256, "S": 32},
    {"T": 512, "S": 16},
    {"T": 513, "S": 9},
    {"T": 1024, "S": 9},
    {"T": 3, "S": 511},
    {"T": 5, "S": 1023},
    {"T": 2, "S": 1024},
    {"T": 1, "S": 300, "left": 64},
    {"T": 1, "S": 260, "left": 128},
    {"T": 37, "S": 290, "left": 31},
)
"""Sizes that are tried where no framework compiles for each shape."""
FORMS = ((None, False), (0, False), (None, True), (1, False), (0, True))
"""Right side of a window, where 1 stands for the left one, and causal."""
SMALL: Mapping[str, tuple[int, ...]] = {
    "B": (1, 2),
    "T": (13, 7, 19),
    "S": (37, 23, 41),
    "D": (16, 8, 32),
    "E": (16, 24, 32),
}
SHARE = 2
"""Examples of other rules that cost about as much as one of these problems."""
MANY = 2**12
"""Number of scores of a head from which options are left out whose bounds take long."""
MOST = 2**22
"""Number of scores beyond which a shape is left out: heads or samples of the user are many."""
MOST_BY_HEADS = 2**21
"""Numbers in q, k, v beyond which the heads of a model are left out: their sizes are the user's."""
NONE = frozenset[str]()
COSTLY = frozenset(OPTIONS) - {"mask", "causal", "window", "bias", "scale"}
HIDING = frozenset({"causal", "window"})
"""Options that may hide all but a few of many keys, and with them a mistake in the others."""
OTHERS = COSTLY | HIDING | {"mask", "bias", "scale"}
"""Options that are left out beside a window, or drawn with it."""
WIDE = 7
"""Keys to the left of a query, from which a window shows mistakes."""
DRAWS = 32
"""Draws of options for a shape, until one is not skipped."""


def model_recipes(
    space: Space,  # sizes that it restricts are kept; a shape that it does not allow is left out
    seed: int,
    examples: int,  # half of it is the number of recipes, at least 1; 150 give all of them
    # Recipe → True if other options must be drawn
    skips: Callable[[Recipe], bool] = lambda recipe: False,
) -> list[Recipe]:
    """Return recipes of the shapes that a space allows, with options drawn from the seed."""
    rng = np.random.default_rng([seed, 23])
    pools = {forbid: _pools(space, forbid) for forbid in (NONE, COSTLY, COSTLY | HIDING, OTHERS)}
    if not all(pools[NONE].lists.values()):
        return []  # sizes of 0 only
    shapes = _join_pairs(space) if space.few_shapes else SHAPES + MORE_SHAPES
    recipes: list[Recipe] = []
    for shape in (shapes[n] for n in rng.permutation(len(shapes))):
        sizes = _sizes(space, {n: size for n, size in shape.items() if n != "left"}, rng)
        # Odd seeds: a mistake in one size hides behind many options.
        odd = (2 * rng.integers(2**31, size=DRAWS) + 1).tolist()
        forms = [FORMS[n] for n in rng.permutation(len(FORMS))]
        if sizes is None or len(recipes) == max(1, examples // SHARE):
            continue
        if "left" in shape:
            drawn = _with_windows(pools[OTHERS], sizes, shape["left"], odd[:2], forms)
        else:
            chosen = pools[_forbidden(sizes["T"], sizes["S"])]
            drawn = (r for r in (replace(chosen.recipe(n), **sizes) for n in odd) if _shows(r))
        allowed = (r for r in drawn if not space.refuses(classes_of_recipe(r)) and not skips(r))
        recipes += [r for r in [next(allowed, None)] if r is not None]
    return recipes


def _join_pairs(space: Space) -> list[Mapping[str, int]]:
    """Return the shapes that a space allows, some sizes of a head with many heads or samples.

    Each shape is compiled: fewer tell as much, for a mistake in one size shows at any other.
    """
    shapes = [shape for shape in SHAPES if not find_obstacle(space, shape)]
    heads = [shape for shape in shapes if shape.keys() == {"D", "E"}]
    # Not with lengths: a mistake in the size of a head is explained by many calls.
    others = [shape for shape in shapes if not shape.keys() & {"D", "S"}]
    for head, other in zip(heads, others, strict=False):
        both = {**head, **other}
        if not find_obstacle(space, both):
            shapes = [both if shape is head else shape for shape in shapes if shape is not other]
    return shapes


def _with_windows(
    pools: Pools,
    sizes: Mapping[str, Any],
    left_keys: int,
    seeds: Sequence[int],
    forms: Sequence[tuple[int | None, bool]],
) -> Iterator[Recipe]:
    """Yield recipes with a window of a left side, and its other sides in turn."""
    features = pools.space.features
    for (right_keys, causal), seed in product(forms, seeds if "window" in features else ()):
        if not causal or "causal" in features:
            recipe = replace(pools.recipe(seed), **sizes, causal=causal)
            yield replace(recipe, window=(left_keys, left_keys if right_keys else right_keys))


def _shows(recipe: Recipe) -> bool:
    """Return True if a mistake in one size shows: many keys are visible, and differ."""
    left_keys, right_keys = recipe.window or (None, None)
    wide = left_keys is None or (right_keys is None and not recipe.causal) or left_keys >= WIDE
    dense = recipe.S < MANY // 8 or {recipe.mask, recipe.bias} <= {None, "matrix", "full", "heads"}
    exact = recipe.scale != 0 and recipe.bias not in OFFSETS
    return wide and dense and exact and recipe.mask != "single key"


def _pools(space: Space, forbid: frozenset[str]) -> Pools:
    force = {"distribution": ("normal",), "broadcast": False, "rank": space.ranks[0]}
    # Options that are always on stay, at long lengths too.
    forbid = forbid & space.features - set(space.always)
    return Pools(space, force=force, forbid=forbid, nonempty=True)


def _forbidden(T: int, S: int) -> frozenset[str]:
    """Return the options that a problem with these lengths leaves out."""
    if T * S <= MANY:
        return NONE
    return COSTLY if 2 * T > S else COSTLY | HIDING


def find_obstacle(space: Space, shape: Mapping[str, int]) -> str:
    """Say why a space does not allow one of the shapes; "" if it does."""
    if "left" in shape and "window" not in space.features:
        return "no window"
    if space.few_shapes and shape in MORE_SHAPES:
        return "not where each shape is compiled"
    shape = {letter: size for letter, size in shape.items() if letter != "left"}
    restricted = [n for n, size in shape.items() if size not in space.sizes.get(n, (size,))]
    if restricted:
        return f"sizes= restricts {', '.join(restricted)}"
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
    structure, limits = space.structure, space.sizes
    heads = "H" in shape
    if heads and "T" in limits:
        shape = {letter: size for letter, size in shape.items() if letter != "T"}
    legal = {letter: [n for n in limits.get(letter, sizes) if n] for letter, sizes in SMALL.items()}
    scores = shape.get("T", 1) * shape.get("S", 1)
    few = 1 if scores > 2**19 else 2 if "S" in shape else 4
    least = {*"BSDE"} if heads or "S" in shape else set()  # many heads or keys are enough
    small = {n: min(x) if n in least else int(rng.choice(x)) for n, x in legal.items()}
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
    B, H, T, S, D, E = (sizes[letter] for letter in "BHTSDE")
    if B * H * T * S > MOST:
        return f"more than {MOST} scores"
    if "H" in shape and B * H * (T + S) * (D + E) > MOST_BY_HEADS:
        return f"more than {MOST_BY_HEADS} numbers in all heads"
    return ""
