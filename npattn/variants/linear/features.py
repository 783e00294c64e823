"""Feature maps φ of linear attention, each with its pullback dx = φ'(x)ᵀ dφ.

No line conjugates, and signs are read off the real part, so that complex steps go through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from npattn.arrays import Array
from npattn.dense import differentiate
from npattn.errors import OptionError

__all__ = ["FEATURE_MAPS", "FeatureMap", "read_feature_map"]


class FeatureMap(NamedTuple):
    """Feature map of rows (..., D) → (..., D), with its pullback."""

    value: Callable[[Array], Array]
    pullback: Callable[[Array, Array], Array]  # (x, dφ) → dx


def _identity(x: Array) -> Array:
    return x


def _identity_pullback(_: Array, dy: Array) -> Array:
    return dy


def _elu(x: Array) -> Array:
    """Return elu(x) + 1."""
    return np.where(x.real > 0, x + 1, _exp_below_zero(x))


def _elu_pullback(x: Array, dy: Array) -> Array:
    return np.where(x.real > 0, 1, _exp_below_zero(x)) * dy


def _exp_below_zero(x: Array) -> Array:
    """Return exp(x), without overflow where x > 0 and another value is taken."""
    return np.asarray(np.exp(np.where(x.real > 0, 0, x)))


def _relu(x: Array) -> Array:
    return np.where(x.real > 0, x, 0)


def _relu_pullback(x: Array, dy: Array) -> Array:
    return np.where(x.real > 0, dy, 0)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.real.max(-1, keepdims=True, initial=-np.inf))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _softmax_pullback(x: Array, dy: Array) -> Array:
    p = _softmax(x)
    return np.asarray(p * (dy - (p * dy).sum(-1, keepdims=True)))


FEATURE_MAPS = {
    "identity": FeatureMap(_identity, _identity_pullback),
    "elu": FeatureMap(_elu, _elu_pullback),
    "relu": FeatureMap(_relu, _relu_pullback),
    "softmax": FeatureMap(_softmax, _softmax_pullback),
}
"""Feature maps by name: x; elu(x) + 1; max(x, 0), of slope 0 at 0; softmax over the features."""


def read_feature_map(value: Any) -> FeatureMap:
    """Return a feature map by name, or that of an elementwise analytic callable.

    Raises OptionError if it is neither.
    """
    if isinstance(value, FeatureMap):
        return value
    if isinstance(value, str) and value in FEATURE_MAPS:
        return FEATURE_MAPS[value]
    if not callable(value):
        raise OptionError(
            f"feature_map is {value!r}, must be one of {', '.join(FEATURE_MAPS)}, or a callable "
            "f(x) that is elementwise"
        )

    def call(x: Array) -> Array:
        y = np.asarray(value(x))
        if y.shape != x.shape:
            raise OptionError(
                f"feature_map returned shape {y.shape}, must return the shape {x.shape} of x"
            )
        return y

    def pullback(x: Array, dy: Array) -> Array:
        if x.dtype.kind == "c":
            raise OptionError("feature_map has no gradient for complex arrays; pass real q and k")
        return differentiate("feature_map", "x", call, x) * dy

    return FeatureMap(call, pullback)
