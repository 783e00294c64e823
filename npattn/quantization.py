"""Numbers of 8 bits and the factors (descales) that stand for q, k, v and o in quantized kernels.

    x ≈ values · descale        values = round(x / descale), saturated at the ends of the format

A descale belongs to a whole array, to a head, to a group of heads, or to a block of rows of a head.
The product is exact in float64, so that an oracle of a quantized kernel is
``npattn.attention(*(dequantize(values, descale) for ... in q, k, v))``.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npattn.arrays import Array, finfo
from npattn.checks import check_integer, read_floating
from npattn.errors import DtypeError, OptionError, ShapeError

__all__ = [
    "FORMATS",
    "Per",
    "Quantized",
    "check_descale",
    "dequantize",
    "dequantize_backward",
    "largest",
    "quantize",
    "quantize_backward",
    "repeats",
    "spread",
]

FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8")
"""Formats of the values, by dtype."""
Per = Literal["tensor", "head", "block"]


class Quantized(NamedTuple):
    """An array in a format of 8 bits.

    Attributes
    ----------
    values : ndarray (..., T, D)
        Of one of `FORMATS`.
    descale : ndarray of float32
        () of the whole array, (...) of each head, or (..., blocks) of each block of rows.
    """

    values: Array
    descale: Array


def largest(dtype: Any) -> float:
    """Return the largest number of a format that is used: 448, 57344, and 127 for int8."""
    name = np.dtype(dtype).name
    if name not in FORMATS:
        raise DtypeError(f"dtype is {name}, must be one of {', '.join(FORMATS)}")
    return 127.0 if name == "int8" else float(finfo(dtype).max)


def quantize(
    x: ArrayLike,
    dtype: Any = "float8_e4m3fn",
    *,
    per: Per = "tensor",
    heads: int | None = None,
    rows: int | None = None,
    descale: ArrayLike | None = None,
) -> Quantized:
    """Round an array to a format of 8 bits.

    Parameters
    ----------
    x : float array_like (..., H, T, D)
    dtype : {"float8_e4m3fn", "float8_e5m2", "int8"}, default "float8_e4m3fn"
    per : {"tensor", "head", "block"}, default "tensor"
        What has a descale of its own.
    heads : int, optional
        Number of groups of heads that share one each, with per="head"; default: H. With K, that of
        the keys, it is FlashAttention 3's ``q_descale``.
    rows : int, optional
        Number of rows in a block, with per="block".
    descale : float array_like, optional
        Descales that are known beforehand; default: the largest absolute value by the largest
        number of the format, and 1 where that is 0.

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
        If `per` is none of the three, if `heads` or `rows` stands beside another one or `rows` is
        missing, or if a descale is not a finite number above 0.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.quantization import quantize
    >>> quantize(np.array([[1.0, -127.0, 0.6]]), "int8")
    Quantized(values=array([[   1, -127,    1]], dtype=int8), descale=array(1., dtype=float32))
    """
    x, top = _read("x", x), largest(dtype)
    if descale is None:
        descale = _descales(x, per, heads, rows) / np.float64(top)
        descale = np.where(descale == 0, 1.0, descale).astype(np.float32)
    elif per != "tensor" or heads is not None:
        raise OptionError("got per= or heads= beside descale=, whose shape says what each is of")
    descale = check_descale(descale)
    scaled = x / spread(descale, x.shape, rows)
    bounded = np.clip(scaled, -top, top)
    whole = np.rint(bounded) if np.dtype(dtype) == np.int8 else bounded
    return Quantized(whole.astype(dtype), descale)


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


def dequantize(values: ArrayLike, descale: ArrayLike, *, rows: int | None = None) -> Array:
    """Return values · descale, exactly.

    Parameters
    ----------
    values : array_like (..., H, T, D)
        Of a floating dtype, or int8.
    descale : float array_like
        () of the whole array, (..., H) of each head, (..., K) where K divides H of each group of
        heads, or (..., H, blocks) of each block of rows; leading axes broadcast.
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
    return dx * factor, _gather(dx * values, descale, rows)


def spread(descale: Array, shape: tuple[int, ...], rows: int | None = None) -> Array:
    """Return descales in a shape that broadcasts against an array (..., H, T, D) of a shape.

    Raises
    ------
    ShapeError, OptionError
        As of `repeats`.
    """
    blocks, heads = repeats(descale.shape, shape, rows)
    if descale.ndim == 0:
        return descale
    if blocks:
        descale = np.repeat(descale, blocks, axis=-1)[..., : shape[-2], None]
    else:
        descale = descale[..., None, None]
    return np.repeat(descale, heads, axis=-3) if heads > 1 else descale


def repeats(descale: tuple[int, ...], shape: tuple[int, ...], rows: int | None) -> tuple[int, int]:
    """Return how often each descale stands for rows (0: of whole heads), and for heads.

    Parameters
    ----------
    descale, shape : tuple of int
        Shapes of the descales and of the array (..., H, T, D) that they belong to.
    rows : int or None
        Number of rows in a block.

    Raises
    ------
    ShapeError
        If they fit no part of it.
    OptionError
        If `rows` stands beside descales that are not of blocks, or is missing.
    """
    of_blocks = bool(descale) and len(descale) == len(shape) - 1
    if rows is not None and not of_blocks:
        raise OptionError(f"rows is {rows}, must be left out: descale {descale} has no blocks")
    if not descale:
        return 0, 1
    lead = descale[:-1] if of_blocks else descale
    fits = len(lead) == len(shape) - 2
    if of_blocks:
        if rows is None:
            raise OptionError(f"descale {descale} is of blocks of rows: say how many with rows=")
        fits = fits and descale[-1] == -(-shape[-2] // check_integer("rows", rows, least=1))
    heads = 1
    if fits and lead:
        own, whole = lead[-1], shape[-3]
        heads = whole // own if own > 1 and whole % own == 0 else 1
        fits = own in (1, whole) or heads > 1
        fits = fits and all(n in (1, m) for n, m in zip(lead[:-1], shape[:-3], strict=True))
    if not fits:
        raise ShapeError(
            f"descale has shape {descale}, must be (), {shape[:-2]} or, for blocks of rows, "
            f"{shape[:-2]} and their number: the array has shape {shape}"
        )
    return rows or 0, heads


def _descales(x: Array, per: str, heads: int | None, rows: int | None) -> Array:
    """Return the largest absolute value of each part that has a descale."""
    if per not in ("tensor", "head", "block"):
        raise OptionError(f"per is {per!r}, must be tensor, head or block")
    if heads is not None and per != "head":
        raise OptionError(f"heads is {heads}, must be left out with per={per!r}")
    if (rows is None) == (per == "block"):
        must = "given" if rows is None else "left out"
        raise OptionError(f"rows is {rows}, must be {must} with per={per!r}")
    if not np.isfinite(x).all():
        raise OptionError("x has NaN or inf, which have no descale: pass descale=")
    size = abs(x)
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


def _gather(terms: Array, descale: Array, rows: int | None) -> Array:
    """Return the sum of the terms (..., H, T, D) that belong to each descale."""
    if descale.ndim == 0:
        return np.asarray(terms.sum())
    if rows is None:
        sums = terms.sum((-2, -1))
    else:
        starts = np.arange(0, terms.shape[-2], rows)
        whole = terms.sum(-1)
        sums = np.add.reduceat(whole, starts, axis=-1) if len(starts) else whole
    head = -1 if rows is None else -2
    if sums.ndim + head >= 0 and descale.shape[head] not in (1, sums.shape[head]):
        split = [*sums.shape]
        split[head : head + 1 or None] = [descale.shape[head], -1]
        sums = sums.reshape(split).sum(head if head == -1 else -2)
    axes = tuple(n for n, size in enumerate(descale.shape) if size == 1 and sums.shape[n] != 1)
    return np.asarray(sums.sum(axes, keepdims=True))


def _read(name: str, x: ArrayLike) -> Array:
    """Return a real array of at least two axes as float64."""
    array = _read_real(name, x)
    if array.ndim < 2:
        raise ShapeError(f"{name} has shape {array.shape}, must be (..., T, D)")
    return array.astype(np.float64)


def _read_values(values: ArrayLike) -> Array:
    array = np.asarray(values)
    return _read("values", array.astype(np.float64) if array.dtype == np.int8 else array)


def check_descale(descale: ArrayLike) -> Array:
    """Return descales as an array. Raises OptionError if one is not a finite number above 0."""
    array = _read_real("descale", descale)
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise OptionError("descale must be finite numbers above 0")
    return array


def _read_real(name: str, x: ArrayLike) -> Array:
    array = read_floating(name, x)
    if array.dtype.kind == "c":
        raise DtypeError(f"{name} is {array.dtype}, must be real")
    return array
