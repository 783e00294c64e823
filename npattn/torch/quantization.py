"""Numbers of 8 bits and their factors, as torch tensors; what has a gradient has it by autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike

from npattn.descales import check_descale, repeats
from npattn.errors import DtypeError
from npattn.quantization import FORMATS, Per, largest
from npattn.quantization import quantize as quantize_array
from npattn.torch.tensors import cast, short_name, to_host

__all__ = ["FORMATS", "Quantized", "dequantize", "fake_quantize", "quantize"]

Tensor = torch.Tensor


class Quantized(NamedTuple):
    """A tensor in a format of 8 bits, and its descale, as `npattn.quantization.Quantized`."""

    values: Tensor
    descale: Tensor


def quantize(
    x: Tensor,
    dtype: Any = torch.float8_e4m3fn,
    *,
    per: Per = "tensor",
    heads: int | None = None,
    rows: int | None = None,
    descale: ArrayLike | Tensor | None = None,
    scale: ArrayLike | Tensor | None = None,
) -> Quantized:
    """Round a tensor to a format of 8 bits, as `npattn.quantization.quantize`.

    Without gradient: `fake_quantize` has one.

    Parameters
    ----------
    x : float tensor (..., H, T, D)
    dtype : {torch.float8_e4m3fn, torch.float8_e5m2, torch.int8} or their names
    per, heads, rows, descale, scale
        As of `npattn.quantization.quantize`.

    Returns
    -------
    Quantized
        On the device of x.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As of `npattn.quantization.quantize`.
    """
    name = short_name(dtype) if isinstance(dtype, torch.dtype) else str(dtype)
    own, other = (to_host(f) if isinstance(f, Tensor) else f for f in (descale, scale))
    found = quantize_array(
        to_host(x), name, per=per, heads=heads, rows=rows, descale=own, scale=other
    )
    # NumPy's float8 is none of torch's: the bits are the same.
    values = torch.from_numpy(found.values.view("int8")).view(getattr(torch, name))
    return Quantized(values.to(x.device), torch.from_numpy(found.descale.copy()).to(x.device))


def dequantize(values: Tensor, descale: Tensor, *, rows: int | None = None) -> Tensor:
    """Return values · descale in float64, as `npattn.quantization.dequantize`.

    Parameters
    ----------
    values : tensor (..., H, T, D)
        Of a floating dtype, or int8; differentiable unless it is of 8 bits.
    descale : float tensor
        As of `npattn.quantization.dequantize`; differentiable.
    rows : int, optional
        Number of rows in a block, if there is a descale for each.

    Returns
    -------
    float64 tensor (..., H, T, D)

    Raises
    ------
    ShapeError, OptionError
        As of `npattn.quantization.dequantize`.
    DtypeError
        If values is neither floating nor int8.
    """
    if not (values.is_floating_point() or values.dtype == torch.int8):
        raise DtypeError(f"values is {short_name(values.dtype)}, must be floating or int8")
    check_descale(to_host(descale))
    return values.double() * spread(descale.double(), tuple(values.shape), rows)


def fake_quantize(
    x: Tensor,
    dtype: Any = torch.float8_e4m3fn,
    *,
    per: Per = "tensor",
    heads: int | None = None,
    rows: int | None = None,
    descale: ArrayLike | Tensor | None = None,
    scale: ArrayLike | Tensor | None = None,
) -> Tensor:
    """Return what `quantize` and `dequantize` leave of a tensor, differentiable by autograd.

    The gradient is that of x itself, and 0 where a value is saturated (straight-through
    estimator).

    Parameters
    ----------
    x, dtype, per, heads, rows, descale, scale
        As of `quantize`.

    Returns
    -------
    tensor (..., H, T, D) of the dtype of x

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As of `quantize`.
    """
    found = quantize(x, dtype, per=per, heads=heads, rows=rows, descale=descale, scale=scale)
    rounded = dequantize(found.values, found.descale, rows=rows)
    top = largest(short_name(found.values.dtype))
    limit = top * spread(found.descale.double(), tuple(x.shape), rows)
    bounded = torch.where(x.double().abs() > limit, x.detach(), x)
    return bounded + (cast(rounded, x.dtype) - bounded).detach()


def spread(descale: Tensor, shape: tuple[int, ...], rows: int | None = None) -> Tensor:
    """Return descales in a shape that broadcasts against a tensor (..., H, T, D) of a shape."""
    blocks, heads = repeats(tuple(descale.shape), shape, rows)
    if descale.ndim == 0:
        return descale
    if blocks:
        descale = descale.repeat_interleave(blocks, -1)[..., : shape[-2], None]
    else:
        descale = descale[..., None, None]
    return descale.repeat_interleave(heads, -3) if heads > 1 else descale
