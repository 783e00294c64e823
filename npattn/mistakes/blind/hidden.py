"""Mistakes with NaN and inf at hidden positions, and with sizes of 0."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import change, mistake, one_result
from npattn.problem.arrays import Array

# --- hidden positions  [10]


@mistake("blind-values-cleared-by-column", "hidden", step="nan", where="hidden keys and contents")
class ValuesClearedByColumn(Attention):
    """Values are cleared only at keys hidden from every query, not at those hidden from one."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        _, lse, p = super().results(c)
        s, live = self.scores(c)
        seen = np.broadcast_to(live.any(-2, keepdims=True), live.shape)
        w = self.softmax(s, c, live)[0] * c.keep
        return self.masked_matmul(w, self.share(c.v, c.q.shape[-3]), seen), lse, p


@mistake("blind-hidden-inf", "hidden", step="nan", where="hidden keys and contents")
class HiddenInf(Attention):
    """NaN is cleared behind the mask, but inf is not."""

    def masked_matmul(self, w: Array, x: Array, live: Array) -> Array:
        unknown = np.isnan(x)
        touched = live.astype(np.float64) @ unknown > 0
        return np.where(touched, np.nan, w @ np.where(unknown, 0, x))


@mistake("blind-delta-of-hidden-values", "hidden", step="nan", where="hidden keys and contents")
class DeltaOfHiddenValues(Attention):
    """D = Σ p dp includes hidden keys: 0 · NaN if a hidden value is NaN."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dp = do @ self.share(c.v, c.q.shape[-3]).swapaxes(-1, -2)
        return super().gradients(c, do, dlse - (0 * dp).sum(-1, keepdims=True), dw)


@mistake("blind-dq-of-hidden-keys", "hidden", step="nan", where="hidden keys and contents")
class DqOfHiddenKeys(Attention):
    """dq = ds k includes hidden keys: 0 · NaN if a hidden key is NaN."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, *others = super().gradients(c, do, dlse, dw)
        return dq + (0 * self.share(c.k, c.q.shape[-3])).sum(-2, keepdims=True), *others


change("blind-dk-of-nan-query", "hidden",
       "dk = dsᵀ q includes hidden queries: a NaN query reaches keys that it does not see.",
       step="nan", where="hidden keys and contents",
       dk=lambda up, dx, c, seen: np.asarray(c.scale * (dx.swapaxes(-1, -2) @ c.q)))  # fmt: skip
change("blind-nan-spreads-over-columns", "hidden",
       "A NaN in one column of a visible value makes every column of out NaN.",
       step="nan", where="contents", results=one_result(0, lambda o, c:
           np.where(np.isnan(o).any(-1, keepdims=True), np.nan, o)))  # fmt: skip


# --- sizes of 0  [12]


change("blind-no-size-scale", "sizes",
       "With D = 0 the default scale is 1/√0, and the scores are inf · 0.",
       step="nan", where="D = 0",
       default_scale=lambda up, H, D: up(H, D) if D else math.inf)  # fmt: skip
change("blind-no-keys-sink", "sizes", "With S = 0 lse is −inf even with a sink.",
       step="lse", where="S = 0 and sinks", equivalent=True,
       softmax=one_result(2, lambda lse, s, c, live:
           lse if s.shape[-1] else np.full_like(lse, -np.inf)))  # fmt: skip


@mistake("blind-no-values-lse", "sizes", step="p", where="E = 0")
class NoValuesLse(Attention):
    """With E = 0 lse and weights are 0, as if there were nothing to compute."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        return (o, lse, p) if c.v.shape[-1] else (o, 0 * lse, 0 * p)


@mistake("blind-no-values-gradient", "sizes", step="delta", where="E = 0 and dlse")
class NoValuesGradient(Attention):
    """With E = 0 every gradient is 0, though lse and weights have gradients."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        results = super().gradients(c, do, dlse, dw)
        return results if c.v.shape[-1] else tuple(np.zeros_like(x) for x in results)


@mistake("blind-no-queries-dk", "sizes", step="nan", where="T = 0")
class NoQueriesDk(Attention):
    """With T = 0 dk and dv are never written."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, *others = super().gradients(c, do, dlse, dw)
        if c.q.shape[-2] == 0:
            dk, dv = np.full_like(dk, np.nan), np.full_like(dv, np.nan)
        return dq, dk, dv, *others
