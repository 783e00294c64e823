"""Arguments of differential attention that `npattn.attention` has not: read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.arrays import Array
from npattn.checks import read_floating
from npattn.errors import OptionError, ShapeError
from npattn.foreign import unknown_option
from npattn.problem import Forward

__all__ = [
    "check_alike",
    "check_norm",
    "check_options",
    "check_out_scale",
    "read_lambda",
    "widen",
]


OPTIONS = (
    *("causal", "window", "bias", "scale", "softcap", "score_mod", "sinks", "dropout_mask"),
    *("dropout_rate", "dtype", "engine", "precision", "conventions"),
)
"""Options of both softmaxes; one whose gradient is not returned here is not among them."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise OptionError if an option is not one of both softmaxes."""
    for name in options:
        if name not in OPTIONS:
            raise unknown_option("attention", name, OPTIONS)


def check_alike(**pair: ArrayLike) -> None:
    """Check that two arrays have one shape."""
    (one, x), (two, y) = pair.items()
    first, second = (read_floating(name, z).shape for name, z in ((one, x), (two, y)))
    if first != second:
        raise ShapeError(f"{two} has shape {second}, must have the shape {first} of {one}")


def widen(dtype: Any, array: Array) -> Any:
    """Return a dtype, or its complex counterpart for a complex array."""
    return np.result_type(dtype, np.complex64) if array.dtype.kind == "c" else dtype


def read_lambda(lam: Any, first: Forward) -> Array:
    """Return λ as an array () or (H,)."""
    is_number = isinstance(lam, (int, float)) and not isinstance(lam, bool)
    array = read_floating("lam", float(lam) if is_number else lam)
    H = first.problem.H
    if array.shape not in ((), (H,)):
        raise ShapeError(f"lam has shape {array.shape}, must be one number, or have (H,) = ({H},)")
    return array


def check_out_scale(value: Any) -> float:
    """Return the factor of the output as a float."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(float(value)):
        raise OptionError(f"out_scale is {value!r}, must be a finite number")
    return float(value)


def check_norm(norm: Any, weight: Any, eps: Any, E: int) -> Array | None:
    """Return the weight of the norm as an array, after checking its options."""
    if not isinstance(norm, (bool, np.bool_)):
        raise OptionError(f"norm is {norm!r}, must be True or False")
    if isinstance(eps, bool) or not isinstance(eps, Real) or not 0 <= float(eps) < math.inf:
        raise OptionError(f"norm_eps is {eps!r}, must be a finite number ≥ 0")
    if weight is None:
        return None
    if not norm:
        raise OptionError("got norm_weight, but norm is False; pass norm=True")
    array = read_floating("norm_weight", weight)
    if array.shape != (E,):
        raise ShapeError(f"norm_weight has shape {array.shape}, must have shape (E,) = ({E},)")
    return array
