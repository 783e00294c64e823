"""Variances of o, lse and the weights."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.bounds.rounding import StorageCost
from npattn.testing.bounds.variance.generic import DEVIATIONS, R2, GenericRows, tile_maxima
from npattn.testing.bounds.worst_case import finite, row_sum, swing

EXPONENT = np.uint64(0x7FF0_0000_0000_0000)
"""The bits of the exponent of a float64."""


class OutVarianceSums(NamedTuple):
    """Sums over the keys of a row in the variance of o and lse."""

    reach: Array  # Σ p (scale² q² k²)
    turned: Array  # Σ p slope k
    var_p: Array
    squares: Array  # Σ p²
    size: Array  # Σ p |s|
    spread: Array  # Σ var_p (z v − o)²
    values: Array  # Σ (p z v)²
    stored: Array  # Σ of the variance of stored weights, times v²
    pull: Array  # Σ p x, and Σ p x z v
    pull_v: Array
    tilt: Array  # Σ p slope, and Σ p slope z v
    tilt_v: Array
    steep_x: Array  # Σ p slope x
    flush: Array


def storage_variance(x: Array, unit: StorageCost) -> Array:
    """Return the variance of storing x: half the distance to its neighbours, squared, by 3."""
    if unit.u == 0:
        return np.zeros_like(x)
    # Of a float64, its exponent alone is the power of 2 below it; what is a little less than a
    # power may be stored as that.
    power = ((x * np.float64(1 + 2.0**-40)).view(np.uint64) & EXPONENT).view(float)
    power *= unit.u
    power *= power
    power += unit.eta**2
    power /= 3
    return power


class ForwardVariance(GenericRows):
    """Variances of the forward, from those of the scores."""

    tilt: Any = 0.0  # Σ p slope of each row
    shift: Any = 0.0  # variance of a shift that all scores of a row share, before their slope
    capped: Any = 0.0  # variance of the logarithm of a row's sum by an error that all tanh share

    @np.errstate(all="ignore")  # hidden scores may be anything
    def forward(self) -> dict[str, Array]:
        """Return limits of o, lse and weights; after the forward of `worst`.

        None, if the roundings of no row are as good as random.
        """
        if not self.generic_rows().any():
            return {}
        var_a, self.var_sink = self._argument_variance()
        self.var_p = self._weight_variance(var_a)
        limits = self._row_limits(self._out_sums())
        if "weights" in self.worst.wanted:
            limits["weights"] = self._weights_limit()
        return limits

    def _weights_limit(self) -> Array:
        # The errors of a row's sum and of merging parts, which no division takes off again.
        of_p = row_sum(self.var_p) + self.u2 * (self.n / 3 + 4)
        var = self.var_w + self.p2 * of_p + storage_variance(self.p, self.unit.p)
        generic = self.generic_rows()[..., None]
        return self.limit(np.where(self.live, var, 0), generic, self.unit.tiny)

    def _out_sums(self) -> OutVarianceSums:
        """Return the sums over the keys of each row from which out's variance is known."""
        worst, unit, p, v, v2 = self.worst, self.unit, self.p, self.r.v, self.squares.v
        steep, px = worst.steep, worst.where_live(p * worst.x)
        pull = row_sum(px)
        lost = np.where(self.live, (unit.tiny + unit.operands.eta) * (self.z + 1), 0)
        return OutVarianceSums(
            reach=self.all_reach,
            turned=worst.sum_steep_k,
            var_p=row_sum(self.var_p),
            squares=row_sum(self.p2),
            size=np.zeros(())
            if worst.problem.softcap is None
            else row_sum(p * abs(finite(worst.s))),  # a bias may be −∞
            spread=worst.square(self.var_p),
            values=self.products(self.w2, v2),
            stored=self.products(self.stored_weights, v2),
            pull=pull,
            pull_v=self.products(worst.drop(px), v),
            tilt=worst.p_total if steep is p else row_sum(steep),
            tilt_v=self.products(worst.drop(steep), v),
            steep_x=pull if steep is p else row_sum(worst.where_live(steep * worst.x)),
            flush=self.products(lost, worst.sizes.v) + unit.partial.eta * (worst.S + worst.blocks),
        )

    def _row_limits(self, sums: OutVarianceSums) -> dict[str, Array]:
        """Limits of o and lse, from sums over all the keys of each row."""
        worst, unit, o = self.worst, self.unit, self.worst.o
        self.all_reach = sums.reach
        self.query_shift = self._query_shift(sums.turned)
        self._set_shift(sums)
        self.var_l, lse = self._lse_variance(sums)
        o2 = o**2
        self.acc_o = self.sum_variance(2 * self.n, o2, 0 * o) + 4 * self.u2 * o2
        self.acc_o = self.acc_o + self.n / 2 * self.u2 * sums.values
        if unit.partial.u:
            # A block's sum is at most the root of its length times that of its squares.
            block = worst.block
            stored = R2 * unit.partial.u**2 * (block**2 / 3 + block / 2) * sums.values
            self.acc_o = self.acc_o + stored
        var = sums.spread + self.acc_o + sums.stored
        # A factor common to all scores, the rounded scale or log₂e, does not average out.
        tanh = 0.0 if worst.problem.softcap is None else unit.exp
        var = var + (3 * unit.u**2 + tanh**2) * (sums.pull_v - o * sums.pull) ** 2
        tilt = sums.tilt_v - o * sums.tilt
        var = var + self.query_shift * (tilt / np.where(sums.tilt == 0, 1, sums.tilt)) ** 2
        if worst.r.p_sink is not None:
            var = var + worst.r.p_sink**2 * self.var_sink * o2
        var = var + self.var_merge * o2  # parts merged by lse are not normalised again
        if worst.rounding.out_roundings > 1:
            var = var + (worst.rounding.out_roundings - 1) * storage_variance(o, unit.low)
        generic, flush = self.generic_rows(), sums.flush + unit.tiny * (self.n + 4)
        return {
            "o": self.limit(var, generic[..., None], flush),
            "lse": self.limit(lse[..., 0], generic, unit.tiny),
        }

    def _argument_variance(self) -> tuple[Array, Any]:
        """Variance of the argument of exp, by element; and of the sink's."""
        worst, unit, u2 = self.worst, self.unit, self.u2
        problem, x, s, m = worst.problem, worst.x, worst.s, worst.m
        reach, x2 = self.reach, x**2
        var = self.sum_variance(problem.D + 2, x2, reach)
        var = var + R2 * (2 * unit.operands.u**2 + unit.q.u**2) * reach
        if self.integer_variance is not None:
            var = var + self.integer_variance
        var = var + 2 * u2 * x2
        if unit.s.u:
            var = var + 2 * storage_variance(x, unit.s)
        if problem.softcap is not None:
            c = problem.softcap
            t = worst.tanh
            near = np.maximum(abs(x) - DEVIATIONS * np.sqrt(var), 0) / c  # where it may be steepest
            var = var * (1 - np.tanh(near) ** 2) ** 2 + (unit.exp**2 / 3 + 4 * u2) * (c * t) ** 2
            var = var + 2 * storage_variance(c * t, unit.s)
            x = c * t
        if problem.score_mod is not None:
            rate, f = worst.rate, worst.modified
            size = f**2 + (x * rate) ** 2
            far = swing(problem, x, f, DEVIATIONS * np.sqrt(var)) / DEVIATIONS
            var = np.maximum(var * rate**2, far**2) + (8 * u2 + 4 * R2 * unit.s.u**2) * size
            x = f
        if problem.bias_array is not None:
            added = u2 * s**2 + storage_variance(s, unit.s)
            least = x**2 + var
            if worst.adds_to_hidden:
                least = np.where(worst.hidden_keys, worst.small**2 + var, least)
            var = var + (np.minimum(added, 16 * least) if worst.stores_bias else added)
            # Of sums of products that begin with the bias.
            if worst.first is not None:
                begun = np.minimum(problem.D * u2 * worst.first**2, 16 * reach)
                var = var + np.where(worst.first == 0, 0, begun)
            if worst.absorbed.ndim:
                var = np.where(worst.absorbed, 0, var)
        near_s, near_m = np.minimum(abs(s), 2.0**14), np.minimum(abs(m), 2.0**14)
        self.online = online = self._online_variance()
        var = var + u2 * (4 * near_s**2 + 2 * near_m**2) + online
        return worst.where_live(var), self._sink_argument_variance()

    def _sink_argument_variance(self) -> Any:
        if self.worst.sink is None:
            return 0.0
        near, near_m = (np.minimum(abs(x), 2.0**14) for x in (self.worst.sink, self.worst.m))
        return self.u2 * (4 * near**2 + 2 * near_m**2) + self.online

    def _online_variance(self) -> Array:
        """Variance of exp, and of the rescaling of an online softmax.

        It rescales as often as the maximum rises from one tile to the next, in either direction;
        in any other order about log(tiles) times.
        """
        s = self.worst.s
        s = s if self.worst.all_live else np.where(self.live, s, -np.inf)
        return self._rescale_variance(tile_maxima(s))

    def _rescale_variance(self, top: Array) -> Array:
        """Return the same from the largest score of each tile."""
        worst = self.worst
        highs = [np.maximum.accumulate(x, -1) for x in (top, np.flip(top, -1))]
        # From a tile without visible keys nothing is rescaled.
        counts = [((x[..., 1:] > x[..., :-1]) & (x[..., :-1] > -np.inf)).sum(-1) for x in highs]
        often = np.maximum(np.maximum(*counts)[..., None], math.log(max(worst.blocks, 1)))
        often = np.minimum(often, min(worst.blocks, 16))
        return self.unit.exp**2 / 3 * (1 + often) + self.u2 * often

    def _query_shift(self, k: Array) -> Array:
        """Variance of the shift of all scores of a row by a rounded query: δq · Σ p k."""
        worst, unit, k2 = self.worst, self.unit, k**2
        size = R2 * (unit.q.u**2 + unit.operands.u**2) * worst.scale**2
        shift = size * row_sum(self.squares.q * k2)
        if worst.integer_errors is not None:
            of_q = worst.scale**2 * worst.integer_errors.q**2 / 3
            shift = shift + of_q * row_sum(k2)
        return shift

    @property
    def leans(self) -> bool:
        """A shift of a row's scores moves its weights: slopes differ, or there is a sink."""
        return self.worst.bends or self.r.p_sink is not None

    def _set_shift(self, sums: OutVarianceSums) -> None:
        """Set what a rounded query, a rounded scale and tanh do to all scores of a row alike."""
        if self.leans:
            tilt = np.where(sums.tilt == 0, 1, sums.tilt)
            self.tilt = sums.tilt
            self.shift = (self.query_shift + 3 * self.unit.u**2 * sums.steep_x**2) / tilt**2
        if self.worst.problem.softcap is not None:
            self.capped = self.unit.exp**2 / 3 * sums.size**2

    @cached_property
    def var_w(self) -> Array:
        """Variance of p e^a, the part included that all weights of a row share; after the row's."""
        # A rounded query moves a score by δq · (k − Σ p k) beside the mean of its row, and var_p
        # has δq · k alone: (a + b)² ≤ (4/3) (a² + 3 b²).
        var = self.var_p + 3 * self.query_shift * self.p2
        if self.leans:
            lean = self.worst.steep - self.p * self.tilt
            var = var + lean**2 * self.shift + self.p2 * self.capped
        return self.worst.where_live(var)

    def _weight_variance(self, var_a: Array) -> Array:
        """Variance of p e^a: p² var_a, but e^a is not linear, and 8 deviations reach its tail."""
        worst, far = self.worst, DEVIATIONS * np.sqrt(var_a)
        reach = self.p * np.expm1(far)  # 0 where p and far are, at scores that take no part
        if not far.max(initial=0) < 1:
            reach = np.where(far < 1, reach, np.exp(np.minimum(worst.log_p + far, 100)))
        return (reach / DEVIATIONS) ** 2

    def _lse_variance(self, sums: OutVarianceSums) -> tuple[Array, Array]:
        """Variance of lse as the backward uses it, and as it is delivered."""
        worst, unit = self.worst, self.unit
        var = sums.var_p + self.u2 * (self.n / 3 + self.n / 2 * sums.squares)
        if worst.r.p_sink is not None:
            var = var + worst.r.p_sink**2 * self.var_sink
        lse = finite(worst.lse)[..., None]
        near = np.minimum(abs(lse), 2.0**14)
        near_m = np.minimum(abs(worst.m), 2.0**14)
        self.var_merge = self.u2 * (4 + 5 * near**2 + 2 * near_m**2)
        saved = var + self.var_merge + storage_variance(near, unit.lse) + unit.exp**2 / 3
        saved = (np.expm1(np.minimum(DEVIATIONS * np.sqrt(saved), 100)) / DEVIATIONS) ** 2
        # A fast exp errs alike on like arguments, so that its error does not average out here.
        common: Any = unit.exp**2 / 3
        if worst.problem.softcap is not None:
            common = common * (1 + sums.size**2)
        delivered = var + common + self.query_shift + self.u2 * (4 + 3 * lse**2 + 2 * worst.m**2)
        return saved, delivered + storage_variance(lse, unit.lse)

    @cached_property
    def stored_weights(self) -> Array:
        """Variance of storing the weights p z, and of rounding them for a product."""
        unit, w2 = self.unit, self.w2
        var = self.n_p * (R2 * unit.p.u**2 * w2 + unit.p.eta**2 / 3 * self.z**2)
        return self.worst.where_live(var + 2 * R2 * unit.operands.u**2 * w2)
