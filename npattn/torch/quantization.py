"""Numbers of 8 bits and their factors, as torch tensors; what has a gradient has it by autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike

from npattn import quantization
from npattn.errors import DtypeError
from npattn.problem.descales import check_descale, spread
from npattn.quantization import FORMATS, Per, largest
from npattn.torch.tensors import cast, short_name, to_host
from npattn.torch.twins import Tensors

__all__ = ["FORMATS", "Quantized", "dequantize", "fake_quantize", "quantize"]

Tensor = torch.Tensor


class Quantized(NamedTuple):
    """A tensor in a format of 8 bits, and its descale, as `npattn.quantization.Quantized`."""

    values: Tensor
    descale: Tensor


_tensors = Tensors(__name__)
quantize = _tensors.bind_on_host(quantization.quantize, Quantized)


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
    wide: Any = descale.double()
    factors: Any = spread(wide, tuple(values.shape), rows, _tensors)
    return values.double() * factors  # type: ignore[no-any-return]


def fake_quantize(
    x: Tensor, dtype: Any = torch.float8_e4m3fn,
    *, per: Per = "tensor", heads: int | None = None, rows: int | None = None,
    descale: ArrayLike | Tensor | None = None, scale: ArrayLike | Tensor | None = None,
) -> Tensor:  # fmt: skip
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
    factors: Any = found.descale.double()
    limit: Any = top * spread(factors, tuple(x.shape), rows, _tensors)
    bounded = torch.where(x.double().abs() > limit, x.detach(), x)
    return bounded + (cast(rounded, x.dtype) - bounded).detach()
