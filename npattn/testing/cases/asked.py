"""Sizes of the problems that were asked and accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from npattn.testing.cases.model_sizes import MORE_SHAPES, SHAPES
from npattn.testing.cases.recipe import Recipe

LETTERS = "BHKGTSDE"


def name_shape(shape: Mapping[str, int]) -> str:
    """Return the name of a model size: "H = 16, K = 2", "D = E = 24", "T = 1, left = 7"."""
    if len(set(shape.values())) == 1:
        return f"{' = '.join(shape)} = {next(iter(shape.values()))}"
    return ", ".join(f"{letter} = {size}" for letter, size in shape.items())


MODELS = {name_shape(shape): shape for shape in SHAPES + MORE_SHAPES}
"""Model sizes by name."""


@dataclass(frozen=True)
class Asked:
    """Sizes of problems that were asked and accepted: a result came back, right or wrong.

    Problems in which a size is 0 are left out: few of their results can be wrong.
    """

    # letter of B H K G T S D E → (least, largest); G counts the query heads of a key head
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    models: frozenset[str] = frozenset()  # names of the `MODELS` among them

    @classmethod
    def of(cls, recipes: Iterable[Recipe]) -> Asked:
        """Return the sizes of recipes."""
        rows = {
            (r.lead[0] if r.lead else 1, r.H, r.K, r.T, r.S, r.D, r.E, (r.window or (None,))[0])
            for r in recipes
        }
        sizes = [
            dict(zip((*LETTERS, "left"), (B, H, K, H // K, T, S, D, E, left_keys), strict=True))
            for B, H, K, T, S, D, E, left_keys in rows
            if 0 not in (B, H, K, T, S, D, E)
        ]
        if not sizes:
            return cls()
        columns = {letter: {row[letter] for row in sizes} for letter in (*LETTERS, "left")}
        models = {
            name
            for name, shape in MODELS.items()
            if all(n in columns[letter] for letter, n in shape.items())  # most end here
            and any(all(row[letter] == n for letter, n in shape.items()) for row in sizes)
        }
        ranges = {x: (min(columns[x]), max(columns[x])) for x in LETTERS}
        return cls(ranges, frozenset(models))

    @classmethod
    def union(cls, parts: Iterable[Asked]) -> Asked:
        """Return the sizes of the problems of all parts."""
        parts = list(parts)
        ranges: dict[str, tuple[int, int]] = {}
        for letter, (least, largest) in (item for one in parts for item in one.ranges.items()):
            low, high = ranges.get(letter, (least, largest))
            ranges[letter] = min(low, least), max(high, largest)
        return cls(ranges, frozenset().union(*(one.models for one in parts)))

    def as_dict(self) -> dict[str, Any]:
        """Return it in the types of JSON."""
        ranges = {letter: list(ends) for letter, ends in self.ranges.items()}
        return {"ranges": ranges, "models": sorted(self.models)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Asked:
        """Return what `as_dict` wrote."""
        ranges = {
            letter: (least, largest) for letter, (least, largest) in content["ranges"].items()
        }
        return cls(ranges, frozenset(content["models"]))

    def __str__(self) -> str:
        """Format the ranges: "B 1–3, H 1–20, K 2, …"."""
        ranges = self.ranges.items()
        return ", ".join(f"{n} {a}–{b}" if a < b else f"{n} {a}" for n, (a, b) in ranges)
