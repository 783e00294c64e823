"""What every red report shows because it was measured: a pair of problems, and a matrix.

The pair is a problem that fails and its nearest neighbour that passes, one change apart. The
matrix is the first wrong quantity, got beside wanted, in a window of at most 8 × 8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.comparison import Comparison
from npattn.testing.excerpt import Excerpt

SIDE = 8
"""Rows and columns of a reading at most."""
CELL = 7
"""Columns of a number in two digits, with its mark and the space before it."""


@dataclass(frozen=True)
class Pair:
    """A failing problem and its nearest neighbour that passes, one change apart."""

    text: str  # the change: "fails with S = 33, passes with S = 32, all else equal"
    failing: str  # recipes to paste; `passing` is "" if no neighbour passes
    passing: str = ""
    # other changes of the failing problem that pass: "without causal", "with T = 1"
    others: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Reading:
    """A window of the first wrong quantity, got beside wanted."""

    quantity: str  # "p", "o", "ds", "dk", …
    axes: str  # letters of its axes: "bhts"
    # at most 8 × 8 elements, with the tolerance of each; NaN where nothing was read
    excerpt: Excerpt
    wrong: Array  # cells out of tolerance
    problem: str  # recipe of the problem, or its text

    @property
    def got(self) -> Array:
        return self.excerpt.got

    @property
    def want(self) -> Array:
        return self.excerpt.want

    def lines(self, width: int = 80, most: int = SIDE) -> list[str]:
        """Return two small tables of two digits, of `most` rows; an asterisk marks what is wrong.

        The rows begin with the first that is wrong, if not all fit.
        """
        first = int(np.argmax(self.wrong.any(-1)))
        start = max(0, min(first, len(self.got) - most))
        shown = slice(start, start + most)
        rows, columns = self.got[shown].shape
        side_by_side = 2 * columns * CELL + 12 <= width
        label, across = self.axes[-2:-1] or " ", self.axes[-1:]
        lead = zip(self.axes[:-2], self.excerpt.lead, strict=False)
        place = ", ".join(f"{x} = {i}" for x, i in lead)
        title = f"{self.quantity} at {place}" if place else self.quantity
        heads = [f"{across} = {self.excerpt.column + i}" for i in range(columns)]
        heads = [h if i == 0 else h.rpartition(" ")[2] for i, h in enumerate(heads)]
        head = "".join(h.rjust(CELL) for h in heads)
        names = [
            f"{label} = {self.excerpt.row + start + i}" if label.strip() else ""
            for i in range(rows)
        ]
        margin = max(map(len, names))
        got, want = (
            [
                "".join(map(_cell, row, marks))
                for row, marks in zip(array[shown], self.wrong[shown], strict=True)
            ]
            for array in (self.got, self.want)
        )
        if side_by_side:
            table = [f"{'':{margin}}{head}   {head}"]
            table += [f"{n:{margin}}{a}   {b}" for n, a, b in zip(names, got, want, strict=True)]
            over = f"{'':{margin}}{'got':>{CELL}}{'':{(columns - 1) * CELL}}   {'wanted':>{CELL}}"
            return [f"{title} (* out of tolerance)", over, *table]
        found = [f"{title}, got (* out of tolerance)", f"{'':{margin}}{head}"]
        found += [f"{n:{margin}}{a}" for n, a in zip(names, got, strict=True)]
        found += ["wanted"]
        return found + [f"{n:{margin}}{b}" for n, b in zip(names, want, strict=True)]


def _cell(x: float, wrong: bool) -> str:
    """Return a number in two digits, with a mark if it is out of tolerance."""
    text = "nan" if wrong and math.isnan(x) else two_digits(float(x))  # and not what is unread
    return (text + ("*" if wrong else " ")).rjust(CELL)


def two_digits(x: float) -> str:
    """Return a number in at most five characters: "0.25", "−1.3", "31", "2e4", "–" for NaN."""
    if math.isnan(x) or math.isinf(x):
        return "–" if math.isnan(x) else "∞" if x > 0 else "−∞"
    size = abs(x)
    if size and (size < 0.005 or size >= 9999.5):
        text = f"{x:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    elif size < 9.995:
        text = f"{x:.2f}".rstrip("0").rstrip(".") if x else "0"
    else:
        text = f"{x:.0f}"
    return text.replace("-0.", "-.") if len(text) > 4 else text


def reading_of_comparison(comparison: Comparison, problem: str) -> Reading | None:
    """Return the window around the worst element of a result; None if it has no excerpt."""
    if comparison.excerpt is None:
        return None
    cut = comparison.excerpt.crop(SIDE)
    return Reading(comparison.name, AXES.get(comparison.name, ""), cut, cut.ratio > 1, problem)


AXES = {
    "o": "bhte", "lse": "bht", "weights": "bhts", "max_score": "bht", "dq": "bhtd", "dk": "bhsd",
    "dv": "bhse", "dsinks": "h", "dbias": "bhts", "dgate": "bhte",
}  # fmt: skip
"""Letters of the axes of each result; of dk and dv, h is the key head."""
