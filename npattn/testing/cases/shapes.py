"""Few whole shapes that carry all contents, for frameworks that compile for each of them.

Together they have what kernels dispatch on: one query, T = S, T > S, keys over the edges of tiles,
D of no multiple of 8, E = D and not, shared heads, one key/value head, B = H, each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from npattn.testing.cases.recipe import ARRAYS, Recipe


@dataclass(frozen=True)
class Shape:
    """Rank and sizes of one problem; `heads` are H and K."""

    rank: str
    B: int
    heads: tuple[int, int]
    T: int
    S: int
    D: int
    E: int
    broadcast: bool = False


SHAPES = (
    Shape("rank 4", 2, (4, 2), 5, 17, 8, 8),
    Shape("rank 4", 2, (2, 2), 16, 16, 16, 16),
    Shape("rank 4", 2, (28, 4), 1, 65, 64, 64),
    Shape("rank 4", 1, (5, 1), 19, 17, 13, 8),
    Shape("rank 3", 1, (3, 3), 2, 19, 5, 3),
    Shape("rank 2", 1, (1, 1), 3, 33, 3, 2),
    Shape("rank 5", 2, (2, 1), 3, 11, 7, 5),
    Shape("rank 4", 3, (2, 2), 5, 13, 8, 3, broadcast=True),
)
PLAIN_SHAPE = SHAPES[1]
"""Shape of the probe, and of sizes of 0, each of which it gets in turn."""
PLAIN: dict[str, Any] = {"extent": "", "zero": ""}
NUMBERS = ("seed", "distribution", "mask", "bias", "sinks", "gate")
"""Fields of a recipe that need no new program unless the shape of an array changes."""
UNCHANGED = ("same size", "square", "round", "B = H")


def few_shapes(
    structure: frozenset[str], lists: Mapping[str, Any], fixed: frozenset[str]
) -> list[dict[str, Any]]:
    """Return values of the lists that decide a shape, for each of few shapes.

    Parameters
    ----------
    structure : frozenset of str
        What is accepted: shapes of other ranks are left out.
    lists : mapping
        Values to sample, by name, of `Pools`.
    fixed : frozenset of str
        Names whose values the user or a rule restricts. Shapes that have one of them are taken; if
        there is none, two shapes get them.
    """
    shapes = [
        s for s in SHAPES if s.rank in structure and (not s.broadcast or "broadcast" in structure)
    ]
    shapes = shapes or [SHAPES[0]]
    fitting = [s for s in shapes if all(getattr(s, n) in lists[n] for n in fixed if hasattr(s, n))]
    found = fitting or shapes[:2]
    values = [_values(shape, structure, lists, fixed, i) for i, shape in enumerate(found)]
    del values[found.index(PLAIN_SHAPE) if PLAIN_SHAPE in found else 0]["zero"]
    return values


def _values(
    shape: Shape,
    structure: frozenset[str],
    lists: Mapping[str, Any],
    fixed: frozenset[str],
    turn: int,
) -> dict[str, Any]:
    """Return the fields of a shape, changed where the structure or the fixed values forbid them."""
    values = {**vars(shape), **PLAIN, **dict.fromkeys(UNCHANGED, False)}
    H, K = shape.heads
    values["heads"] = (H, K) if "K < H" in structure else (H, H)
    for name in "DE" if "D % 8" not in structure else "":
        values[name] = max(values[name] // 8, 1) * 8
    for name in fixed & values.keys():
        if values[name] not in lists[name]:
            values[name] = lists[name][turn % len(lists[name])]
    return values


@lru_cache(maxsize=4096)
def program(recipe: Recipe) -> tuple[Any, ...]:
    """Return a key of the program that a framework compiles: shapes and options, no contents."""
    problem = recipe.problem()
    arrays = [getattr(problem, name) for name in ARRAYS]
    shapes = tuple(None if x is None else x.shape for x in arrays)
    plain = Recipe()
    return replace(recipe, **{name: getattr(plain, name) for name in NUMBERS}), shapes
