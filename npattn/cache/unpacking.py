"""Queries, keys and values in one array, as fused projections have them, and apart.

parts    (..., T, 3, H, D)    (..., T, 2, H, D)
heads    (..., T, H, 3, D)    (..., T, H, 2, D)
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import ShapeError
from npattn.problem.arrays import Array
from npattn.problem.checks import check_choice, read_array
from npattn.problem.foreign import reject_unknown_options

AXES = {"parts": -3, "heads": -2}
Order = Literal["parts", "heads"]
Layout = Literal["BHTD", "BTHD"]


@reject_unknown_options
def unpack(
    packed: Any, *, order: Order = "parts", layout: Layout = "BHTD"
) -> tuple[Any, Any, Any] | tuple[Any, Any]:
    """Part q, k and v, or k and v, that are in one array.

    Parameters
    ----------
    packed : array (..., T, n, H, D) or (..., T, H, n, D)
        n is 3 for q, k and v, 2 for k and v. A tensor of torch or an array of JAX too.
    order : {"parts", "heads"}, default "parts"
        "parts" has n before the heads, as flash_attn_qkvpacked_func; "heads" behind them, as ONNX
        Runtime's MultiHeadAttention and Megatron-LM.
    layout : {"BHTD", "BTHD"}, default "BHTD"
        Of the results: "BHTD" is what `npattn.attention` takes, "BTHD" what `varlen` does.

    Returns
    -------
    tuple of array (..., H, T, D) or (..., T, H, D)
        Views of `packed`: gradients of tensors flow to it.

    Raises
    ------
    OptionError
        If order or layout is none of these.
    ShapeError
        If there are not 2 or 3 parts.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> qkv = np.ones((2, 7, 3, 5, 8))  # (B, T, 3, H, D)
    >>> npattn.attention(*npattn.cache.unpack(qkv)).shape
    (2, 5, 7, 8)
    """
    _check_words(order, layout)
    packed = packed if hasattr(packed, "swapaxes") else read_array("packed", packed)
    shape, axis = tuple(packed.shape), AXES[order]
    if len(shape) < 4 or shape[axis] not in (2, 3):
        must = "(..., T, n, H, D)" if order == "parts" else "(..., T, H, n, D)"
        raise ShapeError(
            f"packed has shape {shape}, must be {must} with n = 3 for q, k and v, 2 for k and v: "
            'pass order="heads" or "parts" where n is on the other side of the heads'
        )
    rest = (slice(None),) * (-axis - 1)
    parts = tuple(packed[(..., n, *rest)] for n in range(shape[axis]))
    return parts if layout == "BTHD" else tuple(x.swapaxes(-2, -3) for x in parts)


@reject_unknown_options
def pack(*parts: ArrayLike, order: Order = "parts", layout: Layout = "BHTD") -> Array:
    """Put q, k and v, or k and v, into one array: the way back of `unpack`.

    Packed gradients of q, k and v are the gradient of packed q, k and v.

    Parameters
    ----------
    *parts : array_like
        Two or three of one shape, (..., H, T, D) or by `layout` (..., T, H, D).
    order, layout
        As in `unpack`.

    Returns
    -------
    ndarray (..., T, n, H, D) or by `order` (..., T, H, n, D)

    Raises
    ------
    OptionError
        If order or layout is none of these.
    ShapeError
        If there are not 2 or 3 parts, or their shapes differ.
    """
    _check_words(order, layout)
    arrays = [read_array("packed", x) for x in parts]
    shapes = [x.shape for x in arrays]
    if len(shapes) not in (2, 3) or len(set(shapes)) > 1 or len(shapes[0]) < 3:
        raise ShapeError(
            f"parts have shapes {', '.join(map(str, shapes))}, must be two or three of one shape "
            "(..., H, T, D)"
        )
    apart = arrays if layout == "BTHD" else [x.swapaxes(-2, -3) for x in arrays]
    return np.stack(apart, AXES[order])


def _check_words(order: Any, layout: Any) -> None:
    check_choice("order", order, get_args(Order))
    check_choice("layout", layout, get_args(Layout))
