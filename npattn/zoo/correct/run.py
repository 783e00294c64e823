"""One call of a `Kernel`, step by step, each step rounded as it says.

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
    D query/key size   E value size

Nothing here is shared with the oracle, or with the bounds that it is there to test. Numbers in
brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from npattn.arrays import Array, sum_to
from npattn.problem import Problem
from npattn.zoo.correct.machine import LOG2E, Machine

if TYPE_CHECKING:
    from npattn.zoo.correct.kernel import Kernel

__all__ = ["Run"]

LOST = 2**14  # a float32 lse beyond it has lost the weights


class Operands(NamedTuple):
    """s = factors[2] · q kᵀ, the first two factors being in q and k."""

    q: Array  # (..., H, T, D) with all leading axes; the bias may add channels
    k: Array  # (..., H, S, D) shared heads repeated
    v: Array  # (..., H, S, E) a row of zeros is added where the sink is a key
    factors: tuple[Any, Any, Any]


class Scores(NamedTuple):
    """Times log₂e where the exponential is binary."""

    s: Array  # (..., H, T, S) final, −inf where hidden; a column is added where the sink is a key
    slope: Array | float  # (..., H, T, S) of the final scores in scale · q kᵀ
    passes: Array  # (..., H, T, S) where a score takes part and passes its gradient on
    sink: Array  # (..., H, T, 1) −inf where there is none, or it is a key


class Softmax(NamedTuple):
    """Of some of the keys, or of all."""

    m: Array  # (..., H, T, 1) what the scores are relative to, −inf where there is nothing
    total: Array  # (..., H, T, 1) Σ exp(s − m)
    o: Array  # (..., H, T, E) Σ exp(s − m) v, or of all keys that by the total
    p: Array | None = None  # (..., H, T, S) normalised weights, where they are stored


class State(NamedTuple):
    """What backward gets from forward."""

    operands: Operands
    scores: Scores
    weights: Array  # (..., H, T, S)
    p: Array  # (..., H, T, S) the same, as backward has them
    p_sink: Array  # (..., H, T, 1)
    out: Array  # (..., H, T, E) as delivered
    lse: Array  # (..., H, T, 1) as saved
    empty: Array  # (..., H, T, 1) where a query sees nothing and has no sink


class Run(Machine):
    """A kernel, and the problem that it computes."""

    def __init__(self, kernel: Kernel, problem: Problem) -> None:
        super().__init__(kernel, problem.q.dtype)
        self.problem = problem

    @np.errstate(all="ignore")  # hidden scores may be anything
    def results(
        self, dout: Array | None, dlse: Array | None, dweights: Array | None
    ) -> dict[str, Array]:
        """o, lse, weights and, with dout, the gradients, by name."""
        state, problem, conventions = self.forward(), self.problem, self.kernel.conventions
        base = 1 if conventions.lse_base == "e" else self.wide(LOG2E)
        lse = np.where(state.empty, self.wide(conventions.lse_empty), state.lse * base)
        found = {"o": state.out, "lse": lse[..., 0], "weights": state.weights[..., : problem.S]}
        found = {n: x[0] if problem.headless else x for n, x in found.items()}
        found["o"] = found["o"].astype(self.dtype)
        return found if dout is None else found | self.backward(state, dout, dlse, dweights)

    # --- forward ----------------------------------------------------------------------------------

    def forward(self) -> State:
        operands = self.operands()
        scores = self.scores(operands)
        softmax = self.rows if self.kernel.tile is None else self.online
        part = softmax(scores, operands.v)
        empty = part.total == 0
        whole = np.where(empty, self.wide(1), part.total)
        m = np.where(part.m == -np.inf, self.wide(0), part.m)
        lse = self.store("lse", self.fit(m + self.log(part.total)) / self.log2e)
        weights = self.normalised(scores.s, m, whole) if part.p is None else part.p
        p = self.rebuilt(scores.s, lse, weights)
        p_sink = self.rebuilt(scores.sink, lse, self.normalised(scores.sink, m, whole))
        out = self.deliver(self.instead(part.o, operands.v, empty))
        return State(operands, scores, weights, p, p_sink, out, lse, empty)

    def operands(self) -> Operands:
        problem, scaled = self.problem, self.kernel.scaled
        q, k, v = (x.astype(self.wide) for x in (problem.q, problem.k, problem.v))
        q, k, v = (x if x.ndim > 2 else x[None] for x in (q, k, v))
        q = np.broadcast_to(q, (*problem.lead, *q.shape[-3:]))
        k, v = (np.repeat(x, problem.H // max(problem.K, 1), axis=-3) for x in (k, v))
        assert problem.scale is not None  # Problem has put the default there
        scale, root = self.wide(problem.scale), self.wide(math.sqrt(abs(problem.scale)))
        one = self.wide(1)
        factors = {
            "scores": (one, one, scale),
            "queries": (scale, one, one),
            "keys": (one, scale, one),
            "both": (math.copysign(1, scale) * root, root, one),
        }[scaled]
        q, k = self.store("queries", self.fit(q * factors[0])), self.fit(k * factors[1])
        if self.folds_bias():
            q, k = self.with_channels(q, k)
        if self.kernel.sink == "key":
            v = np.concatenate([v, np.zeros((*v.shape[:-2], 1, v.shape[-1]), v.dtype)], -2)
        return Operands(q, k, v, factors)

    def folds_bias(self) -> bool:
        """The bias is added to scale · q kᵀ, so that nothing may come between."""
        problem = self.problem
        plain = problem.softcap is None and problem.score_mod is None
        return self.kernel.channels and problem.bias_array is not None and plain

    def with_channels(self, q: Array, k: Array) -> tuple[Array, Array]:
        """(q, 1)(k, bias)ᵀ = q kᵀ + bias, with a channel for each query; −inf waits for later."""
        assert self.problem.bias_array is not None
        bias = self.problem.bias_array.astype(self.wide)
        bias = np.where(bias == -np.inf, self.wide(0), bias)
        bias = np.broadcast_to(bias, (*q.shape[:-1], k.shape[-2])).swapaxes(-1, -2)
        one = np.broadcast_to(np.eye(q.shape[-2], dtype=self.wide), (*q.shape[:-1], q.shape[-2]))
        k = np.broadcast_to(k, (*q.shape[:-2], *k.shape[-2:]))
        return np.concatenate([q, one], -1), np.concatenate([k, bias], -1)

    def scores(self, operands: Operands) -> Scores:
        problem, conventions = self.problem, self.kernel.conventions
        options = (problem.softcap, problem.score_mod, problem.bias_array, conventions.hidden_fill)
        folds = all(option is None for option in options)  # log₂e, into the scale
        factor = self.fit(operands.factors[2] * self.log2e) if folds else operands.factors[2]
        s = self.low(self.dot(operands.q, operands.k.swapaxes(-1, -2)))
        s, slope = self.low(self.fit(factor * s)), self.wide(1)  # [1]
        if problem.softcap is not None:
            c = self.wide(problem.softcap)
            t = self.low(self.inexact(np.tanh(self.low(s / c))))
            s, slope = self.low(c * t), self.low(1 - self.low(t * t))  # [2]
        if problem.score_mod is not None:
            s, rate = self.modified(s)
            slope = slope * rate  # [3]
        if problem.bias_array is not None:
            bias = problem.bias_array.astype(self.wide)
            added = self.low(self.fit(s + bias))  # [4]
            s = np.where(bias == -np.inf, bias, s) if self.folds_bias() else added
        visible = np.broadcast_to(True if problem.visible is None else problem.visible, s.shape)
        s = self.hide(s, visible)  # [5-7]
        passes = (s != -np.inf) & visible
        sink = self.wide(-np.inf) if problem.sinks is None else problem.sinks.astype(self.wide)
        sink = np.broadcast_to(np.reshape(sink, (-1, 1, 1)), (*s.shape[:-1], 1))  # [8]
        s, sink = s if folds else self.fit(s * self.log2e), self.fit(sink * self.log2e)
        if self.kernel.sink == "key":
            s, sink = np.concatenate([s, sink], -1), np.full_like(sink, -np.inf)
        return Scores(s, slope, passes, sink)

    def hide(self, s: Array, visible: Array) -> Array:
        fill = self.kernel.conventions.hidden_fill
        if self.kernel.hides == "bias":
            return np.asarray(s + np.where(visible, self.wide(0), self.wide(-np.inf)))
        return np.where(visible, s, self.wide(-np.inf if fill is None else fill))

    def modified(self, s: Array) -> tuple[Array, Array]:
        """score_mod of s and, by complex step, its slope."""
        problem = self.problem
        assert problem.score_mod is not None
        lead = np.arange(math.prod(problem.lead)).reshape(*problem.lead, 1, 1, 1)
        at = np.ogrid[: problem.H, : problem.T, : problem.S]
        step = np.result_type(self.wide, np.complex64).type(1e-18j)
        found = np.broadcast_to(problem.score_mod(s + step, lead, *at), s.shape)
        real = found.real.astype(self.wide)
        return self.low(real), self.low((found.imag / step.imag).astype(self.wide))

    def rows(self, scores: Scores, v: Array) -> Softmax:
        """Whole rows: the weights are normalised, then stored."""
        s, sink = scores.s, scores.sink
        m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
        pivot = np.where(m == -np.inf, self.wide(0), m)
        e, e_sink = self.exp(s - pivot), self.exp(sink - pivot)
        total = self.fit(self.row_sum(e) + e_sink)
        whole = np.where(total == 0, self.wide(1), total)
        p = self.fit(e / whole)
        if self.kernel.log_softmax:
            p = self.exp(self.fit(s - pivot) - self.log(whole))
        p = np.where(s == -np.inf, self.wide(0), p)
        p = p if self.rounding.fuses else self.store("weights", p)
        return Softmax(m, total, self.see(self.kept(p), v, s != -np.inf), p)

    def online(self, scores: Scores, v: Array) -> Softmax:
        """Tiles of the keys, in one softmax or in several that are merged by their lse."""
        S = scores.s.shape[-1]
        length = max(-(-S // self.kernel.splits), 1)
        nothing = np.full_like(scores.sink, -np.inf)
        joins = scores.sink if self.kernel.sink == "first" else nothing
        parts = []
        for start in range(0, max(S, 1), length):
            begin = joins if start == 0 else nothing
            parts.append(self.tiles(scores.s, v, start, min(start + length, S), begin))
        if self.kernel.sink == "last":
            one = np.where(scores.sink == -np.inf, self.wide(0), self.wide(1))
            parts.append(Softmax(scores.sink, one, np.zeros_like(parts[0].o)))
        return self.merged(parts)

    def tiles(self, s: Array, v: Array, start: int, stop: int, m: Array) -> Softmax:
        """The keys from start to stop, a tile a step; m is the sink, −inf where it is not here."""
        wide, keep = self.wide, np.broadcast_to(self.keep(), s.shape)
        total = np.where(m == -np.inf, wide(0), wide(1))
        acc = np.zeros((*m.shape[:-1], v.shape[-1]), wide)
        assert self.kernel.tile is not None
        steps = list(range(start, stop, self.kernel.tile))
        for first in reversed(steps) if self.kernel.order == "last" else steps:
            keys = slice(first, min(first + self.kernel.tile, stop))
            top = np.maximum(m, s[..., keys].max(-1, keepdims=True))
            pivot = np.where(top == -np.inf, wide(0), top)
            shrink, p = self.exp(m - pivot), self.exp(s[..., keys] - pivot)
            live = s[..., keys] != -np.inf
            p = np.where(live, p, wide(0))
            total = self.store("row_sum", self.fit(self.fit(total * shrink) + self.row_sum(p)))
            seen = self.see(self.store("weights", p) * keep[..., keys], v[..., keys, :], live)
            acc, m = self.fit(self.fit(acc * shrink) + seen), top
        return Softmax(m, total, acc)

    def merged(self, parts: list[Softmax]) -> Softmax:
        """One softmax, its o normalised, of those of parts of the keys."""
        outs, rate = [], self.rate()
        for part in parts:
            acc = part.o if self.rounding.out_roundings == 1 else self.deliver(part.o)
            empty = part.total == 0
            outs.append(self.fit(acc * rate / np.where(empty, self.wide(1), part.total)))
        if len(parts) == 1:
            return parts[0]._replace(o=outs[0])
        lses = [self.fit(part.m + self.log(part.total)) for part in parts]
        # Where an lse has lost the total, the two travel side by side.
        lost = np.max([np.where(p.m == -np.inf, 0, abs(p.m)) for p in parts], axis=0) >= LOST
        m = np.max([np.where(lost, p.m, x) for p, x in zip(parts, lses, strict=True)], axis=0)
        pivot = np.where(m == -np.inf, self.wide(0), m)
        each = [
            np.where(lost, self.fit(self.exp(part.m - pivot) * part.total), self.exp(lse - pivot))
            for part, lse in zip(parts, lses, strict=True)
        ]
        total = self.sum(np.concatenate(each, -1))
        whole = np.where(total == 0, self.wide(1), total)
        shares = [self.fit(out * (e / whole)) for out, e in zip(outs, each, strict=True)]
        return Softmax(m, total, self.sum(np.stack(shares, -1))[..., 0])

    def normalised(self, s: Array, m: Array, whole: Array) -> Array:
        p = self.fit(self.exp(s - m) / whole)
        return np.where(s == -np.inf, self.wide(0), p)

    def rebuilt(self, s: Array, lse: Array, weights: Array) -> Array:
        """exp(s − lse), or the weights themselves: in whole rows, or where lse has lost them."""
        if self.kernel.tile is None:
            return weights
        p = self.exp(s - self.fit(lse * self.log2e))
        return np.where(s == -np.inf, self.wide(0), np.where(abs(lse) < LOST, p, weights))

    def instead(self, o: Array, v: Array, empty: Array) -> Array:
        """o, with what the conventions say of a query that sees nothing."""
        if self.kernel.conventions.empty_row != "mean":
            return o
        S = self.wide(max(self.problem.S, 1))
        mean = self.sum(v[..., : self.problem.S, :].swapaxes(-1, -2)).swapaxes(-1, -2) / S
        return np.where(empty, mean, o)

    # --- backward ---------------------------------------------------------------------------------

    def backward(
        self, state: State, dout: Array, dlse: Array | None, dweights: Array | None
    ) -> dict[str, Array]:
        problem, kernel, wide = self.problem, self.kernel, self.wide
        (q, k, v, factors), scores, p = state.operands, state.scores, state.p
        live = scores.s != -np.inf
        do = dout.astype(wide).reshape(state.out.shape)
        dl = self.dlse(dlse, state)
        dv = self.gradient(self.kept(p).swapaxes(-1, -2), do, live.swapaxes(-1, -2))
        dp = self.store("dweights", self.dot(do, v.swapaxes(-1, -2)))
        dp = np.where(live, self.store("dweights", self.fit(dp * self.z())), wide(0))
        dw = self.dweights(dweights, p)
        delta = self.delta(state, do, dp, dw)
        ds = self.dscores(p, self.fit(dp + dw), delta, dl)
        ds_sink = ds[..., problem.S :]
        ds = np.where(scores.passes, ds[..., : problem.S], wide(0))
        dx = self.store("dscores", self.fit(ds * scores.slope))
        dx = np.where(scores.passes, dx, wide(0))
        after = factors[2] if kernel.tile is not None else wide(1)
        if kernel.tile is None:
            dx = self.fit(dx * factors[2])
            dx = dx if self.rounding.fuses else self.store("dscores", dx)
        live = live[..., : problem.S]
        dq = self.finished(self.gradient(dx, k, live), factors[0] * after)
        dk = self.gradient(dx.swapaxes(-1, -2), q, live.swapaxes(-1, -2))
        if self.folds_bias():
            ds = dk[..., problem.D :].swapaxes(-1, -2)
        dk = self.finished(dk[..., : problem.D], factors[1] * after)
        dv = self.add_mean(dv[..., : problem.S, :], do, state.empty)
        found = {
            "dq": self.deliver(sum_to(dq[..., : problem.D], problem.q.shape)),
            "dk": self.deliver(sum_to(self.unshared(dk), problem.k.shape)),
            "dv": self.deliver(sum_to(self.unshared(dv), problem.v.shape)),
        }
        found = {n: x.astype(self.dtype) for n, x in found.items()}
        if problem.bias_array is not None:
            found["dbias"] = sum_to(ds, problem.bias_array.shape).astype(problem.bias_array.dtype)
        if problem.sinks is not None:
            each = ds_sink if kernel.sink == "key" else self.fit(state.p_sink * (dl - delta))
            found["dsinks"] = sum_to(each, (problem.H, 1, 1))[:, 0, 0]
        return found

    def dlse(self, dlse: Array | None, state: State) -> Array:
        if dlse is None:
            return np.zeros_like(state.lse)
        base = 1 if self.kernel.conventions.lse_base == "e" else self.wide(LOG2E)
        return np.asarray(dlse.astype(self.wide).reshape(state.lse.shape) * base)

    def dweights(self, dweights: Array | None, p: Array) -> Array:
        dw = np.zeros_like(p)
        if dweights is not None:
            dw[..., : self.problem.S] = dweights.reshape(*p.shape[:-1], self.problem.S)
        return np.where(p == 0, self.wide(0), dw)

    def delta(self, state: State, do: Array, dp: Array, dw: Array) -> Array:
        """Σ p dp, or Σ do · out in its place; out knows nothing of the gradient of the weights."""
        if self.kernel.forgets_delta:
            return np.zeros_like(state.lse)
        either = self.rounding.delta_from == "either" and self.kernel.tile is not None
        if (self.rounding.delta_from == "out" or either) and not dw.any():
            return self.sum(self.fit(do * state.out))
        return self.sum(self.fit(state.p * self.fit(dp + dw)))

    def dscores(self, p: Array, dp: Array, delta: Array, dl: Array) -> Array:
        if self.kernel.apart:
            out = self.store("dscores", self.fit(p * self.fit(dp - delta)))
            return self.store("dscores", self.fit(out + self.store("dscores", self.fit(p * dl))))
        return self.store("dscores", self.fit(p * self.fit(dp - self.fit(delta - dl))))

    def gradient(self, a: Array, b: Array, live: Array) -> Array:
        """a @ b, stored low after every block of the sum where that is declared."""
        block = self.rounding.gradient_block
        if block is None:
            return self.see(a, b, live)
        total = np.zeros((*a.shape[:-1], b.shape[-1]), self.wide)
        for i in range(0, a.shape[-1], block):
            step = slice(i, i + block)
            part = self.see(a[..., step], b[..., step, :], live[..., step])
            total = self.deliver(self.fit(total + part))
        return total

    def finished(self, dx: Array, factor: Any) -> Array:
        """dx times what was in the operand, stored before that where that is declared."""
        dx = self.deliver(dx) if self.rounding.gradient_roundings > 1 else dx
        return self.fit(dx * self.wide(factor))

    def unshared(self, dx: Array) -> Array:
        """The sum over the query heads that share a head.  [13]"""
        problem = self.problem
        if problem.headless or problem.H == problem.K:
            return dx
        *lead, H, S, n = self.store("shared", dx).shape
        parts = self.store("shared", dx).reshape(*lead, problem.K, H // problem.K, S, n)
        return self.fit(parts.sum(-3))

    def add_mean(self, dv: Array, do: Array, empty: Array) -> Array:
        """dv, with what a query that sees nothing gives to all values under the conventions."""
        if self.kernel.conventions.empty_row != "mean":
            return dv
        rows = np.where(empty, do, self.wide(0)).swapaxes(-1, -2)
        return np.asarray(dv + self.sum(rows).swapaxes(-1, -2) / self.wide(max(self.problem.S, 1)))

    # --- the parts --------------------------------------------------------------------------------

    def keep(self) -> Array:
        """1 where a weight is kept, 0 where it is dropped, 1 for the sink."""
        dropout_mask = self.problem.dropout_mask
        if dropout_mask is None:
            return np.ones((1, 1), self.wide)
        keep = np.broadcast_to(dropout_mask, (*dropout_mask.shape[:-1], self.problem.S))
        if self.kernel.sink == "key":
            keep = np.concatenate([keep, np.ones((*keep.shape[:-1], 1), keep.dtype)], -1)
        return keep.astype(self.wide)

    def rate(self) -> Any:
        """What kept weights are multiplied by.  [9]"""
        return self.wide(1) / (self.wide(1) - self.wide(self.problem.dropout_rate))

    def z(self) -> Array:
        """The dropout multiplier."""
        return np.asarray(self.keep() * self.rate())

    def kept(self, p: Array) -> Array:
        """The weights after dropout, stored."""
        once = self.problem.dropout_mask is None
        apart = self.kernel.tile is None and not self.rounding.fuses
        p = self.store("weights", p) if once or apart else p
        return p if once else self.store("weights", self.fit(p * self.z()))
