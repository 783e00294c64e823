"""Bounds of the gradients, which make the worst case whole."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from npattn import dense
from npattn.arrays import Array, sum_to
from npattn.conventions import Conventions
from npattn.problem import Problem
from npattn.testing.bounds.rounding import EXACT, Rounding, Storage
from npattn.testing.bounds.worst_case.forward import ForwardErrors

__all__ = ["DeltaErrorSums", "DqErrorSums", "WorstCase"]


class DeltaErrorSums(NamedTuple):
    """Sums over the keys of a row in the bound of D."""

    moved: Array  # Σ pR |dp − D|
    stored: Array  # Σ p̂ |dp|
    weights: Array  # Σ of the errors of P dP


class DqErrorSums(NamedTuple):
    """Sums over the keys of a row in the bound of dq; x is k."""

    each: Array  # Σ errors |x|
    signed: Array  # Σ dx x
    common: Array  # Σ p slope x
    loose: Array  # Σ its errors |x|
    flush: Array  # Σ |x| + 1
    mass: Array  # Σ |dx| |x|


class WorstCase(ForwardErrors):
    """The full form of the bound: every quantity of the oracle, and the error of each.

    Parameters
    ----------
    problem : Problem
        Canonical.
    rounding : Rounding
    dtype : dtype
        The dtype of q, k, v.
    original : Problem, optional
        The problem that `conventions` made canonical.
    conventions : Conventions, optional
    """

    ds: Array
    delivered: Array | float = 0.0
    """Error of the out that the backward gets, where that has another dtype than the inputs."""

    def __init__(
        self,
        problem: Problem,
        rounding: Rounding,
        dtype: Any,
        original: Problem | None = None,
        conventions: Conventions | None = None,
    ) -> None:
        self._set_options(problem, rounding, dtype, original, conventions)
        self._set_lengths(problem.T, problem.S)
        out, lse, residuals = dense.forward(problem)
        head = (None,) if problem.headless else (...,)
        self.o, self.lse = out[head], lse[head]  # with a head axis
        self._set_residuals(residuals)

    @np.errstate(all="ignore")
    def backward(
        self, do: Array, dlse: Array | None, dweights: Array | None = None
    ) -> dict[str, Array]:
        """Return bounds of the gradients, by name; after `forward`."""
        problem, live = self.problem, self.r.live
        dl: Any = 0.0 if dlse is None else dlse[..., None]
        dw: Any = 0.0 if dweights is None else np.where(live, dweights, 0)
        self.dl, self.do = dl, do
        e_dp = self._dp_error(do, dw)
        self.D = (self.r.p * self.dp).sum(-1, keepdims=True)
        self.e_D = self._delta_error(e_dp)
        e_ds = self._ds_error(e_dp, np.where(live.any(-1, keepdims=True), dl, 0))
        self._through_slope(e_ds)
        ds, D, e_D = self.ds, self.D, self.e_D
        bounds = {
            "dq": sum_to(self._dq_bound(self._dq_sums()), problem.q.shape),
            "dk": self._sum_heads(*self._dk_sums(), problem.k),
            "dv": self._sum_heads(*self._dv_sums(), problem.v),
        }
        if problem.bias_array is not None:
            n = ds.size / max(problem.bias_array.size, 1)
            each = e_ds + (self.r.p + self.pR) * e_D + self.rebuild * abs(ds)
            each = np.where(live, each + self.gamma(n + 4) * (abs(ds) + each), 0)
            bounds["dbias"] = sum_to(each, problem.bias_array.shape)
        if self.r.p_sink is not None:
            bounds["dsinks"] = self._dsinks_bound(D - dl, abs(D) + abs(dl), e_D)
        return bounds

    def _dp_error(self, do: Array, dw: Any) -> Array:
        """Set dp, and return its error."""
        u, live = self.unit.u, self.r.live
        dp, e_dp = self._dp_of(do, self.stored_do)
        self.dp_out, self.dp = dp, np.where(live, dp + dw, 0)
        self.more = self.dp - self.dp_out  # through the returned weights, if any
        e_dp = e_dp + u * (abs(dw) + abs(dp)) * (dw != 0)
        return np.where(live, e_dp, 0)

    def _dp_of(self, do: Array, stored: Storage) -> tuple[Array, Array]:
        """Return dp of a cotangent that may be stored, and its error."""
        unit, (v, live) = self.unit, (self.r.v, self.r.live)
        z, n_p, E = self.z, self.n_p, self.problem.E
        dp = np.where(live, z * (do @ v.swapaxes(-1, -2)), 0)
        reach = np.where(live, z * (abs(do) @ abs(v).swapaxes(-1, -2)), 0)
        e_dp = (self.gamma(E + 2) + unit.operands.times(2) + stored.u) * reach
        if stored.eta:
            e_dp = e_dp + stored.eta * np.where(live, z * abs(v).sum(-1)[..., None, :], 0)
        e_dp = e_dp + unit.dp.times(n_p) * (abs(dp) + e_dp)
        e_dp = e_dp + unit.dp.eta * (z + self.drops)
        e_dp = e_dp + (unit.tiny + unit.operands.eta) * (E + 2) * z
        return dp, np.where(live, e_dp, 0)

    @np.errstate(all="ignore")
    def gate_row_error(self, dout: Array) -> Array:
        """Bound on the error of Σ w dw of each row, (..., T, 1): dgate, if it gates the weights.

        After `backward`.
        """
        dp, e_dp = self._dp_of(dout, EXACT)
        whole = (self.r.p * dp).sum(-1, keepdims=True)
        return self._delta_from_weights(self._product_error(dp, e_dp), whole)

    def _ds_error(self, e_dp: Array, dlse: Array) -> Array:
        """Set ds, and return its error without the part that is common to a row."""
        u, unit, (live, p) = self.unit.u, self.unit, (self.r.live, self.r.p)
        dp, D, e_D = self.dp, self.D, self.e_D
        g = np.where(live, dp - D + dlse, 0)
        ds, P = p * g, (p + self.pR) * (1 + self.rebuild)
        e_ds = (1 + self.rebuild) * self.pR * abs(g) + P * self.in_ds * abs(g)
        e_ds = e_ds + P * (1 + unit.p.u) * (e_dp + 3 * u * (abs(dp) + abs(D) + abs(dlse)))
        if unit.dp.u:  # eager: the parts through out and through lse are stored, then added
            apart = P * (abs(dp - D) + abs(dlse)) * (dlse != 0)
            e_ds = e_ds + unit.ds.u * (apart + e_ds) + unit.low.eta
        # Arrays of their own are stored after the backward of the softmax, and after the scale.
        size = abs(ds) + e_ds + p * e_D + self.rebuild * abs(ds)
        e_ds = e_ds + (unit.ds.times(self.n_ds) + u) * size
        e_ds = e_ds + unit.ds.eta + (unit.p.eta + unit.tiny) * (1 + abs(g))
        self.ds = ds
        return np.where(live, e_ds, 0)

    def _through_slope(self, e_ds: Array) -> None:
        """Set dx = ds · slope, p · slope, and the errors of both."""
        live, p, P, ds = self.r.live, self.r.p, self.r.p + self.pR, self.ds
        self.dx, self.e_dx, self.ps, self.loose = ds, e_ds, p, self.pR
        if self.problem.softcap is None and self.problem.score_mod is None:
            return
        unit, slope, bent = self.unit, self.slope, self.slope_error
        dx = np.where(live, ds * slope, 0)
        e_dx = e_ds * (abs(slope) + bent) + abs(ds) * bent
        e_dx = e_dx + ((1 + unit.u + unit.ds.u) ** 2 - 1) * (abs(dx) + e_dx) + unit.ds.eta
        loose = self.pR * abs(slope) + P * bent
        self.dx, self.e_dx = dx, np.where(live, e_dx, 0)
        self.ps, self.loose = np.where(live, p * slope, 0), np.where(live, loose, 0)

    def _flush(self) -> float:
        """Bound on underflow: of products, and of dS · scale where it is stored."""
        unit = self.unit
        return (unit.tiny + unit.operands.eta) * (1 + self.scale) + unit.ds.eta

    def _dq_sums(self) -> DqErrorSums:
        live, k, dx, e_dx = self.r.live, self.r.k, self.dx, self.e_dx
        ak, mm = abs(k), self.unit.operands.times(2)
        each = e_dx + (self.gamma(self.terms(self.S)) + mm) * (abs(dx) + e_dx)
        return DqErrorSums(
            each=self.sum_live(each, ak, live),
            signed=self.sum_live(dx, k, live),
            common=self.sum_live(self.ps, k, live),
            loose=self.sum_live(self.loose, ak, live),
            flush=self.sum_live(1.0 * live, ak + 1, live),
            mass=self.sum_live(abs(dx), ak, live),
        )

    def _dq_bound(self, sums: DqErrorSums) -> Array:
        # Errors common to a row (of D, of lse) meet Σ p k and dq, before absolute values.
        common = abs(sums.common) + sums.loose
        t = sums.each + self.rebuild * abs(sums.signed)
        # A row that sees nothing has no part in it, even where its dout is NaN.
        t = self.scale * (t + np.where(common > 0, self.e_D * common, 0))
        t = t + self._flush() * sums.flush
        return self._add_storage(t, self.scale * sums.mass, self.problem.q, shared=False)

    def _dk_sums(self) -> tuple[Array, Array]:
        """Return the error of dk by query head, and the sum of its absolute terms."""
        live, dx, e_dx, aq = self.r.live, self.dx, self.e_dx, abs(self.r.q)
        turn, mm = live.swapaxes(-1, -2), self.unit.operands.times(2)
        row = e_dx + (abs(self.ps) + self.loose) * self.e_D
        row = row + (self.rebuild + self.unit.q.u) * abs(dx)
        row = np.where(live, row + (self.gamma(self.terms(self.T)) + mm) * (abs(dx) + row), 0)
        t = self.scale * self.sum_live(row.swapaxes(-1, -2), aq, turn)
        t = t + self._flush() * self.sum_live(1.0 * turn, aq + 1, turn)
        if self.unit.q.eta:  # q · scale, stored, may be subnormal
            t = t + self.unit.q.eta * (abs(dx) + row).sum(-2)[..., None]
        return t, self.scale * self.sum_live(abs(dx).swapaxes(-1, -2), aq, turn)

    def _dv_sums(self) -> tuple[Array, Array]:
        """Return the error of dv by query head, and the sum of its absolute terms."""
        unit, ado, turn = self.unit, abs(self.do), self.r.live.swapaxes(-1, -2)
        w, t_w = self._backward_weights()
        mass = dense.sum_live(w.swapaxes(-1, -2), ado, turn)
        t = dense.sum_live(t_w.swapaxes(-1, -2), ado, turn)
        t = t + (unit.operands.times(2) + self.stored_do.u) * mass
        t = t + self.stored_do.eta * w.sum(-2)[..., None]
        return t + (unit.tiny + unit.operands.eta) * turn.sum(-1, keepdims=True), mass

    def _backward_weights(self) -> tuple[Array, Array]:
        """Return p z, the weights that meet v, and their error as the backward rebuilds them."""
        unit, (p, live), z = self.unit, (self.r.p, self.r.live), self.z
        P = (p + self.pR) * (1 + self.rebuild)
        t = self.pR + self.rebuild * (p + self.pR) + unit.p.times(self.n_p) * P
        t = z * (t + self.gamma(self.terms(self.T)) * P)
        t = t + (unit.p.eta + unit.tiny) * (z + self.drops)
        return np.where(live, p * z, 0), np.where(live, t, 0)

    def _dsinks_bound(self, pull: Array, size: Array, e_D: Array) -> Array:
        """Bound on the error of −Σ p_sink (D − dlse)."""
        unit, p_sink = self.unit, self.p_sink
        assert p_sink is not None
        P = p_sink * (1 + self.R_sink) * (1 + self.rebuild)
        each = (P - p_sink) * abs(pull) + P * (e_D + 3 * unit.u * size)
        each = each + P * ((1 + unit.ds.u + unit.p.u) ** 2 - 1) * (abs(pull) + e_D)
        each = each + (unit.ds.eta + unit.tiny) * (1 + abs(pull)) + unit.p.eta * abs(pull)
        each = np.where(self.spoiled_sinks, np.inf, each)
        n = each.size / max(self.problem.H, 1)
        each = each + self.gamma(n + 4) * (p_sink * abs(pull) + each)
        return sum_to(each, (self.problem.H, 1, 1))[:, 0, 0]

    @property
    def spoiled_sinks(self) -> Array:
        """Rows, (..., T, 1), that see no key, but whose Σ do·out is 0 · NaN if it is computed."""
        return np.asarray(~self.seen & ~np.isfinite(self.do).all(-1, keepdims=True))

    def _delta_error(self, e_dp: Array) -> Array:
        """Bound on the error of D, computed as Σ do·out from the delivered out, or as Σ P·dP."""
        self.D_out = (self.r.p * self.dp_out).sum(-1, keepdims=True)
        extra = None
        if self.more.any():  # out knows nothing of these; they join it, or D is of the weights
            whole = (self.r.p * self.more).sum(-1, keepdims=True)
            extra = self._delta_from_weights(self._product_error(self.more, 0 * e_dp), whole)
        return self._delta_bound(self._delta_sums(e_dp), extra)

    def _delta_sums(self, e_dp: Array) -> DeltaErrorSums:
        # Contracted with do before taking absolute values: Σ do (z v − o) = dp − D.
        return DeltaErrorSums(
            moved=(self.pR * abs(self.dp_out - self.D_out)).sum(-1, keepdims=True),
            stored=(self.p_hat * abs(self.dp_out)).sum(-1, keepdims=True),
            weights=self._product_error(self.dp, e_dp),
        )

    def _delta_bound(self, sums: DeltaErrorSums, extra: Array | None = None) -> Array:
        unit, u, ado = self.unit, self.unit.u, abs(self.do)
        soft = sums.moved / self.down
        if self.p_sink is not None:
            soft = soft + self.p_sink * self.R_sink * abs(self.D_out) / self.down
        soft = np.minimum(soft, (ado * self.t_soft).sum(-1, keepdims=True))
        # So is the storage of P: Σ do (Σ δ p z v) = Σ δ p dP.
        soft = soft + self.n_p * unit.p.u * (1 + unit.p.u) * sums.stored
        size = abs(self.o) + self.t_soft + self.t_sum
        delivered = self.t_rest + unit.low.u * size + unit.low.eta + self.delivered
        delivered = np.where(self.seen, delivered, 0)
        # Both factors of do · out are stored once more, where there is a gate.
        product = (self.gamma(self.problem.E + 2) + 2 * self.stored_do.u) * size
        from_out = soft + (ado * (delivered + product)).sum(-1, keepdims=True)
        if self.stored_do.eta:
            from_out = from_out + self.stored_do.eta * (size + ado).sum(-1, keepdims=True)
        from_weights = self._delta_from_weights(sums.weights, self.D)
        chosen = {"out": from_out, "weights": from_weights}
        if extra is not None:
            from_out = from_out + extra
            chosen["out"] = np.maximum(from_out, from_weights)
        e_D = chosen.get(self.rounding.delta_from, np.maximum(from_out, from_weights))
        return np.asarray((1 + self.rebuild) * (e_D + u * (abs(self.D) + e_D)))

    def _product_error(self, dp: Array, e_dp: Array) -> Array:
        """Bound on the error of the terms of Σ P·dP."""
        unit, P = self.unit, self.r.p + self.pR
        each = self.pR * abs(dp) + P * (self.in_ds * abs(dp) + (1 + unit.p.u) * e_dp)
        each = each + self.gamma(self.chain) * P * (abs(dp) + e_dp)
        return np.asarray(each.sum(-1, keepdims=True))

    def _delta_from_weights(self, error: Array, whole: Array) -> Array:
        """Bound on the error of Σ P·dP, which is `whole`."""
        return np.asarray(error + self.rebuild * abs(whole))

    def _add_storage(self, t: Array, mass: Array, of: Array, *, shared: bool) -> Array:
        """Add the roundings of a gradient before it is finished: in blocks, in parts."""
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
