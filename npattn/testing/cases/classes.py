"""Classes of options, by name: the kind of mask, the sign of the scale, options that are off.

What an implementation refuses is a set of classes that occur together, such as {mask, causal}.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array
from npattn.problem.options import Window, default_scale
from npattn.testing.cases.options import BIASES, GATES, MASKS
from npattn.testing.cases.recipe import OPTION_FIELDS, Recipe

SAMPLERS: Mapping[str, Mapping[str, Any]] = {"mask": MASKS, "bias": BIASES, "gate": GATES}
LETTERS = {"mask": "ABHTS", "bias": "ABHTS", "gate": "ABHTE"}
SHAPES = {
    2: Recipe(lead=None, T=5, S=7),
    3: Recipe(lead=(), H=3, K=3, T=5, S=7),
    4: Recipe(lead=(2,), H=3, K=3, T=5, S=7),
    5: Recipe(lead=(4, 2), H=3, K=3, T=5, S=7),
}
"""Sizes from which the kind of a mask, bias or gate is read, by the rank of q."""


def classes_of_value(field: str, value: Any, rank: int = 4) -> frozenset[str]:
    """Return the classes of one option of a recipe, for q of this rank."""
    if value is None or value is False:
        return frozenset({f"no {field}"})
    found = {field}
    if field in SAMPLERS:
        found |= {_name_kind(field, axes, rank) for axes in _axes(field, value, rank)}
    return frozenset(found | _of_number(field, value))


def classes_of_recipe(recipe: Recipe) -> frozenset[str]:
    """Return the classes of all options, and sizes of 0 such as "B = 0"."""
    rank = 2 if recipe.lead is None else 3 + len(recipe.lead)
    found = _zeros(recipe.lead[0] if recipe.lead else 1, recipe) | {f"rank {rank}"}
    return found.union(*(classes_of_value(n, getattr(recipe, n), rank) for n in OPTION_FIELDS))


def classes_of_problem(problem: Problem) -> frozenset[str]:
    """Return the same of a problem; every kind that an array may be, where sizes are 1."""
    rank = 2 if problem.headless else 3 + len(problem.lead)
    found = {*_zeros(problem.lead[0] if problem.lead else 1, problem), f"rank {rank}"}
    for field in ("causal", "window", "softcap", "score_mod", "sinks"):
        value = getattr(problem, field)
        on = value is not None and value is not False
        found |= {field, *_of_number(field, value)} if on else {f"no {field}"}
    default = problem.scale == default_scale(problem.D)[0]
    found |= {"no scale"} if default else {"scale", *_of_number("scale", problem.scale)}
    found.add("dropout" if problem.dropout_mask is not None else "no dropout")
    arrays = {"mask": problem.mask_array, "bias": problem.bias_array, "gate": problem.gate}
    for field, array in arrays.items():
        if array is None:
            found.add(f"no {field}")
        else:
            axes = _possible_axes(field, array, problem)
            found |= {field, *(_name_kind(field, letters, rank) for letters in axes)}
    return frozenset(found)


def structure_of(recipe: Recipe) -> tuple[str, ...]:
    """Return view, leading axes that broadcast, rank, and sizes of 0 and 1, by name."""
    lead = recipe.lead
    names = [recipe.view] if recipe.view != "contiguous" else []
    names += ["broadcast"] if recipe.broadcast else []
    names.append("rank 2" if lead is None else f"rank {3 + len(lead)}")
    sizes = {letter: getattr(recipe, letter) for letter in "HTSDE"} | {"B": math.prod(lead or ())}
    letters = "TSDE" if lead is None else "HTSDE" if not lead else "BHTSDE"
    return (*names, *(f"{x} = {sizes[x]}" for n in (0, 1) for x in letters if sizes[x] == n))


def field_of(name: str) -> str:
    """Return the option of a class, "" for a rank or a size of 0."""
    first, _, rest = name.partition(" ")
    return "" if rest == "= 0" or first == "rank" else rest if first == "no" else first


def _zeros(samples: int, sizes: Any) -> frozenset[str]:
    found = {f"{letter} = 0" for letter in "HTSDE" if getattr(sizes, letter) == 0}
    return frozenset(found | ({"B = 0"} if samples == 0 else set()))


def _of_number(field: str, value: Any) -> set[str]:
    if field == "scale" and value is not None:
        return {"scale > 0" if value > 0 else "scale = 0" if value == 0 else "scale < 0"}
    if field == "softcap" and value is not None:
        return {f"softcap {value:g}"}
    if field == "window" and value is not None:
        return {f"window {_sides(value)}"}
    return set()


def _sides(window: Window) -> str:
    left_keys, right_keys = window
    if left_keys is None or right_keys is None:
        return "(None, n)" if left_keys is None else "(n, None)"
    return "(n, 0)" if right_keys == 0 else "(0, n)" if left_keys == 0 else "(n, n)"


@lru_cache(maxsize=256)
def _axes(field: str, name: str, rank: int) -> frozenset[tuple[str, ...]]:
    """Return the axes of an array by letter, as ("B", "1", "1", "S"); some vary with the seed."""
    sample, letters = SAMPLERS[field][name], LETTERS[field]
    shapes = {np.shape(sample(np.random.default_rng(seed), SHAPES[rank])) for seed in range(8)}
    return frozenset(
        tuple("1" if n == 1 else x for n, x in zip(shape, letters[-len(shape) :], strict=True))
        for shape in shapes
    )


def _possible_axes(field: str, array: Array, problem: Problem) -> Iterator[tuple[str, ...]]:
    """Yield the axes of an array by letter: one of size 1 may be whole, if all of it is 1."""
    heads = () if problem.headless else (problem.H,)
    last = problem.E if field == "gate" else problem.S
    full_shape = (*problem.lead, *heads, problem.T, last)[-array.ndim :]
    sizes = zip(array.shape, full_shape, LETTERS[field][-array.ndim :], strict=True)
    yield from product(*(("1", x) if n == 1 == m else ("1",) if n == 1 else x for n, m, x in sizes))


def _name_kind(field: str, axes: Iterable[str], rank: int) -> str:
    return f"{field} ({', '.join(axes)})" + (f" in rank {rank}" if rank != 4 else "")
