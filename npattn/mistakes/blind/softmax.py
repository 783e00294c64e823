"""Mistakes in the softmax, the lse and the sinks."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes.attention import TILE, Attention, Inputs
from npattn.mistakes.blind.float32 import PivotedFloat32
from npattn.mistakes.register import change, mistake, one_result
from npattn.problem.arrays import Array


@mistake("blind-sinks-by-group", "sinks", step="p", where="K > 1 and G > 1 and sinks")
class SinksByGroup(Attention):
    """Sinks are read in the order (G, K), though query heads are ordered (K, G)."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        H, K = c.q.shape[-3], c.k.shape[-3]
        order = np.arange(H).reshape(H // max(K, 1), K).T.ravel()
        return c._replace(sinks=c.sinks[order])


change("blind-sink-not-in-maximum", "sinks",
       "The maximum leaves out the sink, and a large sink overflows.",
       step="nan", where="sinks and contents", of=PivotedFloat32,
       pivot=lambda up, s, c, live:
           np.asarray(s.max(-1, keepdims=True, initial=-np.inf)))  # fmt: skip


@mistake("blind-sink-minus-inf", "sinks", step="nan", where="rows that see no key and sinks")
class SinkMinusInf(Attention):
    """A fully masked row is NaN if its sink is −inf."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        return c._replace(sinks=np.full(1, -np.inf)) if options.get("sinks") is None else c

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        given = c.sinks.ndim == 3
        broken = given & (c.sinks == -np.inf) & ~live.any(-1, keepdims=True)
        return np.where(broken, np.nan, p), p_sink, np.where(broken, np.nan, lse)


change("blind-empty-row-lse-without-sink", "sinks",
       "lse of a fully masked row is −inf instead of its sink.",
       step="lse", where="rows that see no key and sinks", equivalent=True,
       softmax=one_result(2, lambda lse, s, c, live:
           np.where(live.any(-1, keepdims=True), lse, -np.inf)))  # fmt: skip
change("blind-empty-row-dsinks", "sinks",
       "Backward skips fully masked rows, so that their dlse does not reach dsinks.",
       step="dsinks", where="rows that see no key and sinks and dlse",
       use_dlse=lambda up, dlse, live: np.where(live.any(-1, keepdims=True), dlse, 0))  # fmt: skip


@mistake("blind-weights-without-sink", "sinks", step="p", where="sinks and weights")
class WeightsWithoutSink(Attention):
    """The returned weights are normalised to sum to 1 despite a sink."""

    def returned_weights(self, p: Array, c: Inputs) -> Array:
        total = p.sum(-1, keepdims=True)
        return np.asarray(p / np.where(total == 0, 1, total))


change("blind-dsinks-without-dlse", "sinks",
       "dsinks has only the gradient of out, not that of lse.",
       step="dsinks", where="sinks and dlse",
       ds_sink=lambda up, p_sink, delta, dlse: np.asarray(-p_sink * (delta + dlse)))  # fmt: skip
change("blind-dsinks-of-first-tile", "sinks", "dsinks sums only the first 16 queries.",
       step="dsinks", where="T > 16 and sinks",
       ds_sink=lambda up, p_sink, delta, dlse: up(p_sink, delta, dlse)[..., :TILE, :])  # fmt: skip


@mistake("blind-maximum-of-padding", "softmax", step="p", where="S % 16 ≠ 0 and contents")
class MaximumOfPadding(PivotedFloat32):
    """The zeros that pad the last tile enter the row maximum: very low scores underflow."""

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        m = super().pivot(s, c, live)
        return np.maximum(m, 0) if s.shape[-1] % TILE else m


change("blind-lse-epsilon", "empty",
       "lse is log(sum + 1e-30): finite instead of −inf in fully masked rows.",
       step="lse", where="rows that see no key", equivalent=True,
       lse=lambda up, pivot, total, e_sink: np.asarray(pivot + np.log(total + 1e-30)))  # fmt: skip
