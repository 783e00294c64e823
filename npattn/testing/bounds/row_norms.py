"""The worst case at the price of a few matrix products, for problems too large for the full form.

The full form has an error for every score; this has one for every row: |q·k| ≤ ‖q‖ max‖k‖. Only
|s| then depends on the key, so that every sum is a product of P, |dS| or P∘|s| with k, q, v or do.
It is never below the full form's true worst case, only looser; it covers what long problems have:
masks, bias, shared heads, gradients of lse. docs/tolerance.md §5 derives it.

The array operations are NumPy's or, through npattn.testing.device.tensors, torch's on a device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from npattn.engines.dense import sum_shared
from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to
from npattn.problem.options import OPTIONS
from npattn.testing.bounds.array_ops import ArrayOps
from npattn.testing.bounds.rounding import Rounding, Units

SMALL = 0.5
"""Largest A for which e^A − 1 ≤ A (1 + A) is used; beyond it the full form is needed."""


def covers(problem: Problem) -> bool:
    """Return True if this form supports the options of a problem."""
    unsupported = [option for option in OPTIONS.values() if "row_norms" in option.refusable]
    at_default = all(
        getattr(problem, o.name) == o.default for o in unsupported if o.kind != "array"
    )
    no_array = all(getattr(problem, o.name) is None for o in unsupported if o.kind == "array")
    return at_default and no_array and problem.S > 0 and problem.D > 0


class ScoreGradient(NamedTuple):
    """|δ dS| ≤ |dS| (each + far |s|) + p rest + lost, with factors that are one a row."""

    ds: Array  # (..., H, T, S)
    size: Array  # |dS|
    steep: Array  # |dS| |s|
    each: Array
    far: Any
    rest: Array
    lost: Array  # underflow
    e_D: Array  # error of D
    grown: Array  # the largest factor by which a rebuilt weight may be too large


class RowNorms:
    """Bounds of a problem that `covers`; valid if ``fits``.

    `xp` has the array operations, NumPy's by default, and arrays are its arrays. Queries that are
    `apart` are some of a longer problem, so that each may lie in a block of its own.
    """

    apart = False

    @np.errstate(all="ignore")  # hidden scores may be anything
    def __init__(
        self, problem: Problem, rounding: Rounding, dtype: Any, xp: ArrayOps | None = None
    ) -> None:
        self.problem, self.rounding = problem, rounding
        self.xp = xp = xp or ArrayOps()
        self.unit = unit = Units.of(rounding, dtype)
        self.o, lse, self.r = xp.evaluate(problem)
        self.lse = lse[..., None]
        self.live, self.p = self.r.live, self.r.p
        self.seen = self.lse != -np.inf
        # Most problems hide nothing and hold no NaN, which is then looked for once.
        self.all_live = xp.shows_all(problem, self.live)
        self.finite = xp.all_finite(self.r.q, self.r.k, self.r.v)
        self.scale = abs(problem.scale or 0.0)
        self.blocks = math.ceil(problem.S / 16)
        self.chain = self.gamma(self.terms(problem.S) + self.blocks)
        s = self.r.q @ self.r.k.swapaxes(-1, -2)
        s *= problem.scale
        if problem.bias_array is not None:
            s = s + xp.wide(problem.bias_array)
        s = s if self.all_live else xp.where(self.live, s, -np.inf)
        m = xp.top(s, -1, -np.inf)
        self.s = self.clear_hidden(abs(s))
        self.m = xp.where(xp.isfinite(m), abs(m), 0)
        self.a, self.b = self._argument_error()
        most = self.a + self.b * xp.top(self.s, -1)
        self.fits = bool((most <= SMALL).all() & xp.isfinite(self.o).all())
        self.k1 = 1 + most  # (e^A − 1) / A at most
        self.R = most * self.k1
        self.down = xp.maximum(1 - self.R, 1 - SMALL * (1 + SMALL))
        self.unit_p = unit.p.u

    def clear_hidden(self, x: Array) -> Array:
        """Replace hidden entries of x by 0."""
        return x if self.all_live else self.xp.where(self.live, x, 0)

    def clear_empty(self, x: Array) -> Array:
        """Replace x of fully masked rows by 0."""
        cleared: Array = self.xp.where(self.seen, x, 0)
        return cleared

    def numbers(self, x: Array) -> Array:
        """Replace NaN and inf in x by 0."""
        return x if self.finite else self.xp.where(self.xp.isfinite(x), x, 0)

    def product(self, w: Array, x: Array) -> Array:
        """Return w x over the visible keys."""
        return w @ x if self.finite else self.xp.sum_live(w, x, self.live)

    def transposed_product(self, w: Array, x: Array) -> Array:
        """Return wᵀ x over the queries that see each key."""
        w, live = w.swapaxes(-1, -2), self.live.swapaxes(-1, -2)
        return w @ x if self.finite else self.xp.sum_live(w, x, live)

    def terms(self, n: int) -> int:
        block = self.rounding.sum_block
        return n + 4 if block is None else min(n, block + 3 * math.ceil(n / block)) + 4

    def gamma(self, n: float) -> float:
        return n * self.unit.u / (1 - n * self.unit.u)

    # --- forward ----------------------------------------------------------------------------------

    def _argument_error(self) -> tuple[Array, float]:
        """Return a and b: the error of the argument of exp is at most a + b |s|."""
        xp, unit, u, problem = self.xp, self.unit, self.unit.u, self.problem
        q, k = self.r.q, self.numbers(self.r.k)
        self.ak = abs(self.r.k)
        self.top_k = xp.top(self.numbers(self.ak), -2)  # (..., H, 1, D)
        norm_k = xp.top(xp.sqrt(xp.along(k, k)), -2)
        reach = self.scale * xp.sqrt(xp.along(q, q)) * norm_k
        products = self.gamma(problem.D + 6) + unit.q.u + unit.operands.times(2)
        twice = (1 + u + unit.s.u) ** 2 - 1  # q kᵀ stored, scaled and stored again
        a, b = products * (1 + twice) * reach, twice
        if problem.bias_array is not None:
            bias = xp.where(self.live, abs(xp.wide(problem.bias_array)), 0)
            bias = xp.top(xp.where(xp.isfinite(bias), bias, 0), -1)
            a = (a + twice * bias) * (1 + u + unit.s.u) + self.gamma(problem.D) * bias
            b = b * (1 + u + unit.s.u) + u + unit.s.u
        lost = self.scale * (unit.tiny + unit.operands.eta) * (1 + problem.D)
        lost = lost * (1 + xp.top(abs(q), -1) + xp.top(self.top_k, -1))
        online = unit.exp * (1 + min(self.blocks, 16)) + u * self.blocks
        a = a + lost + unit.s.eta * (2 + self.scale) + 4 * u * self.m + online
        return self.clear_empty(a), b + 6 * u

    @np.errstate(all="ignore")
    def forward(self, weights: bool = True) -> dict[str, Array]:
        """Return bounds of o, lse and, unless `weights` is False, weights."""
        xp, unit, u, p = self.xp, self.unit, self.unit.u, self.p
        v = self.numbers(self.r.v)
        self.ps = p * self.s
        s2 = xp.sqrt(xp.along(self.ps, self.s))
        s1 = self.ps.sum(-1, keepdims=True)
        self.rho = self.k1 * (self.a + self.b * s2)  # √ Σ p R² at most
        self.mean_R = self.k1 * (self.a + self.b * s1)  # Σ p R
        centre = xp.mean(v)
        av = abs(self.r.v)
        far = v - centre
        around = xp.maximum(p @ xp.square(far) - (self.o - centre) ** 2, 0)
        around = around + (self.problem.S + 4) * xp.eps * (self.o - centre) ** 2
        t_soft = self.clear_empty(self.rho * xp.sqrt(around) / self.down)
        row_sum = unit.row_sum.times(self.terms(self.problem.S) + self.blocks)
        lse = self.clear_empty(abs(self.lse))
        fixed = self.chain + row_sum + 4 * u
        near = (5 * u + unit.lse.u) * xp.minimum(lse, 2.0**14) + 2 * u * xp.minimum(self.m, 2.0**14)
        near = near + unit.lse.eta
        soft = xp.log1p(self.mean_R)
        self.rebuild = xp.expm1(soft + fixed + near + unit.exp)
        mass = (1 + self.R) / self.down * self.product(p, av)
        stored = (
            unit.p.u * (1 + unit.p.u) + self.chain + unit.operands.times(2) + xp.expm1(4 * u + near)
        )
        t = stored * mass + fixed * (abs(self.o) + t_soft)
        count = xp.count(self.live, -1)
        vanished = unit.p.eta + unit.operands.eta + unit.tiny
        t = t + count * (vanished * xp.top(self.numbers(av), -2) + unit.tiny)
        again = self.rounding.out_roundings - 1
        t = t + (unit.low.times(again) * (abs(self.o) + t_soft + t) + again * unit.low.eta)
        self.t_soft, self.t_sum = t_soft, self.clear_empty(t)
        self.t_rest = self.clear_empty(t - unit.p.u * (1 + unit.p.u) * mass)
        t_lse = soft + fixed + (3 * u + unit.lse.u) * lse + 2 * u * self.m + unit.lse.eta
        bounds = {"o": self.t_soft + self.t_sum, "lse": self.clear_empty(t_lse)[..., 0]}
        return bounds | ({"weights": self._weights_bound(fixed)} if weights else {})

    def _weights_bound(self, fixed: float) -> Array:
        unit = self.unit
        relative = (self.R + self.mean_R) / self.down
        relative = relative + (1 + self.R) / self.down * (unit.p.u + fixed)
        weights = self.p * relative
        weights += unit.p.eta + unit.tiny
        return self.clear_hidden(self.xp.minimum(weights, 1))

    # --- backward ---------------------------------------------------------------------------------

    @np.errstate(all="ignore")
    def backward(self, do: Array, dlse: Array | None) -> dict[str, Array]:
        """Return bounds of the gradients; after `forward`."""
        xp, problem, unit = self.xp, self.problem, self.unit
        self.finite = self.finite and xp.all_finite(do)
        g = self._score_gradient(do, dlse)
        self.e_top, self.is_top = self._top_error(g, dlse)
        flush = (unit.tiny + unit.operands.eta) * (1 + self.scale) + unit.ds.eta
        t_dq = self._dq_bound(g, flush)
        sums = self.gamma(self.terms(problem.T)) + unit.operands.times(2) + 4 * unit.u
        times = xp.count(self.live, -2).swapaxes(-1, -2)
        t_dk = self._dk_bound(g, flush, sums, times)
        t_dv = self._dv_bound(g, do, sums, times)
        bounds = self._add_storage(t_dq, t_dk, t_dv, g.size, do)
        if problem.bias_array is not None:
            n = math.prod(g.ds.shape) / max(math.prod(problem.bias_array.shape), 1)
            rest = g.rest + (1 + self.R) * g.e_D
            bias = g.size * (g.each + self.rebuild) + g.steep * g.far + self.p * rest
            bias = bias + g.lost + (0.0 if self.is_top is None else self.is_top * self.e_top)
            gamma = self.gamma(n + 4)
            bias = xp.where(self.live, bias * (1 + gamma) + gamma * g.size, 0)
            bounds["dbias"] = sum_to(bias, problem.bias_array.shape)
        return bounds

    def _score_gradient(self, do: Array, dlse: Array | None) -> ScoreGradient:
        xp, problem, unit, u, p = self.xp, self.problem, self.unit, self.unit.u, self.p
        v = self.r.v
        finite_v = self.numbers(v)
        dl: Any = 0.0 if dlse is None else self.clear_empty(dlse[..., None])
        dp = self.clear_hidden(do @ v.swapaxes(-1, -2))
        D = xp.along(p, dp)
        norm_v = xp.top(xp.sqrt(xp.along(finite_v, finite_v)), -2)
        reach = xp.sqrt(xp.along(do, do)) * norm_v
        products = (self.gamma(problem.E + 2) + unit.operands.times(2)) * reach
        products = products + (unit.tiny + unit.operands.eta) * (problem.E + 2) + unit.dp.eta
        away = dp - D
        e_D = self._delta_error(do, dp, away, D, products)

        around = abs(D - dl)
        ds = p * self.clear_hidden(away if dlse is None else away + dl)
        size, grown = abs(ds), (1 + self.R) * (1 + self.rebuild)
        fuses = self.rounding.fuses
        twice = unit.ds.times(1 if fuses else 2) + u
        each = (1 + self.rebuild) * self.k1 * self.a + grown * unit.p.u * (not fuses)
        each = each + grown * (1 + unit.p.u) * (unit.dp.u + 3 * u) + twice * (1 + self.rebuild)
        far = (1 + self.rebuild) * self.k1 * self.b * (1 + twice)
        rest = products * (1 + unit.dp.u) + (unit.dp.u + 3 * u) * around
        rest = grown * (1 + unit.p.u) * (rest + 3 * u * (abs(D) + abs(dl))) + twice * e_D
        if unit.dp.u and dlse is not None:  # through out and through lse, stored apart
            each = each + unit.ds.u * grown
            rest = rest + 2 * unit.ds.u * grown * abs(dl)
        lost = unit.ds.eta + (unit.p.eta + unit.tiny) * (1 + xp.farthest(away) + abs(dl))
        lost = lost + (unit.low.eta if unit.dp.u else 0.0)
        slack = (1 + twice) * (1 + self.gamma(max(problem.S, problem.T) + 4) + unit.operands.u * 3)
        # Sums of |dS|, |dS| |s| and p with factors that are one a row: no array of T × S bounds is
        # made but for dbias.
        steep = size * self.s
        each, far, rest = slack * each, slack * far, slack * rest
        return ScoreGradient(ds, size, steep, each, far, rest, lost, e_D, grown)

    def _top_error(self, g: ScoreGradient, dlse: Array | None) -> tuple[Any, Any]:
        """Error of the gradient through the maximum of each row, and where that may be: 1 or 0."""
        xp = self.xp
        if self.rounding.delta_from == "out":
            return None, None
        size, mass = g.size.sum(-1, keepdims=True), self.p.sum(-1, keepdims=True)
        errors = g.each * size + g.far * g.steep.sum(-1, keepdims=True) + g.rest * mass
        errors = errors + g.lost * xp.count(self.live, -1) + (1 + self.R) * g.e_D
        size = size + errors + (0.0 if dlse is None else abs(dlse[..., None]))
        errors = errors + self.gamma(self.terms(self.problem.S)) * size
        errors = errors * (1 + self.unit.u + self.unit.ds.u) + self.unit.ds.eta
        # A score that may be the largest has at least e^−2A of the largest weight.
        near = self.p >= xp.top(self.p, -1) * self.down**2
        return self.clear_empty(errors), xp.where(near & self.live, 0 * self.p + 1, 0)

    def _dq_bound(self, g: ScoreGradient, flush: float) -> Any:
        xp, unit, p, k, ak = self.xp, self.unit, self.p, self.r.k, self.ak
        sums = self.gamma(self.terms(self.problem.S)) + unit.operands.times(2) + 4 * unit.u
        count = self.xp.count(self.live, -1)
        p_ak = self.product(p, ak)
        self.size_ak = self.product(g.size, ak)
        rows = (g.each + sums) * self.size_ak + g.rest * p_ak
        rows = rows + g.far * self.product(g.steep, ak)
        common = abs(self.product(p, k)) + self.R * p_ak
        t_dq = rows + self.rebuild * abs(self.product(g.ds, k)) + g.e_D * common
        if self.is_top is not None:
            t_dq = t_dq + self.e_top * xp.sqrt(self.product(self.is_top, ak**2))
        lost = g.lost * count * self.top_k
        return self.scale * (t_dq + lost) + flush * count * (self.top_k + 1)

    def _dk_bound(self, g: ScoreGradient, flush: float, sums: float, times: Array) -> Any:
        xp, aq = self.xp, abs(self.r.q)
        factors: list[tuple[Any, Any]] = [
            (g.size, g.each + self.rebuild + self.unit.q.u + sums),
            (g.steep, g.far),
            (self.p, g.rest + (1 + self.R) * g.e_D),
        ]
        factors += [] if self.is_top is None else [(self.is_top, self.e_top)]
        t_dk = sum(self.transposed_product(w, factor * aq) for w, factor in factors)
        top_q, worst = xp.top(self.numbers(aq), -2), xp.top(g.lost, -2)
        return self.scale * (t_dk + worst * times * top_q) + flush * times * (top_q + 1)

    def _dv_bound(self, g: ScoreGradient, do: Array, sums: float, times: Array) -> Any:
        xp, unit, ado = self.xp, self.unit, abs(do)
        kept = self.k1 * self.a + self.rebuild * (1 + self.R) + unit.p.u * g.grown
        kept = kept + (sums + unit.operands.times(2)) * g.grown
        t_dv = self.transposed_product(self.p, kept * ado)
        t_dv = t_dv + self.transposed_product(self.ps, self.k1 * self.b * ado)
        top = (unit.p.eta + unit.tiny) * xp.top(ado, -2) + unit.tiny
        return t_dv + times * top

    def _delta_error(self, do: Array, dp: Array, away: Array, D: Array, products: Array) -> Array:
        """Error of D, from the delivered out or from the weights."""
        xp, unit, u, ado = self.xp, self.unit, self.unit.u, abs(do)
        second = xp.sqrt(xp.along(self.p, dp, dp))
        spread = xp.sqrt(xp.along(self.p, away, away))  # where p is not 0, it is live
        soft = self.rho * spread / self.down
        soft = xp.minimum(soft, (ado * self.t_soft).sum(-1, keepdims=True))
        size = abs(self.o) + self.t_soft + self.t_sum
        # The storage of P is contracted with do, as the softmax's error is.
        soft = soft + unit.p.u * (1 + unit.p.u) * (1 + self.R) / self.down * second
        more = self.t_rest + (unit.low.u + self.gamma(self.problem.E + 2)) * size + unit.low.eta
        from_out = soft + (ado * more).sum(-1, keepdims=True)
        each = products * (1 + unit.dp.u) + unit.dp.u * second
        in_ds = 0.0 if self.rounding.fuses else unit.p.u
        from_weights = self.rho * second + (1 + self.R) * (
            in_ds * second + (1 + unit.p.u) * each + self.chain * (second + each)
        )
        from_weights = from_weights + self.rebuild * abs(D)
        source = self.rounding.delta_from
        either = {"out": from_out, "weights": from_weights}
        error = either.get(source, xp.maximum(from_out, from_weights))
        e_D: Array = (1 + self.rebuild) * (error + u * (abs(D) + error))
        return self.clear_empty(e_D)

    def _add_storage(
        self, t_dq: Array, t_dk: Array, t_dv: Array, size: Array, do: Array
    ) -> dict[str, Array]:
        """Add the roundings of a gradient before it is finished."""
        problem, unit, rounding = self.problem, self.unit, self.rounding
        group, block = problem.H / max(problem.K, 1), rounding.gradient_block
        queries = problem.T * (block or 1) if self.apart else problem.T
        parts = {"dq": (t_dq, problem.q, problem.S), "dk": (t_dk, problem.k, queries)}
        parts["dv"] = (t_dv, problem.v, queries)
        bounds = {}
        for name, (t, of, length) in parts.items():
            heads = group if name != "dq" else 1.0
            copies = math.prod(t.shape) / max(math.prod(of.shape), 1)
            times = rounding.gradient_roundings - 1
            if block is not None:
                times += max(math.ceil(length / block) - 1, 0)
            factor = unit.low.times(times)
            eta = times * unit.low.eta
            if copies > heads:
                factor, eta = factor + self.gamma(copies) + unit.low.u, eta + unit.low.eta
            if heads > 1:
                factor = factor + self.gamma(heads) + unit.shared.u
                eta = eta + unit.shared.eta
            if factor:
                t = t + factor * (self._mass(name, size, do) + t) + eta
            shared = name != "dq"
            bounds[name] = sum_shared(t, problem.K, of.shape) if shared else sum_to(t, of.shape)
        return bounds

    def _mass(self, name: str, size: Array, do: Array) -> Array:
        """Return the sum of the absolute values of the terms of a gradient."""
        if name == "dq":
            return self.scale * self.size_ak
        if name == "dk":
            return self.scale * self.transposed_product(size, abs(self.r.q))
        return self.transposed_product(self.p, abs(do))
