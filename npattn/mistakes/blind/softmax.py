"""Mistakes in the softmax, the lse and the sinks."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import TILE, Attention, Inputs
from npattn.mistakes.blind.float32 import PivotedFloat32
from npattn.mistakes.register import mistake


@mistake("blind-sinks-by-group", "sinks")
class SinksByGroup(Attention):
    """Sinks are read in the order (G, K), though query heads are ordered (K, G)."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        H, K = c.q.shape[-3], c.k.shape[-3]
        order = np.arange(H).reshape(H // max(K, 1), K).T.ravel()
        return c._replace(sinks=c.sinks[order])


@mistake("blind-sink-not-in-maximum", "sinks")
class SinkNotInMaximum(PivotedFloat32):
    """The maximum leaves out the sink, and a large sink overflows."""

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        return np.asarray(s.max(-1, keepdims=True, initial=-np.inf))


@mistake("blind-sink-minus-inf", "sinks")
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


@mistake("blind-empty-row-lse-without-sink", "sinks", equivalent=True)
class EmptyRowLseWithoutSink(Attention):
    """lse of a fully masked row is −inf instead of its sink."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return p, p_sink, np.where(live.any(-1, keepdims=True), lse, -np.inf)


@mistake("blind-empty-row-dsinks", "sinks")
class EmptyRowDsinks(Attention):
    """Backward skips fully masked rows, so that their dlse does not reach dsinks."""

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return np.where(live.any(-1, keepdims=True), dlse, 0)


@mistake("blind-weights-without-sink", "sinks")
class WeightsWithoutSink(Attention):
    """The returned weights are normalised to sum to 1 despite a sink."""

    def returned_weights(self, p: Array, c: Inputs) -> Array:
        total = p.sum(-1, keepdims=True)
        return np.asarray(p / np.where(total == 0, 1, total))


@mistake("blind-dsinks-without-dlse", "sinks")
class DsinksWithoutDlse(Attention):
    """dsinks has only the gradient of out, not that of lse."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return np.asarray(-p_sink * (delta + dlse))


@mistake("blind-dsinks-of-first-tile", "sinks")
class DsinksOfFirstTile(Attention):
    """dsinks sums only the first 16 queries."""

    def ds_sink(self, p_sink: Array, delta: Array, dlse: Any) -> Array:
        return super().ds_sink(p_sink, delta, dlse)[..., :TILE, :]


@mistake("blind-maximum-of-padding", "softmax")
class MaximumOfPadding(PivotedFloat32):
    """The zeros that pad the last tile enter the row maximum: very low scores underflow."""

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        m = super().pivot(s, c, live)
        return np.maximum(m, 0) if s.shape[-1] % TILE else m


@mistake("blind-lse-epsilon", "empty", equivalent=True)
class LseEpsilon(Attention):
    """lse is log(sum + 1e-30): finite instead of −inf in fully masked rows."""

    def lse(self, pivot: Array, total: Array, e_sink: Array) -> Array:
        return np.asarray(pivot + np.log(total + 1e-30))
