"""Mutants: rows that see nothing, NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.problem import Array
from npattn.testing.mutants.attention import Attention, Call
from npattn.testing.mutants.register import mutant


@mutant("empty-row-nan", "empty row", "empty-row", "pytorch/pytorch#103749")
class _EmptyRowNaN(Attention):
    """The softmax has no guard: −inf − −inf is NaN."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        empty = lse == -np.inf
        return np.where(empty, np.nan, p), p_sink, np.where(empty, np.nan, lse)


@mutant("empty-row-mean", "empty row", "empty-row", "NVIDIA/apex#1390")
class _EmptyRowMean(Attention):
    """A query that sees nothing gets the mean of all values."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.where(lse == -np.inf, 1 / max(s.shape[-1], 1), p), p_sink, lse


@mutant("hidden-score-finite", "empty row", "empty-row", "microsoft/onnxruntime#8549")
class _HiddenScoreFinite(Attention):
    """Hidden scores become −1e4, which is not small beside other small scores."""

    def hide(self, s: Array, visible: Array) -> Array:
        return np.where(visible, s, -1e4)


@mutant("empty-row-takes-dlse", "empty row", "empty-row")
class _EmptyRowTakesDlse(Attention):
    """The gradient of lse flows into all keys of a row that sees none, by equal weights."""

    def gradients(self, c: Call, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, ds, ds_sink = super().gradients(c, do, dlse, dw)
        _, live = self.scores(c)
        empty = ~live.any(-1, keepdims=True)
        return dq + np.where(empty, dlse, 0), dk, dv, ds, ds_sink


@mutant("nan-of-query-zeroed", "NaN", "nan-query", "pytorch/pytorch#141128")
class _NaNOfQueryZeroed(Attention):
    """The guard for rows that see nothing also turns the NaN of a query into 0."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.nan_to_num(p), p_sink, lse


@mutant("nan-leaks-through-additive-mask", "NaN", "hidden-nan-k", "deepbeepmeep/Wan2GP#1628")
class _NaNLeaksThroughAdditiveMask(Attention):
    """−inf is added to hidden scores, and NaN + −inf is NaN."""

    def hide(self, s: Array, visible: Array) -> Array:
        return np.where(np.isnan(s), s, np.where(visible, s, -np.inf))


@mutant("nan-leaks-through-zero-weight", "NaN", "hidden-nan-v")
class _NaNLeaksThroughZeroWeight(Attention):
    """Hidden values are multiplied by a weight of 0, and 0 · NaN is NaN."""

    def results(self, c: Call) -> tuple[Array, Array, Array]:
        _, lse, p = super().results(c)
        return p * c.keep @ self.share(c.v, c.q.shape[-3]), lse, p


@mutant("nan-leaks-into-gradients", "NaN", "nan-query hidden-nan-k", "tile-ai/tilelang#2461")
class _NaNLeaksIntoGradients(Attention):
    """Backward multiplies gradients of hidden scores, 0, by rows of q and k that are NaN."""

    def gradients(self, c: Call, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, *rest = super().gradients(c, do, dlse, dw)
        k = self.share(c.k, c.q.shape[-3])
        bad_q, bad_k = (np.isnan(x).any(-2, keepdims=True) for x in (c.q, k))
        return np.where(bad_k, np.nan, dq), np.where(bad_q, np.nan, dk), *rest
