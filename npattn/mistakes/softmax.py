"""Mistakes in the softmax, lse and the sinks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import change, mistake
from npattn.problem.arrays import Array


@mistake(
    "softmax-over-queries",
    "softmax",
    "labmlai/annotated_deep_learning_paper_implementations#146",
    step="p",
    where="everywhere",
)
class _SoftmaxOverQueries(Attention):
    """The softmax is taken over the queries instead of the keys."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        _, p_sink, lse = super().softmax(s, c, live)
        e = np.where(live, np.exp(s - s.max(-2, keepdims=True, initial=-np.inf)), 0)
        total = e.sum(-2, keepdims=True)
        return e / np.where(total == 0, 1, total), p_sink, lse


@mistake("no-max-subtracted", "softmax", "pytorch/executorch#18407", step="nan", where="contents")
class _NoMaxSubtracted(Attention):
    """exp overflows for large scores: the row maximum is not subtracted."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        wide = np.float64 if c.dtype == np.float64 else np.float32
        e, e_sink = (np.exp(x.astype(wide)).astype(np.float64) for x in (s, c.sinks))
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return e / safe, e_sink / safe, np.log(total)


change("lse-base-2", "lse", "lse is a base-2 logarithm.", "deepseek-ai/FlashMLA#106",
       step="lse", where="everywhere",
       lse=lambda up, pivot, total, e_sink: up(pivot, total, e_sink) / math.log(2))  # fmt: skip
change("lse-without-maximum", "lse",
       "lse is the logarithm of Σ exp(s − maximum); the maximum is not added back.",
       step="lse", where="everywhere",
       lse=lambda up, pivot, total, e_sink: np.log(total))  # fmt: skip
change("lse-without-sink", "sinks", "lse leaves out the sink, while the weights include it.",
       step="lse", where="sinks",
       lse=lambda up, pivot, total, e_sink: up(pivot, total - e_sink, e_sink))  # fmt: skip


@mistake("sink-scaled", "sinks", step="p", where="sinks")
class _SinkScaled(Attention):
    """The sinks are multiplied by the scale."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        sinks = np.where(c.sinks == -np.inf, c.sinks, c.scale * c.sinks)
        return super().softmax(s, c._replace(sinks=sinks), live)


change("dsinks-without-dlse", "sinks", "dsinks leaves out the gradient of lse.",
       "Dao-AILab/flash-attention#2706", step="dsinks", where="sinks and dlse",
       ds_sink=lambda up, p_sink, delta, dlse: np.asarray(-p_sink * (delta + dlse)))  # fmt: skip
change("dsinks-zero", "sinks", "dsinks is 0.", "Dao-AILab/flash-attention#1973",
       step="dsinks", where="sinks",
       ds_sink=lambda up, p_sink, delta, dlse: np.zeros_like(delta))  # fmt: skip


@mistake("weights-base-2", "softmax", step="s", where="everywhere")
class _WeightsBase2(Attention):
    """The weights are 2^s instead of e^s: the factor log₂ e is missing."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        factor = math.log(2)
        return super().softmax(factor * s, c._replace(sinks=factor * c.sinks), live)


@mistake("maximum-of-all-queries", "softmax", step="p", where="contents")
class _MaximumOfAllQueries(Attention):
    """One maximum is subtracted for all queries of a head; rows far below it get weights of 0."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        m = np.maximum(s.max((-1, -2), keepdims=True, initial=-np.inf), c.sinks)
        pivot = np.where(m == -np.inf, 0, m)
        e, e_sink = np.exp(s - pivot), np.exp(c.sinks - pivot)
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return np.where(live, e / safe, 0), e_sink / safe, self.lse(pivot, total, e_sink)


change("scores-clipped", "softmax",
       "Scores are clipped to ±80 to avoid overflow instead of subtracting the maximum.",
       step="s", where="contents", cap=lambda up, x, c: np.clip(up(x, c), -80, 80))  # fmt: skip


@mistake("zero-key-in-every-row", "softmax", step="p", where="everywhere")
class _ZeroKeyInEveryRow(Attention):
    """Every row has one more key with score 0 and value 0 (add_zero_attn)."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        joined = np.logaddexp(lse, 0)
        kept = np.exp(lse - joined)
        return p * kept, p_sink * kept, joined


@mistake(
    "lse-of-weights",
    "lse",
    "pytorch/pytorch#124097",
    step="lse",
    where="everywhere",
    equivalent=True,
)
class _LseOfWeights(Attention):
    """lse is computed from the weights instead of the scores."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, _ = super().softmax(s, c, live)
        return p, p_sink, np.log(np.where(live, np.exp(p), 0).sum(-1, keepdims=True))


change("sink-of-first-head", "sinks", "The sink of the first head is used for all heads.",
       step="p", where="h ≥ 1 and sinks",
       softmax=lambda up, s, c, live: up(s, c._replace(sinks=c.sinks[:1]), live))  # fmt: skip


@mistake("sink-has-a-value", "sinks", step="p", where="s = 0 and sinks")
class _SinkHasAValue(Attention):
    """The weight of the sink is added to the first key, so that the weights sum to 1."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        p[..., :1] += p_sink
        return p, p_sink, lse


@mistake("sink-not-in-maximum", "sinks", step="nan", where="sinks and contents")
class _SinkNotInMaximum(Attention):
    """The row maximum leaves out the sink; one far above the scores overflows."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        m = s.max(-1, keepdims=True, initial=-np.inf)
        pivot = np.where(m == -np.inf, 0, m)
        wide = np.float64 if c.dtype == np.float64 else np.float32
        e, e_sink = np.exp(s - pivot), np.exp((c.sinks - pivot).astype(wide)).astype(np.float64)
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return np.where(live, e / safe, 0), e_sink / safe, self.lse(pivot, total, e_sink)


@mistake("dsinks-of-last-query", "sinks", step="dsinks", where="T > 1 and sinks")
class _DsinksOfLastQuery(Attention):
    """dsinks takes only the last query instead of the sum over all."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        dsinks = super().ds_sink(p_sink, delta, dlse)
        dsinks[..., :-1, :] = 0
        return dsinks
