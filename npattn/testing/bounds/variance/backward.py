"""Variances of the gradients, which make the likely case whole."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from npattn.engines import dense
from npattn.problem.arrays import Array, sum_to
from npattn.testing.bounds.variance.forward import ForwardVariance, storage_variance
from npattn.testing.bounds.variance.generic import DEVIATIONS, R2
from npattn.testing.bounds.worst_case import finite, row_sum


class DeltaVarianceSums(NamedTuple):
    """Sums over the keys of a row in the variance of D."""

    away: Array  # Σ var_p (dp − D)²
    squares: Array  # Σ (p dp)², of dp through out
    weights: Array  # Σ of the variances of P dP
    terms: Array  # Σ (p dp)²
    leaned: Array  # Σ p slope dp


class TopVarianceSums(NamedTuple):
    """Sums over the keys of a row in the variance of the gradient of its maximum."""

    var: Array  # Σ variances of dS
    squares: Array  # Σ dS²
    total: Array  # Σ dS
    leaned: Array  # Σ (slope − Σ p slope) dS


class DqVarianceSums(NamedTuple):
    """Sums over the keys of a row in the variance of dq; x is k."""

    var: Array  # Σ var x²
    signed: Array  # Σ dx x
    squares: Array  # Σ dx² x²
    common: Array  # Σ p slope x
    bent: Array  # Σ p |error of the slope| |x|
    underflow: Array  # Σ x² + 1
    flush: Array  # Σ (|x| + 1) of what is flushed
    leaned: Array  # Σ (slope − Σ p slope) dx x


class Variance(ForwardVariance):
    """The deviation of each result of a problem whose worst case is known.

    With `everywhere`, also where roundings are not as good as random.
    """

    var_top: Array | float = 0.0
    """Variance of the gradient that goes through the maximum of each row."""

    @np.errstate(all="ignore")
    def backward(self) -> dict[str, Array]:
        """Return limits of the gradients; after `forward` and the backward of `worst`.

        None where the roundings of no row, or of not all rows and keys, are as good as random.
        """
        worst, problem = self.worst, self.worst.problem
        rows = self.generic_rows(worst.dp_out)
        if not rows.any():
            return {}
        var_dp = self._dp_variance()
        self.var_D = var_D = self._delta_variance(
            self._delta_sums(var_dp), self._dweights_variance()
        )
        var_ds = self._ds_variance(var_dp)
        self._through_slope(var_ds)
        self.var_top = self._top_variance(self._top_sums(var_ds))

        var_q, lost_q = self._dq_variance(self._dq_sums())
        limits = {
            "dq": self.limit(
                sum_to(var_q, problem.q.shape),
                sum_to(1.0 * ~rows[..., None], (*problem.q.shape[:-1], 1)) == 0,
                sum_to(lost_q, problem.q.shape),
            )
        }
        every: Any = rows.all() and self.keys_are_generic()
        if not every:
            return limits
        of = {"dk": problem.k, "dv": problem.v}
        pairs = (
            ("dk", self._dk_variance(self._dk_sums())),
            ("dv", self._dv_variance(self._dv_sums())),
        )
        for name, pair in pairs:
            var, lost = (dense.sum_shared(x, problem.K, of[name].shape) for x in pair)
            limits[name] = self.limit(var, every, lost)
        if problem.bias_array is not None:
            limits["dbias"] = self._dbias_limit(var_ds, var_D, problem.bias_array.shape, every)
        if self.r.p_sink is not None:
            limits["dsinks"] = self._dsinks_limit(var_D, every)
        return limits

    def _through_slope(self, var_ds: Array) -> None:
        """Set the variance of dx = ds · slope, the error of the slope, and the loss by flushing.

        var_ds is (..., H, T, S).
        """
        worst, unit = self.worst, self.unit
        self.var_dx, self.bent = var_ds, None
        if worst.bends:
            # Where the slope is less than its error, as in a saturated cap, that passes errors on.
            self.bent = np.where(self.live, self.p * worst.slope_error, 0)
            steep = abs(worst.slope) + worst.slope_error
            var_dx = var_ds * steep**2 + (worst.ds * worst.slope_error) ** 2
            self.var_dx = var_dx + 2 * (self.u2 * worst.dx**2 + storage_variance(worst.dx, unit.ds))
        # Flushing loses for certain: a weight, a dS, and their products.
        size = 2 + abs(worst.dp) + abs(worst.D) + abs(worst.dl)
        self.lost = worst.where_live((unit.tiny + unit.operands.eta) * size)
        self.flush = (1 + worst.scale) * self.lost

    def _top_sums(self, var_ds: Array) -> TopVarianceSums:
        ds = self.worst.ds
        lean = (self.worst.slope - self.tilt) * ds if self.leans else np.zeros(ds.shape)
        return TopVarianceSums(
            var=row_sum(var_ds),
            squares=row_sum(ds**2),
            total=row_sum(ds),
            leaned=row_sum(self.worst.where_live(lean)),
        )

    def _top_variance(self, sums: TopVarianceSums) -> Array | float:
        """Variance of the gradient that goes through the maximum of each row.

        It is 0 with `everywhere`: deviations that compare implementations do not count it.
        """
        worst = self.worst
        if self.everywhere or not worst.keeps_maximum:
            return 0.0
        var = sums.var + self.var_D + self.sum_variance(self.n, sums.total**2, sums.squares)
        if worst.p_sink is not None:
            var = var + (worst._dsink_errors() / DEVIATIONS) ** 2
        var = var + self.shift * sums.leaned**2
        return var + self.u2 * np.square(worst.dl) + self.unit.ds.eta**2 / 3

    def _dq_sums(self) -> DqVarianceSums:
        """Return the sums over the keys of each row from which dq's variance is known."""
        worst, k, k2 = self.worst, self.worst.numbers.k, self.squares.k
        ak, dx2, ops = abs(k), self.dx2, 2 * R2 * self.unit.operands.u**2
        turned = worst.ps is worst.steep
        return DqVarianceSums(
            var=self.products(self.var_dx + ops * dx2, k2),
            signed=worst.sum_dx_k,
            squares=self.products(dx2, k2),
            common=worst.sum_steep_k if turned else self.products(worst.ps, k),
            bent=np.zeros(()) if self.bent is None else self.products(self.bent, ak),
            underflow=self.products(worst.ones, k2 + 1),
            flush=self.products(self.flush, ak + 1),
            leaned=self._leaned_dq(),
        )

    @cached_property
    def dx2(self) -> Array:
        return self.worst.dx**2

    def _leaned_dq(self) -> Array:
        if not self.leans:
            return np.zeros(())
        lean = np.where(self.live, (self.worst.slope - self.tilt) * self.worst.dx, 0)
        return self.products(lean, self.worst.numbers.k)

    def _dq_variance(self, sums: DqVarianceSums) -> tuple[Array, Array]:
        """Variance of dq = scale · dX k, and the loss by flushing."""
        worst, scale2 = self.worst, self.worst.scale**2
        dq, squares = sums.signed, sums.squares
        dq2 = dq**2
        var = sums.var + self.sum_variance(self.n, dq2, squares)
        var = var + self.var_D * (abs(sums.common) + sums.bent) ** 2 + self.var_l * dq2
        var = var + self.shift * sums.leaned**2
        # It is minus the sum of errors that are in the rest, and may agree with them.
        var = (np.sqrt(var) + np.sqrt(self.var_top) * worst.top_reach) ** 2
        var = scale2 * var + self.unit.ds.eta**2 / 3 * sums.underflow
        var = var + self._gradient_storage(
            dq * worst.scale, squares * scale2, worst.S, worst.problem.q
        )
        return var, sums.flush

    def _dk_sums(self) -> tuple[Array, ...]:
        """Sums over queries, by query head: variance, dk, its squares, underflow, loss, Σ dx²."""
        worst, unit, q, q2 = self.worst, self.unit, self.worst.numbers.q, self.squares.q
        dx2, ops = self.dx2, 2 * R2 * unit.operands.u**2
        turn = self.live.swapaxes(-1, -2)
        common = self.p2 if self.bent is None else (abs(worst.ps) + self.bent) ** 2
        each = self.var_dx + common * self.var_D + worst.top_slope**2 * self.var_top
        each = worst.where_live(each + dx2 * (self.var_l + R2 * unit.q.u**2 + ops))
        return (
            worst.sum_live(each.swapaxes(-1, -2), q2, turn),
            worst.sum_live(worst.dx.swapaxes(-1, -2), q, turn),
            worst.sum_live(dx2.swapaxes(-1, -2), q2, turn),
            worst.sum_live(worst.ones.swapaxes(-1, -2), q2 + 1, turn),
            worst.sum_live(self.flush.swapaxes(-1, -2), abs(q) + 1, turn),
            dx2.sum(-2)[..., None],
        )

    def _dk_variance(self, sums: tuple[Array, ...]) -> tuple[Array, Array]:
        """Variance of dk = scale · dXᵀ q, by query head, and the loss by flushing."""
        var, dk, squares, underflow, lost, terms = sums
        worst, scale2 = self.worst, self.worst.scale**2
        var = scale2 * (var + self.sum_variance(worst.terms(worst.T), dk**2, squares))
        var = var + self.unit.ds.eta**2 / 3 * underflow
        squares, of = squares * scale2, worst.problem.k
        var = var + self.unit.q.eta**2 / 3 * terms
        return var + self._gradient_storage(
            dk * worst.scale, squares, worst.T, of, shared=True
        ), lost

    def _dv_sums(self) -> tuple[Array, ...]:
        """Sums over the queries of each query head: variance, dv, its squares, loss."""
        worst, unit, do2, w2 = self.worst, self.unit, self.do2, self.w2
        stored, w = worst.stored_do, np.sqrt(w2)
        each = w2 * (self.var_l + R2 * stored.u**2) + self.z**2 * self.var_w
        each = each + self.stored_weights
        lost = np.where(self.live, (unit.tiny + unit.operands.eta) * (self.z + 1), 0)
        if stored.eta:
            lost = lost + stored.eta * w
        return (
            worst.sum_do(each, do2),
            worst.sum_do(w, finite(worst.do)),
            worst.sum_do(w2, do2),
            worst.sum_do(lost, abs(worst.do) + 1),
        )

    @cached_property
    def do2(self) -> Array:
        """The numbers among do, squared."""
        return finite(self.worst.do) ** 2

    def _dv_variance(self, sums: tuple[Array, ...]) -> tuple[Array, Array]:
        """Variance of dv = (P z)ᵀ dO, by query head, and the loss by flushing."""
        var, dv, squares, lost = sums
        worst = self.worst
        var = var + self.sum_variance(worst.terms(worst.T), dv**2, squares)
        return var + self._gradient_storage(
            dv, squares, worst.T, worst.problem.v, shared=True
        ), lost

    def _dp_variance(self) -> Array:
        """Variance of dP."""
        worst, unit, v2 = self.worst, self.unit, self.squares.v
        reach = self.do2 @ v2.swapaxes(-1, -2)
        reach = worst.where_live(self.z**2 * reach if worst.drops else reach)
        var = self.sum_variance(worst.problem.E + 2, self.dp_out2, reach)
        var = var + R2 * (2 * unit.operands.u**2 + worst.stored_do.u**2) * reach
        if worst.stored_do.eta:
            lost = np.where(self.live, self.z**2 * v2.sum(-1)[..., None, :], 0)
            var = var + worst.stored_do.eta**2 / 3 * lost
        var = var + self.n_p * (storage_variance(worst.dp_out, unit.dp) + self.u2 * self.dp_out2)
        return worst.where_live(var + self.u2 * self.dp2)

    @cached_property
    def dp2(self) -> Array:
        return self.worst.dp**2

    @cached_property
    def dp_out2(self) -> Array:
        worst = self.worst
        return self.dp2 if worst.dp_out is worst.dp else (worst.dp_out**2)

    def _delta_sums(self, var_dp: Array) -> DeltaVarianceSums:
        worst, p2 = self.worst, self.p2
        away = worst.where_live(worst.dp_out - worst.D_out)
        terms = row_sum(p2 * self.dp2)
        return DeltaVarianceSums(
            away=row_sum(self.var_p * away**2),
            squares=terms if worst.dp_out is worst.dp else row_sum(p2 * self.dp_out2),
            weights=row_sum(self._product_variance(self.dp2, var_dp)),
            terms=terms,
            leaned=row_sum(worst.steep * worst.dp) if self.leans else np.zeros(()),
        )

    def _product_variance(self, dp2: Array, var_dp: Any) -> Array:
        """Variance of each term of Σ P·dP."""
        return (self.var_p + self.in_ds * self.p2) * dp2 + self.p2 * var_dp

    def _dweights_variance(self) -> Array | None:
        """Variance of the part of D through the returned weights; None without their cotangent."""
        more = self.worst.more
        if more is None:
            return None
        terms = row_sum(self._product_variance(more**2, 0.0)), row_sum((self.p * more) ** 2)
        return self._delta_from_weights(*terms, row_sum(self.p * more))

    def _delta_from_weights(self, var: Array, squares: Array, delta: Array) -> Array:
        delta2 = delta**2
        return var + self.var_l * delta2 + self.sum_variance(self.n, delta2, squares)

    def _delta_variance(self, sums: DeltaVarianceSums, more: Array | None = None) -> Array:
        """Variance of D, (..., H, T, 1), from out or from the weights."""
        worst, unit, do2 = self.worst, self.unit, self.do2
        do_o = row_sum(do2 * worst.o**2)
        out = sums.away + self.n_p * R2 * unit.p.u**2 * sums.squares
        out = out + row_sum(do2 * (self.acc_o + storage_variance(worst.o, unit.low)))
        if np.any(worst.delivered):
            out = out + row_sum(do2 * np.square(worst.delivered))
        out = out + self.sum_variance(worst.problem.E + 2, worst.D_out**2, do_o)
        stored = worst.stored_do  # twice where there is a gate: of gate · dout and of gate · o
        out = out + 2 * R2 * stored.u**2 * do_o
        if stored.eta:
            out = out + stored.eta**2 / 3 * row_sum(do2 + worst.o**2)
        of_p = self._delta_from_weights(sums.weights, sums.terms, worst.D)
        chosen = {"out": out, "weights": of_p, "either": np.maximum(out, of_p)}
        if more is not None:  # out knows nothing of these; they join it, or D is of the weights
            chosen["out"] = chosen["either"] = np.maximum(out + more, of_p)
        var = chosen[worst.rounding.delta_from] + self.u2 * worst.D**2
        return var + self.shift * (sums.leaned - self.tilt * worst.D) ** 2

    def _ds_variance(self, var_dp: Array) -> Array:
        """Variance of dS, (..., H, T, S) as var_dp, without the part that is common to a row."""
        worst, unit, p2 = self.worst, self.unit, self.p2
        dp, D, dl, ds = worst.dp, worst.D, worst.dl, worst.ds
        away = dp - D
        g2 = worst.where_live(away + dl) ** 2
        var = (self.var_w + self.in_ds * p2) * g2 + p2 * var_dp
        var = var + 3 * self.u2 * p2 * (self.dp2 + D**2 + np.square(dl))
        if unit.dp.u:  # stored apart, through out and through lse, then added
            apart = p2 * (worst.where_live(away) ** 2 + np.square(dl))
            var = var + R2 * unit.ds.u**2 * apart * (dl != 0)
        var = var + worst.n_ds * storage_variance(ds, unit.ds) + self.u2 * ds**2
        var = var + unit.p.eta**2 / 3 * (1 + g2)
        return worst.where_live(var)

    def _gradient_storage(
        self, total: Array, squares: Array, length: int, of: Array, *, shared: bool = False
    ) -> Array:
        """Variance of the roundings of a gradient before it is finished.

        total and squares are the sums of its terms and of their squares, of one shape; `of` is the
        input, (..., heads, length, size).
        """
        worst, unit, rounding = self.worst, self.unit, self.worst.rounding
        square, low = total**2, storage_variance(total, unit.low)
        var = 4 * self.u2 * square + (rounding.gradient_roundings - 1) * low
        if rounding.gradient_block is not None:
            blocks = max(math.ceil(length / rounding.gradient_block) - 1, 0)
            low2 = R2 * unit.low.u**2
            var = var + low2 * blocks * (square + squares / 2) + blocks * unit.low.eta**2 / 3
        copies, heads = worst.copies(total, of, shared)
        if heads > 1:
            part = low if unit.shared == unit.low else storage_variance(total, unit.shared)
            var = var + part + heads / 2 * self.u2 * square
        if copies > heads:
            var = var + low + copies / 2 * self.u2 * square
        return var

    def _dbias_limit(
        self, var_ds: Array, var_D: Array, shape: tuple[int, ...], every: Array
    ) -> Array:
        """Return the limit of dbias in `shape`; var_ds is (..., H, T, S), var_D (..., H, T, 1)."""
        worst, p, S = self.worst, self.p, self.worst.problem.S
        ds2 = worst.ds**2
        row = self.p2 * var_D + ds2 * self.var_l
        if shape[-1] == 1 and S > 1:  # errors common to a row add up along it
            ps, dss = p.sum(-1, keepdims=True), worst.ds.sum(-1, keepdims=True)
            row = ps**2 * var_D + dss**2 * self.var_l
            if self.leans:
                lean = np.where(self.live, (worst.slope - self.tilt) * worst.ds, 0)
                row = row + self.shift * row_sum(lean) ** 2
            row = np.broadcast_to(row / S, worst.ds.shape)
        n = worst.ds.size / max(math.prod(shape), 1)
        total, squares = sum_to(worst.ds, shape), sum_to(ds2, shape)
        row = row + worst.is_top * self.var_top
        var = sum_to(var_ds + row, shape) + self.sum_variance(n, total**2, squares)
        lost = sum_to(self.lost, shape)
        return self.limit(var, every, lost)

    def _dsinks_limit(self, var_D: Array, every: Array) -> Array:
        """Return the limit of dsinks, (H,), for var_D (..., H, T, 1); inf unless `every`."""
        worst, unit, p_sink = self.worst, self.unit, self.r.p_sink
        assert p_sink is not None
        assert worst.sink is not None
        pull = worst.D - worst.dl
        near = np.minimum(abs(worst.sink), 2.0**14)
        var_sink = self.u2 * (4 * near**2 + 2 * np.minimum(abs(worst.m), 2.0**14) ** 2)
        var_sink = var_sink + self.online
        var_sum = self.var_l + self.tilt**2 * self.shift + self.capped
        factor = var_sink + var_sum + 2 * R2 * (unit.ds.u**2 + unit.p.u**2) + 2 * self.u2
        var = p_sink**2 * (
            factor * pull**2 + var_D + 3 * self.u2 * (worst.D**2 + np.square(worst.dl))
        )
        var = var + worst.sink_is_top * self.var_top
        var = np.where(worst.spoiled_sinks, np.inf, var)
        var = var + unit.p.eta**2 / 3 * pull**2
        terms = p_sink * pull
        shape = (worst.problem.H, 1, 1)
        n = terms.size / max(worst.problem.H, 1)
        total, squares = sum_to(terms, shape), sum_to(terms**2, shape)
        var = sum_to(var + unit.ds.eta**2 / 3, shape) + self.sum_variance(n, total**2, squares)
        lost = unit.tiny * sum_to(1 + abs(pull), shape)
        return self.limit(var, every, lost)[:, 0, 0]
