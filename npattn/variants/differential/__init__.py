"""Differential attention: the difference of two softmaxes over the same values."""

from npattn.variants.differential.api import (
    DifferentialForward,
    DifferentialGradients,
    attention,
    backward,
    forward,
)
from npattn.variants.differential.lambdas import (
    LambdaGradients,
    initial_lambda,
    reparametrise,
    reparametrise_backward,
)

__all__ = [
    "DifferentialForward", "DifferentialGradients", "LambdaGradients", "attention", "backward",
    "forward", "initial_lambda", "reparametrise", "reparametrise_backward",
]  # fmt: skip
