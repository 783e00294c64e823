"""Steps around attention in a module, with their gradients: y = x w + b, heads, norms.

    T length   n number of heads   D size of a head
    rows (..., T, n·D) ↔ heads (..., n, T, D)

Each ``*_backward`` takes dy, the gradient of the result of its forward. No line conjugates, so that
complex-step differentiation works. Derivations: docs/derivations/multihead.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from npattn.arrays import Array

__all__ = [
    "Merge",
    "Norm",
    "NormResiduals",
    "linear",
    "linear_backward",
    "merge",
    "merge_backward",
    "normalise",
    "normalise_backward",
    "sigmoid",
    "sigmoid_backward",
    "split",
]

Merge = Literal["concat", "reshape"]
Norm = Literal["rms", "layer"]


def linear(x: Array, w: Array, b: Array | None) -> Array:
    """x w + b: (..., T, m) → (..., T, n)."""
    y = x @ w
    return np.asarray(y if b is None else y + b)


def linear_backward(dy: Array, x: Array, w: Array) -> tuple[Array, Array, Array]:
    """Gradients of x, w and b."""
    rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return dy @ w.T, rows.T @ drows, drows.sum(0)


def split(y: Array, heads: int) -> Array:
    """(..., T, heads · D) → (..., heads, T, D)."""
    *lead, T, width = y.shape
    return y.reshape(*lead, T, heads, width // heads).swapaxes(-2, -3)


def merge(o: Array, how: Merge) -> Array:
    """(..., H, T, E) → (..., T, H·E).

    "concat" puts the heads of a query side by side. "reshape" forgets to move the head axis back,
    so that rows of one head follow each other, as in some published code.
    """
    *lead, H, T, E = o.shape
    o = o.swapaxes(-2, -3) if how == "concat" else o
    return o.reshape(*lead, T, H * E)


def merge_backward(dy: Array, heads: int, how: Merge) -> Array:
    """(..., T, H·E) → (..., H, T, E)."""
    if how == "concat":
        return split(dy, heads)
    *lead, T, width = dy.shape
    return dy.reshape(*lead, heads, T, width // heads)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^−x), without overflow."""
    falls = x.real < 0
    e = np.exp(np.where(falls, x, -x))
    return np.asarray(np.where(falls, e, 1) / (1 + e))


def sigmoid_backward(dy: Array, y: Array) -> Array:
    """Gradient of x from that of y = sigmoid(x)."""
    return np.asarray(dy * y * (1 - y))


class NormResiduals(NamedTuple):
    """Result of `normalise`, and the arrays that `normalise_backward` needs."""

    y: Array  # (..., T, D)
    unit: Array  # (..., T, D) before the weight
    size: Array  # (..., T, 1) the divisor


def normalise(x: Array, kind: Norm, w: Array | None, b: Array | None, eps: float) -> NormResiduals:
    """Scale each row of x to mean square 1 ("rms") or mean 0, variance 1 ("layer"); · w + b."""
    x = x if kind == "rms" else x - x.mean(-1, keepdims=True)
    size = np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    unit = x / size
    y = unit if w is None else unit * w
    return NormResiduals(y if b is None else y + b, unit, size)


def normalise_backward(
    dy: Array, residuals: NormResiduals, kind: Norm, w: Array | None
) -> tuple[Array, Array, Array]:
    """Gradients of x, w and b."""
    unit, rest = residuals.unit, tuple(range(dy.ndim - 1))
    dunit = dy if w is None else dy * w
    # A longer row is scaled back to the same length, so that nothing flows along it.
    dx = dunit - unit * (dunit * unit).mean(-1, keepdims=True)
    dx = dx if kind == "rms" else dx - dunit.mean(-1, keepdims=True)
    return dx / residuals.size, (dy * unit).sum(rest), dy.sum(rest)
