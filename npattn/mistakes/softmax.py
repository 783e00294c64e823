"""Mistakes in the softmax, lse and the sinks."""

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import TILE, Attention, Inputs
from npattn.mistakes.register import after, change, mistake
from npattn.problem.arrays import Array

LN_2 = math.log(2)
TINY = np.finfo(np.float64).tiny


@mistake("softmax-over-queries", "softmax",
         "labmlai/annotated_deep_learning_paper_implementations#146", step="p",
         where="everywhere")  # fmt: skip
class _SoftmaxOverQueries(Attention):
    """The softmax is taken over the queries instead of the keys."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        _, p_sink, lse = super().softmax(s, c, live)
        e = np.where(live, np.exp(s - s.max(-2, keepdims=True, initial=-np.inf)), 0)
        total = e.sum(-2, keepdims=True)
        return e / np.where(total == 0, 1, total), p_sink, lse


def as_float32(x: Array) -> Array:
    """Round x to float32, with its range: 1e39 becomes inf, 1e−46 becomes 0."""
    return x.astype(np.float32).astype(np.float64)


class PivotedFloat32(Attention):
    """Softmax with exponentials in the range of float32; mistakes override the pivot."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        m = self.pivot(s, c, live)
        pivot = np.where(m == -np.inf, 0, m)
        e, e_sink = as_float32(np.exp(s - pivot)), as_float32(np.exp(c.sinks - pivot))
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return np.where(s == -np.inf, 0, e / safe), e_sink / safe, self.lse(pivot, total, e_sink)

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        return np.asarray(np.maximum(s.max(-1, keepdims=True, initial=-np.inf), c.sinks))


change("no-max-subtracted", "softmax",
       "exp overflows for large scores: the row maximum is not subtracted.",
       "pytorch/executorch#18407", step="nan", where="contents", of=PivotedFloat32,
       pivot=lambda up, s, c, live: np.zeros(1))  # fmt: skip
change("lse-base-2", "lse", "lse is a base-2 logarithm.", "deepseek-ai/FlashMLA#106",
       step="lse", where="everywhere",
       lse=lambda up, pivot, total, e_sink: up(pivot, total, e_sink) / LN_2)  # fmt: skip
change("lse-without-maximum", "lse",
       "lse is the logarithm of Σ exp(s − maximum); the maximum is not added back.",
       step="lse", where="everywhere",
       lse=lambda up, pivot, total, e_sink: np.log(total))  # fmt: skip
change("lse-without-sink", "sinks", "lse leaves out the sink, while the weights include it.",
       step="lse", where="sinks",
       lse=lambda up, pivot, total, e_sink: up(pivot, total - e_sink, e_sink))  # fmt: skip
change("sink-scaled", "sinks", "The sinks are multiplied by the scale.", step="p", where="sinks",
       softmax=lambda up, s, c, live: up(s, c._replace(sinks=np.where(
           c.sinks == -np.inf, c.sinks, c.scale * c.sinks)), live))  # fmt: skip
change("dsinks-without-dlse", "sinks", "dsinks leaves out the gradient of lse.",
       "Dao-AILab/flash-attention#2706", step="dsinks", where="sinks and dlse",
       ds_sink=lambda up, p_sink, delta, dlse: np.asarray(-p_sink * (delta + dlse)))  # fmt: skip
change("dsinks-zero", "sinks", "dsinks is 0.", "Dao-AILab/flash-attention#1973",
       step="dsinks", where="sinks",
       ds_sink=lambda up, p_sink, delta, dlse: np.zeros_like(delta))  # fmt: skip
change("weights-base-2", "softmax",
       "The weights are 2^s instead of e^s: the factor log₂ e is missing.", step="s",
       where="everywhere",
       softmax=lambda up, s, c, live:
           up(LN_2 * s, c._replace(sinks=LN_2 * c.sinks), live))  # fmt: skip
change("exp-of-base-2-scores", "softmax",
       "The factor log₂ e goes onto the scores of a natural exponential.", step="s",
       where="everywhere",
       softmax=lambda up, s, c, live:
           up(s / LN_2, c._replace(sinks=c.sinks / LN_2), live))  # fmt: skip
change("log2e-of-three-digits", "softmax", "log₂ e is taken as 1.44, so that scores are too small.",
       step="s", where="everywhere",
       softmax=lambda up, s, c, live:
           up(1.44 * LN_2 * s, c._replace(sinks=1.44 * LN_2 * c.sinks), live))  # fmt: skip
change("maximum-of-all-queries", "softmax",
       "One maximum is subtracted for all queries of a head; rows far below it get weights of 0.",
       step="p", where="contents", of=PivotedFloat32,
       pivot=lambda up, s, c, live:
           up(s, c, live).max(-2, keepdims=True, initial=-np.inf))  # fmt: skip
change("maximum-from-zero", "softmax",
       "The row maximum begins with 0, so that the weights of a row of low scores vanish.",
       step="p", where="contents", of=PivotedFloat32,
       pivot=lambda up, s, c, live: np.maximum(up(s, c, live), 0))  # fmt: skip
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


@mistake("lse-of-weights", "lse", "pytorch/pytorch#124097", step="lse", where="everywhere",
         equivalent=True)  # fmt: skip
class _LseOfWeights(Attention):
    """lse is computed from the weights instead of the scores."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, _ = super().softmax(s, c, live)
        return p, p_sink, np.log(np.where(live, np.exp(p), 0).sum(-1, keepdims=True))


change("sink-of-first-head", "sinks", "The sink of the first head is used for all heads.",
       step="p", where="h ≥ 1 and sinks",
       softmax=lambda up, s, c, live: up(s, c._replace(sinks=c.sinks[:1]), live))  # fmt: skip
change("sinks-ignored", "sinks", "The sinks are ignored.", step="p", where="sinks",
       inputs=after(lambda c: c._replace(sinks=np.full_like(c.sinks, -np.inf))))  # fmt: skip


@mistake("sink-has-a-value", "sinks", step="p", where="s = 0 and sinks")
class _SinkHasAValue(Attention):
    """The weight of the sink is added to the first key, so that the weights sum to 1."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        p[..., :1] += p_sink
        return p, p_sink, lse


change("sink-not-in-maximum", "sinks",
       "The row maximum leaves out the sink; one far above the scores overflows.", step="nan",
       where="sinks and contents", of=PivotedFloat32,
       pivot=lambda up, s, c, live: s.max(-1, keepdims=True, initial=-np.inf))  # fmt: skip


@mistake("dsinks-of-last-query", "sinks", step="dsinks", where="T > 1 and sinks")
class _DsinksOfLastQuery(Attention):
    """dsinks takes only the last query instead of the sum over all."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        dsinks = super().ds_sink(p_sink, delta, dlse)
        dsinks[..., :-1, :] = 0
        return dsinks


@mistake("sinks-by-group", "sinks", step="p", where="K > 1 and G > 1 and sinks")
class _SinksByGroup(Attention):
    """Sinks are read in the order (G, K), though query heads are ordered (K, G)."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        H, K = c.q.shape[-3], c.k.shape[-3]
        order = np.arange(H).reshape(H // max(K, 1), K).T.ravel()
        return c._replace(sinks=c.sinks[order])


@mistake("sink-minus-inf", "sinks", step="nan", where="rows that see no key and sinks")
class _SinkMinusInf(Attention):
    """A fully masked row is NaN if its sink is −inf."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        return c._replace(sinks=np.full(1, -np.inf)) if options.get("sinks") is None else c

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        per_head = c.sinks.ndim == 3
        broken = per_head & (c.sinks == -np.inf) & ~live.any(-1, keepdims=True)
        return np.where(broken, np.nan, p), p_sink, np.where(broken, np.nan, lse)


change("weights-without-sink", "sinks",
       "The returned weights are normalised to sum to 1 despite a sink.", step="p",
       where="sinks and weights",
       returned_weights=lambda up, p, c:
           p / np.maximum(p.sum(-1, keepdims=True), TINY))  # fmt: skip
change("dsinks-of-first-tile", "sinks", "dsinks sums only the first 16 queries.",
       step="dsinks", where="T > 16 and sinks",
       ds_sink=lambda up, p_sink, delta, dlse: up(p_sink, delta, dlse)[..., :TILE, :])  # fmt: skip
change("maximum-of-padding", "softmax",
       "The zeros that pad the last tile enter the row maximum: very low scores underflow.",
       step="p", where="S % 16 ≠ 0 and contents", of=PivotedFloat32,
       pivot=lambda up, s, c, live:
           np.maximum(up(s, c, live), 0 if s.shape[-1] % TILE else -np.inf))  # fmt: skip
change("lse-epsilon", "empty row",
       "lse is log(sum + 1e-30): finite instead of −inf in fully masked rows.",
       step="lse", where="rows that see no key", equivalent=True,
       lse=lambda up, pivot, total, e_sink: np.asarray(pivot + np.log(total + 1e-30)))  # fmt: skip
