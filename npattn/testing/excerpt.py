"""Excerpt of an array around its worst element, small enough for a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.problem.arrays import Array

SIDE = 16
"""Rows and columns at most."""


@dataclass(frozen=True, eq=False)
class Excerpt:
    """Elements of a result around the worst one: rows and columns of its last two axes."""

    lead: tuple[int, ...]  # index of the matrix in the leading axes
    row: int  # index of the first element
    column: int
    got: Array  # (rows, columns): the result, the exact values and the tolerance
    want: Array
    allowed: Array

    @classmethod
    def around(
        cls, index: tuple[int, ...], got: Array, want: Array, allowed: Array, side: int = SIDE
    ) -> Excerpt:
        """Cut out the elements around `index`; an array of rank 0 or 1 is one row."""
        index = (0,) * (2 - len(index)) + index
        *lead, row, column = index
        shape = got.shape if got.ndim >= 2 else (1,) * (2 - got.ndim) + got.shape
        rows, columns = (_near(i, n, side) for i, n in zip((row, column), shape[-2:], strict=True))
        matrices = (x.reshape(shape)[tuple(lead)] for x in (got, want, allowed))
        parts = (np.array(matrix[rows, columns], np.float64) for matrix in matrices)
        return cls(tuple(lead), rows.start, columns.start, *parts)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Excerpt:
        """Return the excerpt that a report holds as JSON, where NaN is the text "nan"."""
        parts = (np.array(content[name], np.float64) for name in ("got", "want", "allowed"))
        return cls(tuple(content["lead"]), content["row"], content["column"], *parts)

    def crop(self, side: int) -> Excerpt:
        """Return `side` rows and columns at most, with the first element out of tolerance."""
        wrong = np.argwhere(self.ratio > 1)
        place = wrong[0].tolist() if len(wrong) else [0, 0]
        rows, columns = (_near(i, n, side) for i, n in zip(place, self.got.shape, strict=True))
        parts = (x[rows, columns] for x in (self.got, self.want, self.allowed))
        return Excerpt(self.lead, self.row + rows.start, self.column + columns.start, *parts)

    @property
    def ratio(self) -> Array:
        """Error / tolerance; inf where a number is missing or nothing is allowed."""
        with np.errstate(all="ignore"):
            ratio = np.where(self.got == self.want, 0, abs(self.got - self.want) / self.allowed)
        return np.where(np.isnan(ratio), np.inf, ratio)


def _near(i: int, n: int, side: int) -> slice:
    """Return `side` of n positions at most, with i among them."""
    start = max(0, min(i - side // 2, n - side))
    return slice(start, min(n, start + side))
