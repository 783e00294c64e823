"""Recipes as columns, so that few are chosen of thousands without building them.

A column is an array with one entry per recipe: the fields of `Recipe`, but "rank", "B" and "N", the
second leading axis, for `lead`. This is no second kind of recipe: rows say nothing that recipes do
not, either is made from the other, and outside of this folder there are only recipes. Rows exist
because one recipe takes 30 µs to build and to read, and of 20 000 candidates a check asks 1 000.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.cases.recipe import OPTION_FIELDS, Recipe

Rows = dict[str, Array]
"""Columns by name."""
_FIELDS = ("lead", *"HKTSDE", "dtype", "seed", "distribution", "broadcast", *OPTION_FIELDS, "view")
_read = attrgetter(*_FIELDS)


def column(values: Iterable[Any]) -> Array:
    """Return an array of integers, of flags or of objects."""
    values = list(values)
    types = {*map(type, values)}
    whole = types == {bool} or (types == {int} and max(map(abs, values)) < 2**62)
    return np.array(values) if whole else np.fromiter(values, object, len(values))


def rows_of(recipes: Sequence[Recipe]) -> Rows:
    """Return the columns of recipes."""
    lists: list[tuple[Any, ...]] = list(zip(*map(_read, recipes), strict=True))
    lists = lists or [()] * len(_FIELDS)
    rows = {name: column(values) for name, values in zip(_FIELDS, lists, strict=True)}
    leads: list[tuple[int, ...]] = [lead or () for lead in lists[0]]
    rows["rank"] = column(2 if lead is None else 3 + len(lead) for lead in lists[0])
    rows["B"] = column(lead[0] if lead else 1 for lead in leads)
    rows["N"] = column(lead[1] if len(lead) > 1 else 1 for lead in leads)
    del rows["lead"]
    return rows


def recipes_of(rows: Rows, chosen: Any = slice(None)) -> list[Recipe]:
    """Build the recipes of these rows."""
    columns = {name: values[chosen].tolist() for name, values in rows.items()}
    leads = zip(*(columns.pop(name) for name in ("rank", "B", "N")), strict=True)
    columns["lead"] = [None if rank == 2 else (B, N)[: rank - 3] for rank, B, N in leads]
    names = tuple(columns)
    return [
        Recipe(**dict(zip(names, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]
