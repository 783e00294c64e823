"""Bounds of the gradients, which make the worst case whole."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from npattn.conventions import Conventions
from npattn.engines import dense
from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.bounds.rounding import EXACT, Rounding, StorageCost
from npattn.testing.bounds.worst_case.forward import ForwardErrors
from npattn.testing.bounds.worst_case.scores import are_tame, row_sum


class DeltaErrorSums(NamedTuple):
    """Sums over the keys of a row in the bound of D."""

    moved: Array  # Σ pR |dp − D|
    stored: Array  # Σ p̂ |dp|
    weights: Array  # Σ of the errors of P dP


class TopErrorSums(NamedTuple):
    """Sums over the keys of a row in the error of the gradient of its maximum, which is 0."""

    errors: Array  # Σ errors of dS
    size: Array  # Σ |dS|
    weights: Array  # Σ of the largest weights


class DqErrorSums(NamedTuple):
    """Sums over the keys of a row in the bound of dq; x is k."""

    each: Array  # Σ errors |x|
    signed: Array  # Σ dx x
    common: Array  # Σ p slope x
    loose: Array  # Σ its errors |x|
    flush: Array  # Σ |x| + 1
    mass: Array  # Σ |dx| |x|
    top: Array  # Σ (slope x)² over the keys whose score may be the largest


class WorstCase(ForwardErrors):
    """The worst case: every quantity of the oracle, and the error of each."""

    ds: Array
    more: Array | None  # dp through the returned weights
    delivered: Array | float = 0.0
    """Error of the out that the backward gets, where that has another dtype than the inputs."""
    e_top: Array | float = 0.0
    """Error of the gradient that goes through the maximum of each row, where any does."""

    def __init__(
        self,
        problem: Problem,  # canonical
        rounding: Rounding,
        dtype: Any,  # the dtype of q, k, v
        original: Problem | None = None,  # the problem that `conventions` made canonical
        conventions: Conventions | None = None,
    ) -> None:
        self._set_options(problem, rounding, dtype, original, conventions)
        self.set_lengths(problem.T, problem.S)
        out, lse, residuals = dense.forward(problem)
        head = (None,) if problem.headless else (...,)
        self.o, self.lse = out[head], lse[head]  # with a head axis
        self._set_residuals(residuals)

    @np.errstate(all="ignore")
    def backward(
        self, do: Array, dlse: Array | None, dweights: Array | None = None
    ) -> dict[str, Array]:
        """Return bounds of the gradients, by name; after `forward`.

        do is (..., H, T, E), dlse (..., H, T), dweights (..., H, T, S).
        """
        problem, live = self.problem, self.r.live
        dl: Any = 0.0 if dlse is None else dlse[..., None]
        dw: Any = 0.0 if dweights is None else np.where(live, dweights, 0)
        self.dl, self.do = dl, do
        e_dp = self._dp_error(do, dw)
        self.D = row_sum(self.r.p * self.dp)
        self.e_D = self._delta_error(e_dp)
        e_ds = self._ds_error(e_dp, np.where(self.seen_rows, dl, 0))
        self._through_slope(e_ds)
        self.e_top = self._top_error(self._top_sums(e_ds))
        ds, e_D = self.ds, self.e_D
        bounds = {
            "dq": sum_to(self._dq_bound(self._dq_sums()), problem.q.shape),
            "dk": self._sum_heads(*self._dk_sums(), problem.k),
            "dv": self._sum_heads(*self._dv_sums(), problem.v),
        }
        if problem.bias_array is not None:
            n = ds.size / max(problem.bias_array.size, 1)
            size = abs(ds)
            each = e_ds + self.p_up * e_D + self.rebuild * size + self.is_top * self.e_top
            each = self.where_live(each + self.gamma(n + 4) * (size + each))
            bounds["dbias"] = sum_to(each, problem.bias_array.shape)
        if self.r.p_sink is not None:
            bounds["dsinks"] = self._dsinks_bound()
        return bounds

    def _dp_error(self, do: Array, dw: Any) -> Array:
        """Set dp, and return its error, (..., H, T, S), for do (..., H, T, E)."""
        u, live = self.unit.u, self.r.live
        dp, e_dp = self._dp_of(do, self.stored_do)
        self.dp_out = self.dp = dp
        self.more = None
        if isinstance(dw, float) and self.tame and self.tame_do:
            return e_dp
        self.dp = np.where(live, dp + dw, 0)
        more = self.dp - self.dp_out  # through the returned weights, if any
        self.more = more if more.any() else None
        e_dp = e_dp + u * (abs(dw) + abs(dp)) * (dw != 0)
        return np.where(live, e_dp, 0)

    @cached_property
    def tame_do(self) -> bool:
        return are_tame(self.do)

    def sum_do(self, w: Array, x: Array) -> Array:
        """Return Σ w x over the queries of each key, where x is made of do."""
        turned = w.swapaxes(-1, -2)
        if self.tame_do:
            return turned @ x
        return dense.sum_live(turned, x, self.r.live.swapaxes(-1, -2))

    def _dp_of(self, do: Array, stored: StorageCost) -> tuple[Array, Array]:
        """Return dp of a cotangent, (..., H, T, E), that may be stored, and its error."""
        unit, av, live = self.unit, self.sizes.v, self.r.live
        z, n_p, E = self.z, self.n_p, self.problem.E
        dp = self.where_live(self.drop(do @ self.r.v.swapaxes(-1, -2)))
        reach = self.where_live(self.drop(abs(do) @ av.swapaxes(-1, -2)))
        e_dp = (self.gamma(E + 2) + unit.operands.times(2) + stored.u) * reach
        if stored.eta:
            e_dp = e_dp + stored.eta * np.where(live, z * av.sum(-1)[..., None, :], 0)
        e_dp = e_dp + unit.dp.times(n_p) * (abs(dp) + e_dp)
        e_dp = e_dp + unit.dp.eta * (z + self.drops)
        e_dp = e_dp + (unit.tiny + unit.operands.eta) * (E + 2) * z
        return dp, self.where_live(e_dp)

    @np.errstate(all="ignore")
    def gate_row_error(self, dout: Array) -> Array:
        """Bound on the error of Σ w dw of each row, (..., T, 1): dgate, if it gates the weights.

        After `backward`.
        """
        dp, e_dp = self._dp_of(dout, EXACT)
        delta = row_sum(self.r.p * dp)
        return self._delta_from_weights(self._product_error(dp, e_dp), delta)

    def _ds_error(self, e_dp: Array, dlse: Array) -> Array:
        """Set ds, and return its error without the part that is common to a row.

        e_dp is (..., H, T, S), dlse (..., H, T, 1).
        """
        u, unit, p = self.unit.u, self.unit, self.r.p
        dp, D, e_D, more = self.dp, self.D, self.e_D, 1 + self.rebuild
        away = dp - D
        g = self.where_live(away + dlse)
        self.ds, P, ag = p * g, self.p_up * more, abs(g)
        e_ds = more * self.pR * ag
        e_ds += P * self.in_ds * ag
        e_ds += P * (1 + unit.p.u) * (e_dp + 3 * u * (abs(dp) + abs(D) + abs(dlse)))
        if unit.dp.u:  # eager: the parts through out and through lse are stored, then added
            apart = P * (abs(away) + abs(dlse)) * (dlse != 0)
            e_ds = e_ds + unit.ds.u * (apart + e_ds) + unit.low.eta
        # Arrays of their own are stored after the backward of the softmax, and after the scale.
        size = abs(self.ds)
        size = size + e_ds + p * e_D + self.rebuild * size
        e_ds += (unit.ds.times(self.n_ds) + u) * size
        e_ds += unit.ds.eta
        e_ds += (unit.p.eta + unit.tiny) * (1 + ag)
        return self.where_live(e_ds)

    def _through_slope(self, e_ds: Array) -> None:
        """Set dx = ds · slope, p · slope, and the errors of both; e_ds is (..., H, T, S)."""
        live, P, ds = self.r.live, self.p_up, self.ds
        self.dx, self.e_dx, self.ps, self.loose = ds, e_ds, self.r.p, self.pR
        if not self.bends:
            return
        unit, slope, bent = self.unit, self.slope, self.slope_error
        dx = np.where(live, ds * slope, 0)
        e_dx = e_ds * (abs(slope) + bent) + abs(ds) * bent
        e_dx = e_dx + ((1 + unit.u + unit.ds.u) ** 2 - 1) * (abs(dx) + e_dx) + unit.ds.eta
        loose = self.pR * abs(slope) + P * bent
        self.dx, self.e_dx = dx, np.where(live, e_dx, 0)
        self.ps, self.loose = self.steep, np.where(live, loose, 0)

    @property
    def keeps_maximum(self) -> bool:
        """True if gradients may go through the maximum of each row, as autograd sends them."""
        return self.rounding.delta_from != "out"

    @cached_property
    def is_top(self) -> Array | float:
        """1 at scores that may be the largest of their row as it is computed, else 0."""
        if not self.keeps_maximum:
            return 0.0
        return self.where_live(1.0 * (self.s + self.A >= self.high))

    @cached_property
    def top_slope(self) -> Array | float:
        """Slope of the scores that may be the largest, else 0."""
        if not self.bends or not self.keeps_maximum:
            return self.is_top
        return self.where_live(self.is_top * (abs(self.slope) + self.slope_error))

    def _top_sums(self, e_ds: Array) -> TopErrorSums:
        return TopErrorSums(row_sum(e_ds), row_sum(abs(self.ds)), row_sum(self.p_up))

    def _top_error(self, sums: TopErrorSums) -> Array | float:
        """Bound on the gradient of the maximum of each row: exactly, −Σ dS + dlse = 0."""
        if not self.keeps_maximum:
            return 0.0
        unit, errors = self.unit, sums.errors + sums.weights * self.e_D
        size = sums.size + errors + abs(self.dl)
        if self.p_sink is not None:
            e_sink = self._dsink_errors()
            errors, size = errors + e_sink, size + self.p_sink * abs(self.D - self.dl) + e_sink
        error = errors + self.gamma(self.terms(self.S)) * size
        error = error * (1 + unit.u + unit.ds.u) + unit.ds.eta
        return np.where(self.seen, error, 0)

    def _flush(self) -> float:
        """Bound on underflow: of products, and of dS · scale where it is stored."""
        unit = self.unit
        return (unit.tiny + unit.operands.eta) * (1 + self.scale) + unit.ds.eta

    def _dq_sums(self) -> DqErrorSums:
        """Return the sums over the keys of each row from which dq's bound is known."""
        live, k, dx, e_dx = self.r.live, self.r.k, self.dx, self.e_dx
        size, ak, mm = abs(dx), self.sizes.k, self.unit.operands.times(2)
        each = e_dx + (self.gamma(self.terms(self.S)) + mm) * (size + e_dx)
        return DqErrorSums(
            each=self.sum_live(each, ak, live),
            signed=self.sum_dx_k if self.tame else self.sum_live(dx, k, live),
            common=self._common_of(k),
            loose=self.sum_live(self.loose, ak, live),
            flush=self.sum_live(self.ones, ak + 1, live),
            mass=self.sum_live(size, ak, live),
            top=self.sum_live(np.square(self.top_slope), ak**2, live)
            if self.keeps_maximum
            else np.zeros(()),
        )

    def _common_of(self, k: Array) -> Array:
        if self.tame and self.ps is self.steep:
            return self.sum_steep_k
        return self.sum_live(self.ps, k, self.r.live)

    @cached_property
    def sum_dx_k(self) -> Array:
        """Σ dx k of each row, over the numbers among k."""
        return self.sum_live(self.dx, self.numbers.k, self.r.live)

    def _dq_bound(self, sums: DqErrorSums) -> Array:
        # Errors common to a row (of D, of lse) meet Σ p k and dq, before absolute values.
        common = abs(sums.common) + sums.loose
        t = sums.each + self.rebuild * abs(sums.signed)
        # Equal scores share what comes through their maximum: at most the largest of their keys.
        self.top_reach = np.sqrt(sums.top)
        t = t + np.where(self.top_reach > 0, self.e_top * self.top_reach, 0)
        # A row that sees nothing has no part in it, even where its dout is NaN.
        t = self.scale * (t + np.where(common > 0, self.e_D * common, 0))
        t = t + self._flush() * sums.flush
        return self._add_storage(t, self.scale * sums.mass, self.problem.q, shared=False)

    def _dk_sums(self) -> tuple[Array, Array]:
        """Return the error of dk by query head, and the sum of its absolute terms."""
        e_dx, size, aq = self.e_dx, abs(self.dx), self.sizes.q
        turn, mm = self.r.live.swapaxes(-1, -2), self.unit.operands.times(2)
        common = abs(self.ps) + self.loose if self.bends else self.p_up
        row = e_dx + common * self.e_D + self.top_slope * self.e_top
        row = row + (self.rebuild + self.unit.q.u) * size
        row = self.where_live(row + (self.gamma(self.terms(self.T)) + mm) * (size + row))
        t = self.scale * self.sum_live(row.swapaxes(-1, -2), aq, turn)
        t = t + self._flush() * self.sum_live(self.ones.swapaxes(-1, -2), aq + 1, turn)
        if self.unit.q.eta:  # q · scale, stored, may be subnormal
            t = t + self.unit.q.eta * (size + row).sum(-2)[..., None]
        return t, self.scale * self.sum_live(size.swapaxes(-1, -2), aq, turn)

    def _dv_sums(self) -> tuple[Array, Array]:
        """Return the error of dv by query head, and the sum of its absolute terms."""
        unit, ado, turn = self.unit, abs(self.do), self.r.live.swapaxes(-1, -2)
        w, t_w = self._backward_weights()
        mass, t = self.sum_do(w, ado), self.sum_do(t_w, ado)
        t = t + (unit.operands.times(2) + self.stored_do.u) * mass
        if self.stored_do.eta:
            t = t + self.stored_do.eta * w.sum(-2)[..., None]
        return t + (unit.tiny + unit.operands.eta) * turn.sum(-1, keepdims=True), mass

    def _backward_weights(self) -> tuple[Array, Array]:
        """Return p z, the weights that meet v, and their error as the backward rebuilds them."""
        unit = self.unit
        P = self.p_up * (1 + self.rebuild)
        t = self.pR + self.rebuild * self.p_up + unit.p.times(self.n_p) * P
        t = self.drop(t + self.gamma(self.terms(self.T)) * P)
        t = t + (unit.p.eta + unit.tiny) * (self.z + self.drops)
        return self.drop(self.r.p), self.where_live(t)

    def _dsink_errors(self) -> Array:
        """Bound on the error of p_sink (D − dlse) of each row."""
        unit, p_sink, e_D = self.unit, self.p_sink, self.e_D
        pull, size = self.D - self.dl, abs(self.D) + abs(self.dl)
        assert p_sink is not None
        P = p_sink * (1 + self.R_sink) * (1 + self.rebuild)
        each = (P - p_sink) * abs(pull) + P * (e_D + 3 * unit.u * size)
        each = each + P * ((1 + unit.ds.u + unit.p.u) ** 2 - 1) * (abs(pull) + e_D)
        lost = (unit.ds.eta + unit.tiny) * (1 + abs(pull)) + unit.p.eta * abs(pull)
        return each + lost

    def _dsinks_bound(self) -> Array:
        """Bound on the error of −Σ p_sink (D − dlse)."""
        p_sink, pull = self.p_sink, self.D - self.dl
        assert p_sink is not None
        each = self._dsink_errors() + self.sink_is_top * self.e_top
        each = np.where(self.spoiled_sinks, np.inf, each)
        n = each.size / max(self.problem.H, 1)
        each = each + self.gamma(n + 4) * (p_sink * abs(pull) + each)
        return sum_to(each, (self.problem.H, 1, 1))[:, 0, 0]

    @property
    def spoiled_sinks(self) -> Array:
        """Rows, (..., T, 1), that see no key, but whose Σ do·out is 0 · NaN if it is computed."""
        return ~self.seen & ~np.isfinite(self.do).all(-1, keepdims=True)

    def _delta_error(self, e_dp: Array) -> Array:
        """Bound on the error of D, computed as Σ do·out from the delivered out, or as Σ P·dP."""
        self.D_out = self.D if self.more is None else row_sum(self.r.p * self.dp_out)
        extra = None
        if self.more is not None:  # out knows nothing of it; it joins, or D is of the weights
            delta = row_sum(self.r.p * self.more)
            extra = self._delta_from_weights(self._product_error(self.more, 0 * e_dp), delta)
        return self._delta_bound(self._delta_sums(e_dp), extra)

    def _delta_sums(self, e_dp: Array) -> DeltaErrorSums:
        # Contracted with do before taking absolute values: Σ do (z v − o) = dp − D.
        return DeltaErrorSums(
            moved=row_sum(self.pR * abs(self.dp_out - self.D_out)),
            stored=row_sum(self.p_hat * abs(self.dp_out)),
            weights=self._product_error(self.dp, e_dp),
        )

    def _delta_bound(self, sums: DeltaErrorSums, extra: Array | None = None) -> Array:
        """Return the error of D, (..., H, T, 1), from out, from the weights, or the larger."""
        unit, u, ado = self.unit, self.unit.u, abs(self.do)
        soft = sums.moved / self.down
        if self.p_sink is not None:
            soft = soft + self.p_sink * self.R_sink * abs(self.D_out) / self.down
        soft = np.minimum(soft, row_sum(ado * self.t_soft))
        # So is the storage of P: Σ do (Σ δ p z v) = Σ δ p dP.
        soft = soft + self.n_p * unit.p.u * (1 + unit.p.u) * sums.stored
        size = abs(self.o) + self.t_soft + self.t_sum
        delivered = self.t_rest + unit.low.u * size + unit.low.eta + self.delivered
        delivered = np.where(self.seen, delivered, 0)
        # Both factors of do · out are stored once more, where there is a gate.
        product = (self.gamma(self.problem.E + 2) + 2 * self.stored_do.u) * size
        from_out = soft + row_sum(ado * (delivered + product))
        if self.stored_do.eta:
            from_out = from_out + self.stored_do.eta * (size + ado).sum(-1, keepdims=True)
        from_weights = self._delta_from_weights(sums.weights, self.D)
        chosen = {"out": from_out, "weights": from_weights}
        if extra is not None:
            from_out = from_out + extra
            chosen["out"] = np.maximum(from_out, from_weights)
        e_D = chosen.get(self.rounding.delta_from, np.maximum(from_out, from_weights))
        return (1 + self.rebuild) * (e_D + u * (abs(self.D) + e_D))

    def _product_error(self, dp: Array, e_dp: Array) -> Array:
        """Bound on the error of the terms of Σ P·dP."""
        P, size = self.p_up, abs(dp)
        each = self.pR * size + P * (self.in_ds * size + (1 + self.unit.p.u) * e_dp)
        each += self.gamma(self.chain) * P * (size + e_dp)
        return row_sum(each)

    def _delta_from_weights(self, error: Array, delta: Array) -> Array:
        """Bound on the error of Σ P·dP, which is `whole`."""
        return error + self.rebuild * abs(delta)

    def _add_storage(self, t: Array, mass: Array, of: Array, *, shared: bool) -> Array:
        """Add the roundings of a gradient before it is finished: in blocks, in parts.

        t, its bound, and mass, the sum of its terms' sizes, have one shape; `of` is the input,
        (..., heads, length, size).
        """
        unit, rounding, size = self.unit, self.rounding, mass + t
        length = self.T if shared else self.S
        more = unit.low.times(rounding.gradient_roundings - 1) * size + 4 * unit.u * size
        more = more + (rounding.gradient_roundings - 1) * unit.low.eta
        if rounding.gradient_block is not None:
            blocks = max(math.ceil(length / rounding.gradient_block) - 1, 0)
            more = more + unit.low.times(blocks) * size + blocks * unit.low.eta
        # Parts of an input that is broadcast, or shared by heads, may be rounded, then summed.
        copies, heads = self.copies(mass, of, shared)
        if copies > heads:
            more = more + (self.gamma(copies) + unit.low.u) * size + unit.low.eta
        if heads > 1:
            more = more + (self.gamma(heads) + unit.shared.u) * size + unit.shared.eta
        return t + np.where(mass > 0, more, 0)

    def copies(self, mass: Array, of: Array, shared: bool) -> tuple[float, float]:
        """Return how many parts of a gradient are summed, and how many heads share its input."""
        tiles = self.tiles if shared else 1
        heads = self.problem.H / max(self.problem.K, 1) * tiles if shared else 1.0
        return mass.size / max(of.size, 1) * tiles, heads

    def _sum_heads(self, t: Array, mass: Array, of: Array) -> Array:
        stored = self._add_storage(t, mass, of, shared=True)
        return dense.sum_shared(stored, self.problem.K, of.shape)
