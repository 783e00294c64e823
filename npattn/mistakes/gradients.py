"""Mutants: gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import mistake


@mistake("jacobian-without-rank-1-term", "gradient", "Dao-AILab/flash-attention#2481")
class _JacobianWithoutRank1Term(Attention):
    """The Jacobian of the softmax lacks −p pᵀ; dv stays right."""

    def delta(self, p: Array, dp: Array) -> Array:
        return np.zeros((*p.shape[:-1], 1))


@mistake("dlse-ignored", "gradient")
class _DlseIgnored(Attention):
    """The gradient of lse is not passed on."""

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return 0.0


@mistake("dq-unscaled", "gradient")
class _DqUnscaled(Attention):
    """dq lacks the scale."""

    def dq_scale(self, c: Inputs) -> float:
        return 1.0


@mistake("dk-of-base-2-query", "gradient")
class _DkOfBase2Query(Attention):
    """dk takes the query that was scaled by log₂ e for the sake of exp2."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return super().dk(dx, c, seen) / math.log(2)


@mistake("dbias-last-writer-wins", "gradient", "HKUSTDial/flash-sparse-attention#194")
class _DbiasLastWriterWins(Attention):
    """dbias is not summed over the axes along which bias broadcasts: the last one stays."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        found = np.zeros(shape)
        if ds.size:
            axes = (1,) * (ds.ndim - len(shape)) + shape
            last = tuple(slice(-1, None) if n == 1 else slice(None) for n in axes)
            found = ds[last].reshape(shape)
        return found


@mistake("dbias-zero", "gradient", "jax-ml/jax#27184")
class _DbiasZero(Attention):
    """The bias gets no gradient."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        return np.zeros(shape)


@mistake("dlse-subtracted", "gradient")
class _DlseSubtracted(Attention):
    """The gradient of lse enters with the wrong sign."""

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return -dlse


@mistake("dlse-of-base-2", "gradient")
class _DlseOfBase2(Attention):
    """The gradient of the natural lse is passed on as if it were that of one to base 2."""

    def use_dlse(self, dlse: Any, live: Array) -> Any:
        return dlse / math.log(2)


@mistake("delta-without-weight", "gradient")
class _DeltaWithoutWeight(Attention):
    """dS = p dP − D, where it is p (dP − D)."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
        return np.asarray(p * dp - delta)


@mistake("jacobian-without-weights", "gradient")
class _JacobianWithoutWeights(Attention):
    """dS = dP − D, without the weights."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
        return np.asarray(dp - delta)


@mistake("jacobian-diagonal", "gradient", "ooples/AiDotNet.Tensors#49")
class _JacobianDiagonal(Attention):
    """The Jacobian of the softmax is taken as that of a sigmoid, p (1 − p), on its diagonal."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
        return np.asarray(p * (1 - p) * dp)


@mistake("delta-without-sink", "gradient")
class _DeltaWithoutSink(Attention):
    """D is the mean of dP by weights that were made to sum to 1 without the sink."""

    def delta(self, p: Array, dp: Array) -> Array:
        total = p.sum(-1, keepdims=True)
        return super().delta(p, dp) / np.where(total == 0, 1, total)


@mistake("dk-unscaled", "gradient")
class _DkUnscaled(Attention):
    """dk lacks the scale."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return self.masked_matmul(dx.swapaxes(-1, -2), c.q, seen)


@mistake("dk-of-scaled-query", "gradient")
class _DkOfScaledQuery(Attention):
    """dk takes the query that forward scaled, and is scaled once more."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return c.scale * super().dk(dx, c, seen)


@mistake("dk-of-next-query-head", "gradient")
class _DkOfNextQueryHead(Attention):
    """dk of a head multiplies its scores' gradient by the queries of the next."""

    def dk(self, dx: Array, c: Inputs, seen: Array) -> Array:
        return super().dk(dx, c._replace(q=np.roll(c.q, -1, axis=-3)), seen)


@mistake("dv-of-unnormalised-weights", "gradient")
class _DvOfUnnormalisedWeights(Attention):
    """dv takes exp(s − maximum), which is not yet divided by the row sum."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, _, *rest = super().gradients(c, do, dlse, dw)
        s, live = self.scores(c)
        m = s.max(-1, keepdims=True, initial=-np.inf)
        total = np.where(m == -np.inf, 1, np.exp(self.softmax(s, c, live)[2] - m))
        return dq, dk, super().gradients(c, do * total, dlse, dw)[2], *rest


@mistake("dout-taken-as-ones", "gradient")
class _DoutTakenAsOnes(Attention):
    """The gradient is that of the sum of out, whatever dout is."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        return super().gradients(c, np.ones_like(do), dlse, dw)


@mistake("dk-mean-over-samples", "gradient")
class _DkMeanOverSamples(Attention):
    """dk and dv of keys that all samples share are their mean, not their sum."""

    def reduce(self, dx: Array, shape: tuple[int, ...]) -> Array:
        return super().reduce(dx, shape) * (math.prod(shape) / max(dx.size, 1))


@mistake("dk-and-dv-exchanged", "gradient")
class _DkAndDvExchanged(Attention):
    """dk and dv are exchanged where they have the same shape."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, dv, *rest = super().gradients(c, do, dlse, dw)
        return (dq, dv, dk, *rest) if dk.shape == dv.shape else (dq, dk, dv, *rest)


@mistake("dbias-transposed", "gradient")
class _DbiasTransposed(Attention):
    """dbias is summed over a transposed array where there are as many queries as keys."""

    def reduce_bias(self, ds: Array, shape: tuple[int, ...]) -> Array:
        square = ds.shape[-1] == ds.shape[-2]
        return super().reduce_bias(ds.swapaxes(-1, -2) if square else ds, shape)
