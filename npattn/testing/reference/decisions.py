"""Decisions of a run in float64: comparisons, indices and steps that numbers take.

A random rounding that moves a maximum to its neighbour, or a zero of a ReLU across its kink,
changes a gradient by as much as itself: a spread over both sides would allow every gradient between
them. So each noisy run repeats the decisions of the exact one. What another right function may
decide otherwise is asked afterwards: "turn" runs decide against the exact run wherever the numbers
are within their error, and show which results depend on that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from npattn.problem.arrays import Array

Kind = Literal["compare", "choose", "step", "fixed"]
Mode = Literal["record", "repeat", "turn"]


@dataclass
class Site:
    """One decision of the exact run."""

    result: Any  # booleans, indices or steps, as decided
    # numbers that decided it: a − b of a comparison, else the array itself; None where another
    # decision is not to be tried
    array: Array | None
    squares: Array  # sum of (noisy − exact)² over the noisy runs, shaped like `array`


@dataclass
class Decisions:
    """Decisions of the exact run in their order, repeated or turned in later runs."""

    sites: list[Site] = field(default_factory=list)
    mode: Mode = "record"  # "record", "repeat" or "turn"
    draws: int = 0  # number of runs that have repeated them
    # (mean of squares, number of elements) → error that a right function may have there; of "turn"
    # runs
    width: Callable[[Array, int], Array] | None = None
    # 0 or 1: side to which steps and every other element of an order are moved; of "turn" runs
    parity: int = 0
    turned: bool = False  # True if a "turn" run decided anything otherwise
    at: int = 0

    def start(self, mode: Mode) -> None:
        """Begin a run."""
        self.mode, self.at = mode, 0
        self.draws += mode == "repeat"

    def decide(
        self,
        kind: Kind,
        array: Array | None,
        evaluate: Callable[[Array | None], Any],
        sign: Callable[[Any], Array] | None = None,
    ) -> Any:
        """Return the decision of this run: of kind "compare", "choose", "step" or "fixed".

        `evaluate` makes it of `array` (of any shape), perhaps changed; comparisons ignore their
        argument. `sign` returns for a decision ±1 shaped like `array`: where to move it for another
        choice.
        """
        if self.mode == "record":
            result = evaluate(array)
            margin = np.zeros(0) if array is None else np.zeros(array.shape)
            self.sites.append(Site(result, None if array is None else array.copy(), margin))
            return result
        site = self.sites[self.at] if self.at < len(self.sites) else None
        self.at += 1
        shape = None if array is None else array.shape
        if site is None or shape != (None if site.array is None else site.array.shape):
            return evaluate(array)  # the run went another way, which no decision of ours made
        if self.mode == "repeat":
            if array is not None:
                with np.errstate(all="ignore"):
                    site.squares += (array - site.array) ** 2
            return site.result
        return self._turn(kind, site, array, evaluate, sign)

    def _turn(
        self,
        kind: Kind,
        site: Site,
        array: Array | None,
        evaluate: Callable[[Array | None], Any],
        sign: Callable[[Any], Array] | None,
    ) -> Any:
        """Return the decision on `array`, of any shape, turned where it is within its error."""
        if array is None or site.array is None or kind == "fixed":
            return evaluate(array)
        assert self.width is not None
        with np.errstate(all="ignore"):
            width = np.nan_to_num(self.width(site.squares / max(self.draws, 1), array.size))
        if kind == "compare":
            near = (abs(site.array) <= width) & (width > 0)
            self.turned |= bool(near.any())
            return np.where(near, ~np.asarray(site.result), evaluate(array))
        side = (-1.0) ** self.parity if sign is None else sign(site.result)
        result = evaluate(array + side * width)
        self.turned |= not np.array_equal(result, site.result)
        return result
