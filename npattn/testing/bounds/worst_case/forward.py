"""Bounds of o, lse and the weights."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.bounds.worst_case.scores import ScoreErrors, finite, row_sum

VAST = 50.0
"""An error of the argument of exp that is too large to take its exponential."""
GONE = -746.0
"""The exponential of it, and of anything below, is 0 in float64."""


class WeightSums(NamedTuple):
    """Sums over the weights of a row, (..., T, 1), whose arguments of exp err by A."""

    up: Array  # Σ pR
    down: Array  # Σ p e^−A
    most: Array  # max A
    top: Array  # max of s − lse + A, at least 0
    whole: Array  # log Σ e^(s − lse + A)
    least: Array  # log Σ p e^−A
    high: Array  # max of s − A: what the largest score is at least, as it is computed


class OutErrorSums(NamedTuple):
    """Sums over the keys of a row in the bound of o."""

    moved: Array  # Σ pR
    square: Array  # Σ pR (z v − o)²
    mass: Array  # Σ p̂ z |v|
    lost: Array  # Σ |v| of weights that vanish
    far: Array  # max |z v − o|
    seen: Array  # True where any key is visible


class ForwardErrors(ScoreErrors):
    """Bounds of the forward, from the errors of the scores."""

    A: Array  # error of the argument of exp
    o: Array  # (..., H, T, E)
    lse: Array  # (..., H, T)

    @np.errstate(all="ignore")  # hidden scores may be anything
    def forward(self) -> dict[str, Array]:
        """Return bounds of o, lse, weights and the largest scores."""
        self.A, A_sink = self._argument_error()
        self._perturb_weights(self.A)
        t_lse = self._normalise(self._weight_sums(self.A), A_sink)
        self._limit_weights()
        bounds = {"o": self._out_bound(self._out_sums()), "lse": t_lse[..., 0]}
        if "weights" in self.wanted:
            bounds["weights"] = self._weights_bound()
        if "max_score" in self.wanted:
            bounds["max_score"] = self.t_top
        return bounds

    def _weights_bound(self) -> Array:
        unit = self.unit
        t = (self.pR + self.r.p * self.up) / self.down  # of p e^a / Σ p e^a
        t = t + self.p_hat * (unit.p.u + self.gamma(self.chain) + self.row_sum + 4 * unit.u)
        t = t + unit.p.eta + unit.tiny
        return np.where(self.r.live, np.minimum(t, 1), 0)

    # --- the softmax ------------------------------------------------------------------------------

    def _perturb_weights(self, A: Array) -> None:
        """Bound each weight before it is normalised: p e^a with |a| ≤ A, so pR ≥ p (e^A − 1)."""
        # A weight that is 0 to float64 may not be 0 after such an error, so grow its logarithm.
        self.log_p = self.s - finite(self.lse)[..., None]
        grown = self.log_p + A
        self.grown = grown if self.all_live else np.where(self.r.live, grown, -np.inf)
        self.pR = self.r.p * np.expm1(A)  # 0 where p and A are, at scores that take no part
        if not A.max(initial=0) < 1:
            self.pR = np.where(A < 1, self.pR, np.exp(np.minimum(self.grown, 100)))

    def _weight_sums(self, A: Array) -> WeightSums:
        """Return sums over the keys of each row, for scores that err by A, (..., H, T, S)."""
        p, up = self.r.p, row_sum(self.pR)
        down = row_sum(p * np.exp(-A))
        most = A.max(-1, keepdims=True, initial=0)
        if not (most < 1).all():
            # A weight that is 0 whatever its error, as under a fill of −1e9, makes no row vast.
            most = np.max(A, -1, keepdims=True, initial=0, where=self.grown > GONE)
        top = self.grown.max(-1, keepdims=True, initial=0)
        log_sum, least = np.log(self.p_total + up), np.log(down)
        if not (most < 1).all():  # pR may have been cut off
            log_sum = top + np.log(row_sum(np.exp(self.grown - top)))
        if (most > VAST).any():  # down may have vanished
            fallen = np.where(self.grown == -np.inf, -np.inf, self.log_p - A)
            low = fallen.max(-1, keepdims=True, initial=-np.finfo(float).max)
            least = low + np.log(row_sum(np.exp(fallen - low)))
        shown: Any = True if self.all_live else self.r.live
        high = np.max(self.s - A, -1, keepdims=True, initial=-np.inf, where=shown)
        return WeightSums(up, down, most, top, log_sum, least, high)

    @cached_property
    def p_total(self) -> Array:
        """Σ p of each row, (..., T, 1)."""
        return row_sum(self.r.p)

    @cached_property
    def steep(self) -> Array:
        """p · slope: the derivative of each weight by its own score, unnormalised."""
        p, slope = self.r.p, self.slope
        return p if isinstance(slope, float) else np.where(self.r.live, p * slope, 0)

    @cached_property
    def sum_steep_k(self) -> Array:
        """Σ p slope k of each row, over the numbers among k."""
        return self.sum_live(self.steep, self.numbers.k, self.r.live)

    def _normalise(self, sums: WeightSums, A_sink: Any) -> Array:
        """Add the sink, so that up ≥ Σ pR and down ≤ Σ p e^−A, and return the bound of lse.

        Where no exponential of A can be held, pR becomes the largest weight possible after the
        division, by log_down, and the divisor is 1.
        """
        up, down, most, top, log_sum, least, self.high = sums
        lse = finite(self.lse)[..., None]
        self.R_sink: Array = np.zeros_like(self.m)
        grown: Any = -np.inf  # of the sink
        if self.p_sink is not None and self.sink is not None:
            self.R_sink = np.broadcast_to(np.expm1(np.minimum(A_sink, 100)), self.m.shape)
            grown = np.broadcast_to(self.sink - lse + A_sink, self.m.shape)
            down, up = down + self.p_sink * np.exp(-A_sink), up + self.p_sink * self.R_sink
            most, top = np.maximum(most, A_sink), np.maximum(top, grown)
            log_sum = np.logaddexp(log_sum, grown)
            fallen = np.where(grown == -np.inf, -np.inf, self.sink - lse - A_sink)
            least = np.logaddexp(least, fallen)
            self.high = np.maximum(self.high, self.sink - A_sink)
            self.sink_is_top = self.sink + A_sink >= self.high
        # A fully masked row has no error; one whose A is vast has the range as its bound.
        seen = self.lse[..., None] != -np.inf
        self.vast, self.log_down = most > VAST, least
        soft = np.where(top < 90, np.log1p(up), log_sum)
        self.last = np.exp(np.minimum(grown - least, 0))  # the largest weight of the sink
        if self.vast.any():
            if self.p_sink is not None:
                self.p_sink = np.where(self.vast, np.maximum(self.p_sink, 1e-300), self.p_sink)
                self.R_sink = np.where(self.vast, self.last / self.p_sink, self.R_sink)
            down = np.where(self.vast, 1, down)
            soft = np.where(self.vast, np.maximum(log_sum, -least), soft)
        self.up, self.down = up, np.where(seen, np.maximum(down, np.exp(-600)), 1)
        return np.where(seen, self._lse_bound(soft, lse), 0)

    def _limit_weights(self) -> None:
        """Set p_hat, the largest weight possible."""
        if self.vast.any():
            weight = np.exp(np.minimum(self.grown - self.log_down, 0))
            self.pR = np.where(self.vast, weight, self.pR)
            self.up = np.where(self.vast, row_sum(weight) + self.last, self.up)
        self.p_hat = np.minimum(1, self.p_up / self.down)

    @cached_property
    def p_up(self) -> Array:
        """p + pR, once pR is final."""
        return self.r.p + self.pR

    def _lse_bound(self, soft: Array, lse: Array) -> Array:
        """Bound of lse, (..., H, T, 1); set those of weights that are rebuilt or merged by it."""
        u, unit = self.unit.u, self.unit
        self.row_sum = unit.row_sum.times(self.chain)  # summed in that format
        fixed = self.gamma(self.chain) + self.row_sum + 4 * u
        # Rebuilding P from a saved lse beyond 2¹⁴ loses the weights: a defect, not rounding.
        near = (5 * u + unit.lse.u) * np.minimum(abs(lse), 2.0**14) + unit.lse.eta
        near = near + 2 * u * np.minimum(abs(self.m), 2.0**14)
        self.merge = np.expm1(4 * u + near)
        soft_left = np.where(self.vast, 0, soft)  # there the weights are normalised already
        self.rebuild = np.expm1(np.minimum(soft_left + fixed + near + unit.exp, 100))
        stored = (3 * u + unit.lse.u) * abs(lse) + 2 * u * abs(self.m) + unit.lse.eta
        if self.hidden_rounding:
            stored = stored + np.where(self.near_hidden, self.hidden_rounding, 0)
        return soft + fixed + stored

    # --- o ----------------------------------------------------------------------------------------

    def _out_sums(self) -> OutErrorSums:
        """Return the sums over the keys of each row from which out's bound is known."""
        unit, live, av = self.unit, self.r.live, self.sizes.v
        # Weights vanish in storage, or because subnormals are flushed.
        vanished = unit.p.eta + unit.operands.eta + unit.tiny
        lost = np.where(live, vanished * (self.z + self.drops), 0)
        return OutErrorSums(
            moved=row_sum(self.pR),
            square=self.square(self.pR),
            mass=self.sum_live(self.drop(self.p_hat), av, live),
            lost=self.sum_live(lost, av, live),
            far=self._range(),
            seen=self.seen_rows,
        )

    def _out_bound(self, sums: OutErrorSums) -> Array:
        """Return the error of out, (..., H, T, E), and keep its parts for the backward."""
        u, unit, p_sink, mass = self.unit.u, self.unit, self.p_sink, sums.mass
        chain, n_p, ao = self.gamma(self.chain), self.n_p, abs(self.o)
        # At least Σ pR |z v − o|, by Cauchy and Schwarz.
        t_soft = np.sqrt(sums.moved) * np.sqrt(sums.square) / self.down
        if p_sink is not None:
            t_soft = t_soft + p_sink * self.R_sink * ao / self.down
        t_soft = np.minimum(t_soft, sums.far)
        t_p = n_p * unit.p.u * (1 + unit.p.u) * mass
        t_sum = chain * mass + (chain + self.row_sum + 4 * u) * (ao + t_soft)
        t_sum = t_sum + (unit.operands.times(2) + unit.partial.times(self.block)) * mass
        if unit.partial.eta:
            t_sum = t_sum + unit.partial.eta * (self.S + self.blocks) * (mass > 0)
        t_sum = t_sum + sums.lost + np.where(sums.seen, (self.S + 2) * unit.tiny, 0)
        # Parts that are merged by e^(lse − whole), and exp(log_softmax), are not normalised again.
        t_sum = t_sum + self.merge * mass
        again = self.rounding.out_roundings - 1
        if again or not self.tame:  # 0 · inf is NaN, and allows nothing
            size = np.where(mass > 0, ao + t_soft + t_p + t_sum, 0)
            t_sum = t_sum + unit.low.times(again) * size + again * unit.low.eta * (size > 0)
        self.seen, self.t_soft, self.t_rest, self.t_sum = sums.seen, t_soft, t_sum, t_p + t_sum
        return t_soft + t_p + t_sum

    def square(self, w: Array) -> Array:
        """Return Σ w (z v − o)² over the live keys, in three products."""
        live, (v, v2, centre) = self.r.live, self._centred_values
        o = self.o - centre
        first, wz = o**2 * row_sum(w), self.drop(w)
        square = self.sum_live(self.drop(wz), v2, live)
        cross = o * self.sum_live(wz, v, live)
        # What the three terms lose to float64 when they cancel.
        noise = (self.problem.S + 4) * 2.0**-52 * (square + 2 * abs(cross) + first)
        return np.maximum(square - 2 * cross + first + noise, 0)

    @cached_property
    def _centred_values(self) -> tuple[Array, Array, Array | float]:
        """v less a centre, its square, and the centre."""
        v, centre = self.r.v, 0.0
        # Only z = 1 lets a common offset of v cancel; the centre is free, so take the mean.
        if not self.drops and v.shape[-2]:
            centre = self._visible_values.mean(-2, keepdims=True)
        v = v - centre
        return v, v**2, centre

    @cached_property
    def _visible_values(self) -> Array:
        """v with non-finite and never-visible entries set to 0."""
        v = self.numbers.v
        if self.all_live and self.problem.T:
            return v
        seen = np.any(self.r.live, -2)[..., None]
        return v if seen.all() else np.where(seen, v, 0)

    def _range(self) -> Array:
        """The largest |z v − o| possible: a convex combination cannot err by more."""
        v, z, values = self.r.v, self.z, self._visible_values
        top = values.max(-2, keepdims=True, initial=-np.inf) if v.shape[-2] else np.zeros((1, 1))
        low = values.min(-2, keepdims=True, initial=np.inf) if v.shape[-2] else np.zeros((1, 1))
        if self.drops or self.r.p_sink is not None:
            most = z.max(initial=1)
            top, low = np.maximum(most * top, 0), np.minimum(most * low, 0)
        far = np.maximum(abs(top - self.o), abs(self.o - low))
        return np.where(self.seen_rows, far, 0)
