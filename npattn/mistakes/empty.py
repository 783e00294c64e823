"""Mistakes in fully masked rows, with NaN, and with sizes of 0."""

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import after, change, mistake, one_result
from npattn.mistakes.softmax import PivotedFloat32
from npattn.problem.arrays import Array


@mistake("empty-row-nan", "empty row", "pytorch/pytorch#103749", step="nan",
         where="rows that see no key")  # fmt: skip
class _EmptyRowNaN(Attention):
    """A fully masked row gives NaN: the softmax computes −inf − (−inf)."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        empty = lse == -np.inf
        return np.where(empty, np.nan, p), p_sink, np.where(empty, np.nan, lse)


@mistake("empty-row-mean", "empty row", "NVIDIA/apex#1390", step="p", where="rows that see no key")
class _EmptyRowMean(Attention):
    """A fully masked row gives the mean of all values instead of 0."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.where(lse == -np.inf, 1 / max(s.shape[-1], 1), p), p_sink, lse


change("hidden-score-finite", "empty row",
       "Hidden scores are set to −1e4, which still has weight beside other very low scores.",
       "microsoft/onnxruntime#8549", step="p", where="rows that see no key",
       hide=lambda up, s, visible: np.where(visible, s, -1e4))  # fmt: skip


@mistake("empty-row-takes-dlse", "empty row", step="dq", where="rows that see no key and dlse")
class _EmptyRowTakesDlse(Attention):
    """In a fully masked row, the gradient of lse reaches dq."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, ds, ds_sink = super().gradients(c, do, dlse, dw)
        _, live = self.scores(c)
        empty = ~live.any(-1, keepdims=True)
        return dq + np.where(empty, dlse, 0), dk, dv, ds, ds_sink


change("nan-of-query-zeroed", "NaN",
       "The guard for fully masked rows also turns the NaN of a NaN query into 0.",
       "pytorch/pytorch#141128", step="nan", where="contents",
       softmax=one_result(0, lambda p, s, c, live: np.nan_to_num(p)))  # fmt: skip
change("nan-leaks-through-additive-mask", "NaN",
       "−inf is added to hidden scores, so that a NaN key stays NaN behind the mask.",
       "deepbeepmeep/Wan2GP#1628", step="nan", where="hidden keys and contents",
       hide=lambda up, s, visible:
           np.where(np.isnan(s), s, np.where(visible, s, -np.inf)))  # fmt: skip


@mistake("nan-leaks-through-zero-weight", "NaN", step="nan", where="hidden keys and contents")
class _NaNLeaksThroughZeroWeight(Attention):
    """Hidden values are multiplied by a weight of 0, and 0 · NaN is NaN."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        _, lse, p = super().results(c)
        return p * c.keep @ self.share(c.v, c.q.shape[-3]), lse, p


@mistake("nan-leaks-into-gradients", "NaN", "tile-ai/tilelang#2461", step="nan", where="contents")
class _NaNLeaksIntoGradients(Attention):
    """Backward multiplies the zero gradients of hidden scores by NaN rows of q and k."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, *rest = super().gradients(c, do, dlse, dw)
        k = self.share(c.k, c.q.shape[-3])
        bad_q, bad_k = (np.isnan(x).any(-2, keepdims=True) for x in (c.q, k))
        return np.where(bad_k, np.nan, dq), np.where(bad_q, np.nan, dk), *rest


@mistake("empty-row-nan-with-weights", "empty row", "pytorch/pytorch#160064", step="nan",
         where="rows that see no key and weights")  # fmt: skip
class _EmptyRowNaNWithWeights(Attention):
    """A fully masked row gives NaN if the weights are requested, as on a separate code path."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return np.where(c.returns_weights & (lse == -np.inf), np.nan, p), p_sink, lse


@mistake("empty-row-unwritten", "empty row", step="o", where="rows that see no key")
class _EmptyRowUnwritten(Attention):
    """A fully masked row is skipped, and its out is what the previous row left there."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        return np.where(_empty(self, c), np.roll(o, 1, axis=-2), o), lse, p


@mistake("empty-row-nan-in-backward", "empty row", step="nan", where="rows that see no key")
class _EmptyRowNaNInBackward(Attention):
    """Backward makes NaN of a fully masked row, and so of dk and dv: exp(−inf + inf) or 0 · NaN."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, *rest = super().gradients(c, do, dlse, dw)
        empty = _empty(self, c)
        bad = empty.any(-2, keepdims=True)
        dk, dv = (np.where(bad, np.nan, x) for x in (dk, dv))
        return np.where(empty, np.nan, dq), dk, dv, *rest


@mistake("empty-row-mean-in-backward", "empty row", step="dv", where="rows that see no key")
class _EmptyRowMeanInBackward(Attention):
    """out of a fully masked row is 0, but its gradient reaches dv in equal parts."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, *rest = super().gradients(c, do, dlse, dw)
        passed = np.where(_empty(self, c), do, 0).sum(-2, keepdims=True)
        return dq, dk, dv + passed / max(c.k.shape[-2], 1), *rest


@mistake("empty-row-passes-no-dsinks", "empty row", step="dsinks",
         where="rows that see no key and sinks and dlse")  # fmt: skip
class _EmptyRowPassesNoDsinks(Attention):
    """lse of a fully masked row is the sink, but its gradient does not reach dsinks."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        *grads, ds_sink = super().gradients(c, do, dlse, dw)
        return *grads, np.where(_empty(self, c), 0, ds_sink)


change("empty-row-lse-zero", "empty row",
       "lse of a fully masked row is 0: the logarithm of a sum that was replaced by 1.",
       step="lse", where="rows that see no key", equivalent=True,
       lse=lambda up, pivot, total, e_sink:
           up(pivot, np.where(total == 0, 1, total), e_sink))  # fmt: skip
change("empty-row-lse-without-sink", "empty row",
       "lse of a fully masked row is −inf even with a sink.", "Dao-AILab/flash-attention#2706",
       step="lse", where="rows that see no key and sinks", equivalent=True,
       softmax=one_result(2, lambda lse, s, c, live:
           np.where(live.any(-1, keepdims=True), lse, -np.inf)))  # fmt: skip


@mistake("maximum-over-hidden", "empty row", "torch-spyre/torch-spyre#4517", step="p",
         where="contents")  # fmt: skip
class _MaximumOverHidden(PivotedFloat32):
    """The row maximum includes hidden scores; a large one makes all visible weights vanish."""

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        return super().pivot(self.cap(self.product(c), c) + self.bias(c), c, live)


change("nan-score-hidden", "NaN",
       "A NaN score is treated as hidden: the maximum skips it, and it has no weight.", step="nan",
       where="contents",
       scores=after(lambda x:
           (np.where(np.isnan(x[0]), -np.inf, x[0]), x[1] & ~np.isnan(x[0]))))  # fmt: skip
change("nan-of-value-zeroed", "NaN",
       "NaN in v is replaced by 0 before the product, at visible keys too.",
       step="nan", where="contents",
       inputs=after(lambda c: c._replace(v=np.nan_to_num(c.v))))  # fmt: skip
change("size-0-gives-0", "sizes of 0",
       "out is 0 if q has no elements; with D = 0 it should be the mean of the values.",
       "pytorch/pytorch#184914", step="o", where="D = 0",
       results=one_result(0, lambda o, c: o if c.q.size else np.zeros_like(o)))  # fmt: skip


@mistake("no-queries-no-gradient", "sizes of 0", "ROCm/flash-attention#179", step="nan",
         where="T = 0")  # fmt: skip
class _NoQueriesNoGradient(Attention):
    """With T = 0 backward returns at once and leaves dk and dv uninitialised."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, *rest = super().gradients(c, do, dlse, dw)
        garbage = np.nan if c.q.shape[-2] == 0 else 0.0
        return dq, dk + garbage, dv + garbage, *rest


def _empty(self: Attention, c: Inputs) -> Array:
    """Return True for fully masked rows, (..., H, T, 1)."""
    return np.asarray(~self.scores(c)[1].any(-1, keepdims=True))


@mistake("values-cleared-by-column", "NaN", step="nan", where="hidden keys and contents")
class _ValuesClearedByColumn(Attention):
    """Values are cleared only at keys hidden from every query, not at those hidden from one."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        _, lse, p = super().results(c)
        s, live = self.scores(c)
        seen = np.broadcast_to(live.any(-2, keepdims=True), live.shape)
        w = self.softmax(s, c, live)[0] * c.keep
        return self.masked_matmul(w, self.share(c.v, c.q.shape[-3]), seen), lse, p


@mistake("hidden-inf", "NaN", step="nan", where="hidden keys and contents")
class _HiddenInf(Attention):
    """NaN is cleared behind the mask, but inf is not."""

    def masked_matmul(self, w: Array, x: Array, live: Array) -> Array:
        unknown = np.isnan(x)
        touched = live.astype(np.float64) @ unknown > 0
        return np.where(touched, np.nan, w @ np.where(unknown, 0, x))


@mistake("delta-of-hidden-values", "NaN", step="nan", where="hidden keys and contents")
class _DeltaOfHiddenValues(Attention):
    """D = Σ p dp includes hidden keys: 0 · NaN if a hidden value is NaN."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dp = do @ self.share(c.v, c.q.shape[-3]).swapaxes(-1, -2)
        return super().gradients(c, do, dlse - (0 * dp).sum(-1, keepdims=True), dw)


@mistake("dq-of-hidden-keys", "NaN", step="nan", where="hidden keys and contents")
class _DqOfHiddenKeys(Attention):
    """dq = ds k includes hidden keys: 0 · NaN if a hidden key is NaN."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, *others = super().gradients(c, do, dlse, dw)
        return dq + (0 * self.share(c.k, c.q.shape[-3])).sum(-2, keepdims=True), *others


change("dk-of-nan-query", "NaN",
       "dk = dsᵀ q includes hidden queries: a NaN query reaches keys that it does not see.",
       step="nan", where="hidden keys and contents",
       dk=lambda up, dx, c, seen: np.asarray(c.scale * (dx.swapaxes(-1, -2) @ c.q)))  # fmt: skip
change("nan-spreads-over-columns", "NaN",
       "A NaN in one column of a visible value makes every column of out NaN.",
       step="nan", where="contents", results=one_result(0, lambda o, c:
           np.where(np.isnan(o).any(-1, keepdims=True), np.nan, o)))  # fmt: skip
change("no-size-scale", "sizes of 0",
       "With D = 0 the default scale is 1/√0, and the scores are inf · 0.",
       step="nan", where="D = 0",
       default_scale=lambda up, H, D: up(H, D) if D else math.inf)  # fmt: skip
change("no-keys-sink", "sizes of 0", "With S = 0 lse is −inf even with a sink.",
       step="lse", where="S = 0 and sinks", equivalent=True,
       softmax=one_result(2, lambda lse, s, c, live:
           lse if s.shape[-1] else np.full_like(lse, -np.inf)))  # fmt: skip


@mistake("no-values-lse", "sizes of 0", step="p", where="E = 0")
class _NoValuesLse(Attention):
    """With E = 0 lse and weights are 0, as if there were nothing to compute."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        return (o, lse, p) if c.v.shape[-1] else (o, 0 * lse, 0 * p)


@mistake("no-values-gradient", "sizes of 0", step="delta", where="E = 0 and dlse")
class _NoValuesGradient(Attention):
    """With E = 0 every gradient is 0, though lse and weights have gradients."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        results = super().gradients(c, do, dlse, dw)
        return results if c.v.shape[-1] else tuple(np.zeros_like(x) for x in results)
