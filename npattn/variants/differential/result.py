"""Results and gradients of differential attention."""

from dataclasses import dataclass, field
from typing import Any

from npattn.multihead.projections import NormResiduals
from npattn.problem import Forward
from npattn.problem.arrays import Array


@dataclass(frozen=True, eq=False)
class DifferentialForward:
    """Results of differential attention.

    Attributes
    ----------
    out : array (..., H, T, E)
    first, second : npattn.Forward
        The two attentions, with .out .lse .weights.
    lam : array () or (H,)
    weights : array (..., H, T, S)
        P1 − λ P2, before dropout.
    """

    out: Array
    first: Forward
    second: Forward
    lam: Array
    norm: NormResiduals | None = field(repr=False)
    norm_weight: Array | None = field(repr=False)
    out_scale: float = field(repr=False)
    norm_eps: float = field(default=0.0, repr=False)

    @property
    def weights(self) -> Array:
        second: Array = beside(self.lam, self.out) * self.second.weights
        return self.first.weights - second


@dataclass(frozen=True, eq=False)
class DifferentialGradients:
    """Gradients of one loss, each shaped as its input; None where there is no such input."""

    q1: Array
    k1: Array
    q2: Array
    k2: Array
    v: Array
    lam: Array
    bias: Any = None
    sinks: Array | None = None
    norm_weight: Array | None = None


def beside(lam: Array, out: Array) -> Array:
    """Return λ with axes that broadcast against out (..., H, T, E)."""
    return lam if lam.ndim == 0 else lam.reshape(lam.shape if out.ndim == 2 else (-1, 1, 1))
