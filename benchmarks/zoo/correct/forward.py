"""Forward pass of a kernel, step by step, each step rounded as its choices say.

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
    D query/key size   E value size

Shares nothing with the oracle, nor with the bounds that it is there to test. Numbers in brackets
are the rules of docs/semantics.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks.zoo.correct.choices import Choices
from benchmarks.zoo.correct.machine import Machine
from npattn.problem import Problem
from npattn.problem.arrays import Array

LOST = 2**14  # a float32 lse beyond it has lost the weights


class Operands(NamedTuple):
    """Operands of the products: s = factors[2] · q kᵀ; q and k hold the first two factors."""

    q: Array  # (..., H, T, D) with all leading axes; the bias may add channels
    k: Array  # (..., H, S, D) shared heads repeated
    v: Array  # (..., H, S, E) a row of zeros is added where the sink is a key
    factors: tuple[Any, Any, Any]


class Scores(NamedTuple):
    """Final scores and their slope; times log₂e where it is folded into the scale."""

    s: Array  # (..., H, T, S) final, −inf where hidden; a column is added where the sink is a key
    slope: Array | float  # (..., H, T, S) of the final scores in scale · q kᵀ
    passes: Array  # (..., H, T, S) where a score takes part and passes its gradient on
    sink: Array  # (..., H, T, 1) −inf where there is none, or it is a key


class PartialSoftmax(NamedTuple):
    """Softmax over some of the keys, or over all."""

    m: Array  # (..., H, T, 1) what the scores are relative to, −inf where there is nothing
    total: Array  # (..., H, T, 1) Σ exp(s − m)
    o: Array  # (..., H, T, E) Σ exp(s − m) v, or of all keys that by the total
    p: Array | None = None  # (..., H, T, S) normalised weights, where they are stored


class SavedState(NamedTuple):
    """State that forward saves for backward."""

    operands: Operands
    scores: Scores
    weights: Array  # (..., H, T, S)
    p: Array  # (..., H, T, S) the same, as backward has them
    p_sink: Array  # (..., H, T, 1)
    out: Array  # (..., H, T, E) as delivered
    lse: Array  # (..., H, T, 1) as saved
    empty: Array  # (..., H, T, 1) where a query sees nothing and has no sink


class ForwardRun(Machine):
    """Forward pass of a kernel with `choices` over one problem."""

    def __init__(self, choices: Choices, problem: Problem) -> None:
        super().__init__(choices, problem.q.dtype)
        self.problem = problem
        fill = choices.conventions.hidden_fill
        options = (problem.softcap, problem.score_mod, problem.bias_array, fill)
        if choices.binary and all(option is None for option in options):
            self.unit = self.log2e  # folded into the scale

    def forward(self) -> SavedState:
        operands = self.operands()
        scores = self.scores(operands)
        softmax = self.softmax_of_rows if self.choices.tile is None else self.online_softmax
        part = softmax(scores, operands.v)
        empty = part.total == 0
        whole = np.where(empty, self.wide(1), part.total)
        m = np.where(part.m == -np.inf, self.wide(0), part.m)
        lse = self.store("lse", self.fit(m + self.log(part.total)) / self.unit)
        weights = self.normalize(scores.s, m, whole) if part.p is None else part.p
        p = self.rebuild(scores.s, lse, weights)
        p_sink = self.rebuild(scores.sink, lse, self.normalize(scores.sink, m, whole))
        out = self.deliver(self.fill_empty_rows(part.o, operands.v, empty))
        return SavedState(operands, scores, weights, p, p_sink, out, lse, empty)

    def operands(self) -> Operands:
        problem, scaled = self.problem, self.choices.scaled
        q, k, v = (x.astype(self.wide) for x in (problem.q, problem.k, problem.v))
        q, k, v = (x if x.ndim > 2 else x[None] for x in (q, k, v))
        q = np.broadcast_to(q, (*problem.lead, *q.shape[-3:]))
        k, v = (np.repeat(x, problem.H // max(problem.K, 1), axis=-3) for x in (k, v))
        assert problem.scale is not None  # Problem fills in the default
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
        if self.choices.sink == "key":
            v = np.concatenate([v, np.zeros((*v.shape[:-2], 1, v.shape[-1]), v.dtype)], -2)
        return Operands(q, k, v, factors)

    def folds_bias(self) -> bool:
        """The bias is added to scale · q kᵀ, so that nothing may come between."""
        problem = self.problem
        plain = problem.softcap is None and problem.score_mod is None
        return self.choices.channels and problem.bias_array is not None and plain

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
        problem = self.problem
        factor = self.fit(operands.factors[2] * self.unit)
        s = self.low(self.dot(operands.q, operands.k.swapaxes(-1, -2)))
        s, slope = self.low(self.fit(factor * s)), self.wide(1)  # [1]
        if problem.softcap is not None:
            c = self.wide(problem.softcap)
            t = self.low(self.inexact(np.tanh(self.low(s / c))))
            s, slope = self.low(c * t), self.low(1 - self.low(t * t))  # [2]
        if problem.score_mod is not None:
            s, rate = self.apply_score_mod(s)
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
        sink = self.fit(sink * self.unit)
        if self.choices.sink == "key":
            s, sink = np.concatenate([s, sink], -1), np.full_like(sink, -np.inf)
        return Scores(s, slope, passes, sink)

    def hide(self, s: Array, visible: Array) -> Array:
        fill = self.choices.conventions.hidden_fill
        if self.choices.hides == "bias":
            return np.asarray(s + np.where(visible, self.wide(0), self.wide(-np.inf)))
        return np.where(visible, s, self.wide(-np.inf if fill is None else fill))

    def apply_score_mod(self, s: Array) -> tuple[Array, Array]:
        """Return score_mod of s and, by complex step, its slope."""
        problem = self.problem
        assert problem.score_mod is not None
        lead = np.arange(math.prod(problem.lead)).reshape(*problem.lead, 1, 1, 1)
        at = np.ogrid[: problem.H, : problem.T, : problem.S]
        step = np.result_type(self.wide, np.complex64).type(1e-18j)
        modified = np.broadcast_to(problem.score_mod(s + step, lead, *at), s.shape)
        real = modified.real.astype(self.wide)
        return self.low(real), self.low((modified.imag / step.imag).astype(self.wide))

    def softmax_of_rows(self, scores: Scores, v: Array) -> PartialSoftmax:
        """Softmax of whole rows: the weights are normalised, then stored."""
        s, sink = scores.s, scores.sink
        m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), sink)
        pivot = np.where(m == -np.inf, self.wide(0), m)
        e, e_sink = self.exp(s - pivot), self.exp(sink - pivot)
        total = self.fit(self.row_sum(e) + e_sink)
        whole = np.where(total == 0, self.wide(1), total)
        p = self.fit(e / whole)
        if self.choices.log_softmax:
            p = self.exp(self.fit(s - pivot) - self.log(whole))
        p = np.where(s == -np.inf, self.wide(0), p)
        p = p if self.rounding.fuses else self.store("weights", p)
        return PartialSoftmax(m, total, self.masked_matmul(self.drop(p), v, s != -np.inf), p)

    def online_softmax(self, scores: Scores, v: Array) -> PartialSoftmax:
        """Softmax over tiles of the keys, in one part or in several merged by their lse."""
        S = scores.s.shape[-1]
        length = max(-(-S // self.choices.splits), 1)
        nothing = np.full_like(scores.sink, -np.inf)
        joins = scores.sink if self.choices.sink == "first" else nothing
        parts = []
        for start in range(0, max(S, 1), length):
            begin = joins if start == 0 else nothing
            parts.append(self.tiles(scores.s, v, start, min(start + length, S), begin))
        if self.choices.sink == "last":
            one = np.where(scores.sink == -np.inf, self.wide(0), self.wide(1))
            parts.append(PartialSoftmax(scores.sink, one, np.zeros_like(parts[0].o)))
        return self.merge(parts)

    def tiles(self, s: Array, v: Array, start: int, stop: int, m: Array) -> PartialSoftmax:
        """Softmax of the keys from start to stop, tile by tile; m is its sink, or −inf."""
        wide, keep = self.wide, np.broadcast_to(self.keep(), s.shape)
        total = np.where(m == -np.inf, wide(0), wide(1))
        acc = np.zeros((*m.shape[:-1], v.shape[-1]), wide)
        assert self.choices.tile is not None
        steps = list(range(start, stop, self.choices.tile))
        for first in reversed(steps) if self.choices.order == "last" else steps:
            keys = slice(first, min(first + self.choices.tile, stop))
            top = np.maximum(m, s[..., keys].max(-1, keepdims=True))
            pivot = np.where(top == -np.inf, wide(0), top)
            shrink, p = self.exp(m - pivot), self.exp(s[..., keys] - pivot)
            live = s[..., keys] != -np.inf
            p = np.where(live, p, wide(0))
            total = self.store("row_sum", self.fit(self.fit(total * shrink) + self.row_sum(p)))
            seen = self.masked_matmul(
                self.store("weights", p) * keep[..., keys], v[..., keys, :], live
            )
            acc, m = self.fit(self.fit(acc * shrink) + seen), top
        return PartialSoftmax(m, total, acc)

    def merge(self, parts: list[PartialSoftmax]) -> PartialSoftmax:
        """Merge the softmaxes of parts of the keys into one, its o normalised."""
        outs, rate = [], self.rate()
        for part in parts:
            acc = part.o if self.rounding.out_roundings == 1 else self.deliver(part.o)
            empty = part.total == 0
            outs.append(self.fit(acc * rate / np.where(empty, self.wide(1), part.total)))
        if len(parts) == 1:
            return parts[0]._replace(o=outs[0])
        lses = [self.fit(part.m + self.log(part.total)) for part in parts]
        # An lse that has lost the total is replaced by m and the total.
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
        return PartialSoftmax(m, total, self.sum(np.stack(shares, -1))[..., 0])

    def normalize(self, s: Array, m: Array, whole: Array) -> Array:
        p = self.fit(self.exp(s - m) / whole)
        return np.where(s == -np.inf, self.wide(0), p)

    def rebuild(self, s: Array, lse: Array, weights: Array) -> Array:
        """Return exp(s − lse), or the weights themselves for whole rows or if lse has lost them."""
        if self.choices.tile is None:
            return weights
        p = self.exp(s - self.fit(lse * self.unit))
        return np.where(s == -np.inf, self.wide(0), np.where(abs(lse) < LOST, p, weights))

    def fill_empty_rows(self, o: Array, v: Array, empty: Array) -> Array:
        """Set o of fully masked rows as the conventions say."""
        if self.choices.conventions.empty_row != "mean":
            return o
        S = self.wide(max(self.problem.S, 1))
        mean = self.sum(v[..., : self.problem.S, :].swapaxes(-1, -2)).swapaxes(-1, -2) / S
        return np.where(empty, mean, o)

    # --- dropout

    def keep(self) -> Array:
        """Return 1 for kept weights and the sink, 0 for dropped weights."""
        dropout_mask = self.problem.dropout_mask
        if dropout_mask is None:
            return np.ones((1, 1), self.wide)
        keep = np.broadcast_to(dropout_mask, (*dropout_mask.shape[:-1], self.problem.S))
        if self.choices.sink == "key":
            keep = np.concatenate([keep, np.ones((*keep.shape[:-1], 1), keep.dtype)], -1)
        return keep.astype(self.wide)

    def rate(self) -> Any:
        """Return the factor of kept weights [9]."""
        return self.wide(1) / (self.wide(1) - self.wide(self.problem.dropout_rate))

    def dropout_factor(self) -> Array:
        """Return the factor of each weight."""
        return np.asarray(self.keep() * self.rate())

    def drop(self, p: Array) -> Array:
        """Apply dropout to the weights and store them."""
        once = self.problem.dropout_mask is None
        apart = self.choices.tile is None and not self.rounding.fuses
        p = self.store("weights", p) if once or apart else p
        return p if once else self.store("weights", self.fit(p * self.dropout_factor()))
