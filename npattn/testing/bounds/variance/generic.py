"""Generic rows and keys: those whose roundings are as good as random."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from npattn.engines import dense
from npattn.problem.arrays import Array
from npattn.testing.bounds.worst_case import Operands, WorstCase, row_sum

R2 = 1 / (8 * math.log(2))
"""Mean square of a rounding error in units of u|x|, for a significand distributed as 1/x: 0.18."""
DEVIATIONS = 8.0
"""An error beyond so many deviations is not chance: 10⁻¹⁵ for a normal variable. The largest
that correct implementations came to on generic inputs is in docs/tolerance.md."""
DISTINCT = 0.9
"""The share of a row's scores that must be distinct in float32 for it to be generic."""
FAINT = float(np.finfo(np.float64).tiny) / np.finfo(np.float64).eps
FEW = int(DEVIATIONS**2 * R2)
"""So many roundings cannot add up to `DEVIATIONS`, even if all are at their worst: 11."""
SPREAD = 8.0
"""Least spread of the scores of a row, in units of storage, whose roundings are independent."""


class Variety(NamedTuple):
    """Variety of the live x of each row."""

    distinct: Array  # number of values that differ in float32
    number: Array  # number of values
    spread: Array  # their deviation, weighted by p

    def generic_rows(self, unit: Array) -> Array:
        """Return the rows in which nearly all x are distinct, and spread over many units."""
        wide = self.spread >= SPREAD * unit[..., 0]
        return (self.distinct >= DISTINCT * self.number) & wide | (self.number <= FEW)


def tile_maxima(s: Array) -> Array:
    """Return the largest score of each tile of 16 keys."""
    S = s.shape[-1]
    if S % 16:
        s = np.concatenate([s, np.full((*s.shape[:-1], -S % 16), -np.inf)], -1)
    return s.reshape(*s.shape[:-1], s.shape[-1] // 16, 16).max(-1)


def count_rises(values: Array) -> Array:
    """Return in how many steps the numbers of each row rise, once they are sorted."""
    steps = np.diff(np.sort(values, -1), axis=-1) > 0  # NaN sorts last, and is above nothing
    return steps.sum(-1)


class GenericRows:
    """The rows and keys of a problem whose roundings are as good as independent.

    With `everywhere`, all of them.
    """

    r: dense.Residuals

    def __init__(self, worst: WorstCase, everywhere: bool = False) -> None:
        self.everywhere = everywhere
        self.worst, self.r, self.unit = worst, worst.r, worst.unit
        self.live, self.p, self.z = worst.r.live, worst.r.p, worst.z
        self.u2 = R2 * worst.unit.u**2
        self.n_p = worst.n_p
        self.in_ds = 0.0 if worst.rounding.fuses else self.n_p * R2 * self.unit.p.u**2
        self.n = worst.terms(worst.S)

    @cached_property
    def squares(self) -> Operands:
        """The numbers among q, k and v, squared."""
        return Operands(*(x**2 for x in self.worst.numbers))

    @cached_property
    def p2(self) -> Array:
        """p²."""
        return self.p**2

    @cached_property
    def w2(self) -> Array:
        """(p z)²."""
        return (self.p * self.z) ** 2 if self.worst.drops else self.p2

    @cached_property
    def reach(self) -> Array:
        """scale² q² k²."""
        q, k = self.r.q, self.r.k
        return self.worst.scale**2 * (q**2 @ (k**2).swapaxes(-1, -2))

    @cached_property
    def all_reach(self) -> Array:
        """Σ p (scale² q² k²) of each row."""
        return row_sum(self.worst.where_live(self.p * self.reach))

    @cached_property
    def integer_variance(self) -> Array | None:
        """Variance of the scores by integers for queries and keys; None without."""
        worst = self.worst
        if worst.integer_errors is None:
            return None
        return worst.scale**2 * worst.integer_errors.variance(worst.numbers.q)

    @property
    def least_spread(self) -> Any:
        """Change of a score by integers for queries and keys, (..., T, 1)."""
        if self.integer_variance is None:
            return 0.0
        return np.sqrt(np.max(self.integer_variance, -1, initial=0, keepdims=True))

    def sum_variance(self, n: float, square: Array, squares: Array) -> Array:
        """Return the variance that accumulating n terms adds, from their sum squared."""
        return self.u2 * (n / 3 * square + n / 2 * squares)

    def generic_rows(self, dp: Array | None = None) -> Array:
        """Return the rows, (..., H, T), whose roundings are as good as independent.

        Their scores, and dP where that counts, are distinct, and spread over more than one
        rounding interval.
        """
        worst = self.worst
        if self.everywhere:
            return np.ones(self.live.shape[:-1], bool)
        if dp is None:
            return self._generic_forward
        v = worst.numbers.v
        if worst.drops or v is not self.r.v:  # else it is do vᵀ
            dp = np.where(self.live, worst.do @ v.swapaxes(-1, -2), 0)
        size = np.sqrt(row_sum(self.p * dp**2))
        return self._generic_forward & self._generic_pulls(self._variety(dp), size)

    @cached_property
    def _generic_forward(self) -> Array:
        return self.generic_from(self._variety(self.worst.s))

    def generic_from(self, scores: Variety, dp: Variety | None = None, size: Any = 0.0) -> Array:
        """Return the same from the variety of scores and dP; dp² is size² on average."""
        unit = self.unit
        # Scores that differ by less than the error of their products err alike.
        least = max(unit.operands.u, unit.u) * np.sqrt(self.all_reach)
        if self.integer_variance is not None:
            least = np.maximum(least, self.least_spread)
        generic = scores.generic_rows(np.maximum(max(unit.p.u, unit.u), least))
        if dp is not None:
            generic = generic & self._generic_pulls(dp, size)
        return generic & self.unbiased_rows()

    def _generic_pulls(self, dp: Variety, size: Any) -> Array:
        return dp.generic_rows(max(self.unit.dp.u, self.unit.u) * size)

    def unbiased_rows(self) -> Array:
        """Return the rows, (..., H, T), whose errors are small and do not lean to one side."""
        worst = self.worst
        biased = worst.rounding.accumulator == "truncated" or self.unit.row_sum.u > 0
        return ~worst.vast[..., 0] & (not biased)

    def _variety(self, x: Array) -> Variety:
        count = self._row_counts
        shown = self._shown_scores if x is self.worst.s else self._narrow(x)
        steps = count_rises(shown)
        x = self.worst.where_live(x)
        mean = row_sum(self.p * x) / self._row_total
        return Variety(
            steps + (count > 0), count, np.sqrt(row_sum(self.p * (x - mean) ** 2)[..., 0])
        )

    def _narrow(self, x: Array) -> Array:
        """Return x in float32, NaN where a score takes no part."""
        shown = x if self.worst.all_live else np.where(self.live, x, np.nan)
        return shown.astype(np.float32)

    @cached_property
    def _shown_scores(self) -> Array:
        return self._narrow(self.worst.s)

    @cached_property
    def _row_counts(self) -> Array:
        return self.live.sum(-1)

    @cached_property
    def _row_total(self) -> Array:
        return np.where(self.worst.p_total > 0, self.worst.p_total, 1)

    def keys_are_generic(self) -> bool:
        """Return True if the queries of each key are distinct too."""
        if self.everywhere:
            return True
        values = self._shown_scores.swapaxes(-1, -2)
        count = self.live.sum(-2)
        return bool(((count_rises(values) + 1 >= DISTINCT * count) | (count <= FEW)).all())

    def limit(self, var: Array, generic: Array, lost: Any) -> Array:
        """Return `DEVIATIONS` of a result with this variance, plus the loss by flushing."""
        generic = generic & (var > FAINT)  # else squares vanished, and the rest is not all
        return np.where(generic, DEVIATIONS * np.sqrt(var) + lost, np.inf)

    def products(self, w: Array, x: Array) -> Array:
        return self.worst.sum_live(w, x, self.live)
