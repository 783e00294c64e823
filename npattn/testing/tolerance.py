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
        u, unit = self.unit.u, self.unit
        v, live, p, p_sink = self.r.v, self.r.live, self.r.p, self.r.p_sink
        s, error = self._scores()
        m = np.max(np.where(live, s, -np.inf), -1, keepdims=True, initial=-np.inf)
        sinks = self.problem.sinks
        sink = None if sinks is None else sinks.astype(float)[:, None, None]
        m = m if sink is None else np.maximum(m, sink)
        m = np.where(np.isneginf(m), 0, m)

        # The argument of exp: s − m, with or without a factor log₂e, then exp itself and the
        # rescaling of an online softmax, which hits all earlier keys alike.
        online = unit.exp * (1 + min(self.blocks, 16)) + u * self.blocks
        free = np.where(live, error + 2 * u * abs(s) + 2 * u * (abs(s) + abs(m)) + online, 0)
        A = np.minimum(free, 50)  # beyond it the bound is the range of v anyway
        self.A, self.R = A, np.where(live, np.expm1(A), 0)
        worst = free.max(-1, keepdims=True, initial=0)
        down, up = (p * np.exp(-A)).sum(-1, keepdims=True), (p * self.R).sum(-1, keepdims=True)
        self.R_sink = np.zeros_like(m)
        if p_sink is not None and sink is not None:
            A_sink = np.minimum(4 * u * abs(sink) + 2 * u * abs(m) + online, 50)
            self.R_sink = np.expm1(np.broadcast_to(A_sink, m.shape))
            down, up = down + p_sink * np.exp(-A_sink), up + p_sink * self.R_sink
        self.down = np.where(down == 0, 1, down)

        L = np.where(np.isfinite(self.lse), abs(self.lse), 0)[..., None]
        soft = np.where(worst > 50, worst, np.log1p(up))
        fixed = self.gamma(self.chain) + 4 * u
        seen = self.lse[..., None] != -np.inf
        t_lse = np.where(seen, soft + fixed + 3 * u * L + 2 * u * abs(m), 0)
        # Rebuilding P from a saved lse beyond 2¹⁴ loses the weights: a defect, not rounding.
        kept = np.minimum(L, 2.0**14), np.minimum(abs(m), 2.0**14)
        self.rebuild = np.expm1(
            np.minimum(soft + fixed + 5 * u * kept[0] + 2 * u * kept[1] + unit.exp, 50)
        )

        z, o = self.z, self.o
        av = abs(v)
        n_p = 1 + self.drops
        self.p_hat = np.minimum(1, p * (1 + self.R) / self.down)
        t_soft = self._spread(p * self.R) / self.down
        if p_sink is not None:
            t_soft = t_soft + p_sink * self.R_sink * abs(o) / self.down
        t_soft = np.minimum(t_soft, self._range())
        mass = dense.sum_live(self.p_hat * z, av, live)
        reach = dense.sum_live(np.where(live, z, 0), av, live)
        t_p = n_p * unit.p * 1.05 * mass
        t_sum = self.gamma(self.chain) * mass + (self.gamma(self.chain) + 4 * u) * (abs(o) + t_soft)
        lost = (unit.p and unit.eta) + unit.tiny
        t_sum = t_sum + lost * reach + np.where(seen, (self.problem.S + 2) * unit.tiny, 0)
        self.t_soft, self.t_sum = t_soft, t_p + t_sum
        t_w = np.minimum(
            1, p * self.R / self.down + self.p_hat * (unit.p + self.gamma(self.chain) + 4 * u)
        )
        t_w = np.where(live, t_w + lost, 0)
        return {"o": t_soft + t_p + t_sum, "lse": t_lse[..., 0], "weights": t_w}

    def _scores(self) -> tuple[Array, Array]:
        """The final scores and the error of each, stage by stage; and that of their slope."""
        unit, u, problem = self.unit, self.unit.u, self.problem
        q, k, live = self.r.q, self.r.k, self.r.live
        scale, D = self.scale, problem.D
        aq, ak = abs(q), abs(k)
        s = problem.scale * (q @ k.swapaxes(-1, -2))
        # D products and sums; the scale may be rounded, its root taken, and put on q and k.
        error = scale * self.gamma(D + 6) * (aq @ ak.swapaxes(-1, -2))
        error = error + 2 * (u + unit.s) * abs(s) + (unit.s and unit.eta) * (1 + scale)
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
            moved = moved + (2 * unit.s + unit.exp + 4 * u) * abs(t)
            slope, slope_error = 1 - t**2, 2 * abs(t) * moved + moved**2 + 3 * u + 2 * unit.s
            s, error = c * t, c * moved + 2 * (unit.s and unit.eta)
        if problem.score_mod is not None:
            f = dense.call_score_mod(problem, s)
            rate = dense.slope(problem, s)
            up, down = (dense.call_score_mod(problem, s + d) for d in (error, -error))
            step = np.maximum(abs(up - f), abs(down - f))
            bent = [abs(dense.slope(problem, s + d) - rate) for d in (error, -error)]
            rate_error = np.maximum(*bent) + (8 * u + 2 * unit.s) * abs(rate)
            slope_error = slope_error * abs(rate) + abs(slope) * rate_error
            slope = slope * rate
            error = step + (8 * u + 2 * unit.s) * (abs(f) + abs(s * rate))
            s = f
        if problem.bias is not None:
            s = s + problem.bias.astype(float)
            error = error + (u + unit.s) * abs(s) + (unit.s and unit.eta)
        self.slope, self.slope_error = slope, np.where(live, slope_error, 0)
        return s, error

    def _spread(self, w: Array) -> Array:
        """At least Σ w |z v − o| over the live keys, by Cauchy and Schwarz: three products."""
        live, z, v = self.r.live, self.z, self.r.v
        finite = np.where(np.isfinite(v), v, 0)
        # Only z = 1 lets a common offset of v cancel; the centre is free, so take the mean.
        centre: Any = 0.0 if self.drops or v.shape[-2] == 0 else finite.mean(-2, keepdims=True)
        v, o = v - centre, self.o - centre
        W = w.sum(-1, keepdims=True)
        square = dense.sum_live(w * z * z, v**2, live)
        cross = o * dense.sum_live(w * z, v, live)
        # What the three terms lose to float64 when they cancel.
        noise = (self.problem.S + 4) * 2.0**-52 * (square + 2 * abs(cross) + o**2 * W)
        return np.asarray(np.sqrt(W * np.maximum(square - 2 * cross + o**2 * W + noise, 0)))

    def _range(self) -> Array:
        """The largest |z v − o| there is: a convex combination cannot err by more."""
        v, z, live = self.r.v, self.z, self.r.live
        finite = np.where(np.isfinite(v), v, 0)
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
        u, unit, problem = self.unit.u, self.unit, self.problem
        q, k, v, _, _, live, p, p_sink, _ = self.r
        R, rebuild, z, n_p = self.R, self.rebuild, self.z, 1 + self.drops
        dl: Any = 0.0 if dlse is None else dlse[..., None]
        ado = abs(do)
        dp = np.where(live, z * (do @ v.swapaxes(-1, -2)), 0)
        reach = np.where(live, z * (ado @ abs(v).swapaxes(-1, -2)), 0)
        e_dp = self.gamma(problem.E + 2) * reach + n_p * (
            unit.dp * abs(dp) + (unit.dp and unit.eta)
        )
        e_dp = np.where(live, e_dp + unit.tiny * (problem.E + 2) * z, 0)
        D = (p * dp).sum(-1, keepdims=True)
        e_D = self._delta_error(do, dp, e_dp, D) + u * abs(D)
        D_rows = np.where(live.any(-1, keepdims=True), dl, 0)

        g = np.where(live, dp - D + D_rows, 0)
        ds = p * g
        e_ds = p * (R + n_p * unit.p) * abs(g) + p * (1 + R) * (
            e_dp + 3 * u * (abs(dp) + abs(D) + abs(D_rows))
        )
        n_ds = 2  # softmax backward, then the scale
        e_ds = e_ds + (n_ds * unit.ds + u) * abs(ds) + n_ds * (unit.ds and unit.eta)
        e_ds = np.where(live, e_ds + ((unit.p and unit.eta) + unit.tiny) * (1 + abs(g)), 0)

        slope, bent = self.slope, self.slope_error
        dx = np.where(live, ds * slope, 0)
        e_dx = e_ds
        if problem.softcap is not None or problem.score_mod is not None:
            e_dx = e_ds * (abs(slope) + bent) + abs(ds) * bent + 2 * (u + unit.ds) * abs(dx)
            e_dx = np.where(live, e_dx + (unit.ds and unit.eta), 0)
        ps = np.where(live, p * slope, 0)
        loose = p * (R * abs(slope) + (1 + R) * bent)  # of ps
        loose = np.where(live, loose, 0)

        scale, ak, aq = self.scale, abs(k), abs(q)
        live_t = live.swapaxes(-1, -2)
        # Errors common to a row (of D, of lse) meet Σ p k and dq, before absolute values.
        t_dq = dense.sum_live(
            (1 + rebuild) * e_dx + self.gamma(problem.S + 4) * (abs(dx) + e_dx), ak, live
        )
        t_dq = t_dq + e_D * (abs(dense.sum_live(ps, k, live)) + dense.sum_live(loose, ak, live))
        t_dq = scale * (t_dq + rebuild * abs(dense.sum_live(dx, k, live)))
        flush = unit.tiny * (1 + scale)
        t_dq = t_dq + flush * dense.sum_live(live.astype(float), ak + 1, live)

        row = (1 + rebuild) * e_dx + (abs(ps) + loose) * e_D + rebuild * abs(dx)
        row = np.where(live, row + self.gamma(problem.T + 4) * (abs(dx) + row), 0)
        t_dk = scale * dense.sum_live(row.swapaxes(-1, -2), aq, live_t)
        t_dk = t_dk + flush * dense.sum_live(live_t.astype(float), aq + 1, live_t)

        w = p * z
        t_dv = w * (R + rebuild * (1 + R) + 1.05 * n_p * unit.p)
        t_dv = t_dv + self.gamma(problem.T + 4) * w * (1 + R) * (1 + rebuild)
        t_dv = np.where(live, t_dv + ((unit.p and unit.eta) + unit.tiny) * z, 0)
        t_dv = dense.sum_live(t_dv.swapaxes(-1, -2), ado, live_t)
        t_dv = t_dv + unit.tiny * live_t.sum(-1, keepdims=True)

        terms = {
            "dq": (scale * dense.sum_live(abs(dx), ak, live), problem.S),
            "dk": (scale * dense.sum_live(abs(dx).swapaxes(-1, -2), aq, live_t), problem.T),
            "dv": (dense.sum_live(w.swapaxes(-1, -2), ado, live_t), problem.T),
        }
        t = {"dq": t_dq, "dk": t_dk, "dv": t_dv}
        for name, (mass, length) in terms.items():
            t[name] = t[name] + self._storage(mass, length)
        found = {
            "dq": sum_to(t["dq"] + self._partial(terms["dq"][0], problem.q), problem.q.shape),
            "dk": self._shared(t["dk"], terms["dk"][0], problem.k),
            "dv": self._shared(t["dv"], terms["dv"][0], problem.v),
        }
        if problem.bias is not None:
            each = np.where(live, (1 + rebuild) * e_ds + p * (1 + R) * e_D + rebuild * abs(ds), 0)
            n = ds.size / max(problem.bias.size, 1)
            found["dbias"] = sum_to(each + self.gamma(n + 4) * (abs(ds) + each), problem.bias.shape)
        if p_sink is not None:
            pull = abs(D - dl)
            each = p_sink * ((self.R_sink + rebuild + 2 * unit.ds + unit.p) * pull)
            each = each + p_sink * (1 + self.R_sink) * (e_D + 3 * u * (abs(D) + abs(dl)))
            each = each + ((unit.ds and unit.eta) + unit.tiny) * (1 + pull)
            n = each.size / max(problem.H, 1)
            each = each + self.gamma(n + 4) * (p_sink * pull + each)
            found["dsinks"] = sum_to(each, (problem.H, 1, 1))[:, 0, 0]
        return found

    def _delta_error(self, do: Array, dp: Array, e_dp: Array, D: Array) -> Array:
        """Of D, computed as Σ do·out from the delivered out, or as Σ P·dP."""
        unit, (live, p, p_sink) = self.unit, (self.r.live, self.r.p, self.r.p_sink)
        n_p, ado = 1 + self.drops, abs(do)
        # Contracted with do before taking absolute values: Σ do (z v − o) = dp − D.
        soft = (p * self.R * abs(dp - D)).sum(-1, keepdims=True) / self.down
        if p_sink is not None:
            soft = soft + p_sink * self.R_sink * abs(D) / self.down
        soft = np.minimum(soft, (ado * self.t_soft).sum(-1, keepdims=True))
        delivered = self.t_sum + unit.low * abs(self.o) + unit.eta
        delivered = np.where(live.any(-1, keepdims=True), delivered, 0)
        from_out = soft + (ado * (delivered + self.gamma(self.problem.E + 2) * abs(self.o))).sum(
            -1, keepdims=True
        )
        each = p * (self.R + n_p * unit.p) * abs(dp) + p * (1 + self.R) * e_dp
        each = each + self.gamma(self.chain) * p * (1 + self.R) * abs(dp)
        from_weights = each.sum(-1, keepdims=True) + self.rebuild * abs(D)
        if self.rounding.delta_from == "out":
            return np.asarray(from_out)
        if self.rounding.delta_from == "weights":
            return np.asarray(from_weights)
        return np.asarray(np.maximum(from_out, from_weights))

    def _storage(self, mass: Array, length: int) -> Array:
        """Of gradients that are rounded before they are finished."""
        unit, rounding = self.unit, self.rounding
        t = (rounding.gradient_roundings - 1) * (unit.low * mass + unit.eta) + 4 * unit.u * mass
        if rounding.gradient_block is not None:
            blocks = math.ceil(length / rounding.gradient_block)
            t = t + max(blocks - 1, 0) * (unit.grad * mass + unit.eta)
        return np.where(mass > 0, t, 0)

    def _partial(self, mass: Array, of: Array) -> Array:
        """Of gradients of shared inputs: each part is rounded, then they are summed."""
        copies = mass.size / max(of.size, 1)
        if copies <= 1:
            return np.zeros_like(mass)
        return (
            self.gamma(copies) * mass + self.unit.low * mass + np.where(mass > 0, self.unit.eta, 0)
        )

    def _shared(self, t: Array, mass: Array, of: Array) -> Array:
        return dense.sum_shared(t + self._partial(mass, of), self.problem.K, of.shape)


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
        flat = lse[0] if problem.headless else lse
        filled = Conventions(hidden_fill=conventions.hidden_fill)
        grads = filled.gradients(problem, raw, abs(dout), flat)
        if mean:
            # The cotangent of an empty row goes to v through a rounded 1/S.
            whole = Conventions(empty_row="mean").gradients(
                problem, replace(grads, v=np.zeros_like(grads.v)), abs(dout), flat
            )
            rel = form.gamma(form.chain + problem.T + 4) + 3 * form.unit.low
            grads = replace(grads, v=grads.v + rel * whole.v)
        for name in ("q", "k", "v", "bias", "sinks"):
            if getattr(grads, name) is not None:
                found[f"d{name}"] = getattr(grads, name)
    return found
