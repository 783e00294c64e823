"""Steps around attention in a module, with their gradients: y = x w + b, heads, norms.

    T length   n number of heads   D size of a head
    rows (..., T, n·D) ↔ heads (..., n, T, D)

Each ``*_backward`` takes dy, the gradient of the result of its forward. No line conjugates, so that
complex-step differentiation works. Derivations: docs/derivations/multihead.md.
"""

from typing import Any, Literal, NamedTuple

import numpy as np

from npattn.problem.arrays import Array, sum_to

Merge = Literal["concat", "reshape"]
Norm = Literal["rms", "layer", "l2", "rms_projection", "layer_projection"]
NORMS: tuple[Norm, ...] = ("rms", "layer", "l2", "rms_projection", "layer_projection")


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
    """Result of `normalise`, and the arrays that `normalise_backward` needs.

    Rows are those of heads, D long; of a whole projection, n·D.
    """

    y: Array  # (..., n, T, D)
    unit: Array  # rows before the weight
    size: Array  # (..., 1) the divisor
    moves: Array  # (..., 1) True where the divisor depends on the row


def normalise(
    x: Array, kind: Norm, w: Array | None, b: Array | None, eps: float, xp: Any = np
) -> NormResiduals:
    """Scale each row of x to mean square 1 ("rms"), mean 0 and variance 1 ("layer") or length 1.

    The result is · w + b, where w and b are (D,), or (n, D) or (n, 1) for each head. Rows of a
    "_projection" are all heads of a position; w and b are (n·D,).
    """
    merged, heads = kind.endswith("_projection"), x.shape[-3] if x.ndim > 2 else 1
    x = merge(x, "concat") if merged else x
    x = x - x.mean(-1, keepdims=True) if kind.startswith("layer") else x
    squares = x * x
    if kind == "l2":  # as torch.nn.functional.normalize
        size = np.sqrt(squares.sum(-1, keepdims=True))
        moves = size.real > eps
        size = np.where(moves, size, eps)
    else:
        size = xp.sqrt(squares.mean(-1, keepdims=True) + eps)
        moves = np.ones(tuple(size.shape), bool)
    unit = x / size
    y = unit if w is None else unit * _beside(w)
    y = y if b is None else y + _beside(b)
    return NormResiduals(split(y, heads) if merged else y, unit, size, moves)


def normalise_backward(
    dy: Array, residuals: NormResiduals, kind: Norm, w: Array | None
) -> tuple[Array, Array, Array]:
    """Gradients of x, w and b; those of w and b have the shape of w, a row if it is None."""
    merged, heads = kind.endswith("_projection"), dy.shape[-3] if dy.ndim > 2 else 1
    dy = merge(dy, "concat") if merged else dy
    unit = residuals.unit
    dunit = dy if w is None else dy * _beside(w)
    # A longer row is scaled back to the same length, so that nothing flows along it.
    along = dunit * unit
    along = along.sum(-1, keepdims=True) if kind == "l2" else along.mean(-1, keepdims=True)
    dx = dunit - np.where(residuals.moves, unit * along, 0)
    dx = dx - dunit.mean(-1, keepdims=True) if kind.startswith("layer") else dx
    dx = dx / residuals.size
    shape = (dy.shape[-1],) if w is None else w.shape
    dw, db = (sum_to(d, _beside(np.empty(shape)).shape).reshape(shape) for d in (dy * unit, dy))
    return split(dx, heads) if merged else dx, dw, db


def _beside(w: Array) -> Array:
    """Return a weight with axes that broadcast against rows: (n, D) is one for each head."""
    return w if w.ndim == 1 else w[:, None, :]
