"""How far a correct implementation may be from the exact result, per element, derived.

An implementation with a given rounding model (which intermediates it rounds, and to what) cannot
err by more than these bounds; docs/tolerance.md derives them. No number here is fitted: each is a
count of roundings, a unit roundoff, or a constant of the calculus.

    u    unit roundoff of the accumulators       γ(n) = n u / (1 − n u), n roundings in a row
    A    error of the argument of exp            R = exp(A) − 1, relative error of a weight
    z    dropout multiplier (1 without)          D = Σ p dp, "delta"
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np

from npattn import dense
from npattn.conventions import Conventions
from npattn.problem import Array, Gradients, Problem, sum_to
from npattn.testing.rounding import Rounding, Units, unit_roundoff

__all__ = ["Rounding", "bounds", "unit_roundoff"]


def bounds(
    problem: Problem,
    dtype: Any,
    rounding: Rounding | None = None,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    conventions: Conventions | None = None,
) -> dict[str, Array]:
    """The allowed error of each result of an implementation that computes `problem` in `dtype`.

    Parameters
    ----------
    problem : Problem
    dtype : dtype
        Of q, k, v as the implementation gets them.
    rounding : Rounding, optional
        Default: what is allowed to whoever declares nothing, for this dtype.
    dout, dlse : array, optional
        Cotangents, float64. With dout the gradients are bounded too.
    conventions : Conventions, optional

    Returns
    -------
    dict
        o, lse, weights and, with dout, dq, dk, dv, dbias, dsinks: absolute, float64, each of the
        shape of what it bounds. It is the distance allowed from the exact value to the interval of
        numbers that round to what was delivered (so rounding the result itself costs nothing), the
        oracle's own error included.
    """
    rounding = rounding or Rounding.undeclared(dtype)
    conventions = conventions or Conventions()
    canonical = conventions.canonical(problem)
    form = _Form(canonical, rounding, Units.of(rounding, dtype))
    found = form.forward()
    if dout is not None:
        do, dl, _ = conventions.cotangents(problem, dout.astype(float), dlse, None)
        if problem.headless:
            do, dl = do[None], None if dl is None else dl[None]
        found |= form.backward(do, dl)
    found = _translated(problem, conventions, form, found, dout)
    # The oracle's own rounding obeys the same bound with its own, smaller unit.
    certificate = 1 + unit_roundoff(np.float64) / form.unit.u
    return {name: certificate * bound for name, bound in found.items()}


class _Form:
    """The full form of the bound: every quantity of the oracle, and the error of each."""

    def __init__(self, problem: Problem, rounding: Rounding, unit: Units) -> None:
        self.problem, self.rounding, self.unit = problem, rounding, unit
        out, lse, self.r = dense.forward(problem)
        head = (None,) if problem.headless else (...,)
        self.o, self.lse = out[head], lse[head]  # with a head axis
        keep = self.r.keep
        self.z = np.ones((1, 1)) if keep is None else np.broadcast_to(keep, self.r.p.shape)
        self.drops = keep is not None
        self.scale = abs(cast(float, problem.scale))  # a number, once the problem is made
        self.blocks = math.ceil(problem.S / 16)  # no online softmax has smaller tiles
        self.chain = problem.S + 2 * self.blocks + 4  # any order of summation

    def gamma(self, n: float) -> float:
        """n roundings in a row."""
        return n * self.unit.u / (1 - n * self.unit.u)

    # --- forward ----------------------------------------------------------------------------------

    @np.errstate(all="ignore")  # hidden scores may be anything
    def forward(self) -> dict[str, Array]:
        """Bounds of o, lse and weights."""
        u, unit, live, p_sink = self.unit.u, self.unit, self.r.live, self.r.p_sink
        t_lse = self._softmax()
        z, av, chain = self.z, abs(self.r.v), self.gamma(self.chain)
        n_p = 1 + self.drops
        t_soft = self._spread(self.pR) / self.down
        if p_sink is not None:
            t_soft = t_soft + p_sink * self.R_sink * abs(self.o) / self.down
        t_soft = np.minimum(t_soft, self._range())
        mass = dense.sum_live(self.p_hat * z, av, live)
        t_p = n_p * unit.p * (1 + unit.p) * mass
        t_sum = chain * mass + (chain + 4 * u) * (abs(self.o) + t_soft)
        # What vanishes in storage, or because subnormals are flushed.
        lost = np.where(live, (unit.eta_of(unit.p) + unit.tiny) * (z + self.drops), 0)
        t_sum = t_sum + dense.sum_live(lost, av, live)
        t_sum = t_sum + np.where(live.any(-1, keepdims=True), (self.problem.S + 2) * unit.tiny, 0)
        if self.rounding.queries == "input":  # eager: exp(log_softmax) is not normalised again
            t_sum = t_sum + self.lse_rounding * mass
        self.t_soft, self.t_sum = t_soft, t_p + t_sum
        t_w = (self.pR + self.r.p * self.up) / self.down  # of p e^a / Σ p e^a
        t_w = t_w + self.p_hat * (unit.p + chain + 4 * u) + unit.eta_of(unit.p) + unit.tiny
        t_w = np.where(live, np.minimum(t_w, 1), 0)
        return {"o": t_soft + t_p + t_sum, "lse": t_lse[..., 0], "weights": t_w}

    def _softmax(self) -> Array:
        """Of the weights before they are normalised, p e^a with |a| ≤ A; returns that of lse.

        pR ≥ p (e^A − 1) and up, its sum; down ≤ Σ p e^−A; p_hat, the largest weight there can be.
        """
        u, unit = self.unit.u, self.unit
        live, p, p_sink = self.r.live, self.r.p, self.r.p_sink
        s, error = self._scores()
        m = np.max(np.where(live, s, -np.inf), -1, keepdims=True, initial=-np.inf)
        sinks = self.problem.sinks
        sink = None if sinks is None else sinks.astype(float)[:, None, None]
        m = m if sink is None else np.maximum(m, sink)
        m = np.where(np.isneginf(m), 0, m)

        # The argument of exp: s − m, with or without a factor log₂e, then exp itself and the
        # rescaling of an online softmax, which hits all earlier keys alike.
        online = unit.exp * (1 + min(self.blocks, 16)) + u * self.blocks
        # (Multiplied by log₂e one by one, s and m lose their difference beyond 2¹⁴: a defect.)
        near_s, near_m = np.minimum(abs(s), 2.0**14), np.minimum(abs(m), 2.0**14)
        shift = 2 * u * abs(s - m) + 4 * u * near_s + 2 * u * near_m
        A = np.where(live, error + shift + online, 0)
        # A weight that is 0 to float64 may not be 0 after such an error, so grow its logarithm;
        # beyond e¹⁰⁰ every use of it is capped by the range of v, or vacuous.
        lse = np.where(np.isfinite(self.lse), self.lse, 0)[..., None]
        grown = np.where(live, s - lse + A, -np.inf)
        pR = np.where(A < 1, p * np.expm1(A), np.exp(np.minimum(grown, 100)))
        self.pR = np.where(live, pR, 0)
        down, up = (p * np.exp(-A)).sum(-1, keepdims=True), self.pR.sum(-1, keepdims=True)
        self.R_sink = np.zeros_like(m)
        if p_sink is not None and sink is not None:
            shift = 2 * u * abs(sink - m) + 4 * u * np.minimum(abs(sink), 2.0**14)
            A_sink = shift + 2 * u * near_m + online
            self.R_sink = np.broadcast_to(np.expm1(np.minimum(A_sink, 100)), m.shape)
            grown = np.concatenate([grown, np.broadcast_to(sink - lse + A_sink, m.shape)], -1)
            down, up = down + p_sink * np.exp(-A_sink), up + p_sink * self.R_sink
        # A row that sees nothing has no error; one whose A is vast has the range as its bound.
        seen = self.lse[..., None] != -np.inf
        self.up, self.down = up, np.where(seen, np.maximum(down, np.exp(-600)), 1)
        self.p_hat = np.minimum(1, (p + self.pR) / self.down)

        top = np.max(grown, -1, keepdims=True, initial=0)
        vast = top + np.log(np.exp(grown - top).sum(-1, keepdims=True))
        soft = np.where(top < 90, np.log1p(up), vast)
        fixed = self.gamma(self.chain) + 4 * u
        # Rebuilding P from a saved lse beyond 2¹⁴ loses the weights: a defect, not rounding.
        near = 5 * u * np.minimum(abs(lse), 2.0**14) + 2 * u * near_m
        self.lse_rounding = np.expm1(fixed + near)
        self.rebuild = np.expm1(np.minimum(soft + fixed + near + unit.exp, 100))
        return np.where(seen, soft + fixed + 3 * u * abs(lse) + 2 * u * abs(m), 0)

    def _scores(self) -> tuple[Array, Array]:
        """The final scores and the error of each, stage by stage; and that of their slope."""
        unit, u, problem = self.unit, self.unit.u, self.problem
        q, k, live = self.r.q, self.r.k, self.r.live
        scale, D = self.scale, problem.D
        aq, ak = abs(q), abs(k)
        s = problem.scale * (q @ k.swapaxes(-1, -2))
        # D products and sums; the scale may be rounded, its root taken, and put on q and k.
        reach = scale * (aq @ ak.swapaxes(-1, -2))
        error = (self.gamma(D + 6) + unit.q) * reach  # q · scale may be stored before the product
        error = error + _times(2, u + unit.s) * (abs(s) + error)
        error = error + unit.eta_of(unit.s) * (1 + scale)
        subnormal = aq.sum(-1, keepdims=True) + ak.sum(-1, keepdims=True).swapaxes(-1, -2) + D
        error = error + scale * unit.tiny * subnormal
        slope: Any = 1.0
        slope_error: Any = 0.0
        if problem.softcap is not None:
            c = problem.softcap
            t = np.tanh(s / c)
            moved = (error + (u + unit.s) * abs(s)) / c
            # tanh rises by at most (1 − t²) δ + ½ max|tanh″| δ², and by at most δ.
            moved = np.minimum(moved, (1 - t**2) * moved + 2 / 27**0.5 * moved**2)
            moved = moved + (_times(2, unit.s) + unit.exp + 4 * u) * abs(t)
            slope, slope_error = 1 - t**2, 2 * abs(t) * moved + moved**2 + 3 * u + 2 * unit.s
            s, error = c * t, c * moved + unit.eta_of(unit.s) * (2 * c + 1)
        if problem.score_mod is not None:
            f = dense.call_score_mod(problem, s)
            rate = dense.slope(problem, s)
            up, down = (dense.call_score_mod(problem, s + d) for d in (error, -error))
            step = np.maximum(abs(up - f), abs(down - f))
            bent = [abs(dense.slope(problem, s + d) - rate) for d in (error, -error)]
            # What score_mod rounds inside is its own: eight operations on numbers of its size.
            inside = 8 * u + 4 * unit.s
            rate_error = np.maximum(*bent) + inside * (1 + abs(rate)) + unit.eta_of(unit.s)
            slope_error = slope_error * (abs(rate) + rate_error) + abs(slope) * rate_error
            slope = slope * rate
            error = step + inside * (abs(f) + abs(s * rate)) + unit.eta_of(unit.s)
            s = f
        if problem.bias is not None:
            x, s = s, s + problem.bias.astype(float)
            # The bias itself is a number of the format, so no rounding of the sum moves it further
            # than x does; a padding of −1e9 swallows x, and no more.
            added = np.minimum((u + unit.s) * (abs(s) + error), 4 * (abs(x) + error))
            error = error + added + unit.eta_of(unit.s)
        self.slope, self.slope_error = slope, np.where(live, slope_error, 0)
        return s, error

    def _spread(self, w: Array) -> Array:
        """At least Σ w |z v − o| over the live keys, by Cauchy and Schwarz: three products."""
        live, z, v = self.r.live, self.z, self.r.v
        finite = self._seen_values()
        # Only z = 1 lets a common offset of v cancel; the centre is free, so take the mean.
        centre: Any = 0.0 if self.drops or v.shape[-2] == 0 else finite.mean(-2, keepdims=True)
        v, o = v - centre, self.o - centre
        W = w.sum(-1, keepdims=True)
        square = dense.sum_live(w * z * z, v**2, live)
        cross = o * dense.sum_live(w * z, v, live)
        # What the three terms lose to float64 when they cancel.
        noise = (self.problem.S + 4) * 2.0**-52 * (square + 2 * abs(cross) + o**2 * W)
        return np.asarray(np.sqrt(W * np.maximum(square - 2 * cross + o**2 * W + noise, 0)))

    def _seen_values(self) -> Array:
        """v, but 0 where it is not a number, and where nobody looks: garbage may stand there."""
        seen = np.asarray(self.r.live.any(-2))[..., None]
        return np.where(np.isfinite(self.r.v) & seen, self.r.v, 0)

    def _range(self) -> Array:
        """The largest |z v − o| there is: a convex combination cannot err by more."""
        v, z, live, finite = self.r.v, self.z, self.r.live, self._seen_values()
        top = finite.max(-2, keepdims=True, initial=-np.inf) if v.shape[-2] else np.zeros((1, 1))
        low = finite.min(-2, keepdims=True, initial=np.inf) if v.shape[-2] else np.zeros((1, 1))
        if self.drops or self.r.p_sink is not None:
            most = z.max(initial=1)
            top, low = np.maximum(most * top, 0), np.minimum(most * low, 0)
        far = np.maximum(abs(top - self.o), abs(self.o - low))
        return np.where(live.any(-1, keepdims=True), far, 0)

    # --- backward ---------------------------------------------------------------------------------

    @np.errstate(all="ignore")
    def backward(self, do: Array, dlse: Array | None) -> dict[str, Array]:
        """Bounds of the gradients."""
        problem, (q, k, live) = self.problem, (self.r.q, self.r.k, self.r.live)
        dl: Any = 0.0 if dlse is None else dlse[..., None]
        ds, e_ds, D, e_D = self._dscores(do, np.where(live.any(-1, keepdims=True), dl, 0))
        dx, e_dx, ps, loose = self._through_slope(ds, e_ds)
        scale, ak, aq, unit = self.scale, abs(k), abs(q), self.unit
        turn = live.swapaxes(-1, -2)
        # What vanishes: products below the smallest number, and dS · scale where it is stored.
        flush = unit.tiny * (1 + scale) + unit.eta_of(unit.ds)

        # Errors common to a row (of D, of lse) meet Σ p k and dq, before absolute values.
        each = e_dx + self.gamma(problem.S + 4) * (abs(dx) + e_dx)
        t_dq = dense.sum_live(each, ak, live) + self.rebuild * abs(dense.sum_live(dx, k, live))
        common = abs(dense.sum_live(ps, k, live)) + dense.sum_live(loose, ak, live)
        t_dq = scale * (t_dq + e_D * common) + flush * dense.sum_live(1.0 * live, ak + 1, live)

        row = e_dx + (abs(ps) + loose) * e_D + self.rebuild * abs(dx) + unit.q * abs(dx)
        row = np.where(live, row + self.gamma(problem.T + 4) * (abs(dx) + row), 0)
        t_dk = scale * dense.sum_live(row.swapaxes(-1, -2), aq, turn)
        t_dk = t_dk + flush * dense.sum_live(1.0 * turn, aq + 1, turn)

        w, t_w = self._kept_weights()
        t_dv = dense.sum_live(t_w.swapaxes(-1, -2), abs(do), turn)
        t_dv = t_dv + unit.tiny * turn.sum(-1, keepdims=True)

        dx_t, w_t = abs(dx).swapaxes(-1, -2), w.swapaxes(-1, -2)
        mass_q = scale * dense.sum_live(abs(dx), ak, live)
        mass_k = scale * dense.sum_live(dx_t, aq, turn)
        mass_v = dense.sum_live(w_t, abs(do), turn)
        found = {
            "dq": sum_to(self._stored(t_dq, mass_q, problem.S, problem.q), problem.q.shape),
            "dk": self._shared(t_dk, mass_k, problem.k),
            "dv": self._shared(t_dv, mass_v, problem.v),
        }
        if problem.bias is not None:
            n = ds.size / max(problem.bias.size, 1)
            each = e_ds + (self.r.p + self.pR) * e_D + self.rebuild * abs(ds)
            each = np.where(live, each + self.gamma(n + 4) * (abs(ds) + each), 0)
            found["dbias"] = sum_to(each, problem.bias.shape)
        if self.r.p_sink is not None:
            found["dsinks"] = self._dsinks(D - dl, abs(D) + abs(dl), e_D)
        return found

    def _dscores(self, do: Array, dlse: Array) -> tuple[Array, Array, Array, Array]:
        """ds, its error but for what is common to a row, D, and the error of D."""
        u, unit, (v, live, p) = self.unit.u, self.unit, (self.r.v, self.r.live, self.r.p)
        z, n_p, E = self.z, 1 + self.drops, self.problem.E
        dp = np.where(live, z * (do @ v.swapaxes(-1, -2)), 0)
        reach = np.where(live, z * (abs(do) @ abs(v).swapaxes(-1, -2)), 0)
        e_dp = self.gamma(E + 2) * reach
        e_dp = e_dp + _times(n_p, unit.dp) * (abs(dp) + e_dp)
        e_dp = e_dp + unit.eta_of(unit.dp) * (z + self.drops) + unit.tiny * (E + 2) * z
        e_dp = np.where(live, e_dp, 0)
        D = (p * dp).sum(-1, keepdims=True)
        e_D = self._delta_error(do, dp, e_dp, D)
        e_D = (1 + self.rebuild) * (e_D + u * (abs(D) + e_D))

        g = np.where(live, dp - D + dlse, 0)
        ds, P = p * g, (p + self.pR) * (1 + self.rebuild)
        e_ds = (1 + self.rebuild) * self.pR * abs(g) + P * _times(n_p, unit.p) * abs(g)
        e_ds = e_ds + P * (1 + unit.p) * (e_dp + 3 * u * (abs(dp) + abs(D) + abs(dlse)))
        if unit.dp:  # eager: the parts through out and through lse are stored, then added
            apart = P * (abs(dp - D) + abs(dlse)) * (dlse != 0)
            e_ds = e_ds + unit.ds * (apart + e_ds) + unit.eta
        # Stored twice: after the backward of the softmax, and after the scale.
        e_ds = e_ds + (_times(2, unit.ds) + u) * (abs(ds) + e_ds + p * e_D + self.rebuild * abs(ds))
        e_ds = e_ds + unit.eta_of(unit.ds) + (unit.eta_of(unit.p) + unit.tiny) * (1 + abs(g))
        return ds, np.where(live, e_ds, 0), D, e_D

    def _through_slope(self, ds: Array, e_ds: Array) -> tuple[Array, Array, Array, Array]:
        """dx = ds · slope and its error, p · slope and what it may grow by."""
        live, p, P = self.r.live, self.r.p, self.r.p + self.pR
        if self.problem.softcap is None and self.problem.score_mod is None:
            return ds, e_ds, p, self.pR
        unit, slope, bent = self.unit, self.slope, self.slope_error
        dx = np.where(live, ds * slope, 0)
        e_dx = e_ds * (abs(slope) + bent) + abs(ds) * bent
        e_dx = e_dx + _times(2, unit.u + unit.ds) * (abs(dx) + e_dx) + unit.eta_of(unit.ds)
        loose = self.pR * abs(slope) + P * bent
        return dx, np.where(live, e_dx, 0), np.where(live, p * slope, 0), np.where(live, loose, 0)

    def _kept_weights(self) -> tuple[Array, Array]:
        """The weights that meet v, p z, and their error as the backward makes them."""
        unit, (p, live), z = self.unit, (self.r.p, self.r.live), self.z
        P = (p + self.pR) * (1 + self.rebuild)
        t = self.pR + self.rebuild * (p + self.pR) + _times(1 + self.drops, unit.p) * P
        t = z * (t + self.gamma(self.problem.T + 4) * P)
        t = t + (unit.eta_of(unit.p) + unit.tiny) * (z + self.drops)
        return np.where(live, p * z, 0), np.where(live, t, 0)

    def _dsinks(self, pull: Array, size: Array, e_D: Array) -> Array:
        """Of −Σ p_sink (D − dlse)."""
        unit, p_sink = self.unit, self.r.p_sink
        assert p_sink is not None
        P = p_sink * (1 + self.R_sink) * (1 + self.rebuild)
        each = (P - p_sink) * abs(pull) + P * (e_D + 3 * unit.u * size)
        each = each + P * _times(2, unit.ds + unit.p) * (abs(pull) + e_D)
        each = each + (unit.eta_of(unit.ds) + unit.tiny) * (1 + abs(pull))
        n = each.size / max(self.problem.H, 1)
        each = each + self.gamma(n + 4) * (p_sink * abs(pull) + each)
        return sum_to(each, (self.problem.H, 1, 1))[:, 0, 0]

    def _delta_error(self, do: Array, dp: Array, e_dp: Array, D: Array) -> Array:
        """Of D, computed as Σ do·out from the delivered out, or as Σ P·dP."""
        unit, live, p_sink = self.unit, self.r.live, self.r.p_sink
        n_p, ado, P = 1 + self.drops, abs(do), self.r.p + self.pR
        # Contracted with do before taking absolute values: Σ do (z v − o) = dp − D.
        soft = (self.pR * abs(dp - D)).sum(-1, keepdims=True) / self.down
        if p_sink is not None:
            soft = soft + p_sink * self.R_sink * abs(D) / self.down
        soft = np.minimum(soft, (ado * self.t_soft).sum(-1, keepdims=True))
        delivered = self.t_sum + unit.low * (abs(self.o) + self.t_soft + self.t_sum) + unit.eta
        delivered = np.where(live.any(-1, keepdims=True), delivered, 0)
        product = self.gamma(self.problem.E + 2) * (abs(self.o) + self.t_soft + self.t_sum)
        from_out = soft + (ado * (delivered + product)).sum(-1, keepdims=True)
        each = self.pR * abs(dp) + P * (_times(n_p, unit.p) * abs(dp) + (1 + unit.p) * e_dp)
        each = each + self.gamma(self.chain) * P * (abs(dp) + e_dp)
        from_weights = each.sum(-1, keepdims=True) + self.rebuild * abs(D)
        if self.rounding.delta_from == "out":
            return np.asarray(from_out)
        if self.rounding.delta_from == "weights":
            return np.asarray(from_weights)
        return np.asarray(np.maximum(from_out, from_weights))

    def _stored(self, t: Array, mass: Array, length: int, of: Array) -> Array:
        """Of gradients that are rounded before they are finished: in blocks, in parts."""
        unit, rounding, size = self.unit, self.rounding, mass + t
        more = _times(rounding.gradient_roundings - 1, unit.low) * size + 4 * unit.u * size
        more = more + (rounding.gradient_roundings - 1) * unit.eta
        if rounding.gradient_block is not None:
            blocks = max(math.ceil(length / rounding.gradient_block) - 1, 0)
            more = more + _times(blocks, unit.low) * size + blocks * unit.eta
        copies = mass.size / max(of.size, 1)
        if copies > 1:  # a shared input: each part is rounded, then they are summed
            more = more + (self.gamma(copies) + unit.low) * size + unit.eta
        return t + np.where(mass > 0, more, 0)

    def _shared(self, t: Array, mass: Array, of: Array) -> Array:
        stored = self._stored(t, mass, self.problem.T, of)
        return dense.sum_shared(stored, self.problem.K, of.shape)


def _times(n: int, unit: float) -> float:
    """n roundings of that unit, one after the other, to all orders."""
    return (1 + unit) ** n - 1


def _translated(
    problem: Problem,
    conventions: Conventions,
    form: _Form,
    found: dict[str, Array],
    dout: Array | None,
) -> dict[str, Array]:
    """Bounds of the canonical problem as those of what the conventions make of it."""
    u, lse = form.unit.u, form.lse
    empty = np.isneginf(lse)
    if conventions.lse_base == "2":
        size = np.where(empty, 0, abs(lse))
        found["lse"] = (found["lse"] + 4 * u * size) / math.log(2)
    if found["weights"].shape[-1] != problem.S:
        found["weights"] = found["weights"][..., : problem.S] + found["weights"][..., problem.S :]
    mean = conventions.empty_row == "mean" and empty.any()
    if mean:
        # As a softmax over S equal scores: a weight, S products and sums, a division.
        rel = form.gamma(form.chain + 4) + 2 * form.unit.p + form.unit.exp
        sizes = conventions.results(problem.replace(v=abs(problem.v)), abs(form.o), lse)[0]
        found["o"] = np.where(empty[..., None], rel * sizes, found["o"])
        even = rel / max(problem.S, 1)
        found["weights"] = np.where(empty[..., None], even, found["weights"])
    if problem.headless:
        found = {n: t[0] if n in ("o", "lse", "weights") else t for n, t in found.items()}
    if dout is not None:
        raw = Gradients(**{n[1:]: t for n, t in found.items() if n[0] == "d"})
        flat = form.lse[0] if problem.headless else form.lse
        filled = Conventions(hidden_fill=conventions.hidden_fill)
        grads = filled.gradients(problem, raw, abs(dout), flat)
        if mean:
            # The cotangent of an empty row goes to v through a rounded 1/S.
            whole = Conventions(empty_row="mean").gradients(
                problem, replace(grads, v=np.zeros_like(grads.v)), abs(dout), flat
            )
            rel = form.gamma(form.chain + problem.T + 4) + 3 * form.unit.low
            grads = replace(grads, v=grads.v + rel * whole.v)
        found = {n: t for n, t in found.items() if n[0] != "d"}
        found |= {f"d{n}": t for n, t in vars(grads).items() if t is not None}
    return found
