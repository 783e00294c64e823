"""The worst case: how far the steps of a rounding model can take each result from the exact one.

    u    unit roundoff of the accumulators       γ(n) = n u / (1 − n u), n roundings in a row
    A    error of the argument of exp            R = exp(A) − 1, relative error of a weight
    z    dropout multiplier (1 without)          D = Σ p dp, "delta"

docs/tolerance.md derives every line. No number here is fitted: each is a count of roundings, a unit
roundoff, or a constant of the calculus.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np

from npattn import dense
from npattn.arrays import Array, sum_to
from npattn.conventions import Conventions
from npattn.problem import Problem
from npattn.testing.bounds.rounding import Rounding, Units

__all__ = ["DeltaSums", "GradientSums", "Hard", "OutSums", "Shares"]


VAST = 50.0
"""An error of the argument of exp whose exponential is no longer looked at."""
WIDE = 0.25
"""Errors of scores within which a score_mod may turn."""


def swing(problem: Problem, s: Array, error: Array) -> Array:
    """How far score_mod moves where its argument moves by the error: at both ends, and where that
    is wide also between them, evenly and around 0, where functions turn."""
    f = dense.call_score_mod(problem, s)
    at = [s - error, s + error]
    if np.max(error, initial=0, where=np.isfinite(error)) > WIDE:
        at += [s + t * error for t in np.linspace(-1, 1, 18)[1:-1]]
        at += [np.clip(x * 2.0**n, s - error, s + error) for n in range(-3, 8) for x in (-1, 1)]
    return np.asarray(np.max([abs(dense.call_score_mod(problem, x) - f) for x in at], axis=0))


def finite(x: Array) -> Array:
    """x, but 0 where it is no number."""
    numbers = np.isfinite(x)
    return x if numbers.all() else np.where(numbers, x, 0)


class Shares(NamedTuple):
    """Of the weights of a row, (..., T, 1), where the arguments of exp err by A."""

    up: Array  # Σ pR
    down: Array  # Σ p e^−A
    most: Array  # max A
    top: Array  # max of s − lse + A, at least 0
    whole: Array  # log Σ e^(s − lse + A)
    least: Array  # log Σ p e^−A


class OutSums(NamedTuple):
    """What the bound of o sums over the keys of a row."""

    moved: Array  # Σ pR
    square: Array  # Σ pR (z v − o)²
    mass: Array  # Σ p̂ z |v|
    lost: Array  # Σ |v| of what vanishes
    far: Array  # max |z v − o|
    seen: Array  # whether there are any


class DeltaSums(NamedTuple):
    """What the bound of D sums over the keys of a row."""

    moved: Array  # Σ pR |dp − D|
    stored: Array  # Σ p̂ |dp|
    weights: Array  # Σ of the errors of P dP


class GradientSums(NamedTuple):
    """What the bound of dq sums over the keys of a row; x is k."""

    each: Array  # Σ errors |x|
    signed: Array  # Σ dx x
    common: Array  # Σ p slope x
    loose: Array  # Σ its errors |x|
    flush: Array  # Σ |x| + 1
    mass: Array  # Σ |dx| |x|


class Hard:
    """The full form of the bound: every quantity of the oracle, and the error of each.

    `problem` is canonical, `given` what it was made of, under the conventions `meaning`.

    What belongs to one score and what sums over a row are functions apart, since parts of a row
    (rows.py) have their own scores, but sums and sizes T, S of the whole.
    """

    def __init__(
        self,
        problem: Problem,
        rounding: Rounding,
        dtype: Any,
        given: Problem | None = None,
        meaning: Conventions | None = None,
    ) -> None:
        self._begin(problem, rounding, dtype, given, meaning)
        self._count(problem.T, problem.S)
        out, lse, residuals = dense.forward(problem)
        head = (None,) if problem.headless else (...,)
        self.o, self.lse = out[head], lse[head]  # with a head axis
        self._hold(residuals)

    p_sink: Array | None  # what the sink takes of each row
    ds: Array

    def _begin(
        self,
        problem: Problem,
        rounding: Rounding,
        dtype: Any,
        given: Problem | None,
        meaning: Conventions | None,
    ) -> None:
        """What the options say, before anything is computed."""
        self.given, self.meaning = given or problem, meaning or Conventions()
        # Heads that are shared by tiling are expanded in the canonical problem.
        self.tiles = self.given.H // self.given.K if problem.K != self.given.K else 1
        self.problem, self.rounding, self.dtype = problem, rounding, dtype
        self.unit = Units.of(rounding, dtype)
        self.drops = problem.dropout_mask is not None
        self.n_p = 1 + (self.drops and not rounding.fuses)
        self.in_ds = 0.0 if rounding.fuses else self.unit.p.times(self.n_p)
        self.n_ds = 1 if rounding.fuses else 2
        self.scale = abs(cast(float, problem.scale))  # a number, once the problem is made

    def _count(self, T: int, S: int) -> None:
        """What T queries and S keys cost, of which `problem` may be a part."""
        self.T, self.S = T, S
        self.blocks = math.ceil(S / 16)  # no online softmax has smaller tiles
        self.chain = self.terms(S) + self.blocks

    def _hold(self, residuals: dense.Residuals) -> None:
        self.r, keep = residuals, residuals.keep
        self.z = np.ones((1, 1)) if keep is None else np.broadcast_to(keep, self.r.p.shape)

    def terms(self, n: int) -> int:
        """How many roundings one term of a sum of n may meet: in any order, or in blocks."""
        block = self.rounding.sum_block
        return n + 4 if block is None else min(n, block + 3 * math.ceil(n / block)) + 4

    def gamma(self, n: float) -> float:
        """n roundings in a row."""
        return n * self.unit.u / (1 - n * self.unit.u)

    # --- forward ----------------------------------------------------------------------------------

    @np.errstate(all="ignore")  # hidden scores may be anything
    def forward(self) -> dict[str, Array]:
        """Bounds of o, lse and weights."""
        u, unit, live = self.unit.u, self.unit, self.r.live
        A, A_sink = self._argument()
        self._move(A)
        t_lse = self._normalise(self._shares(A), A_sink)
        self._limit()
        t_o = self._of_out(self._out_sums())
        t_w = (self.pR + self.r.p * self.up) / self.down  # of p e^a / Σ p e^a
        t_w = t_w + self.p_hat * (unit.p.u + self.gamma(self.chain) + self.row_sum + 4 * u)
        t_w = t_w + unit.p.eta + unit.tiny
        t_w = np.where(live, np.minimum(t_w, 1), 0)
        return {"o": t_o, "lse": t_lse[..., 0], "weights": t_w}

    def _move(self, A: Array) -> None:
        """Of each weight before it is normalised, p e^a with |a| ≤ A: pR ≥ p (e^A − 1)."""
        live, p = self.r.live, self.r.p
        # A weight that is 0 to float64 may not be 0 after such an error, so grow its logarithm.
        self.grown = np.where(live, self.s - finite(self.lse)[..., None] + A, -np.inf)
        pR = p * np.expm1(A)
        if not (A < 1).all():
            pR = np.where(A < 1, pR, np.exp(np.minimum(self.grown, 100)))
        self.pR = np.where(live, pR, 0)

    def _shares(self, A: Array) -> Shares:
        p, up = self.r.p, self.pR.sum(-1, keepdims=True)
        down = (p * np.exp(-A)).sum(-1, keepdims=True)
        most = A.max(-1, keepdims=True, initial=0)
        top = np.max(self.grown, -1, keepdims=True, initial=0)
        whole, least = np.log(p.sum(-1, keepdims=True) + up), np.log(down)
        if not (most < 1).all():  # pR may have been cut off
            whole = top + np.log(np.exp(self.grown - top).sum(-1, keepdims=True))
        if (most > VAST).any():  # down may have vanished
            fallen = np.where(np.isneginf(self.grown), -np.inf, self.grown - 2 * A)
            low = fallen.max(-1, keepdims=True, initial=-1e300)
            least = low + np.log(np.exp(fallen - low).sum(-1, keepdims=True))
        return Shares(up, down, most, top, whole, least)

    def _normalise(self, shares: Shares, A_sink: Any) -> Array:
        """The bound of lse; up ≥ Σ pR and down ≤ Σ p e^−A, with the sink.

        Where no exponential of A can be held, pR becomes the largest weight there can be after the
        division, by log_down, and what divides is 1.
        """
        up, down, most, top, whole, least = shares
        lse = finite(self.lse)[..., None]
        self.R_sink: Array = np.zeros_like(self.m)
        grown: Any = -np.inf  # of the sink
        if self.p_sink is not None and self.sink is not None:
            self.R_sink = np.broadcast_to(np.expm1(np.minimum(A_sink, 100)), self.m.shape)
            grown = np.broadcast_to(self.sink - lse + A_sink, self.m.shape)
            down, up = down + self.p_sink * np.exp(-A_sink), up + self.p_sink * self.R_sink
            most, top = np.maximum(most, A_sink), np.maximum(top, grown)
            whole = np.logaddexp(whole, grown)
            least = np.logaddexp(least, np.where(np.isneginf(grown), -np.inf, grown - 2 * A_sink))
        # A row that sees nothing has no error; one whose A is vast has the range as its bound.
        seen = self.lse[..., None] != -np.inf
        self.vast, self.log_down = most > VAST, least
        soft = np.where(top < 90, np.log1p(up), whole)
        self.last = np.exp(np.minimum(grown - least, 0))  # the largest weight of the sink
        if self.vast.any():
            if self.p_sink is not None:
                self.p_sink = np.where(self.vast, np.maximum(self.p_sink, 1e-300), self.p_sink)
                self.R_sink = np.where(self.vast, self.last / self.p_sink, self.R_sink)
            down = np.where(self.vast, 1, down)
            soft = np.where(self.vast, np.maximum(whole, -least), soft)
        self.up, self.down = up, np.where(seen, np.maximum(down, np.exp(-600)), 1)
        return np.where(seen, self._of_lse(soft, lse), 0)

    def _limit(self) -> None:
        """p_hat, the largest weight there can be."""
        if self.vast.any():
            weight = np.exp(np.minimum(self.grown - self.log_down, 0))
            self.pR = np.where(self.vast, weight, self.pR)
            self.up = np.where(self.vast, weight.sum(-1, keepdims=True) + self.last, self.up)
        self.p_hat = np.minimum(1, (self.r.p + self.pR) / self.down)

    def _out_sums(self) -> OutSums:
        unit, live, z, av = self.unit, self.r.live, self.z, abs(self.r.v)
        # What vanishes in storage, or because subnormals are flushed.
        vanished = unit.p.eta + unit.operands.eta + unit.tiny
        lost = np.where(live, vanished * (z + self.drops), 0)
        return OutSums(
            moved=self.pR.sum(-1, keepdims=True),
            square=self.square(self.pR),
            mass=dense.sum_live(self.p_hat * z, av, live),
            lost=dense.sum_live(lost, av, live),
            far=self._range(),
            seen=np.asarray(live.any(-1, keepdims=True)),
        )

    def _of_out(self, sums: OutSums) -> Array:
        u, unit, p_sink, mass = self.unit.u, self.unit, self.p_sink, sums.mass
        chain, n_p = self.gamma(self.chain), self.n_p
        # At least Σ pR |z v − o|, by Cauchy and Schwarz.
        t_soft = np.sqrt(sums.moved) * np.sqrt(sums.square) / self.down
        if p_sink is not None:
            t_soft = t_soft + p_sink * self.R_sink * abs(self.o) / self.down
        t_soft = np.minimum(t_soft, sums.far)
        t_p = n_p * unit.p.u * (1 + unit.p.u) * mass
        t_sum = chain * mass + (chain + self.row_sum + 4 * u) * (abs(self.o) + t_soft)
        t_sum = t_sum + unit.operands.times(2) * mass
        t_sum = t_sum + sums.lost + np.where(sums.seen, (self.S + 2) * unit.tiny, 0)
        # Parts that are merged by e^(lse − whole), and exp(log_softmax), are not normalised again.
        t_sum = t_sum + self.merge * mass
        again = self.rounding.out_roundings - 1
        size = np.where(mass > 0, abs(self.o) + t_soft + t_p + t_sum, 0)
        t_sum = t_sum + unit.low.times(again) * size + again * unit.low.eta * (size > 0)
        self.seen, self.t_soft, self.t_rest, self.t_sum = sums.seen, t_soft, t_sum, t_p + t_sum
        return np.asarray(t_soft + t_p + t_sum)

    def _argument(self) -> tuple[Array, Any]:
        """A of each key, and of the sink."""
        s, error = self._scores()
        m = np.max(np.where(self.r.live, s, -np.inf), -1, keepdims=True, initial=-np.inf)
        sinks = self.problem.sinks
        sink = None if sinks is None else sinks.astype(float)[:, None, None]
        m = m if sink is None else np.maximum(m, sink)
        m = np.where(np.isneginf(m), 0, m)
        self.s, self.m, self.sink, self.p_sink = s, m, sink, self.r.p_sink
        return np.where(self.r.live, error + self._shift(s), 0), self._sink_argument()

    def _sink_argument(self) -> Any:
        if self.sink is None:
            return None
        return np.where(np.isneginf(self.sink), 0, self._shift(self.sink))

    def _shift(self, s: Array) -> Array:
        """The argument of exp: s − m, with or without a factor log₂e, then exp itself and the
        rescaling of an online softmax, which hits all earlier keys alike."""
        u, unit, m = self.unit.u, self.unit, self.m
        online = unit.exp * (1 + min(self.blocks, 16)) + u * self.blocks
        # (Multiplied by log₂e one by one, s and m lose their difference beyond 2¹⁴: a defect.)
        near_m = 2 * u * np.minimum(abs(m), 2.0**14)
        size = 2 * abs(s - m) + 4 * np.minimum(abs(s), 2.0**14)
        return np.asarray(u * size + near_m + online)

    def _of_lse(self, soft: Array, lse: Array) -> Array:
        """Its bound, and how far weights go that are rebuilt from it, or merged by it."""
        u, unit = self.unit.u, self.unit
        self.row_sum = unit.row_sum.times(self.chain)  # summed in that format
        fixed = self.gamma(self.chain) + self.row_sum + 4 * u
        # Rebuilding P from a saved lse beyond 2¹⁴ loses the weights: a defect, not rounding.
        near = (5 * u + unit.lse.u) * np.minimum(abs(lse), 2.0**14) + unit.lse.eta
        near = near + 2 * u * np.minimum(abs(self.m), 2.0**14)
        self.merge = np.expm1(4 * u + near)
        whole = np.where(self.vast, 0, soft)  # there the weights are normalised already
        self.rebuild = np.expm1(np.minimum(whole + fixed + near + unit.exp, 100))
        stored = (3 * u + unit.lse.u) * abs(lse) + 2 * u * abs(self.m) + unit.lse.eta
        return np.asarray(soft + fixed + stored)

    def _scores(self) -> tuple[Array, Array]:
        """The final scores and the error of each, stage by stage; and that of their slope."""
        unit, u, problem = self.unit, self.unit.u, self.problem
        q, k, live = self.r.q, self.r.k, self.r.live
        scale, D = self.scale, problem.D
        aq, ak = abs(q), abs(k)
        self.x = s = problem.scale * (q @ k.swapaxes(-1, -2))
        # D products and sums; the scale may be rounded, its root taken, and put on q and k.
        reach = scale * (aq @ ak.swapaxes(-1, -2))
        # q · scale may be stored before the product, and both rounded as they enter it.
        error = (self.gamma(D + 6) + unit.q.u + unit.operands.times(2)) * reach
        error = error + ((1 + u + unit.s.u) ** 2 - 1) * (abs(s) + error)
        error = error + unit.s.eta * (1 + scale)
        subnormal = aq.sum(-1, keepdims=True) + ak.sum(-1, keepdims=True).swapaxes(-1, -2) + D
        error = error + scale * (unit.tiny + unit.operands.eta) * subnormal
        slope: Any = 1.0
        slope_error: Any = 0.0
        if problem.softcap is not None:
            c = problem.softcap
            t = np.tanh(s / c)
            moved = (error + (u + unit.s.u) * abs(s)) / c
            # tanh rises by at most (1 − t²) δ + ½ max|tanh″| δ², and by at most δ.
            moved = np.minimum(moved, (1 - t**2) * moved + 2 / 27**0.5 * moved**2)
            moved = moved + (unit.s.times(2) + unit.exp + 4 * u) * abs(t)
            slope, slope_error = 1 - t**2, 2 * abs(t) * moved + moved**2 + 3 * u + 2 * unit.s.u
            s, error = c * t, c * moved + unit.s.eta * (2 * c + 1)
        if problem.score_mod is not None:
            f = dense.call_score_mod(problem, s)
            rate = dense.slope(problem, s)
            step = swing(problem, s, error)
            bent = [abs(dense.slope(problem, s + d) - rate) for d in (error, -error)]
            # What score_mod rounds inside is its own: eight operations on numbers of its size.
            inside = 8 * u + 4 * unit.s.u
            rate_error = np.maximum(*bent) + inside * (1 + abs(rate)) + unit.s.eta
            slope_error = slope_error * (abs(rate) + rate_error) + abs(slope) * rate_error
            slope = slope * rate
            error = step + inside * (abs(f) + abs(s * rate)) + unit.s.eta
            if self.given.softcap is not None and self.capped_late:
                c = self.given.softcap
                t = abs(f) / c
                error = error + (unit.exp + 4 * u) * abs(f)
                error = error + inside * self._before_cap(s) * (1 - t**2)
                cap_error = 2 * t * (unit.exp + error / c) + (error / c) ** 2 + 3 * u + 2 * unit.s.u
                self.cap_error = np.where(live, cap_error, 0)
                slope_error = slope_error + 2 * t * unit.exp * abs(rate)
            s = f
        if problem.bias_array is not None:
            x, s = s, s + problem.bias_array.astype(float)
            # Where the bias itself is a number of the format, no rounding of the sum moves it
            # further than x does; a padding of −1e9 swallows x, and no more.
            added = (u + unit.s.u) * (abs(s) + error)
            if self.rounding.accumulator != "truncated" and self.holds_bias:
                added = np.minimum(added, 4 * (abs(x) + error))
            if self.meaning.bias == "before_scale" and not self.capped_late:
                # The sum is rounded, then its product with a rounded scale; or each product is.
                size = abs(x) + abs(problem.bias_array.astype(float)) + error
                added = ((1 + u + unit.s.u) ** 3 - 1) * size + unit.s.eta * self.scale
            error = error + added + unit.s.eta
            fill = self.meaning.fill(self.given)
            if self.meaning.softcap == "after_mask" and fill is not None:
                twin = np.arange(problem.S) >= self.given.S
                error = error + np.where(twin, (unit.s.times(2) + unit.exp + 4 * u) * abs(fill), 0)
        self.slope, self.slope_error = slope, np.where(live, slope_error, 0)
        return s, error

    @property
    def holds_bias(self) -> bool:
        """Whether a bias in the dtype of the inputs is a number of what scores are stored in."""
        return self.unit.s.u <= self.unit.low.u

    @property
    def capped_late(self) -> bool:
        """Whether the canonical score_mod adds the bias and caps."""
        return self.given.softcap is not None and self.problem.softcap is None

    def _before_cap(self, x: Array) -> Array:
        """|score_mod(x)| + |bias|, which meet before a late cap."""
        given, S = self.given, self.given.S
        x = x[..., :S]
        size = abs(x) if given.score_mod is None else abs(dense.call_score_mod(given, x))
        if given.bias_array is not None:
            factor = self.scale if self.meaning.bias == "before_scale" else 1.0
            b = abs(given.bias_array.astype(float)) * factor
            size = size + np.where(np.isfinite(b), b, 0)
        size = np.broadcast_to(size, x.shape)
        return size if self.problem.S == S else np.concatenate([size, 0 * size], -1)

    def square(self, w: Array) -> Array:
        """Σ w (z v − o)² over the live keys, in three products."""
        live, z = self.r.live, self.z
        v, v2, centre = self._centred
        o = self.o - centre
        W = w.sum(-1, keepdims=True)
        square = dense.sum_live(w * z * z, v2, live)
        cross = o * dense.sum_live(w * z, v, live)
        # What the three terms lose to float64 when they cancel.
        noise = (self.problem.S + 4) * 2.0**-52 * (square + 2 * abs(cross) + o**2 * W)
        return np.asarray(np.maximum(square - 2 * cross + o**2 * W + noise, 0))

    @cached_property
    def _centred(self) -> tuple[Array, Array, Array | float]:
        """v less a centre, its square, and the centre."""
        v, centre = self.r.v, 0.0
        # Only z = 1 lets a common offset of v cancel; the centre is free, so take the mean.
        if not self.drops and v.shape[-2]:
            centre = self._seen_values.mean(-2, keepdims=True)
        v = v - centre
        return v, v**2, centre

    @cached_property
    def _seen_values(self) -> Array:
        """v, but 0 where it is not a number, and where nobody looks: garbage may stand there."""
        seen, v = np.asarray(self.r.live.any(-2))[..., None], finite(self.r.v)
        return v if seen.all() else np.where(seen, v, 0)

    def _range(self) -> Array:
        """The largest |z v − o| there is: a convex combination cannot err by more."""
        v, z, live, finite = self.r.v, self.z, self.r.live, self._seen_values
        top = finite.max(-2, keepdims=True, initial=-np.inf) if v.shape[-2] else np.zeros((1, 1))
        low = finite.min(-2, keepdims=True, initial=np.inf) if v.shape[-2] else np.zeros((1, 1))
        if self.drops or self.r.p_sink is not None:
            most = z.max(initial=1)
            top, low = np.maximum(most * top, 0), np.minimum(most * low, 0)
        far = np.maximum(abs(top - self.o), abs(self.o - low))
        return np.where(live.any(-1, keepdims=True), far, 0)

    # --- backward ---------------------------------------------------------------------------------

    @np.errstate(all="ignore")
    def backward(
        self, do: Array, dlse: Array | None, dweights: Array | None = None
    ) -> dict[str, Array]:
        """Bounds of the gradients."""
        problem, live = self.problem, self.r.live
        dl: Any = 0.0 if dlse is None else dlse[..., None]
        dw: Any = 0.0 if dweights is None else np.where(live, dweights, 0)
        self.dl, self.do = dl, do
        e_dp = self._dweights(do, dw)
        self.D = (self.r.p * self.dp).sum(-1, keepdims=True)
        self.e_D = self._delta_error(e_dp)
        e_ds = self._dscores(e_dp, np.where(live.any(-1, keepdims=True), dl, 0))
        self._through_slope(e_ds)
        ds, D, e_D = self.ds, self.D, self.e_D
        found = {
            "dq": sum_to(self._of_dq(self._dq_sums()), problem.q.shape),
            "dk": self._shared(*self._dk_sums(), problem.k),
            "dv": self._shared(*self._dv_sums(), problem.v),
        }
        if problem.bias_array is not None:
            n = ds.size / max(problem.bias_array.size, 1)
            each = e_ds + (self.r.p + self.pR) * e_D + self.rebuild * abs(ds)
            each = np.where(live, each + self.gamma(n + 4) * (abs(ds) + each), 0)
            found["dbias"] = sum_to(each, problem.bias_array.shape)
        if self.r.p_sink is not None:
            found["dsinks"] = self._dsinks(D - dl, abs(D) + abs(dl), e_D)
        return found

    def _dweights(self, do: Array, dw: Any) -> Array:
        """The error of dp."""
        u, unit, (v, live) = self.unit.u, self.unit, (self.r.v, self.r.live)
        z, n_p, E = self.z, self.n_p, self.problem.E
        dp = np.where(live, z * (do @ v.swapaxes(-1, -2)), 0)
        reach = np.where(live, z * (abs(do) @ abs(v).swapaxes(-1, -2)), 0)
        e_dp = (self.gamma(E + 2) + unit.operands.times(2)) * reach
        e_dp = e_dp + unit.dp.times(n_p) * (abs(dp) + e_dp)
        e_dp = e_dp + unit.dp.eta * (z + self.drops)
        e_dp = e_dp + (unit.tiny + unit.operands.eta) * (E + 2) * z
        self.dp_out, self.dp = dp, np.where(live, dp + dw, 0)
        self.more = self.dp - self.dp_out  # through the returned weights, where they are asked for
        e_dp = e_dp + u * (abs(dw) + abs(dp)) * (dw != 0)
        return np.where(live, e_dp, 0)

    def _dscores(self, e_dp: Array, dlse: Array) -> Array:
        """ds, and its error but for what is common to a row."""
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
        """dx = ds · slope and its error, p · slope and what it may grow by."""
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
        """What vanishes: products below the smallest number, and dS · scale where it is stored."""
        unit = self.unit
        return (unit.tiny + unit.operands.eta) * (1 + self.scale) + unit.ds.eta

    def _dq_sums(self) -> GradientSums:
        live, k, dx, e_dx = self.r.live, self.r.k, self.dx, self.e_dx
        ak, mm = abs(k), self.unit.operands.times(2)
        each = e_dx + (self.gamma(self.terms(self.S)) + mm) * (abs(dx) + e_dx)
        return GradientSums(
            each=dense.sum_live(each, ak, live),
            signed=dense.sum_live(dx, k, live),
            common=dense.sum_live(self.ps, k, live),
            loose=dense.sum_live(self.loose, ak, live),
            flush=dense.sum_live(1.0 * live, ak + 1, live),
            mass=dense.sum_live(abs(dx), ak, live),
        )

    def _of_dq(self, sums: GradientSums) -> Array:
        # Errors common to a row (of D, of lse) meet Σ p k and dq, before absolute values.
        t = sums.each + self.rebuild * abs(sums.signed)
        t = self.scale * (t + self.e_D * (abs(sums.common) + sums.loose))
        t = t + self._flush() * sums.flush
        return self._stored(t, self.scale * sums.mass, self.problem.q, shared=False)

    def _dk_sums(self) -> tuple[Array, Array]:
        """The error of dk by query head, and the sum of its absolute terms."""
        live, dx, e_dx, aq = self.r.live, self.dx, self.e_dx, abs(self.r.q)
        turn, mm = live.swapaxes(-1, -2), self.unit.operands.times(2)
        row = e_dx + (abs(self.ps) + self.loose) * self.e_D
        row = row + (self.rebuild + self.unit.q.u) * abs(dx)
        row = np.where(live, row + (self.gamma(self.terms(self.T)) + mm) * (abs(dx) + row), 0)
        t = self.scale * dense.sum_live(row.swapaxes(-1, -2), aq, turn)
        t = t + self._flush() * dense.sum_live(1.0 * turn, aq + 1, turn)
        return t, self.scale * dense.sum_live(abs(dx).swapaxes(-1, -2), aq, turn)

    def _dv_sums(self) -> tuple[Array, Array]:
        """The error of dv by query head, and the sum of its absolute terms."""
        unit, ado, turn = self.unit, abs(self.do), self.r.live.swapaxes(-1, -2)
        w, t_w = self._kept_weights()
        mass = dense.sum_live(w.swapaxes(-1, -2), ado, turn)
        t = dense.sum_live(t_w.swapaxes(-1, -2), ado, turn) + unit.operands.times(2) * mass
        return t + (unit.tiny + unit.operands.eta) * turn.sum(-1, keepdims=True), mass

    def _kept_weights(self) -> tuple[Array, Array]:
        """The weights that meet v, p z, and their error as the backward makes them."""
        unit, (p, live), z = self.unit, (self.r.p, self.r.live), self.z
        P = (p + self.pR) * (1 + self.rebuild)
        t = self.pR + self.rebuild * (p + self.pR) + unit.p.times(self.n_p) * P
        t = z * (t + self.gamma(self.terms(self.T)) * P)
        t = t + (unit.p.eta + unit.tiny) * (z + self.drops)
        return np.where(live, p * z, 0), np.where(live, t, 0)

    def _dsinks(self, pull: Array, size: Array, e_D: Array) -> Array:
        """Of −Σ p_sink (D − dlse)."""
        unit, p_sink = self.unit, self.p_sink
        assert p_sink is not None
        P = p_sink * (1 + self.R_sink) * (1 + self.rebuild)
        each = (P - p_sink) * abs(pull) + P * (e_D + 3 * unit.u * size)
        each = each + P * ((1 + unit.ds.u + unit.p.u) ** 2 - 1) * (abs(pull) + e_D)
        each = each + (unit.ds.eta + unit.tiny) * (1 + abs(pull))
        n = each.size / max(self.problem.H, 1)
        each = each + self.gamma(n + 4) * (p_sink * abs(pull) + each)
        return sum_to(each, (self.problem.H, 1, 1))[:, 0, 0]

    def _delta_error(self, e_dp: Array) -> Array:
        """Of D, computed as Σ do·out from the delivered out, or as Σ P·dP."""
        self.D_out = (self.r.p * self.dp_out).sum(-1, keepdims=True)
        extra = None
        if self.more.any():  # out knows nothing of these; they join it, or D is of the weights
            whole = (self.r.p * self.more).sum(-1, keepdims=True)
            extra = self._from_weights(self._weights_error(self.more, 0 * e_dp), whole)
        return self._of_delta(self._delta_sums(e_dp), extra)

    def _delta_sums(self, e_dp: Array) -> DeltaSums:
        # Contracted with do before taking absolute values: Σ do (z v − o) = dp − D.
        return DeltaSums(
            moved=(self.pR * abs(self.dp_out - self.D_out)).sum(-1, keepdims=True),
            stored=(self.p_hat * abs(self.dp_out)).sum(-1, keepdims=True),
            weights=self._weights_error(self.dp, e_dp),
        )

    def _of_delta(self, sums: DeltaSums, extra: Array | None = None) -> Array:
        unit, u, ado = self.unit, self.unit.u, abs(self.do)
        soft = sums.moved / self.down
        if self.p_sink is not None:
            soft = soft + self.p_sink * self.R_sink * abs(self.D_out) / self.down
        soft = np.minimum(soft, (ado * self.t_soft).sum(-1, keepdims=True))
        # So is what storing P costs: Σ do (Σ δ p z v) = Σ δ p dP.
        soft = soft + self.n_p * unit.p.u * (1 + unit.p.u) * sums.stored
        size = abs(self.o) + self.t_soft + self.t_sum
        delivered = np.where(self.seen, self.t_rest + unit.low.u * size + unit.low.eta, 0)
        product = self.gamma(self.problem.E + 2) * size
        from_out = soft + (ado * (delivered + product)).sum(-1, keepdims=True)
        from_weights = self._from_weights(sums.weights, self.D)
        chosen = {"out": from_out, "weights": from_weights}
        if extra is not None:
            from_out = from_out + extra
            chosen["out"] = np.maximum(from_out, from_weights)
        e_D = chosen.get(self.rounding.delta_from, np.maximum(from_out, from_weights))
        return np.asarray((1 + self.rebuild) * (e_D + u * (abs(self.D) + e_D)))

    def _weights_error(self, dp: Array, e_dp: Array) -> Array:
        """Of the terms of Σ P·dP."""
        unit, P = self.unit, self.r.p + self.pR
        each = self.pR * abs(dp) + P * (self.in_ds * abs(dp) + (1 + unit.p.u) * e_dp)
        each = each + self.gamma(self.chain) * P * (abs(dp) + e_dp)
        return np.asarray(each.sum(-1, keepdims=True))

    def _from_weights(self, error: Array, whole: Array) -> Array:
        """Of Σ P·dP, which is `whole`."""
        return np.asarray(error + self.rebuild * abs(whole))

    def _stored(self, t: Array, mass: Array, of: Array, *, shared: bool) -> Array:
        """Of gradients that are rounded before they are finished: in blocks, in parts."""
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
        """How many parts of a gradient are summed, and how many heads share its input."""
        tiles = self.tiles if shared else 1
        heads = self.problem.H / max(self.problem.K, 1) * tiles if shared else 1.0
        return mass.size / max(of.size, 1) * tiles, heads

    def _shared(self, t: Array, mass: Array, of: Array) -> Array:
        stored = self._stored(t, mass, of, shared=True)
        return dense.sum_shared(stored, self.problem.K, of.shape)
