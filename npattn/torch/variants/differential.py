"""Differential attention on torch tensors, differentiable by autograd.

Meanings are those of `npattn.variants.differential`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import ArrayLike

from npattn.arrays import MaskLike
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem import Forward
from npattn.torch.api import forward as attend
from npattn.torch.tensors import short_name, stand_in
from npattn.variants.differential import initial_lambda
from npattn.variants.differential.arguments import (
    check_alike,
    check_norm,
    check_options,
    check_out_scale,
)

__all__ = ["DifferentialForward", "attention", "forward", "initial_lambda", "reparametrise"]

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class DifferentialForward:
    """Results of differential attention.

    Attributes
    ----------
    out : Tensor (..., H, T, E)
    first, second : npattn.torch.Forward
        The two attentions, with .out .lse .weights.
    lam : Tensor () or (H,)
    weights : Tensor (..., H, T, S)
        P1 − λ P2, before dropout; differentiable once.
    """

    out: Tensor
    first: Forward
    second: Forward
    lam: Tensor

    @property
    def weights(self) -> Tensor:
        one: Any = self.first.weights
        return one - _beside(self.lam, self.out) * self.second.weights  # type: ignore[no-any-return]


def attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    mask: Tensor | ArrayLike | MaskLike | None = None,
    *,
    lam: float | Tensor,
    norm: bool = False,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    out_scale: float = 1.0,
    **options: Any,
) -> Tensor:
    """Exact differential attention on tensors, as `npattn.variants.differential.attention`.

    Parameters
    ----------
    q1, k1, q2, k2, v : Tensor
        Shaped as there, of real floating dtypes, on one device.
    lam : float or Tensor () or (H,)
    norm_weight : Tensor (E,), optional
    mask, norm, norm_eps, out_scale, **options
        As there, of `npattn.torch.attention`.

    Returns
    -------
    Tensor (..., H, T, E)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As there; OptionError also if tensors are on different devices.

    Examples
    --------
    >>> import torch, npattn.torch
    >>> x, lam = torch.ones(1, 3, 2), torch.tensor(0.25, requires_grad=True)
    >>> npattn.torch.variants.differential.attention(x, x, x, x, x, lam=lam).sum().backward()
    >>> lam.grad
    tensor(-6.)
    """
    return forward(
        q1, k1, q2, k2, v, mask, lam=lam, norm=norm, norm_weight=norm_weight, norm_eps=norm_eps,
        out_scale=out_scale, **options,
    ).out  # fmt: skip


def forward(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    mask: Tensor | ArrayLike | MaskLike | None = None,
    *,
    lam: float | Tensor,
    norm: bool = False,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    out_scale: float = 1.0,
    **options: Any,
) -> DifferentialForward:
    """Differential attention with its weights and the two attentions.

    Parameters
    ----------
    q1, k1, q2, k2, v, mask, lam, norm, norm_weight, norm_eps, out_scale, **options
        As in `attention`.

    Returns
    -------
    DifferentialForward
        .out (..., H, T, E), .weights (..., H, T, S), .first, .second, .lam

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As in `attention`.
    """
    check_options(options)
    for one, two in (({"q1": q1}, {"q2": q2}), ({"k1": k1}, {"k2": k2})):
        check_alike(**{n: stand_in(n, _tensor(n, x)) for n, x in (one | two).items()})
    first = attend(q1, k1, v, mask, **options)
    o1: Any = first.out
    if first.problem.storage is not None:
        raise DtypeError(
            f"dtype is {short_name(o1.dtype)}, must be float32 or float64: differential attention "
            "emulates no mixed precision"
        )
    factors = _read_lambda(lam, first).to(o1.dtype)
    out_scale = check_out_scale(out_scale)
    own = None if norm_weight is None else stand_in("norm_weight", _on_device(
        "norm_weight", norm_weight, o1
    ))  # fmt: skip
    check_norm(norm, own, norm_eps, first.problem.E)
    second = attend(q2, k2, v, mask, **options)
    y = o1 - _beside(factors, o1) * second.out
    if norm:
        y = y / ((y * y).mean(-1, keepdim=True) + norm_eps).sqrt()
        y = y if norm_weight is None else y * norm_weight.to(y.dtype)
    return DifferentialForward(y if out_scale == 1 else out_scale * y, first, second, factors)


def reparametrise(
    lambda_q1: Tensor,
    lambda_k1: Tensor,
    lambda_q2: Tensor,
    lambda_k2: Tensor,
    lambda_init: float,
) -> Tensor:
    """λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init.

    Parameters
    ----------
    lambda_q1, lambda_k1, lambda_q2, lambda_k2 : Tensor (D,) or (H, D)
        All of one shape.
    lambda_init : float

    Returns
    -------
    Tensor () or (H,), in the widest dtype of the four

    Raises
    ------
    ShapeError
        If the four differ in shape, or have no axis.
    DtypeError
        If one is no tensor.
    """
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    for name, x in zip(names, (lambda_q1, lambda_k1, lambda_q2, lambda_k2), strict=True):
        if _tensor(name, x).ndim == 0 or x.shape != lambda_q1.shape:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, must have shape (D,) or (H, D), that of "
                f"lambda_q1 {tuple(lambda_q1.shape)}"
            )
    first, second = (lambda_q1 * lambda_k1).sum(-1).exp(), (lambda_q2 * lambda_k2).sum(-1).exp()
    return first - second + lambda_init


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise DtypeError(
            f"{name} is {type(value).__name__}, must be a tensor: use npattn.variants.differential"
        )
    return value


def _on_device(name: str, value: Any, beside: Tensor) -> Tensor:
    if _tensor(name, value).device != beside.device:
        raise OptionError(f"{name} is on {value.device}, must be on {beside.device} as q1")
    return value  # type: ignore[no-any-return]


def _read_lambda(lam: Any, first: Forward) -> Tensor:
    """Return λ as a tensor () or (H,)."""
    o: Any = first.out
    if isinstance(lam, (int, float)) and not isinstance(lam, bool):
        return o.new_tensor(float(lam))  # type: ignore[no-any-return]
    factors, H = _on_device("lam", lam, o), first.problem.H
    if not factors.is_floating_point():
        raise DtypeError(f"lam is {short_name(factors.dtype)}, must be real floating")
    if tuple(factors.shape) not in ((), (H,)):
        raise ShapeError(
            f"lam has shape {tuple(factors.shape)}, must be one number, or have (H,) = ({H},)"
        )
    return factors


def _beside(lam: Tensor, out: Tensor) -> Tensor:
    """Return λ with axes that broadcast against out (..., H, T, E)."""
    return lam if lam.ndim == 0 or out.ndim == 2 else lam[:, None, None]
