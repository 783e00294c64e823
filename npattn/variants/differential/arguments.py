"""Arguments of differential attention that `npattn.attention` has not: read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from npattn.errors import OptionError, ShapeError
from npattn.problem import Forward
from npattn.problem.arrays import Array
from npattn.problem.foreign import unknown_option

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
    if not isinstance(norm, (bool, np.bool_)):
        raise OptionError(f"norm is {norm!r}, must be True or False")
    if isinstance(eps, bool) or not isinstance(eps, Real) or not 0 <= float(eps) < math.inf:
        raise OptionError(f"norm_eps is {eps!r}, must be a finite number ≥ 0")
    if weight is not None and not norm:
        raise OptionError("got norm_weight, but norm is False; pass norm=True")
    if weight is not None and weight.shape != (E,):
        raise ShapeError(f"norm_weight has shape {weight.shape}, must have shape (E,) = ({E},)")
