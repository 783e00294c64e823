"""Mutants: softmax, lse, sinks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.problem import Array
from npattn.testing.mutants.attention import Attention, Call
from npattn.testing.mutants.register import mutant


@mutant(
    "softmax-over-queries",
    "softmax",
    "rows-sum-to-one agreement-o",
    "labmlai/annotated_deep_learning_paper_implementations#146",
)
class _SoftmaxOverQueries(Attention):
    """The weights of a key over all queries sum to 1, not those of a query over all keys."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        _, p_sink, lse = super().softmax(s, c, live)
        e = np.where(live, np.exp(s - s.max(-2, keepdims=True, initial=-np.inf)), 0)
        total = e.sum(-2, keepdims=True)
        return e / np.where(total == 0, 1, total), p_sink, lse


@mutant("no-max-subtracted", "softmax", "agreement-o", "pytorch/executorch#18407")
class _NoMaxSubtracted(Attention):
    """exp is taken of the scores as they are, in the dtype computed in, and overflows."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        wide = np.float64 if c.dtype == np.float64 else np.float32
        e, e_sink = (np.exp(x.astype(wide)).astype(np.float64) for x in (s, c.sinks))
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return e / safe, e_sink / safe, np.log(total)


@mutant("lse-base-2", "lse", "agreement-lse", "deepseek-ai/FlashMLA#106")
class _LseBase2(Attention):
    """lse is a logarithm to base 2."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return super().lse(pivot, total, e_sink) / math.log(2)


@mutant("lse-without-maximum", "lse", "agreement-lse")
class _LseWithoutMaximum(Attention):
    """lse is that of the scores after the maximum was subtracted."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return np.log(total)


@mutant("lse-without-sink", "sinks", "agreement-lse")
class _LseWithoutSink(Attention):
    """The sink takes weight, but is not in lse."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return super().lse(pivot, total - e_sink, e_sink)


@mutant("sink-scaled", "sinks", "agreement-o agreement-lse")
class _SinkScaled(Attention):
    """The sink is multiplied by the scale, as the scores are."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        sinks = np.where(c.sinks == -np.inf, c.sinks, c.scale * c.sinks)
        return super().softmax(s, c._replace(sinks=sinks), live)


@mutant("dsinks-without-dlse", "sinks", "agreement-dsinks", "Dao-AILab/flash-attention#2706")
class _DsinksWithoutDlse(Attention):
    """The gradient of lse does not reach the sinks."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return np.asarray(-p_sink * (delta + dlse))


@mutant("dsinks-zero", "sinks", "agreement-dsinks", "Dao-AILab/flash-attention#1973")
class _DsinksZero(Attention):
    """The sinks get no gradient."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return np.zeros_like(delta)
