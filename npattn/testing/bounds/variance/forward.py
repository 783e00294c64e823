"""The likely case: the standard deviation of each result, if roundings are as good as random.

Every rounding of a number x is taken for independent, with mean 0 and variance R2 u² x². A sum of n
terms meets n of them at its partial sums, which grow towards the total S as (k/n) S plus a bridge:
R2 u² (n/3 S² + n/2 Σ x²) whatever the order. Variances are pushed through the formulas of hard.py
with squares where that has absolute values. docs/tolerance.md §6 derives every line.

Independence is false where the same error repeats: equal keys, equal rows, weights that all round
alike. There the deviation is inf, and only the worst case counts (`Noise.generic`).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from npattn import dense
from npattn.arrays import Array, sum_to
from npattn.testing.bounds.rounding import Stored
from npattn.testing.bounds.worst_case import Hard, finite, swing

__all__ = ["DEVIATIONS", "DeltaSums", "GradientSums", "Noise", "OutSums", "Variety"]

R2 = 1 / (8 * math.log(2))
"""Mean square of a rounding error in units of u|x|, for a significand distributed as 1/x: 0.18."""
DEVIATIONS = 8.0
"""Beyond so many deviations nothing is taken for chance: 10⁻¹⁵ for a normal variable. The largest
that correct implementations came to on generic inputs is in docs/tolerance.md."""
DISTINCT = 0.9
"""The share of a row's scores that must be distinct in float32 for it to be generic."""
FAINT = float(np.finfo(np.float64).tiny) / np.finfo(np.float64).eps
FEW = int(DEVIATIONS**2 * R2)
"""So many roundings cannot add up to `DEVIATIONS`, even if all are at their worst: 11."""
SPREAD = 8.0
"""How many units of storage the scores of a row must spread over to round independently."""


class OutSums(NamedTuple):
    """What the variance of o and lse sums over the keys of a row."""

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
    flush: Array


class DeltaSums(NamedTuple):
    """What the variance of D sums over the keys of a row."""

    away: Array  # Σ var_p (dp − D)²
    squares: Array  # Σ (p dp)², of dp through out
    weights: Array  # Σ of the variances of P dP
    terms: Array  # Σ (p dp)²


class GradientSums(NamedTuple):
    """What the variance of dq sums over the keys of a row; x is k."""

    var: Array  # Σ var x²
    signed: Array  # Σ dx x
    squares: Array  # Σ dx² x²
    common: Array  # Σ p slope x
    bent: Array  # Σ p |error of the slope| |x|
    underflow: Array  # Σ x² + 1
    flush: Array  # Σ (|x| + 1) of what is flushed


class Variety(NamedTuple):
    """How various the live x of each row are."""

    distinct: Array  # how many differ in float32
    number: Array  # of how many
    spread: Array  # their deviation, weighted by p

    def generic(self, unit: Array) -> Array:
        """Rows in which nearly all x are distinct, and spread over many units."""
        wide = self.spread >= SPREAD * unit[..., 0]
        return np.asarray((self.distinct >= DISTINCT * self.number) & wide | (self.number <= FEW))


class Noise:
    """The deviation of each result of a problem whose worst case is known.

    With `everywhere` also where roundings are not as good as random.
    """

    def __init__(self, hard: Hard, everywhere: bool = False) -> None:
        self.everywhere = everywhere
        self.hard, self.r, self.unit = hard, hard.r, hard.unit
        self.live, self.p, self.z = hard.r.live, hard.r.p, hard.z
        self.u2 = R2 * hard.unit.u**2
        self.n_p = hard.n_p
        self.in_ds = 0.0 if hard.rounding.fuses else self.n_p * R2 * self.unit.p.u**2
        self.n = hard.terms(hard.S)
        self.v2 = finite(hard.r.v) ** 2

    def summed(self, n: float, total: Array, squares: Array) -> Array:
        """The variance that accumulating n terms adds."""
        return self.u2 * (n / 3 * total**2 + n / 2 * squares)

    # --- forward ----------------------------------------------------------------------------------

    @np.errstate(all="ignore")  # hidden scores may be anything
    def forward(self) -> dict[str, Array]:
        """Deviations of o, lse and weights; the forward of `hard` has run."""
        var_a, self.var_sink = self._argument()
        self.var_p = self._weights(var_a)
        found = self._of_rows(self._out_sums())
        # Of a row's sum, and of the merge of parts, which no division takes off again.
        of_p = self.var_p.sum(-1, keepdims=True) + self.u2 * (self.n / 3 + 4)
        p = self.p
        weights = np.where(self.live, self.var_p + p**2 * of_p + rounded(p, self.unit.p), 0)
        plain = self.generic()[..., None]
        return found | {"weights": self.sharp(weights, plain, self.unit.tiny)}

    def _out_sums(self) -> OutSums:
        hard, unit, p, k, v = self.hard, self.unit, self.p, self.hard.r.k, self.hard.r.v
        steep = np.where(self.live, p * hard.slope, 0)
        px = np.where(self.live, p * hard.x, 0)
        w2 = np.where(self.live, (p * self.z) ** 2, 0)
        lost = np.where(self.live, (unit.tiny + unit.operands.eta) * (self.z + 1), 0)
        return OutSums(
            reach=along(np.where(self.live, p * self.reach, 0)),
            turned=self.products(steep, finite(k)),
            var_p=along(self.var_p),
            squares=along(p**2),
            size=along(p * abs(hard.s)) if hard.problem.softcap is not None else np.zeros(()),
            spread=hard.square(self.var_p),
            values=self.products(w2, self.v2),
            stored=self.products(self.stored_weights(w2), self.v2),
            pull=along(px),
            pull_v=self.products(px * self.z, v),
            tilt=along(steep),
            tilt_v=self.products(steep * self.z, v),
            flush=self.products(lost, abs(v)),
        )

    def _of_rows(self, sums: OutSums) -> dict[str, Array]:
        """Of o and lse, from sums over all the keys of each row."""
        hard, unit, o = self.hard, self.unit, self.hard.o
        self.all_reach = sums.reach
        self.alike = self._alike(sums.turned)
        self.var_l, lse = self._lse(sums)
        self.acc_o = self.summed(2 * self.n, o, 0 * o) + 4 * self.u2 * o**2
        self.acc_o = self.acc_o + self.n / 2 * self.u2 * sums.values
        var = sums.spread + self.acc_o + sums.stored
        # A factor common to all scores, the rounded scale or log₂e, does not average out.
        tanh = 0.0 if hard.problem.softcap is None else unit.exp
        var = var + (3 * unit.u**2 + tanh**2) * (sums.pull_v - o * sums.pull) ** 2
        tilt = sums.tilt_v - o * sums.tilt
        var = var + self.alike * (tilt / np.where(sums.tilt == 0, 1, sums.tilt)) ** 2
        if hard.r.p_sink is not None:
            var = var + hard.r.p_sink**2 * self.var_sink * o**2
        var = var + self.var_merge * o**2  # parts merged by lse are not normalised again
        var = var + (hard.rounding.out_roundings - 1) * rounded(o, unit.low)
        plain, flush = self.generic(), sums.flush + unit.tiny * (self.n + 4)
        return {
            "o": self.sharp(var, plain[..., None], flush),
            "lse": self.sharp(lse[..., 0], plain, unit.tiny),
        }

    def _argument(self) -> tuple[Array, Any]:
        """Of the argument of exp, by element; and of the sink's."""
        hard, unit, u2 = self.hard, self.unit, self.u2
        problem, x, s, m = hard.problem, hard.x, hard.s, hard.m
        reach = hard.scale**2 * (self.r.q**2 @ (self.r.k**2).swapaxes(-1, -2))
        self.reach = reach
        var = self.summed(problem.D + 2, x, reach)
        var = var + R2 * (2 * unit.operands.u**2 + unit.q.u**2) * reach
        var = var + 2 * u2 * x**2
        var = var + 2 * rounded(x, unit.s)
        if problem.softcap is not None:
            c = problem.softcap
            t = np.tanh(x / c)
            near = np.maximum(abs(x) - DEVIATIONS * np.sqrt(var), 0) / c  # where it may be steepest
            var = var * (1 - np.tanh(near) ** 2) ** 2 + (unit.exp**2 / 3 + 4 * u2) * (c * t) ** 2
            var = var + 2 * rounded(c * t, unit.s)
            x = c * t
        if problem.score_mod is not None:
            rate, f = dense.slope(problem, x), dense.call_score_mod(problem, x)
            size = f**2 + (x * rate) ** 2
            far = swing(problem, x, DEVIATIONS * np.sqrt(var)) / DEVIATIONS
            var = np.maximum(var * rate**2, far**2) + (8 * u2 + 4 * R2 * unit.s.u**2) * size
            x = f
        if problem.bias_array is not None:
            added = u2 * s**2 + rounded(s, unit.s)
            var = var + (np.minimum(added, 16 * (x**2 + var)) if hard.holds_bias else added)
        near_s, near_m = np.minimum(abs(s), 2.0**14), np.minimum(abs(m), 2.0**14)
        self.online = online = self._online()
        var = var + u2 * (4 * near_s**2 + 2 * near_m**2) + online
        return np.where(self.live, var, 0), self._sink_argument()

    def _sink_argument(self) -> Any:
        if self.hard.sink is None:
            return 0.0
        near, near_m = (np.minimum(abs(x), 2.0**14) for x in (self.hard.sink, self.hard.m))
        return self.u2 * (4 * near**2 + 2 * near_m**2) + self.online

    def _online(self) -> Array:
        """Of exp, and of the rescaling of an online softmax: as often as the maximum rises from one
        tile to the next, in either direction; in any other order about log(tiles) times."""
        return self._rescales(tops(np.where(self.live, self.hard.s, -np.inf)))

    def _rescales(self, top: Array) -> Array:
        """The same, of the largest score of each tile."""
        hard = self.hard
        counts = [
            (np.maximum.accumulate(x, -1)[..., 1:] > np.maximum.accumulate(x, -1)[..., :-1]).sum(-1)
            for x in (top, top[..., ::-1])
        ]
        often = np.maximum(np.maximum(*counts)[..., None], math.log(max(hard.blocks, 1)))
        often = np.minimum(often, min(hard.blocks, 16))
        return np.asarray(self.unit.exp**2 / 3 * (1 + often) + self.u2 * often)

    def _alike(self, k: Array) -> Array:
        """Of what a rounded query moves all scores of its row by: by δq · k, and Σ p k remains."""
        hard, unit, q = self.hard, self.unit, finite(self.hard.r.q)
        size = R2 * (unit.q.u**2 + unit.operands.u**2) * hard.scale**2
        return np.asarray(size * (q**2 * k**2).sum(-1, keepdims=True))

    def _weights(self, var_a: Array) -> Array:
        """Of p e^a: p² var_a, but e^a is not linear, and of 8 deviations its tail counts."""
        hard, far = self.hard, DEVIATIONS * np.sqrt(var_a)
        lse = np.where(np.isfinite(hard.lse), hard.lse, 0)[..., None]
        reach = self.p * np.expm1(far)
        if not (far < 1).all():
            reach = np.where(far < 1, reach, np.exp(np.minimum(hard.s - lse + far, 100)))
        return np.where(self.live, (reach / DEVIATIONS) ** 2, 0)

    def _lse(self, sums: OutSums) -> tuple[Array, Array]:
        """Of lse as the backward uses it, and as it is delivered."""
        hard, unit = self.hard, self.unit
        var = sums.var_p + self.u2 * (self.n / 3 + self.n / 2 * sums.squares)
        if hard.r.p_sink is not None:
            var = var + hard.r.p_sink**2 * (self.var_sink + self.alike)
        lse = np.where(np.isfinite(hard.lse), hard.lse, 0)[..., None]
        near = np.minimum(abs(lse), 2.0**14)
        near_m = np.minimum(abs(hard.m), 2.0**14)
        self.var_merge = self.u2 * (4 + 5 * near**2 + 2 * near_m**2)
        saved = var + self.var_merge + rounded(near, unit.lse) + unit.exp**2 / 3
        saved = (np.expm1(np.minimum(DEVIATIONS * np.sqrt(saved), 100)) / DEVIATIONS) ** 2
        # A fast exp errs alike on like arguments, so that its error does not average out here.
        common: Any = unit.exp**2 / 3
        if hard.problem.softcap is not None:
            common = common * (1 + sums.size**2)
        whole = var + common + self.alike + self.u2 * (4 + 3 * lse**2 + 2 * hard.m**2)
        return saved, whole + rounded(lse, unit.lse)

    def stored_weights(self, w2: Array) -> Array:
        """Of weights (squared: w2) that are stored, and enter a product."""
        unit = self.unit
        var = self.n_p * (R2 * unit.p.u**2 * w2 + unit.p.eta**2 / 3 * self.z**2)
        return np.where(self.live, var + 2 * R2 * unit.operands.u**2 * w2, 0)

    # --- backward ---------------------------------------------------------------------------------

    @np.errstate(all="ignore")
    def backward(self) -> dict[str, Array]:
        """Deviations of the gradients; the backward of `hard` has run."""
        hard, problem = self.hard, self.hard.problem
        var_dp = self._dweights()
        self.var_D = var_D = self._of_delta(self._delta_sums(var_dp), self._of_more())
        var_ds = self._dscores(var_dp)
        self._through_slope(var_ds)

        rows = self.generic(hard.dp_out)
        every = np.asarray(rows.all() and self.generic_columns())
        var_q, lost_q = self._of_dq(self._dq_sums())
        found = {
            "dq": self.sharp(
                sum_to(var_q, problem.q.shape),
                sum_to(1.0 * ~rows[..., None], (*problem.q.shape[:-1], 1)) == 0,
                sum_to(lost_q, problem.q.shape),
            )
        }
        of = {"dk": problem.k, "dv": problem.v}
        pairs = (("dk", self._of_dk(self._dk_sums())), ("dv", self._of_dv(self._dv_sums())))
        for name, pair in pairs:
            var, lost = (dense.sum_shared(x, problem.K, of[name].shape) for x in pair)
            found[name] = self.sharp(var, every, lost)
        if problem.bias_array is not None:
            found["dbias"] = self._dbias(var_ds, var_D, problem.bias_array.shape, every)
        if self.r.p_sink is not None:
            found["dsinks"] = self._dsinks(var_D, every)
        return found

    def _through_slope(self, var_ds: Array) -> None:
        """var_dx, of dx = ds · slope; what the slope errs by; what is flushed on the way."""
        hard, unit, problem = self.hard, self.unit, self.hard.problem
        self.var_dx, self.bent = var_ds, np.zeros_like(self.p)
        if problem.softcap is not None or problem.score_mod is not None:
            # Where the slope is less than its error, as in a saturated cap, that passes errors on.
            self.bent = np.where(self.live, self.p * hard.slope_error, 0)
            steep = abs(np.asarray(hard.slope)) + hard.slope_error
            var_dx = var_ds * steep**2 + (hard.ds * hard.slope_error) ** 2
            self.var_dx = var_dx + 2 * (self.u2 * hard.dx**2 + rounded(hard.dx, unit.ds))
        # What is flushed is lost for certain: a weight, a dS, and their products.
        size = 2 + abs(hard.dp) + abs(hard.D) + abs(np.asarray(hard.dl))
        self.lost = np.where(self.live, (unit.tiny + unit.operands.eta) * size, 0)
        self.flush = (1 + hard.scale) * self.lost

    def _dq_sums(self) -> GradientSums:
        hard, k, ops = self.hard, finite(self.hard.r.k), 2 * R2 * self.unit.operands.u**2
        dx2, k2 = hard.dx**2, k**2
        return GradientSums(
            var=self.products(self.var_dx + ops * dx2, k2),
            signed=self.products(hard.dx, k),
            squares=self.products(dx2, k2),
            common=self.products(hard.ps, k),
            bent=self.products(self.bent, abs(k)),
            underflow=self.products(1.0 * self.live, k2 + 1),
            flush=self.products(self.flush, abs(k) + 1),
        )

    def _of_dq(self, sums: GradientSums) -> tuple[Array, Array]:
        """Of dq = scale · dX k, and what is flushed."""
        hard, scale2 = self.hard, self.hard.scale**2
        dq, squares = sums.signed, sums.squares
        var = sums.var + self.summed(self.n, dq, squares)
        var = var + self.var_D * (abs(sums.common) + sums.bent) ** 2 + self.var_l * dq**2
        var = scale2 * var + self.unit.ds.eta**2 / 3 * sums.underflow
        var = var + self._stored(dq * hard.scale, squares * scale2, hard.S, hard.problem.q)
        return var, sums.flush

    def _dk_sums(self) -> tuple[Array, ...]:
        """By query head, over its queries: of the variance of each, dk, its squares, underflow and
        what is flushed."""
        hard, unit, q = self.hard, self.unit, finite(self.hard.r.q)
        dx2, ops = hard.dx**2, 2 * R2 * unit.operands.u**2
        turn = self.live.swapaxes(-1, -2)
        each = self.var_dx + (abs(hard.ps) + self.bent) ** 2 * self.var_D
        each = each + dx2 * (self.var_l + R2 * unit.q.u**2 + ops)
        return (
            dense.sum_live(np.where(self.live, each, 0).swapaxes(-1, -2), q**2, turn),
            dense.sum_live(hard.dx.swapaxes(-1, -2), q, turn),
            dense.sum_live(dx2.swapaxes(-1, -2), q**2, turn),
            dense.sum_live(1.0 * turn, q**2 + 1, turn),
            dense.sum_live(self.flush.swapaxes(-1, -2), abs(q) + 1, turn),
        )

    def _of_dk(self, sums: tuple[Array, ...]) -> tuple[Array, Array]:
        """Of dk = scale · dXᵀ q, by query head, and what is flushed."""
        var, dk, squares, underflow, lost = sums
        hard, scale2 = self.hard, self.hard.scale**2
        var = scale2 * (var + self.summed(hard.terms(hard.T), dk, squares))
        var = var + self.unit.ds.eta**2 / 3 * underflow
        squares, of = squares * scale2, hard.problem.k
        return var + self._stored(dk * hard.scale, squares, hard.T, of, shared=True), lost

    def _dv_sums(self) -> tuple[Array, ...]:
        """By query head, over its queries: of the variance of each, dv, its squares, and what is
        flushed."""
        hard, unit, do2 = self.hard, self.unit, finite(self.hard.do) ** 2
        turn = self.live.swapaxes(-1, -2)
        w2 = np.where(self.live, (self.p * self.z) ** 2, 0)
        each = w2 * self.var_l + self.z**2 * self.var_p + self.stored_weights(w2)
        lost = np.where(self.live, (unit.tiny + unit.operands.eta) * (self.z + 1), 0)
        return (
            dense.sum_live(each.swapaxes(-1, -2), do2, turn),
            dense.sum_live(np.sqrt(w2).swapaxes(-1, -2), finite(hard.do), turn),
            dense.sum_live(w2.swapaxes(-1, -2), do2, turn),
            dense.sum_live(lost.swapaxes(-1, -2), abs(hard.do) + 1, turn),
        )

    def _of_dv(self, sums: tuple[Array, ...]) -> tuple[Array, Array]:
        """Of dv = (P z)ᵀ dO, by query head, and what is flushed."""
        var, dv, squares, lost = sums
        hard = self.hard
        var = var + self.summed(hard.terms(hard.T), dv, squares)
        return var + self._stored(dv, squares, hard.T, hard.problem.v, shared=True), lost

    def _dweights(self) -> Array:
        """Of dP."""
        hard, unit, z2 = self.hard, self.unit, self.z**2
        E = hard.problem.E
        do2 = np.where(np.isfinite(hard.do), hard.do, 0) ** 2
        reach = np.where(self.live, z2 * (do2 @ self.v2.swapaxes(-1, -2)), 0)
        var = self.summed(E + 2, hard.dp_out, reach) + 2 * R2 * unit.operands.u**2 * reach
        var = var + self.n_p * (rounded(hard.dp_out, unit.dp) + self.u2 * hard.dp_out**2)
        return np.where(self.live, var + self.u2 * hard.dp**2, 0)

    def _delta_sums(self, var_dp: Array) -> DeltaSums:
        hard, p2 = self.hard, self.p**2
        away = np.where(self.live, hard.dp_out - hard.D_out, 0)
        return DeltaSums(
            away=along(self.var_p * away**2),
            squares=along(p2 * hard.dp_out**2),
            weights=along(self._of_terms(hard.dp, var_dp)),
            terms=along(p2 * hard.dp**2),
        )

    def _of_terms(self, dp: Array, var_dp: Any) -> Array:
        """Of each term of Σ P·dP."""
        p2 = self.p**2
        return np.asarray((self.var_p + self.in_ds * p2) * dp**2 + p2 * var_dp)

    def _of_more(self) -> Array | None:
        """Of the part of D through the returned weights, where they are asked for."""
        more = self.hard.more
        if not more.any():
            return None
        terms = along(self._of_terms(more, 0.0)), along((self.p * more) ** 2)
        return self._from_weights(*terms, along(self.p * more))

    def _from_weights(self, var: Array, squares: Array, whole: Array) -> Array:
        return np.asarray(var + self.var_l * whole**2 + self.summed(self.n, whole, squares))

    def _of_delta(self, sums: DeltaSums, more: Array | None = None) -> Array:
        """Of D, from out or from the weights."""
        hard, unit, do2 = self.hard, self.unit, finite(self.hard.do) ** 2
        out = sums.away + self.n_p * R2 * unit.p.u**2 * sums.squares
        out = out + along(do2 * (self.acc_o + rounded(hard.o, unit.low)))
        out = out + self.summed(hard.problem.E + 2, hard.D_out, along(do2 * hard.o**2))
        of_p = self._from_weights(sums.weights, sums.terms, hard.D)
        chosen = {"out": out, "weights": of_p, "either": np.maximum(out, of_p)}
        if more is not None:  # out knows nothing of these; they join it, or D is of the weights
            chosen["out"] = chosen["either"] = np.maximum(out + more, of_p)
        return np.asarray(chosen[hard.rounding.delta_from] + self.u2 * hard.D**2)

    def _dscores(self, var_dp: Array) -> Array:
        """Of dS, but for what is common to a row."""
        hard, unit, p2 = self.hard, self.unit, self.p**2
        dp, D, dl, ds = hard.dp, hard.D, hard.dl, hard.ds
        g2 = np.where(self.live, dp - D + dl, 0) ** 2
        var = (self.var_p + self.in_ds * p2) * g2 + p2 * var_dp
        var = var + 3 * self.u2 * p2 * (dp**2 + D**2 + np.square(dl))
        if unit.dp.u:  # stored apart, through out and through lse, then added
            apart = p2 * (np.where(self.live, dp - D, 0) ** 2 + np.square(dl))
            var = var + R2 * unit.ds.u**2 * apart * (np.asarray(dl) != 0)
        var = var + hard.n_ds * rounded(ds, unit.ds) + self.u2 * ds**2
        var = var + unit.p.eta**2 / 3 * (1 + g2)
        return np.where(self.live, var, 0)

    def _stored(
        self, total: Array, squares: Array, length: int, of: Array, *, shared: bool = False
    ) -> Array:
        """Of gradients that are rounded before they are finished."""
        hard, unit, rounding = self.hard, self.unit, self.hard.rounding
        var = 4 * self.u2 * total**2 + (rounding.gradient_roundings - 1) * rounded(total, unit.low)
        if rounding.gradient_block is not None:
            blocks = max(math.ceil(length / rounding.gradient_block) - 1, 0)
            low2 = R2 * unit.low.u**2
            var = var + low2 * blocks * (total**2 + squares / 2) + blocks * unit.low.eta**2 / 3
        copies, heads = hard.copies(total, of, shared)
        if heads > 1:
            var = var + rounded(total, unit.shared) + heads / 2 * self.u2 * total**2
        if copies > heads:
            var = var + rounded(total, unit.low) + copies / 2 * self.u2 * total**2
        return np.asarray(var)

    def _dbias(self, var_ds: Array, var_D: Array, shape: tuple[int, ...], every: Array) -> Array:
        hard, p, S = self.hard, self.p, self.hard.problem.S
        row = p**2 * var_D + hard.ds**2 * self.var_l
        if shape[-1] == 1 and S > 1:  # what is common to a row adds up along it
            ps, dss = p.sum(-1, keepdims=True), hard.ds.sum(-1, keepdims=True)
            row = np.broadcast_to((ps**2 * var_D + dss**2 * self.var_l) / S, hard.ds.shape)
        n = hard.ds.size / max(math.prod(shape), 1)
        total, squares = sum_to(hard.ds, shape), sum_to(hard.ds**2, shape)
        var = sum_to(var_ds + row, shape) + self.summed(n, total, squares)
        lost = sum_to(self.lost, shape)
        return self.sharp(var, every, lost)

    def _dsinks(self, var_D: Array, every: Array) -> Array:
        hard, unit, p_sink = self.hard, self.unit, self.r.p_sink
        assert p_sink is not None
        assert hard.sink is not None
        pull = hard.D - hard.dl
        near = np.minimum(abs(hard.sink), 2.0**14)
        var_sink = self.u2 * (4 * near**2 + 2 * np.minimum(abs(hard.m), 2.0**14) ** 2)
        var_sink = var_sink + self.online
        factor = var_sink + self.var_l + 2 * R2 * (unit.ds.u**2 + unit.p.u**2) + 2 * self.u2
        var = p_sink**2 * (
            factor * pull**2 + var_D + 3 * self.u2 * (hard.D**2 + np.square(hard.dl))
        )
        terms = p_sink * pull
        shape = (hard.problem.H, 1, 1)
        n = terms.size / max(hard.problem.H, 1)
        total, squares = sum_to(terms, shape), sum_to(terms**2, shape)
        var = sum_to(var + unit.ds.eta**2 / 3, shape) + self.summed(n, total, squares)
        lost = unit.tiny * sum_to(1 + abs(pull), shape)
        return self.sharp(var, every, lost)[:, 0, 0]

    # --- where it holds ---------------------------------------------------------------------------

    def generic(self, dp: Array | None = None) -> Array:
        """Rows, (..., H, T), whose roundings are as good as independent.

        Their scores, and dP where that counts, are distinct, and spread over more than what rounds
        to the same number.
        """
        hard = self.hard
        if self.everywhere:
            return np.ones(self.live.shape[:-1], bool)
        if dp is None:
            return self.is_generic(self._scores)
        dp = np.where(self.live, hard.do @ finite(self.r.v).swapaxes(-1, -2), 0)
        size = np.sqrt(along(self.p * dp**2))
        return self.is_generic(self._scores, self._variety(dp), size)

    @cached_property
    def _scores(self) -> Variety:
        return self._variety(self.hard.s)

    def is_generic(self, scores: Variety, dp: Variety | None = None, size: Any = 0.0) -> Array:
        """The same, from how various scores and dP are; dp² is size² on average."""
        unit = self.unit
        # Scores that differ by less than the error of their products err alike.
        least = max(unit.operands.u, unit.u) * np.sqrt(self.all_reach)
        plain = scores.generic(np.maximum(max(unit.p.u, unit.u), least))
        if dp is not None:
            plain = plain & dp.generic(max(unit.dp.u, unit.u) * size)
        return plain & self.unbiased()

    def unbiased(self) -> Array:
        """Rows, (..., H, T), of which errors are small, and do not lean to one side."""
        hard = self.hard
        biased = hard.rounding.accumulator == "truncated" or self.unit.row_sum.u > 0
        return np.asarray(~hard.vast[..., 0] & (not biased))

    def _variety(self, x: Array) -> Variety:
        count = self.live.sum(-1)
        steps = rises(np.where(self.live, x, np.nan).astype(np.float32))
        x = np.where(self.live, x, 0)
        total = along(self.p)
        mean = along(self.p * x) / np.where(total > 0, total, 1)
        return Variety(steps + (count > 0), count, np.sqrt(along(self.p * (x - mean) ** 2)[..., 0]))

    def generic_columns(self) -> bool:
        """Whether the queries of each key are distinct too."""
        if self.everywhere:
            return True
        values = np.where(self.live, self.hard.s, np.nan).swapaxes(-1, -2).astype(np.float32)
        count = self.live.sum(-2)
        return bool(((rises(values) + 1 >= DISTINCT * count) | (count <= FEW)).all())

    def sharp(self, var: Array, plain: Array, lost: Any) -> Array:
        """What is allowed of a result with this variance: `DEVIATIONS`, and what is flushed."""
        plain = plain & (var > FAINT)  # else squares vanished, and what is left is not all
        return np.where(plain, DEVIATIONS * np.sqrt(var) + lost, np.inf)

    def products(self, w: Array, x: Array) -> Array:
        return dense.sum_live(w, x, self.live)


def along(x: Array) -> Array:
    """The sum over the keys of each row."""
    return np.asarray(x.sum(-1, keepdims=True))


def tops(s: Array) -> Array:
    """The largest score of each tile of 16 keys."""
    pad = [(0, 0)] * (s.ndim - 1) + [(0, -s.shape[-1] % 16)]
    s = np.pad(s, pad, constant_values=-np.inf)
    return np.asarray(s.reshape(*s.shape[:-1], s.shape[-1] // 16, 16).max(-1))


def rises(values: Array) -> Array:
    """In how many steps the numbers of each row rise, once they are sorted."""
    steps = np.diff(np.sort(values, -1), axis=-1) > 0  # NaN sorts last, and is above nothing
    return np.asarray(steps.sum(-1))


def rounded(x: Array, unit: Stored) -> Array:
    """The variance of storing x: half the distance to its neighbours, squared, by 3."""
    if unit.u == 0:
        return np.zeros_like(x)
    # Of a float64, its exponent alone is the power of 2 below it.
    power = (np.asarray(x, float).view(np.uint64) & np.uint64(0x7FF0_0000_0000_0000)).view(float)
    return np.asarray(((unit.u * power) ** 2 + unit.eta**2) / 3)
