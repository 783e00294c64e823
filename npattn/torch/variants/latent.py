"""Multi-head latent attention on torch tensors, as `npattn.variants.latent`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from npattn.checks import check_dtype, read_floating
from npattn.errors import DtypeError
from npattn.problem import Forward
from npattn.torch import api
from npattn.torch.flags import exact
from npattn.torch.tensors import has_float64, short_name, stand_in
from npattn.variants.latent import NAMES, Form, check_form, check_latent

__all__ = ["LatentResults", "attention", "forward"]

Tensor = torch.Tensor


class LatentResults(NamedTuple):
    """Output, lse, and the attention inside, which has the weights."""

    out: Tensor
    lse: Tensor
    attention: Forward

    @property
    def weights(self) -> Tensor:
        """Weights (..., H, T, S), differentiable once."""
        weights: Any = self.attention.weights
        return weights  # type: ignore[no-any-return]


def attention(
    q_nope: Tensor,
    q_rope: Tensor,
    c: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    form: Form = "unabsorbed",
    **options: Any,
) -> Tensor:
    """Multi-head latent attention, as `npattn.variants.latent.attention`.

    Parameters
    ----------
    q_nope, q_rope, c, k_rope, w_uk, w_uv : Tensor
        (..., H, T, N), (..., H, T, R), (..., S, C), (..., S, R), (H, C, N), (H, C, E), of floating
        dtypes on one device.
    form : {"unabsorbed", "absorbed"}, default "unabsorbed"
    **options
        As in `npattn.variants.latent.attention`, of `npattn.torch.attention`.

    Returns
    -------
    Tensor (..., H, T, E)

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `npattn.variants.latent.attention`; DtypeError also if one of the six is no tensor.
    """
    tensors = (q_nope, q_rope, c, k_rope, w_uk, w_uv)
    return forward(*tensors, form=form, **options).out


def forward(
    q_nope: Tensor,
    q_rope: Tensor,
    c: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    form: Form = "unabsorbed",
    **options: Any,
) -> LatentResults:
    """Multi-head latent attention with its lse and weights.

    Parameters
    ----------
    q_nope, q_rope, c, k_rope, w_uk, w_uv, form, **options
        As in `attention`.

    Returns
    -------
    LatentResults
        .out (..., H, T, E), .lse (..., H, T), .weights (..., H, T, S), .attention

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `attention`.
    """
    given = dict(zip(NAMES, (q_nope, q_rope, c, k_rope, w_uk, w_uv), strict=True))
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} is {type(x).__name__}, must be a tensor: use npattn.variants")
    arrays = {name: read_floating(name, stand_in(name, x)) for name, x in given.items()}
    sizes = check_latent({name: x.shape for name, x in arrays.items()})
    check_form(form, options)
    dtype = _compute_dtype(options.get("dtype"), tuple(arrays.values()), q_nope.device)
    own = {"scale": sizes.scale} | options | {"dtype": dtype}
    own["scale"] = sizes.scale if own["scale"] is None else own["scale"]

    query, rotary, c, k_rope, w_uk, w_uv = (x.to(dtype) for x in given.values())
    c, k_rope = c[..., None, :, :], k_rope[..., None, :, :]
    with exact(dtype, q_nope.device):
        if form == "unabsorbed":
            k, v = _join(_multiply(c, w_uk), k_rope), _multiply(c, w_uv)
            attention: Any = api.forward(_join(query, rotary), k, v, **own)
            out = attention.out
        else:
            absorbed = _multiply(query, w_uk.swapaxes(-1, -2))
            k, v = (x[..., : sizes.H, :, :] for x in (_join(c, k_rope), c))
            attention = api.forward(_join(absorbed, rotary), k, v, **own)
            out = _multiply(attention.out, w_uv)
    return LatentResults(out, attention.lse, attention)


def _compute_dtype(given: Any, arrays: tuple[Any, ...], device: torch.device) -> torch.dtype:
    """Return the dtype to compute in."""
    name = short_name(given) if isinstance(given, torch.dtype) else given
    wide, narrow = check_dtype(name, "dense", arrays)
    if narrow is not None or wide not in ("f4", "f8"):
        raise DtypeError(f"dtype is {given!r}, must be float32 or float64, and all tensors real")
    if wide == "f8" and (has_float64(device.type) or given is not None):
        return torch.float64
    return torch.float32


def _join(x: Tensor, y: Tensor) -> Tensor:
    """Join features of two tensors whose other axes broadcast."""
    lead = np.broadcast_shapes(tuple(x.shape[:-1]), tuple(y.shape[:-1]))
    return torch.cat([a.expand(*lead, a.shape[-1]) for a in (x, y)], dim=-1)


def _multiply(x: Tensor, w: Tensor) -> Tensor:
    """Multiply rows (..., H | 1, rows, m) by a matrix (H, m, n) of each head."""
    apply: Any = _Product.apply
    product: Tensor = apply(x, w)
    return product


class _Product(torch.autograd.Function):
    """x w, in whose gradient a hidden row that is not finite counts nothing [10]."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = (dy @ w.swapaxes(-1, -2)).sum_to_size(x.shape)
        # 0 · NaN is NaN: a row without gradient counts nothing, whatever stands in the other one.
        x = torch.where(~x.isfinite() & (dy == 0).all(-1, keepdim=True), 0, x)
        dy = torch.where(~dy.isfinite() & (x == 0).all(-1, keepdim=True), 0, dy)
        return dx, (x.swapaxes(-1, -2) @ dy).sum_to_size(w.shape)
