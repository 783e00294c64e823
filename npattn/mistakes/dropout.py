"""Mistakes in dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.online import Online
from npattn.mistakes.register import after, change, mistake
from npattn.problem.arrays import Array

change("dropped-weights-in-jacobian", "dropout",
       "The Jacobian of the softmax uses the weights after dropout.", "aws-neuron/nki-samples#81",
       step="ds", where="dropout",
       jacobian=lambda up, p, dp, delta, c: np.asarray(p * c.keep * (dp - delta)))  # fmt: skip
change("dp-not-dropped", "dropout",
       "Dropout is not applied to the gradient of the weights; only dv is right.",
       "aws-neuron/nki-samples#81", step="dp", where="dropout",
       undrop=lambda up, dp, c: dp)  # fmt: skip
change("weights-after-dropout", "dropout", "The returned weights are those after dropout.",
       "pytorch/pytorch#42929", step="p", where="dropout and weights",
       returned_weights=lambda up, p, c: p * c.keep)  # fmt: skip
change("dropout-not-rescaled", "dropout", "Kept weights are not divided by 1 − rate.",
       step="p", where="dropout",
       inputs=after(lambda c: c._replace(keep=np.sign(c.keep))))  # fmt: skip
change("dropout-rescaled-twice", "dropout", "Kept weights are divided by 1 − rate twice.",
       step="p", where="dropout",
       inputs=after(lambda c: c._replace(keep=c.keep * c.keep)))  # fmt: skip


@mistake("dropout-mask-inverted", "dropout", step="p", where="dropout")
class _DropoutMaskInverted(Attention):
    """True in the dropout mask drops the weight instead of keeping it."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        if options.get("dropout_mask") is not None:
            options["dropout_mask"] = ~options["dropout_mask"]
        return super().inputs(*arrays, **options)


@mistake(
    "dropout-of-first-query",
    "dropout",
    "NVIDIA/TransformerEngine#227",
    step="p",
    where="t ≥ 1 and dropout",
)
class _DropoutOfFirstQuery(Attention):
    """The dropout mask of the first query is used for all queries of a head."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        if options.get("dropout_mask") is not None:
            options["dropout_mask"] = options["dropout_mask"][..., :1, :]
        return super().inputs(*arrays, **options)


@mistake("dropout-of-first-head", "dropout", step="p", where="h ≥ 1 and dropout")
class _DropoutOfFirstHead(Attention):
    """The dropout mask of the first head is used for all heads."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        keep = options.get("dropout_mask")
        if keep is not None and keep.ndim > 2:
            options["dropout_mask"] = keep[..., :1, :, :]
        return super().inputs(*arrays, **options)


change("dropout-before-softmax", "dropout",
       "Dropped positions are removed before the softmax, as if they were masked.",
       step="p", where="dropout",
       visible=lambda up, c: np.asarray(up(c) & (np.asarray(c.keep) > 0)))  # fmt: skip


@mistake("dropped-weights-normalised", "dropout", step="p", where="dropout")
class _DroppedWeightsNormalised(Attention):
    """The weights left by dropout are divided by their sum (the sink included)."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        kept = (p * c.keep).sum(-1, keepdims=True) + p_sink
        return p / np.where(kept == 0, 1, kept), p_sink, lse


@mistake("lse-after-dropout", "dropout", step="lse", where="dropout", equivalent=True)
class _LseAfterDropout(Attention):
    """lse sums only the weights that dropout keeps."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        p, p_sink, lse = super().softmax(s, c, live)
        return p, p_sink, lse + np.log((p * c.keep).sum(-1, keepdims=True) + p_sink)


@mistake("dp-rescaled-by-rate", "dropout", "NVIDIA/apex#816", step="dp", where="dropout")
class _DpRescaledByRate(Attention):
    """Backward multiplies the gradient of the weights by the rate, not by 1 / (1 − rate)."""

    def undrop(self, dp: Array, c: Inputs) -> Array:
        most = np.max(c.keep, initial=1)
        return np.asarray(dp * np.sign(c.keep) * (1 - 1 / most if most > 1 else 1))


@mistake(
    "dropout-of-other-seed-in-backward",
    "dropout",
    "pytorch/pytorch#197563",
    step="p",
    where="backward: dropout",
)
class _DropoutOfOtherSeedInBackward(Attention):
    """Backward uses another dropout mask than forward, as with a wrong random offset."""

    def recompute(self, c: Inputs) -> Inputs:
        keep = np.asarray(c.keep)
        return c._replace(keep=np.roll(keep, 1, axis=-1) if keep.ndim else keep)


@mistake("dv-of-undropped-weights", "dropout", step="dv", where="dropout")
class _DvOfUndroppedWeights(Attention):
    """dv uses the weights before dropout."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        dq, dk, _, *rest = super().gradients(c, do, dlse, dw)
        return dq, dk, super().gradients(c._replace(keep=1.0), do, dlse, dw)[2], *rest


@mistake("delta-of-undropped-out", "dropout", step="delta", where="dropout")
class _DeltaOfUndroppedOut(Online):
    """Σ do·out in backward uses an out without dropout."""

    def row_delta(self, do: Array, out: Array, c: Inputs) -> Array:
        whole = self.states(c._replace(keep=1.0))
        return super().row_delta(do, self.divide(whole), c)
