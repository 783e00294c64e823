"""Mistakes in dropout."""

from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.online import Online
from npattn.mistakes.register import (
    after,
    change,
    mistake,
    one_for_all,
    option,
    some_of_other_inputs,
)
from npattn.problem.arrays import Array

change("dropped-weights-in-jacobian", "dropout",
       "The Jacobian of the softmax uses the weights after dropout.", "aws-neuron/nki-samples#81",
       step="ds", where="dropout",
       jacobian=lambda up, p, dp, delta, c: np.asarray(p * c.keep * (dp - delta)))  # fmt: skip
change("dp-not-dropped", "dropout",
       "Dropout is not applied to the gradient of the weights; only dv is right.",
       "aws-neuron/nki-samples#81", step="dp", where="dropout",
       undrop=lambda up, dp, c: dp)  # fmt: skip
change("dp-not-rescaled", "dropout",
       "The gradient of the weights is dropped, but not divided by 1 − rate.", step="dp",
       where="dropout", undrop=lambda up, dp, c: dp * np.sign(c.keep))  # fmt: skip
change("dp-rescaled-twice", "dropout",
       "The gradient of the weights is divided by 1 − rate twice.", step="dp",
       where="dropout", undrop=lambda up, dp, c: up(up(dp, c), c))  # fmt: skip
change("dv-not-rescaled", "dropout", "dv leaves out 1 / (1 − rate) of the dropout.", step="dv",
       where="dropout",
       gradients=some_of_other_inputs(
           (2,), lambda c: c._replace(keep=np.sign(c.keep))))  # fmt: skip
change("dropout-ignored", "dropout", "Dropout is ignored.", step="p", where="dropout",
       inputs=after(lambda c: c._replace(keep=1.0)))  # fmt: skip
change("weights-after-dropout", "dropout", "The returned weights are those after dropout.",
       "pytorch/pytorch#42929", step="p", where="dropout and weights",
       returned_weights=lambda up, p, c: p * c.keep)  # fmt: skip
change("dropout-not-rescaled", "dropout", "Kept weights are not divided by 1 − rate.",
       step="p", where="dropout",
       inputs=after(lambda c: c._replace(keep=np.sign(c.keep))))  # fmt: skip
change("dropout-rescaled-twice", "dropout", "Kept weights are divided by 1 − rate twice.",
       step="p", where="dropout",
       inputs=after(lambda c: c._replace(keep=c.keep * c.keep)))  # fmt: skip
change("dropout-mask-inverted", "dropout",
       "True in the dropout mask drops the weight instead of keeping it.", step="p",
       where="dropout", inputs=option("dropout_mask", np.logical_not))  # fmt: skip
change("dropout-of-first-query", "dropout",
       "The dropout mask of the first query is used for all queries of a head.",
       "NVIDIA/TransformerEngine#227", step="p", where="t ≥ 1 and dropout",
       inputs=option("dropout_mask", one_for_all(-2)))  # fmt: skip
change("dropout-of-first-head", "dropout",
       "The dropout mask of the first head is used for all heads.", step="p",
       where="h ≥ 1 and dropout", inputs=option("dropout_mask", one_for_all(-3)))  # fmt: skip
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


change("dropout-of-other-seed-in-backward", "dropout",
       "Backward uses another dropout mask than forward, as with a wrong random offset.",
       "pytorch/pytorch#197563", step="p", where="backward: dropout",
       recompute=lambda up, c: c._replace(
           keep=np.roll(c.keep, 1, axis=-1) if np.ndim(c.keep) else c.keep))  # fmt: skip
change("dv-of-undropped-weights", "dropout", "dv uses the weights before dropout.", step="dv",
       where="dropout",
       gradients=some_of_other_inputs((2,), lambda c: c._replace(keep=1.0)))  # fmt: skip


@mistake("delta-of-undropped-out", "dropout", step="delta", where="dropout")
class _DeltaOfUndroppedOut(Online):
    """Σ do·out in backward uses an out without dropout."""

    def row_delta(self, do: Array, out: Array, c: Inputs) -> Array:
        undropped = self.states(c._replace(keep=1.0))
        return super().row_delta(do, self.divide(undropped), c)


@mistake("dropout-in-lse", "dropout", step="lse", where="dropout", equivalent=True)
class _DropoutInLse(Attention):
    """lse is the log of the sum of the weights that dropout keeps."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, _ = super().results(c)
        s, live = self.scores(c)
        p, p_sink, _ = self.softmax(s, c, live)
        kept = (p * (np.asarray(c.keep) != 0)).sum(-1) + p_sink[..., 0]
        lost = np.where(live.any(-1), np.log(kept), 0)
        return o, lse + lost, self.returned_weights(p, c)


change("dweights-dropped", "dropout",
       "Dropout is applied to dweights, though the returned weights are those before dropout.",
       step="dp", where="dropout and dweights",
       gradients=lambda up, c, do, dlse, dw: up(c, do, dlse, dw * c.keep))  # fmt: skip
change("delta-dropped", "dropout",
       "D is multiplied by the dropped weights w: ds = p dp − w D.", step="ds", where="dropout",
       jacobian=lambda up, p, dp, delta, c: np.asarray(p * dp - p * c.keep * delta))  # fmt: skip


@mistake("dropped-row-dlse", "dropout", step="delta", where="dropout and dlse")
class _DroppedRowDlse(Attention):
    """A row whose weights are all dropped is skipped, and the gradient of its lse is lost."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        _, live = self.scores(c)
        kept = (live & (np.asarray(c.keep) != 0)).any(-1, keepdims=True)
        empty = ~live.any(-1, keepdims=True)
        return super().gradients(c, do, np.where(kept | empty, dlse, 0), dw)
