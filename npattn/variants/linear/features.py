"""Feature maps φ of linear attention, each with its pullback dx = φ'(x)ᵀ dφ.

No line conjugates, and signs are read off the real part, so that complex steps go through.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from npattn.engines.score_mod import call_score_mod, slope
from npattn.errors import OptionError
from npattn.problem import Problem
from npattn.problem.arrays import Array


class FeatureMap(NamedTuple):
    """Feature map of rows (..., D) → (..., D), with its pullback."""

    value: Callable[[Array], Array]
    pullback: Callable[[Array, Array], Array]  # (x, dφ) → dx


def _exp_below_zero(x: Array) -> Array:
    """Return exp(x), without overflow where x > 0 and another value is taken."""
    return np.asarray(np.exp(np.where(x.real > 0, 0, x)))


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.real.max(-1, keepdims=True, initial=-np.inf))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _softmax_pullback(x: Array, dy: Array) -> Array:
    p = _softmax(x)
    return np.asarray(p * (dy - (p * dy).sum(-1, keepdims=True)))


FEATURE_MAPS = {
    "identity": FeatureMap(lambda x: x, lambda x, dy: dy),
    "elu": FeatureMap(
        lambda x: np.where(x.real > 0, x + 1, _exp_below_zero(x)),
        lambda x, dy: np.where(x.real > 0, 1, _exp_below_zero(x)) * dy,
    ),
    "relu": FeatureMap(
        lambda x: np.where(x.real > 0, x, 0), lambda x, dy: np.where(x.real > 0, dy, 0)
    ),
    "softmax": FeatureMap(_softmax, _softmax_pullback),
}
"""Feature maps by name: x; elu(x) + 1; max(x, 0), of slope 0 at 0; softmax over the features."""


def read_feature_map(value: Any) -> FeatureMap:
    """Return a feature map by name, or that of an elementwise analytic callable."""
    if isinstance(value, FeatureMap):
        return value
    if isinstance(value, str) and value in FEATURE_MAPS:
        return FEATURE_MAPS[value]
    if not callable(value):
        raise OptionError(
            f"feature_map is {value!r}, must be one of {', '.join(FEATURE_MAPS)}, or a callable "
            "f(x) that is elementwise"
        )

    def value_of(x: Array) -> Array:
        return _name(lambda: call_score_mod(_scores_like(x, value), x))

    def pullback(x: Array, dy: Array) -> Array:
        return _name(lambda: slope(_scores_like(x, value), x) * dy)

    return FeatureMap(value_of, pullback)


def _scores_like(x: Array, f: Callable[[Any], Any]) -> Problem:
    """Attention problem whose scores have the shape of x, and whose score_mod is f."""
    zeros = np.zeros((), x.dtype)
    q = np.broadcast_to(zeros, (*x.shape[:-1], 1))
    k = np.broadcast_to(zeros, (*x.shape[:-2], x.shape[-1], 1))
    return Problem(q, k, k, score_mod=lambda s, *_: f(s))


def _name(evaluate: Callable[[], Array]) -> Array:
    """Evaluate a feature map as score_mod is, with its own name in errors."""
    try:
        return evaluate()
    except OptionError as err:
        raise OptionError(str(err).replace("score_mod", "feature_map")) from None
