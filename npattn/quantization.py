"""Numbers of 8 bits and the factors (descales) that stand for q, k, v and o in quantized kernels.

    x ≈ values · descale        values = round(x / descale), saturated at the ends of the format

The quotient is a float64, and rounded once: to the nearest number of the format, ties to even.

A descale belongs to a whole array, to a head, to a group of heads, to a block of rows of a head, or
to one row, a token. The product is exact in float64, so that an oracle of a quantized kernel is
``npattn.attention(*(dequantize(values, descale) for ... in q, k, v))``, and of one that returns o
in 8 bits ``quantize(o, descale=o_descale)``. Formats are symmetric: none has a zero point.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem.arrays import Array, cast, finfo
from npattn.problem.checks import check_choice, check_integer, read_array
from npattn.problem.descales import check_descale, gather, read_real, spread
from npattn.problem.foreign import reject_unknown_options

__all__ = [
    "FORMATS", "Per", "Quantized", "dequantize", "dequantize_backward", "largest", "quantize",
    "quantize_backward",
]  # fmt: skip
__dir__ = __all__.copy


FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8")
"""Formats of the values, by dtype."""
Per = Literal["tensor", "head", "block", "token"]


class Quantized(NamedTuple):
    """An array in a format of 8 bits.

    Attributes
    ----------
    values : ndarray (..., T, D)
        Of one of `FORMATS`.
    descale : ndarray of float32
        () of the whole array, (...) of each head, (..., blocks) of each block of rows, or (..., T)
        of each token.
    """

    values: Array
    descale: Array


def largest(dtype: Any) -> float:
    """Return the largest number of a format that is used: 448, 57344, and 127 for int8."""
    try:
        name = np.dtype(dtype).name
    except TypeError:  # NumPy knows no such name
        name = repr(dtype)
    if name not in FORMATS:
        zero = "; npattn has no zero points" if name == "uint8" else ""
        raise DtypeError(f"dtype is {name}, must be one of {', '.join(FORMATS)}{zero}")
    return 127.0 if name == "int8" else float(finfo(dtype).max)


@reject_unknown_options
def quantize(
    x: ArrayLike, dtype: Any = "float8_e4m3fn",
    *, per: Per = "tensor", heads: int | None = None, rows: int | None = None,
    descale: ArrayLike | None = None, scale: ArrayLike | None = None,
) -> Quantized:  # fmt: skip
    """Round an array to a format of 8 bits.

    Parameters
    ----------
    x : float array_like (..., H, T, D)
    dtype : {"float8_e4m3fn", "float8_e5m2", "int8"}, default "float8_e4m3fn"
    per : {"tensor", "head", "block", "token"}, default "tensor"
        What has a descale of its own.
    heads : int, optional
        Number of groups of heads that share one each, with per="head"; default: H. With K, that of
        the keys, it is FlashAttention 3's ``q_descale``.
    rows : int, optional
        Number of rows in a block, with per="block".
    descale : float array_like, optional
        Descales that are known beforehand; default: the largest absolute value by the largest
        number of the format, and 1 where that is 0.
    scale : float array_like, optional
        In place of `descale`, factors that x is multiplied by: cuDNN's ``scale_o``, where vLLM's
        ``output_scale`` and FlashInfer's ``o_scale`` are descales. The descale is then 1 / scale,
        in float64.

    Returns
    -------
    Quantized

    Raises
    ------
    ShapeError
        If x has less than two axes, its heads cannot be shared so, or `descale` fits no part of it.
    DtypeError
        If x is not real and floating, or `dtype` is none of the formats.
    OptionError
        If x has NaN and `dtype` is int8, if `per` is none of the four, if `heads` or `rows` stands
        beside another one or `rows` is missing, if both descale and scale are given, or if one is
        not a finite number above 0.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.quantization import quantize
    >>> quantize(np.array([[1.0, -127.0, 0.6]]), "int8")
    Quantized(values=array([[   1, -127,    1]], dtype=int8), descale=array(1., dtype=float32))
    """
    x, top = _read("x", x), largest(dtype)
    if descale is not None and scale is not None:
        raise OptionError("got descale beside scale, which is 1 / descale: pass one of them")
    if descale is None and scale is None:
        descale = _descales(x, per, heads, rows) / np.float64(top)
        descale = np.where(descale == 0, 1.0, descale).astype(np.float32)
    elif per != "tensor" or heads is not None:
        raise OptionError("got per= or heads= beside descale= or scale=, whose shape says what")
    if scale is not None:
        scale = check_descale(scale, "scale").astype(np.float64)
        descale, scaled = 1 / scale, x * spread(scale, x.shape, rows)
    else:
        assert descale is not None
        descale = check_descale(descale)
        scaled = x / spread(descale, x.shape, rows)
    if np.dtype(dtype) == np.int8 and np.isnan(scaled).any():
        raise OptionError("x has NaN, which int8 has not")
    bounded = np.clip(scaled, -top, top)
    rounded = np.rint(bounded) if np.dtype(dtype) == np.int8 else bounded
    return Quantized(cast(rounded, dtype), np.asarray(descale))


@reject_unknown_options
def quantize_backward(
    dvalues: ArrayLike, x: ArrayLike, dtype: Any, descale: ArrayLike, *, rows: int | None = None
) -> Array:
    """Return the gradient of x from that of its values, taken as if nothing was rounded.

    That is the straight-through estimator: 1 / descale, and 0 where a value is saturated. The
    descale counts as a constant.

    Parameters
    ----------
    dvalues : float array_like (..., H, T, D)
    x : float array_like (..., H, T, D)
        As it was given to `quantize`.
    dtype : {"float8_e4m3fn", "float8_e5m2", "int8"}
    descale : float array_like
        That of the result of `quantize`.
    rows : int, optional
        Number of rows in a block, if there is a descale for each.

    Returns
    -------
    ndarray (..., H, T, D) of float64

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As of `quantize`; ShapeError also if dvalues has another shape than x.
    """
    x, dvalues, top = _read("x", x), _read("dvalues", dvalues), largest(dtype)
    if dvalues.shape != x.shape:
        raise ShapeError(f"dvalues has shape {dvalues.shape}, must be {x.shape}")
    factor = spread(check_descale(descale), x.shape, rows)
    return np.where(abs(x / factor) > top, 0.0, dvalues / factor)


@reject_unknown_options
def dequantize(values: ArrayLike, descale: ArrayLike, *, rows: int | None = None) -> Array:
    """Return values · descale, exactly.

    Parameters
    ----------
    values : array_like (..., H, T, D)
        Of a floating dtype, or int8.
    descale : float array_like
        () of the whole array, (..., H) of each head, (..., K) where K divides H of each group of
        heads, (..., H, blocks) of each block of rows, or (..., H, T) of each token; leading axes
        broadcast.
    rows : int, optional
        Number of rows in a block, if there is a descale for each.

    Returns
    -------
    ndarray (..., H, T, D) of float64

    Raises
    ------
    ShapeError
        If values has less than two axes, or `descale` fits no part of it.
    DtypeError
        If values is neither real and floating nor int8, or `descale` is not real and floating.
    OptionError
        If a descale is not a finite number above 0; if `rows` stands beside a descale that is not
        of blocks, or is missing.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.quantization import dequantize
    >>> dequantize(np.array([[[2, -3]], [[4, 5]]], np.int8), np.array([0.5, 2.0]))
    array([[[ 1. , -1.5]],
    <BLANKLINE>
           [[ 8. , 10. ]]])
    """
    values = _read_values(values)
    return np.asarray(values * spread(check_descale(descale), values.shape, rows))


@reject_unknown_options
def dequantize_backward(
    dx: ArrayLike, values: ArrayLike, descale: ArrayLike, *, rows: int | None = None
) -> tuple[Array, Array]:
    """Return the gradients of values and of descale from that of their product.

    Parameters
    ----------
    dx : float array_like (..., H, T, D)
    values, descale, rows
        As of `dequantize`.

    Returns
    -------
    dvalues : ndarray (..., H, T, D) of float64
    ddescale : ndarray of float64
        Of the shape of descale.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As of `dequantize`; ShapeError also if dx has another shape than values.
    """
    values, dx, descale = _read_values(values), _read("dx", dx), check_descale(descale)
    if dx.shape != values.shape:
        raise ShapeError(f"dx has shape {dx.shape}, must be {values.shape}")
    factor = spread(descale, values.shape, rows)
    return dx * factor, gather(dx * values, descale, rows)


def _descales(x: Array, per: str, heads: int | None, rows: int | None) -> Array:
    """Return max |x| of each part of x, (..., S, D) or by head (..., H, S, D), with a descale."""
    check_choice("per", per, get_args(Per))
    if heads is not None and per != "head":
        raise OptionError(f"heads is {heads}, must be left out with per={per!r}")
    if (rows is None) == (per == "block"):
        must = "given" if rows is None else "left out"
        raise OptionError(f"rows is {rows}, must be {must} with per={per!r}")
    if not np.isfinite(x).all():
        raise OptionError("x has NaN or inf, which have no descale: pass descale=")
    size = abs(x)
    if per == "token":
        return np.asarray(size.max(-1, initial=0))
    if per == "tensor":
        return np.asarray(size.max(initial=0))
    if rows is not None:
        starts = np.arange(0, x.shape[-2], check_integer("rows", rows))
        if not len(starts):
            return np.zeros((*x.shape[:-2], 0))
        return np.maximum.reduceat(size.max(-1, initial=0), starts, axis=-1)
    top = np.asarray(size.max((-2, -1), initial=0))
    if heads is None:
        return top
    if x.ndim < 3 or check_integer("heads", heads) == 0 or x.shape[-3] % heads:
        raise ShapeError(f"heads is {heads}, must divide the heads of x {x.shape}")
    return np.asarray(top.reshape(*top.shape[:-1], heads, -1).max(-1, initial=0))


def _read(name: str, x: ArrayLike) -> Array:
    """Return a real array of at least two axes as float64."""
    array = read_real(name, x)
    if array.ndim < 2:
        raise ShapeError(f"{name} has shape {array.shape}, must be (..., T, D)")
    return array.astype(np.float64)


def _read_values(values: ArrayLike) -> Array:
    array = read_array("values", values)
    if array.dtype == np.uint8:
        raise DtypeError("values is uint8, must be floating or int8: npattn has no zero points")
    if array.dtype.kind in "biu" and array.dtype != np.int8:
        raise DtypeError(f"values is {array.dtype}, must be floating or int8")
    return _read("values", array.astype(np.float64) if array.dtype == np.int8 else array)
