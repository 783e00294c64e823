"""Mutants: dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import Attention, Call
from npattn.mistakes.online import Online
from npattn.mistakes.register import mistake


@mistake("dropped-weights-in-jacobian", "dropout", "aws-neuron/nki-samples#81")
class _DroppedWeightsInJacobian(Attention):
    """The Jacobian of the softmax takes the weights after dropout."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Call) -> Array:
        return np.asarray(p * c.keep * (dp - delta))


@mistake("dp-not-dropped", "dropout", "aws-neuron/nki-samples#81")
class _DpNotDropped(Attention):
    """The gradient of the weights is not dropped; dv stays right."""

    def undrop(self, dp: Array, c: Call) -> Array:
        return dp


@mistake("weights-after-dropout", "dropout", "pytorch/pytorch#42929")
class _WeightsAfterDropout(Attention):
    """The weights returned are those after dropout."""

    def returned_weights(self, p: Array, c: Call) -> Array:
        return p * c.keep


@mistake("dropout-not-rescaled", "dropout")
class _DropoutNotRescaled(Attention):
    """The weights that are kept are not divided by 1 − rate."""

    def call(self, *arguments: Any) -> Call:
        c = super().call(*arguments)
        return c._replace(keep=np.sign(c.keep))


@mistake("dropout-rescaled-twice", "dropout")
class _DropoutRescaledTwice(Attention):
    """The weights that are kept are divided by 1 − rate twice."""

    def call(self, *arguments: Any) -> Call:
        c = super().call(*arguments)
        return c._replace(keep=c.keep * c.keep)


@mistake("dropout-mask-inverted", "dropout")
class _DropoutMaskInverted(Attention):
    """True in the dropout mask drops."""

    def call(self, arrays: tuple[Any, ...], *options: Any) -> Call:
        *others, keep = arrays
        return super().call((*others, None if keep is None else ~keep), *options)


@mistake("dropout-mask-needs-a-rate", "dropout")
class _DropoutMaskNeedsARate(Attention):
    """At rate 0 nothing is dropped, though a dropout mask is given."""

    def call(self, arrays: tuple[Any, ...], *options: Any) -> Call:
        *others, keep = arrays
        return super().call((*others, keep if options[-1] else None), *options)


@mistake("dropout-of-first-query", "dropout", "NVIDIA/TransformerEngine#227")
class _DropoutOfFirstQuery(Attention):
    """All queries of a head are dropped by the mask of the first."""

    def call(self, arrays: tuple[Any, ...], *options: Any) -> Call:
        *others, keep = arrays
        return super().call((*others, None if keep is None else keep[..., :1, :]), *options)


@mistake("dropout-of-first-head", "dropout")
class _DropoutOfFirstHead(Attention):
    """All heads are dropped by the mask of the first."""

    def call(self, arrays: tuple[Any, ...], *options: Any) -> Call:
        *others, keep = arrays
        first = keep if keep is None or keep.ndim < 3 else keep[..., :1, :, :]
        return super().call((*others, first), *options)


@mistake("dropout-before-softmax", "dropout")
class _DropoutBeforeSoftmax(Attention):
    """What is dropped leaves the softmax, as if it were hidden."""

    def visible(self, c: Call) -> Array:
        return np.asarray(super().visible(c) & (np.asarray(c.keep) > 0))


@mistake("dropped-weights-normalised", "dropout")
class _DroppedWeightsNormalised(Attention):
    """The weights that dropout leaves are divided by their sum, the sink included."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        kept = (p * c.keep).sum(-1, keepdims=True) + p_sink
        return p / np.where(kept == 0, 1, kept), p_sink, lse


@mistake("lse-after-dropout", "dropout", equivalent=True)
class _LseAfterDropout(Attention):
    """lse sums what dropout leaves."""

    def softmax(self, s: Array, c: Call, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return p, p_sink, lse + np.log((p * c.keep).sum(-1, keepdims=True) + p_sink)


@mistake("dp-rescaled-by-rate", "dropout", "NVIDIA/apex#816")
class _DpRescaledByRate(Attention):
    """Backward multiplies the gradient of the weights by the rate, not by 1 / (1 − rate)."""

    def undrop(self, dp: Array, c: Call) -> Array:
        most = np.max(c.keep, initial=1)
        return np.asarray(dp * np.sign(c.keep) * (1 - 1 / most if most > 1 else 1))


@mistake("dropout-of-other-seed-in-backward", "dropout", "pytorch/pytorch#197563")
class _DropoutOfOtherSeedInBackward(Attention):
    """Backward draws its dropout mask with another offset than forward."""

    def recompute(self, c: Call) -> Call:
        keep = np.asarray(c.keep)
        return c._replace(keep=np.roll(keep, 1, axis=-1) if keep.ndim else keep)


@mistake("dv-of-undropped-weights", "dropout")
class _DvOfUndroppedWeights(Attention):
    """dv takes the weights before dropout."""

    def gradients(self, c: Call, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, _, *rest = super().gradients(c, do, dlse, dw)
        return dq, dk, super().gradients(c._replace(keep=1.0), do, dlse, dw)[2], *rest


@mistake("delta-of-undropped-out", "dropout")
class _DeltaOfUndroppedOut(Online):
    """Σ do·out takes an out that was not dropped."""

    def row_delta(self, do: Array, out: Array, c: Call) -> Array:
        whole = self.states(c._replace(keep=1.0))
        return super().row_delta(do, self.divide(whole), c)
