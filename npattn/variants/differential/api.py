"""Differential attention: the difference of two softmaxes, o = (P1 − λ P2) v, and its gradients.

    P_i = softmax(scale · q_i k_iᵀ + bias) over the visible keys        both read the same values
    y = P1 v − λ P2 v        out = out_scale · y / √(mean y² + eps) · norm_weight    (with norm)
    λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init

Every option of `npattn.attention` applies to both softmaxes. Source: Ye et al. 2024, arXiv
2410.05258, eq. 1 to 3. Gradients: docs/differential.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.multihead.projections import NormResiduals, normalise, normalise_backward
from npattn.oracle import api
from npattn.oracle.signatures import only_out
from npattn.oracle.twins import on_arrays, widen
from npattn.problem import Forward
from npattn.problem.arrays import Array, MaskLike
from npattn.problem.checks import check_cotangent, check_flag, check_not_negative, check_result
from npattn.problem.foreign import reject_options, reject_unknown_options


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


@reject_unknown_options
@on_arrays
def forward(
    xp: Any, /, q1: ArrayLike, k1: ArrayLike, q2: ArrayLike, k2: ArrayLike, v: ArrayLike,
    mask: ArrayLike | MaskLike | None = None,
    *, lam: float | ArrayLike, norm: bool = False, norm_weight: ArrayLike | None = None,
    norm_eps: float = 1e-5, out_scale: float = 1.0, **options: Any,
) -> DifferentialForward:  # fmt: skip
    """Differential attention with its weights and the two attentions, as `backward` needs them.

    Parameters
    ----------
    q1, q2 : array_like (..., H, T, D)
        Queries of the two softmaxes, shaped alike. Rank 2 (all arrays) is one head.
    k1, k2 : array_like (..., K, S, D)
        Their keys, shaped alike; K divides H.
    v : array_like (..., K, S, E)
        In the paper E is 2·D.
    mask : bool array_like or one of `npattn.masks`, optional
        True = may attend, in both.
    lam : float or float array_like (H,)
        λ; `reparametrise` computes it from the four vectors of the paper.
    norm : bool, default False
        Divide the result of each query and head by its root mean square over E.
    norm_weight : float array_like (E,), optional
        Factors after that, with norm.
    norm_eps : float, default 1e-5
        Added to the mean square under the root.
    out_scale : float, default 1.0
        Multiplies the output: 1 − λ_init in the paper.
    **options
        Every other option of `npattn.attention`, for both softmaxes; not a narrow dtype.

    Returns
    -------
    DifferentialForward
        .out (..., H, T, E), .weights (..., H, T, S), .first, .second, .lam

    Raises
    ------
    ShapeError
        If an array has a shape that does not fit the others.
    DtypeError
        If an array has a dtype that is not legal here, or dtype is bfloat16 or float16.
    OptionError
        If an option has an illegal value, does not exist, or does not go with another one.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.variants import differential
    >>> q, k, v = np.zeros((1, 2, 4)), np.zeros((1, 2, 4)), np.array([[[1.0], [3.0]]])
    >>> differential.attention(q, k, q, k, v, causal=True, lam=0.5)[0, :, 0]
    array([0.5, 1. ])
    """
    reject_options("attention", options, OPTIONS)
    arrays, facts = xp.read(q1=q1, k1=k1, q2=q2, k2=k2)
    check_alike("q1", "q2", facts)
    check_alike("k1", "k2", facts)
    first = xp.forward(arrays["q1"], arrays["k1"], v, mask, **options)
    if first.problem.storage is not None:
        raise DtypeError(
            f"dtype is {str(first.problem.storage).removeprefix('torch.')}, must be float32 or "
            "float64: differential attention emulates no mixed precision"
        )
    factors = xp.widen(read_lambda(xp, lam, first), first.out)
    out_scale = check_out_scale(out_scale)
    weight, of_weight = None, None
    if norm_weight is not None:
        weight, of_weight = (
            x["norm_weight"] for x in xp.read(beside=first.out, norm_weight=norm_weight)
        )
    check_norm(norm, of_weight, norm_eps, first.problem.E)
    second = xp.forward(arrays["q2"], arrays["k2"], v, mask, **options)
    y = first.out - beside(factors, first.out) * second.out
    residuals = None
    if norm:
        weight = None if weight is None else xp.widen(weight, first.out)
        residuals = normalise(y, "rms", weight, None, norm_eps, xp)
        y = residuals.y
    out = y if out_scale == 1 else out_scale * y
    eps = float(norm_eps) if norm else 0.0
    return DifferentialForward(out, first, second, factors, residuals, weight, out_scale, eps)


attention = only_out(
    "attention", forward, np.ndarray, "Exact differential attention, (P1 − λ P2) v.",
    "array (..., H, T, E)",
)  # fmt: skip


@reject_unknown_options
def backward(
    fwd: DifferentialForward, dout: ArrayLike, dweights: ArrayLike | None = None
) -> DifferentialGradients:
    """Exact gradients of Σ dout·out + Σ dweights·weights.

    Parameters
    ----------
    fwd : DifferentialForward
        Result of `forward`.
    dout : float array_like (..., H, T, E)
    dweights : float array_like (..., H, T, S), optional
        Cotangent of P1 − λ P2.

    Returns
    -------
    DifferentialGradients
        .q1 .k1 .q2 .k2 .v .lam .bias .sinks .norm_weight

    Raises
    ------
    ShapeError
        If a cotangent is not shaped like its result.
    DtypeError
        If a cotangent is not floating.
    OptionError
        If `fwd` is not a result of `forward`.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.variants import differential
    >>> x = np.ones((3, 2))
    >>> fwd = differential.forward(x, x, x, x, x, lam=0.25)
    >>> float(differential.backward(fwd, np.ones_like(fwd.out)).lam)
    -6.0
    """
    check_result(fwd, DifferentialForward, "npattn.variants.differential.forward")
    lam = beside(fwd.lam, fwd.out)
    do = check_cotangent("dout", dout, fwd.out.shape)
    dy = fwd.out_scale * do.astype(widen(fwd.out.dtype, do), copy=False)
    dnorm_weight = None
    if fwd.norm is not None:
        dy, dnorm_weight, _ = normalise_backward(dy, fwd.norm, "rms", fwd.norm_weight)
    dlam = -dy * fwd.second.out  # from y = o1 − λ o2
    total = dlam.sum((-1, -2))
    d1 = d2 = None
    if dweights is not None:
        d1 = check_cotangent("dweights", dweights, (*fwd.out.shape[:-1], fwd.first.problem.S))
        d2 = -lam * d1
        total = total - (d1 * fwd.second.weights).sum((-1, -2))  # from P1 − λ P2
    one = api.backward(fwd.first, dy, None, d1)
    two = api.backward(fwd.second, -lam * dy, None, d2)
    return DifferentialGradients(
        q1=one.q, k1=one.k, q2=two.q, k2=two.k, v=one.v + two.v,
        lam=_sum_heads(total, fwd.lam.shape), bias=_add(one.bias, two.bias),
        sinks=_add(one.sinks, two.sinks),
        norm_weight=None if fwd.norm_weight is None else dnorm_weight,
    )  # fmt: skip


def _sum_heads(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum (..., H) to the shape () or (H,) of λ."""
    return np.asarray(x.sum() if shape == () else x.reshape(-1, *shape).sum(0))


def _add(one: Any, two: Any) -> Any:
    """Add two gradients of a bias: arrays, tuples of them, or None."""
    if one is None:
        return None
    if isinstance(one, tuple):
        return tuple(_add(x, y) for x, y in zip(one, two, strict=True))
    return one + two


OPTIONS = (
    *("causal", "window", "bias", "scale", "softcap", "score_mod", "sinks", "dropout_mask"),
    *("dropout_rate", "dtype", "engine", "precision", "conventions"),
)
"""Options of both softmaxes; one whose gradient is not returned here is not among them."""


def check_alike(one: str, two: str, arrays: Mapping[str, Array]) -> None:
    """Check that two arrays have one shape."""
    first, second = arrays[one].shape, arrays[two].shape
    if first != second:
        raise ShapeError(f"{two} has shape {second}, must have the shape {first} of {one}")


def read_lambda(xp: Any, lam: Any, first: Forward) -> Any:
    """Return λ as an array () or (H,)."""
    if isinstance(lam, (int, float)) and not isinstance(lam, bool):
        return xp.full((), float(lam), like=first.out)
    arrays, facts = xp.read(beside=first.out, lam=lam)
    shape, H = facts["lam"].shape, first.problem.H
    if shape not in ((), (H,)):
        raise ShapeError(f"lam has shape {shape}, must be one number, or have (H,) = ({H},)")
    return arrays["lam"]


def check_out_scale(value: Any) -> float:
    """Return the factor of the output as a float."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(float(value)):
        raise OptionError(f"out_scale is {value!r}, must be a finite number")
    return float(value)


def check_norm(norm: Any, weight: Any, eps: Any, E: int) -> None:
    """Check the options of the norm, and the shape of its weight."""
    check_flag("norm", norm)
    check_not_negative("norm_eps", eps)
    if weight is not None and not norm:
        raise OptionError("got norm_weight, but norm is False; pass norm=True")
    if weight is not None and weight.shape != (E,):
        raise ShapeError(f"norm_weight has shape {weight.shape}, must have shape (E,) = ({E},)")
