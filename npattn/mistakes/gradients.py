"""Mistakes in the gradients."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import mistake


@mistake("jacobian-without-rank-1-term", "gradient", "Dao-AILab/flash-attention#2481")
class _JacobianWithoutRank1Term(Attention):
    """The Jacobian of the softmax lacks the term −p pᵀ; only dv is right."""

    def delta(self, p: Array, dp: Array) -> Array:
        return np.zeros((*p.shape[:-1], 1))


@mistake("dlse-ignored", "gradient")
class _DlseIgnored(Attention):
    """The gradient of lse is ignored in dq and dk."""

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return 0.0


@mistake("dq-unscaled", "gradient")
class _DqUnscaled(Attention):
    """dq is not multiplied by the scale."""

    def dq_scale(self, c: Inputs) -> float:
        return 1.0


@mistake("dk-of-base-2-query", "gradient")
class _DkOfBase2Query(Attention):
    """dk uses the query that was multiplied by log₂ e for exp2."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return super().dk(dx, c, seen) / math.log(2)


@mistake("dbias-last-writer-wins", "gradient", "HKUSTDial/flash-sparse-attention#194")
class _DbiasLastWriterWins(Attention):
    """dbias is not summed over the axes along which bias broadcasts: the last entry wins."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        dbias = np.zeros(shape)
        if ds.size:
            axes = (1,) * (ds.ndim - len(shape)) + shape
            last = tuple(slice(-1, None) if n == 1 else slice(None) for n in axes)
            dbias = ds[last].reshape(shape)
        return dbias


@mistake("dbias-zero", "gradient", "jax-ml/jax#27184")
class _DbiasZero(Attention):
    """dbias is 0."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape)


@mistake("weights-from-rounded-lse", "gradient")
class _WeightsFromRoundedLse(Attention):
    """Backward rebuilds weights as exp(s − lse), of which float32 leaves 1 where a row is −1e9."""

    def scores(self, c: Inputs) -> tuple[Array, Array]:
        s, live = super().scores(c)
        return s.astype(np.result_type(c.dtype, np.float32)), live

    def gradients(self, c: Inputs, *given: Any) -> tuple[Array, ...]:
        return super(type(self), copy(self)).gradients(c, *given)  # each call keeps its weights

    def rebuild(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array]:
        self.weights, p_sink, lse = self.softmax(s, c, live)
        return np.where(live, np.exp(s - lse.astype(s.dtype)), 0), p_sink

    def delta(self, p: Array, dp: Array) -> Array:
        return super().delta(self.weights, dp)  # as Σ dout · out, which is right


@mistake("dlse-subtracted", "gradient")
class _DlseSubtracted(Attention):
    """The gradient of lse is applied with the wrong sign."""

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return -dlse


@mistake("dlse-of-base-2", "gradient")
class _DlseOfBase2(Attention):
    """The gradient of the natural lse is treated as that of a base-2 lse."""

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return dlse / math.log(2)


@mistake("delta-without-weight", "gradient")
class _DeltaWithoutWeight(Attention):
    """dS = p dP − D instead of p (dP − D), where D = Σ p dP."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
        return np.asarray(p * dp - delta)


@mistake("jacobian-without-weights", "gradient")
class _JacobianWithoutWeights(Attention):
    """dS = dP − D instead of p (dP − D): the weights are missing."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
        return np.asarray(dp - delta)


@mistake("jacobian-diagonal", "gradient", "ooples/AiDotNet.Tensors#49")
class _JacobianDiagonal(Attention):
    """The Jacobian of the softmax is only its diagonal p (1 − p), as for a sigmoid."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
        return np.asarray(p * (1 - p) * dp)


@mistake("delta-without-sink", "gradient")
class _DeltaWithoutSink(Attention):
    """D = Σ p dP uses weights normalised to sum to 1 without the sink."""

    def delta(self, p: Array, dp: Array) -> Array:
        total = p.sum(-1, keepdims=True)
        return super().delta(p, dp) / np.where(total == 0, 1, total)


@mistake("dk-unscaled", "gradient")
class _DkUnscaled(Attention):
    """dk is not multiplied by the scale."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return self.masked_matmul(dx.swapaxes(-1, -2), c.q, seen)


@mistake("dk-of-scaled-query", "gradient")
class _DkOfScaledQuery(Attention):
    """dk is scaled twice: it uses the scaled query and multiplies by the scale again."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return c.scale * super().dk(dx, c, seen)


@mistake("dk-of-next-query-head", "gradient")
class _DkOfNextQueryHead(Attention):
    """dk of a head uses the queries of the next head."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return super().dk(dx, c._replace(q=np.roll(c.q, -1, axis=-3)), seen)


@mistake("dv-of-unnormalised-weights", "gradient")
class _DvOfUnnormalisedWeights(Attention):
    """dv uses exp(s − maximum), which is not yet divided by the row sum."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, _, *rest = super().gradients(c, do, dlse, dw)
        s, live = self.scores(c)
        m = s.max(-1, keepdims=True, initial=-np.inf)
        total = np.where(m == -np.inf, 1, np.exp(self.softmax(s, c, live)[2] - m))
        return dq, dk, super().gradients(c, do * total, dlse, dw)[2], *rest


@mistake("dout-taken-as-ones", "gradient")
class _DoutTakenAsOnes(Attention):
    """dout is ignored: the gradients are those of the sum of out."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        return super().gradients(c, np.ones_like(do), dlse, dw)


@mistake("dk-mean-over-samples", "gradient")
class _DkMeanOverSamples(Attention):
    """dk and dv of keys shared by the batch are averaged over it instead of summed."""

    def reduce(self, dx: Array, shape: tuple[int, ...]) -> Array:
        return super().reduce(dx, shape) * (math.prod(shape) / max(dx.size, 1))


@mistake("dk-and-dv-exchanged", "gradient")
class _DkAndDvExchanged(Attention):
    """dk and dv are swapped if their shapes are equal."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, *rest = super().gradients(c, do, dlse, dw)
        return (dq, dv, dk, *rest) if dk.shape == dv.shape else (dq, dk, dv, *rest)


@mistake("dbias-transposed", "gradient")
class _DbiasTransposed(Attention):
    """dbias is transposed if there are as many queries as keys."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        square = ds.shape[-1] == ds.shape[-2]
        return super().reduce_bias(ds.swapaxes(-1, -2) if square else ds, shape)
