"""Traits of the values of an option: axes that share an array, edges of a window, signs of a scale.

A fault that shows with some values of an option alone is where they have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from npattn.problem import Problem
from npattn.testing.cases.options import BIASES, GATES, MASKS
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.evidence import sizes_of

ARRAYS = {"mask": MASKS, "bias": BIASES, "gate": GATES}
"""Kinds of arrays, by option."""
AXES = {"b": "samples", "h": "heads", "t": "queries", "s": "keys", "e": "columns"}
SCALES = (0.3, 2.0, 0.0, -0.75)
OPTIONS = ("window", "scale", *ARRAYS)
"""Options whose values are of several kinds."""


def values_of(name: str, recipe: Recipe, extreme: Iterable[str]) -> Iterator[Any]:
    """Yield values of an option that is on in a recipe, but for those with extreme numbers."""
    if name in ARRAYS:
        yield from (kind for kind in ARRAYS[name] if kind not in extreme)
        return
    if name == "scale":
        yield from SCALES
        return
    left, right = recipe.window or (None, None)
    for n in (0, 1, recipe.S - 1, recipe.S, recipe.S + 1, None):
        for window in ((n, right), (left, n)):
            if window != (None, None):
                yield window


def traits_of(problem: Problem, name: str) -> set[str]:
    """Return conditions on the value of an option that hold.

    An array that is shared may have an axis of length 1 or none:
    {"bias shared by heads", "bias.shape[-3] = 1"}.
    """
    if name == "window":
        edges = list(enumerate(problem.window or ()))
        beyond = {f"window[{i}] ≥ S" for i, n in edges if n is not None and n >= problem.S}
        return beyond | {f"window[{i}] = {n}" for i, n in edges}
    if name == "scale":
        scale = problem.scale or 0.0
        signs = {"< 0": scale < 0, "= 0": scale == 0, "≤ 0": scale <= 0}
        return {f"scale {sign}" for sign, holds in signs.items() if holds}
    own = np.shape(getattr(problem, name))
    shape, letters = (1, 1, 1, *own), "bhte" if name == "gate" else "bhts"
    sizes = sizes_of(problem)
    traits = {f"{name}.shape[{i}] = 1" for i in range(-len(own), 0) if own[i] == 1}
    for x, n in zip(letters, (math.prod(shape[:-3]), *shape[-3:]), strict=True):
        traits |= {f"{name} shared by {AXES[x]}"} if n == 1 else set()
        # Of one sample both hold.
        is_own = n > 1 or sizes[x.upper()] == 1
        traits |= {f"{name} not shared by {AXES[x]}"} if is_own else set()
    return traits
