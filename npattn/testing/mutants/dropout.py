"""Mutants: dropout."""

from __future__ import annotations

import numpy as np

from npattn.problem import Array
from npattn.testing.mutants.attention import Attention, Call
from npattn.testing.mutants.register import mutant


@mutant(
    "dropped-weights-in-jacobian",
    "dropout",
    "agreement-dq agreement-dk",
    "aws-neuron/nki-samples#81",
)
class _DroppedWeightsInJacobian(Attention):
    """The Jacobian of the softmax takes the weights after dropout."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Call) -> Array:
        return np.asarray(p * c.keep * (dp - delta))


@mutant("dp-not-dropped", "dropout", "agreement-dq agreement-dk", "aws-neuron/nki-samples#81")
class _DpNotDropped(Attention):
    """The gradient of the weights is not dropped; dv stays right."""

    def undrop(self, dp: Array, c: Call) -> Array:
        return dp


@mutant("weights-after-dropout", "dropout", "agreement-weights", "pytorch/pytorch#42929")
class _WeightsAfterDropout(Attention):
    """The weights returned are those after dropout."""

    def returned_weights(self, p: Array, c: Call) -> Array:
        return p * c.keep
