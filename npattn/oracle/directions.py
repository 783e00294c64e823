"""Directions of derivatives, and cotangents of gradients: one array for each input, checked."""

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from npattn.biases import Bias
from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array, BiasLike, describe_value
from npattn.problem.checks import check_cotangent, direction_shape

Direction: TypeAlias = dict[str, Any]
"""By the name of the input: an array, None for 0, a `Bias` for one of `npattn.biases`."""


def read_directions(problem: Problem, values: dict[str, Any], prefix: str = "d") -> Direction:
    """Return directions, by input name, in the dtype of the computation; None is 0."""
    return {
        name: None if x is None else _read(problem, prefix, name, x) for name, x in values.items()
    }


def _read(problem: Problem, prefix: str, name: str, value: Any) -> Any:
    of = getattr(problem, name)
    if isinstance(of, BiasLike):
        return bias_direction(of, f"{prefix}{name}", value)
    shape = direction_shape(name, of, prefix)
    return read_array(f"{prefix}{name}", value, shape, problem.dtype)


def bias_direction(bias: BiasLike, name: str, value: Any) -> Bias:
    """Return the change of a bias object along a direction of its parameter, as a bias."""
    if not isinstance(bias, Bias):
        raise OptionError(
            f"got {name}, but bias is {describe_value(bias)}, which is not of npattn.biases: "
            "call forward with bias=bias.to_array(...)"
        )
    return bias.with_parameter(value, name)


def read_array(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array of that shape in `dtype`, or in its complex counterpart, checked."""
    array = check_cotangent(name, value, shape)
    if array.dtype.kind == "c":
        dtype = np.result_type(dtype, np.complex64)
    return array.astype(dtype, copy=False)


def with_numbers(conventions: Conventions | None, problem: Problem) -> Conventions | None:
    """Return conventions with the number of the problem's dtype in place of the word "min"."""
    if conventions is None:
        return None
    words = [n for n in ("hidden_fill", "hidden_add") if getattr(conventions, n) == "min"]
    numbers: dict[str, Any] = dict.fromkeys(words, problem.lowest)
    return replace(conventions, **numbers)
