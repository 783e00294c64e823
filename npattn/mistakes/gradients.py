"""Mistakes in the gradients."""

import math
from copy import copy
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import after, change, mistake
from npattn.mistakes.softmax import TINY
from npattn.problem.arrays import Array

change("jacobian-without-rank-1-term", "gradient",
       "The Jacobian of the softmax lacks the term −p pᵀ; only dv is right.",
       "Dao-AILab/flash-attention#2481", step="delta", where="everywhere",
       delta=lambda up, p, dp: np.zeros((*p.shape[:-1], 1)))  # fmt: skip
change("dlse-ignored", "gradient", "The gradient of lse is ignored in dq and dk.",
       step="delta", where="dlse", use_dlse=lambda up, dlse, live: 0.0)  # fmt: skip
change("dq-unscaled", "gradient", "dq is not multiplied by the scale.",
       step="dq", where="everywhere", dq_scale=lambda up, c: 1.0)  # fmt: skip
change("dk-of-base-2-query", "gradient",
       "dk uses the query that was multiplied by log₂ e for exp2.", step="dk", where="everywhere",
       dk=lambda up, dx, c, seen: up(dx, c, seen) / math.log(2))  # fmt: skip


@mistake("dbias-last-writer-wins", "gradient", "HKUSTDial/flash-sparse-attention#194", step="dbias",
         where="bias")  # fmt: skip
class _DbiasLastWriterWins(Attention):
    """dbias is not summed over the axes along which bias broadcasts: the last entry wins."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        dbias = np.zeros(shape)
        if ds.size:
            axes = (1,) * (ds.ndim - len(shape)) + shape
            last = tuple(slice(-1, None) if n == 1 else slice(None) for n in axes)
            dbias = ds[last].reshape(shape)
        return dbias


change("dbias-zero", "gradient", "dbias is 0.", "jax-ml/jax#27184", step="dbias", where="bias",
       reduce_bias=lambda up, ds, shape: np.zeros(shape))  # fmt: skip


@mistake("weights-from-rounded-lse", "gradient", step="precision", where="backward: contents")
class _WeightsFromRoundedLse(Attention):
    """Backward rebuilds weights as exp(s − lse), of which float32 leaves 1 where a row is −1e9."""

    def scores(self, c: Inputs) -> tuple[Array, Array]:
        s, live = super().scores(c)
        return s.astype(np.result_type(c.dtype, np.float32)), live

    def gradients(self, c: Inputs, *arguments: Any) -> tuple[Array, ...]:
        return super(type(self), copy(self)).gradients(c, *arguments)  # each call keeps its weights

    def rebuild(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array]:
        self.weights, p_sink, lse = self.softmax(s, c, live)
        return np.where(live, np.exp(s - lse.astype(s.dtype)), 0), p_sink

    def delta(self, p: Array, dp: Array) -> Array:
        return super().delta(self.weights, dp)  # as Σ dout · out, which is right


change("dlse-subtracted", "gradient", "The gradient of lse is applied with the wrong sign.",
       step="delta", where="dlse", use_dlse=lambda up, dlse, live: -dlse)  # fmt: skip
change("dlse-of-base-2", "gradient",
       "The gradient of the natural lse is treated as that of a base-2 lse.",
       step="delta", where="dlse", use_dlse=lambda up, dlse, live: dlse / math.log(2))  # fmt: skip
change("dweights-ignored", "gradient", "The gradient of the returned weights is ignored.",
       step="dp", where="dweights",
       gradients=lambda up, c, do, dlse, dw: up(c, do, dlse, 0.0))  # fmt: skip
change("delta-without-weight", "gradient", "dS = p dP − D instead of p (dP − D), where D = Σ p dP.",
       step="ds", where="everywhere",
       jacobian=lambda up, p, dp, delta, c: np.asarray(p * dp - delta))  # fmt: skip
change("jacobian-without-weights", "gradient",
       "dS = dP − D instead of p (dP − D): the weights are missing.", step="ds", where="everywhere",
       jacobian=lambda up, p, dp, delta, c: np.asarray(dp - delta))  # fmt: skip
change("jacobian-diagonal", "gradient",
       "The Jacobian of the softmax is only its diagonal p (1 − p), as for a sigmoid.",
       "ooples/AiDotNet.Tensors#49", step="ds", where="everywhere",
       jacobian=lambda up, p, dp, delta, c: np.asarray(p * (1 - p) * dp))  # fmt: skip
change("delta-without-sink", "gradient",
       "D = Σ p dP uses weights normalised to sum to 1 without the sink.", step="delta",
       where="sinks",
       delta=lambda up, p, dp:
           up(p, dp) / np.maximum(p.sum(-1, keepdims=True), TINY))  # fmt: skip
change("dk-unscaled", "gradient", "dk is not multiplied by the scale.", step="dk",
       where="everywhere",
       dk=lambda up, dx, c, seen: up(dx, c._replace(scale=1.0), seen))  # fmt: skip
change("dk-of-scaled-query", "gradient",
       "dk is scaled twice: it uses the scaled query and multiplies by the scale again.",
       step="dk", where="everywhere",
       dk=lambda up, dx, c, seen: c.scale * up(dx, c, seen))  # fmt: skip
change("dk-of-next-query-head", "gradient", "dk of a head uses the queries of the next head.",
       step="dk", where="H > 1", dk=lambda up, dx, c, seen:
           up(dx, c._replace(q=np.roll(c.q, -1, axis=-3)), seen))  # fmt: skip


@mistake("dv-of-unnormalised-weights", "gradient", step="dv", where="everywhere")
class _DvOfUnnormalisedWeights(Attention):
    """dv uses exp(s − maximum), which is not yet divided by the row sum."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, _, *rest = super().gradients(c, do, dlse, dw)
        s, live = self.scores(c)
        m = s.max(-1, keepdims=True, initial=-np.inf)
        total = np.where(m == -np.inf, 1, np.exp(self.softmax(s, c, live)[2] - m))
        return dq, dk, super().gradients(c, do * total, dlse, dw)[2], *rest


change("dout-taken-as-ones", "gradient",
       "dout is ignored: the gradients are those of the sum of out.", step="dv", where="everywhere",
       gradients=lambda up, c, do, dlse, dw: up(c, np.ones_like(do), dlse, dw))  # fmt: skip
change("dk-mean-over-samples", "gradient",
       "dk and dv of keys shared by the batch are averaged over it instead of summed.",
       step="dv", where="B > 1", reduce=lambda up, dx, shape:
           up(dx, shape) * (math.prod(shape) / max(dx.size, 1)))  # fmt: skip
change("dk-and-dv-exchanged", "gradient", "dk and dv are swapped if their shapes are equal.",
       step="dv", where="D = E",
       gradients=after(lambda g:
           (g[0], g[2], g[1], *g[3:]) if g[1].shape == g[2].shape else g))  # fmt: skip
change("dbias-transposed", "gradient", "dbias is transposed if there are as many queries as keys.",
       step="dbias", where="T = S and bias", reduce_bias=lambda up, ds, shape:
           up(ds.swapaxes(-1, -2) if ds.shape[-1] == ds.shape[-2] else ds, shape))  # fmt: skip


@mistake("delta-without-dweights", "gradient", step="delta", where="dweights")
class _DeltaWithoutDweights(Attention):
    """D is Σ do·out, which lacks the share of dweights."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        s, live = self.scores(c)
        p, _, _ = self.softmax(s, c, live)
        missing = (p * np.where(live, dw, 0)).sum(-1, keepdims=True)
        return super().gradients(c, do, dlse + missing, dw)


@mistake("broadcast-last-wins", "gradient", step="dv", where="B > 1")
class _BroadcastLastWins(Attention):
    """If k or v broadcasts along the batch, only the last entry adds to its gradient."""

    def reduce(self, dx: Array, shape: tuple[int, ...]) -> Array:
        if dx.size == 0:
            return super().reduce(dx, shape)
        full = (*(1,) * (dx.ndim - len(shape)), *shape)
        return np.asarray(dx[tuple(slice(-n, None) for n in full)].reshape(shape))
