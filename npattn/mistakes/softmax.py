"""Mutants: softmax, lse, sinks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import mistake


@mistake(
    "softmax-over-queries", "softmax", "labmlai/annotated_deep_learning_paper_implementations#146"
)
class _SoftmaxOverQueries(Attention):
    """The weights of a key over all queries sum to 1, not those of a query over all keys."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        _, p_sink, lse = super().softmax(s, c, live)
        e = np.where(live, np.exp(s - s.max(-2, keepdims=True, initial=-np.inf)), 0)
        total = e.sum(-2, keepdims=True)
        return e / np.where(total == 0, 1, total), p_sink, lse


@mistake("no-max-subtracted", "softmax", "pytorch/executorch#18407")
class _NoMaxSubtracted(Attention):
    """exp is taken of the scores as they are, in the dtype computed in, and overflows."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        wide = np.float64 if c.dtype == np.float64 else np.float32
        e, e_sink = (np.exp(x.astype(wide)).astype(np.float64) for x in (s, c.sinks))
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return e / safe, e_sink / safe, np.log(total)


@mistake("lse-base-2", "lse", "deepseek-ai/FlashMLA#106")
class _LseBase2(Attention):
    """lse is a logarithm to base 2."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return super().lse(pivot, total, e_sink) / math.log(2)


@mistake("lse-without-maximum", "lse")
class _LseWithoutMaximum(Attention):
    """lse is that of the scores after the maximum was subtracted."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return np.log(total)


@mistake("lse-without-sink", "sinks")
class _LseWithoutSink(Attention):
    """The sink takes weight, but is not in lse."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return super().lse(pivot, total - e_sink, e_sink)


@mistake("sink-scaled", "sinks")
class _SinkScaled(Attention):
    """The sink is multiplied by the scale, as the scores are."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        sinks = np.where(c.sinks == -np.inf, c.sinks, c.scale * c.sinks)
        return super().softmax(s, c._replace(sinks=sinks), live)


@mistake("dsinks-without-dlse", "sinks", "Dao-AILab/flash-attention#2706")
class _DsinksWithoutDlse(Attention):
    """The gradient of lse does not reach the sinks."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return np.asarray(-p_sink * (delta + dlse))


@mistake("dsinks-zero", "sinks", "Dao-AILab/flash-attention#1973")
class _DsinksZero(Attention):
    """The sinks get no gradient."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return np.zeros_like(delta)


@mistake("weights-base-2", "softmax")
class _WeightsBase2(Attention):
    """The weights are powers of 2 of scores that were not multiplied by log₂ e."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        factor = math.log(2)
        return super().softmax(factor * s, c._replace(sinks=factor * c.sinks), live)


@mistake("maximum-of-all-queries", "softmax")
class _MaximumOfAllQueries(Attention):
    """One maximum is subtracted for all queries of a head; far below it all weights are 0."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        m = np.maximum(s.max((-1, -2), keepdims=True, initial=-np.inf), c.sinks)
        pivot = np.where(m == -np.inf, 0, m)
        e, e_sink = np.exp(s - pivot), np.exp(c.sinks - pivot)
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return np.where(live, e / safe, 0), e_sink / safe, self.lse(pivot, total, e_sink)


@mistake("scores-clipped", "softmax")
class _ScoresClipped(Attention):
    """Scores are clipped to ±80 so that exp cannot overflow, and no maximum is needed."""

    def cap(self, x: Array, c: Inputs) -> Array:
        return np.clip(super().cap(x, c), -80, 80)


@mistake("zero-key-in-every-row", "softmax")
class _ZeroKeyInEveryRow(Attention):
    """A key with score 0 and value 0 joins every row, as a module's option for it would do."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        joined = np.logaddexp(lse, 0)
        kept = np.exp(lse - joined)
        return p * kept, p_sink * kept, joined


@mistake("lse-of-weights", "lse", "pytorch/pytorch#124097", equivalent=True)
class _LseOfWeights(Attention):
    """lse is taken of the weights, not of the scores."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, _ = super().softmax(s, c, live)
        return p, p_sink, np.log(np.where(live, np.exp(p), 0).sum(-1, keepdims=True))


@mistake("sink-of-first-head", "sinks")
class _SinkOfFirstHead(Attention):
    """All heads have the sink of the first."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        return super().softmax(s, c._replace(sinks=c.sinks[:1]), live)


@mistake("sink-has-a-value", "sinks")
class _SinkHasAValue(Attention):
    """The weight of the sink goes to the first key, so that the weights sum to 1."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        p[..., :1] += p_sink
        return p, p_sink, lse


@mistake("sink-not-in-maximum", "sinks")
class _SinkNotInMaximum(Attention):
    """The maximum is that of the scores alone, and a sink far above them overflows."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        m = s.max(-1, keepdims=True, initial=-np.inf)
        pivot = np.where(m == -np.inf, 0, m)
        wide = np.float64 if c.dtype == np.float64 else np.float32
        e, e_sink = np.exp(s - pivot), np.exp((c.sinks - pivot).astype(wide)).astype(np.float64)
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return np.where(live, e / safe, 0), e_sink / safe, self.lse(pivot, total, e_sink)


@mistake("dsinks-of-last-query", "sinks")
class _DsinksOfLastQuery(Attention):
    """The gradient of a sink is that through the last query, not the sum over all."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        found = super().ds_sink(p_sink, delta, dlse)
        found[..., :-1, :] = 0
        return found
