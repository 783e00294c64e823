"""Gradients that are wrong in small ways, and right ones that are hard to confirm.

Each is a NumPy function with its vjp. A case says of itself if it is right; no checker was run
before that was written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from scipy.special import erf

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A function, its arguments and the vjp to judge; `right` says if that is the gradient."""

    name: str
    f: Callable[..., Any]
    args: tuple[Array, ...]
    vjp: Callable[..., tuple[Any, ...]]
    right: bool


CASES: list[Case] = []
R = np.random.default_rng(17)


def case(name: str, f: Any, args: Any, vjp: Any, *, right: bool = False) -> None:
    args = args if isinstance(args, tuple) else (args,)

    def tuple_vjp(dout: Any, *own: Any) -> tuple[Any, ...]:
        grads = vjp(dout, *own)
        return grads if isinstance(grads, tuple) else (grads,)

    CASES.append(Case(name, f, args, tuple_vjp, right))


def normal(*shape: int, scale: float = 1.0, dtype: Any = np.float64) -> Array:
    return (scale * R.standard_normal(shape)).astype(dtype)


# --- functions with their gradients -------------------------------------------------------------


def layer_norm(x: Array, g: Array, eps: float = 1e-5) -> Array:
    m, s = x.mean(-1, keepdims=True), np.sqrt(x.var(-1, keepdims=True) + x.dtype.type(eps))
    return (x - m) / s * g


def layer_norm_vjp(
    dy: Array, x: Array, g: Array, eps: float = 1e-5, mean: float = 1, scale: float = 1
) -> tuple[Array, Array]:
    m, s = x.mean(-1, keepdims=True), np.sqrt(x.var(-1, keepdims=True) + x.dtype.type(eps))
    h, dh = (x - m) / s, dy * g
    mean, scale = x.dtype.type(mean), x.dtype.type(scale)
    dx = (dh - mean * dh.mean(-1, keepdims=True) - scale * h * (dh * h).mean(-1, keepdims=True)) / s
    return dx, (dy * h).sum(tuple(range(x.ndim - 1)))


def softmax(s: Array) -> Array:
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_vjp(dp: Array, s: Array) -> Array:
    p = softmax(s)
    return p * (dp - (dp * p).sum(-1, keepdims=True))


def attend(q: Array, k: Array, v: Array) -> Array:
    return softmax(q @ k.T * q.dtype.type(q.shape[-1] ** -0.5)) @ v


def attend_vjp(
    do: Array, q: Array, k: Array, v: Array, change: Any = lambda ds: ds
) -> tuple[Array, Array, Array]:
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    s = q @ k.T * scale
    ds = change(softmax_vjp(do @ v.T, s)) * scale
    return ds @ k, ds.T @ q, softmax(s).T @ do


def one_first(x: Array) -> Array:
    """Return 1 at the first largest element of each row."""
    return np.eye(x.shape[-1], dtype=x.dtype)[x.argmax(-1)]


def gelu(x: Array) -> Array:
    return x * (1 + erf(x / np.sqrt(2))) / 2


def gelu_vjp(dy: Array, x: Array) -> Array:
    return dy * ((1 + erf(x / np.sqrt(2))) / 2 + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi))


def tanh_gelu_vjp(dy: Array, x: Array) -> Array:
    c = np.sqrt(2 / np.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return dy * ((1 + t) / 2 + x / 2 * (1 - t**2) * c * (1 + 3 * 0.044715 * x**2))


def convolve(x: Array, w: Array) -> Array:
    return np.convolve(x, w, "valid")


def convolve_vjp(dy: Array, x: Array, w: Array) -> tuple[Array, Array]:
    return np.convolve(dy, w[::-1], "full"), np.convolve(x[::-1], dy, "valid")


def shift(change: Any) -> Any:
    """Return attend_vjp with ds changed."""
    return lambda do, q, k, v: attend_vjp(do, q, k, v, change)


def replace(array: Array, index: Any, value: Any) -> Array:
    array = array.copy()
    array[index] = value
    return array


x, g, b, w = normal(3, 5, 7), normal(7), normal(1, 7), normal(7, 11)
q, k, v = normal(5, 3), normal(7, 3), normal(7, 2)
square, near = normal(5, 5), normal(5, 5)
near = near + near.T + 1e-5 * normal(5, 5)
spd = square @ square.T + np.eye(5)
ties = np.array([[1.0, 3, 3, 2], [2, 2, 0, 1], [0, 5, 1, 5]])
zeros = np.where(R.random((3, 7)) < 0.4, 0, normal(3, 7))
long = normal(1009)
low = {"q": q.astype(np.float32), "k": k.astype(np.float32), "v": v.astype(np.float32)}
lows = tuple(low.values())

# --- wrong ----------------------------------------------------------------------------------------
# A row each
# fmt: off

case("cube × 3.00001/3", lambda x: x**3, x, lambda d, x: d * 3.00001 * x**2)
case("cube × 1.0001", lambda x: x**3, x, lambda d, x: d * 3.0003 * x**2)
case("layer norm: mean kept", layer_norm, (x, g), lambda d, x, g: layer_norm_vjp(d, x, g, mean=0))
case("layer norm: no term of the scale", layer_norm, (x, g),
     lambda d, x, g: layer_norm_vjp(d, x, g, scale=0))
case("layer norm: N − 1", layer_norm, (x, g), lambda d, x, g: layer_norm_vjp(d, x, g, scale=7 / 6))
case("layer norm: other ε", layer_norm, (x, g), lambda d, x, g: layer_norm_vjp(d, x, g, eps=3e-5))
case("softmax: no correction", softmax, x, lambda d, x: softmax(x) * d)
case("softmax: correction over another axis", softmax, square,
     lambda d, x: softmax(x) * (d - (d * softmax(x)).sum(0)))
case("attention: dk lacks the scale", attend, (q, k, v),
     lambda d, q, k, v: (lambda a, b, c: (a, b * 3**0.5, c))(*attend_vjp(d, q, k, v)))
case("attention: dq scaled twice", attend, (q, k, v),
     lambda d, q, k, v: (lambda a, b, c: (a * 3**-0.5, b, c))(*attend_vjp(d, q, k, v)))
case("attention: last query forgotten in dS", attend, (q, k, v),
     shift(lambda ds: replace(ds, -1, 0)))
case("attention: one score of 35 off by 1e-3", attend, (q, k, v),
     shift(lambda ds: replace(ds, (2, 3), ds[2, 3] * 1.001)))
case("attention: dv transposed weights", lambda a, v: softmax(a) @ v, (square, normal(5, 3)),
     lambda d, a, v: (softmax_vjp(d @ v.T, a), softmax(a) @ d))
case("one element of 1009 off by 1e-3", np.sin, long,
     lambda d, x: d * replace(np.cos(x), 503, 1.001 * np.cos(x[503])))
case("one element of 1009 is 0", np.exp, long, lambda d, x: d * replace(np.exp(x), -1, 0))
case("tiny arguments: factor 2", lambda x: (x**2).sum(-1), normal(5, 3, scale=1e-6),
     lambda d, x: 4 * d[:, None] * x)
case("tiny results: factor 1.5", lambda x: 1e-8 * np.tanh(x), x,
     lambda d, x: 1.5e-8 * d * (1 - np.tanh(x) ** 2))
case("large arguments: + 1", lambda x: x**2, normal(7, scale=1e6), lambda d, x: d * (2 * x + 1))
case("one tiny argument: zero", lambda x, y: x + y**2, (normal(5), normal(5, scale=1e-7)),
     lambda d, x, y: (d, 0 * y))
case("maximum at ties: each gets 1", lambda x: x.max(-1), ties,
     lambda d, x: d[:, None] * (x == x.max(-1, keepdims=True)))
case("maximum of two at ties: both get 1", np.maximum, (ties, ties.copy()),
     lambda d, x, y: (d * (x >= y), d * (y >= x)))
case("maximum at ties: none gets any", lambda x: x.max(-1), ties,
     lambda d, x: d[:, None] * one_first(x) * (np.sort(x)[:, -1] > np.sort(x)[:, -2])[:, None])
case("float32: × 1.0005", np.tanh, x.astype(np.float32),
     lambda d, x: np.float32(1.0005) * d * (1 - np.tanh(x) ** 2))
case("float32 alone: × 1.001", lambda x: x * np.exp(x), x.astype(np.float32),
     lambda d, x: (1.001 if x.dtype == np.float32 else 1) * d * (1 + x) * np.exp(x))
case("float32: dS of one key off by 1 %", attend, lows,
     shift(lambda ds: replace(ds, (slice(None), 3), ds[:, 3] * np.float32(1.01))))
case("float32: layer norm N − 1 of 1009", layer_norm,
     (long[None].astype(np.float32), np.ones(1009, np.float32)),
     lambda d, x, g: layer_norm_vjp(d, x, g, scale=1009 / 1008))
case("float16 activations kept", lambda x: np.tanh(x), x,
     lambda d, x: d * (1 - np.tanh(x).astype(np.float16).astype(float) ** 2))
case("bias: gradient is zero", lambda x, b: np.tanh(x + b), (x, b),
     lambda d, x, b: (d / np.cosh(x + b) ** 2, 0 * b))
case("bias: mean over the batch", lambda x, b: np.tanh(x + b), (x, b),
     lambda d, x, b: (d / np.cosh(x + b) ** 2, (d / np.cosh(x + b) ** 2).mean((0, 1))[None]))
case("bias: first sample alone", lambda x, b: x * b, (x, b),
     lambda d, x, b: (d * b, (d * x)[0].sum(0)[None]))
case("bias: not summed", lambda x, b: x * b, (x, b), lambda d, x, b: (d * b, d * x))
case("product: second argument negative", lambda x, y: x * y, (x, normal(3, 5, 7)),
     lambda d, x, y: (d * y, -d * x))
case("product: gradients exchanged", lambda x, y: x * y**2, (x, normal(3, 5, 7)),
     lambda d, x, y: (2 * d * x * y, d * y**2))
case("cotangent ignored", np.sin, x, lambda d, x: np.cos(x))
case("cotangent averaged", lambda x: np.sin(x).sum(-1), x, lambda d, x: d.mean() * np.cos(x))
case("ReLU: not masked", lambda x: np.maximum(x, 0), x, lambda d, x: d)
case("clip: not masked", lambda x: np.clip(x, -1, 1), x, lambda d, x: d)
case("clip: lower bound not masked", lambda x: np.clip(x, -2, 2), normal(31, 7),
     lambda d, x: d * (x < 2))
case("norm: not divided", lambda x: np.sqrt((x**2).sum(-1)), x, lambda d, x: d[..., None] * x)
case("logarithm of x + 1e-6", np.log, abs(x) + 0.5, lambda d, x: d / (x + 1e-6))
case("GELU: gradient of the tanh form", gelu, x, tanh_gelu_vjp)
case("quadratic form, nearly symmetric", lambda x, a: x @ a @ x, (normal(5), near),
     lambda d, x, a: (2 * d * (a @ x), d * np.outer(x, x)))
case("solve: not transposed", np.linalg.solve, (spd + 1e-4 * normal(5, 5), normal(5)),
     lambda d, a, y: (lambda z: (-np.outer(z, np.linalg.solve(a, y)), z))(np.linalg.solve(a, d)))
case("cumulated sum: not reversed", lambda x: np.cumsum(x, -1), x, lambda d, x: np.cumsum(d, -1))
case("convolution: kernel not reversed", convolve, (normal(13), normal(3)),
     lambda d, x, w: (np.convolve(d, w, "full"), convolve_vjp(d, x, w)[1]))
case("roll: the other way", lambda x: np.roll(x, 1, -1) ** 2, x,
     lambda d, x: 2 * x * np.roll(d, 1, -1))
case("logsumexp: no maximum subtracted in one row", lambda x: np.log(np.exp(x).sum(-1)),
     normal(5, 7), lambda d, x: d[:, None] * replace(softmax(x), 0, softmax(x)[0] * (1 - 1e-4)))

# --- right ----------------------------------------------------------------------------------------


def right(name: str, f: Any, args: Any, vjp: Any) -> None:
    case(name, f, args, vjp, right=True)


def offset_norm(x: Array, g: Array) -> Array:
    return layer_norm(x, g, 1e-12)


def single(f: Any) -> Any:
    return lambda x: f(x.astype(np.float32)).astype(x.dtype)


def drop(x: Array) -> Array:
    return np.where(np.random.rand(*x.shape) < 0.5, 0, 2 * x**2)  # noqa: NPY002


def drop_vjp(d: Array, x: Array) -> Array:
    return np.where(np.random.rand(*x.shape) < 0.5, 0, 4 * x * d)  # noqa: NPY002


inverse = np.linalg.inv
ill = square @ np.diag([1, 1e-2, 1e-4, 1e-6, 1e-7]) @ np.linalg.inv(square)
clock = np.random.default_rng(3)
knots = np.array([-2.0, -1, 0, 1, 2])

right("|x| at 0", np.abs, zeros, lambda d, x: d * np.sign(x))
right("ReLU at 0", lambda x: np.maximum(x, 0), zeros, lambda d, x: d * (x > 0))
right("ReLU of a layer at 0", lambda x, w: np.maximum(x @ w, 0), (zeros, normal(7, 5)),
      lambda d, x, w: ((d * (x @ w > 0)) @ w.T, x.T @ (d * (x @ w > 0))))
right("maximum at ties: the first", lambda x: x.max(-1), ties,
      lambda d, x: d[:, None] * one_first(x))
right(
    "maximum at ties: shared",
    lambda x: x.max(-1),
    ties,
    lambda d, x: (
        d[:, None]
        * (x == x.max(-1, keepdims=True))
        / (x == x.max(-1, keepdims=True)).sum(-1, keepdims=True)
    ),
)
right("maximum of two at ties: the first", np.maximum, (ties, ties.copy()),
      lambda d, x, y: (d * (x >= y), d * (y > x)))
right("clip at its bounds", lambda x: np.clip(x, -1, 1), np.array([-2.0, -1, -0.3, 0, 0.7, 1, 3]),
      lambda d, x: d * (abs(x) <= 1))
right("hinge at its corner", lambda x: np.maximum(0, 1 - x), np.array([0.5, 1, 1, 2, -1]),
      lambda d, x: -d * (x < 1))
right("interpolation at a knot", lambda x: np.interp(x, knots, knots**2),
      np.array([-1.0, 0.3, 1.0, 1.7]), lambda d, x: d * np.array([-1, 1, 3, 3.0]))
right("sorted", lambda x: np.sort(x, -1), x,
      lambda d, x: np.take_along_axis(d, np.argsort(np.argsort(x, -1), -1), -1))
right("layer norm", layer_norm, (x, g), layer_norm_vjp)
right("layer norm, float32", layer_norm, (x.astype(np.float32), g.astype(np.float32)),
      layer_norm_vjp)
right("layer norm, mean 1e4, float32", layer_norm,
      ((x + 1e4).astype(np.float32), g.astype(np.float32)), layer_norm_vjp)
right("layer norm of almost equal elements", offset_norm, (1 + 1e-6 * x, g),
      lambda d, x, g: layer_norm_vjp(d, x, g, 1e-12))
right("attention, float32", attend, lows, attend_vjp)
right("attention, logits of 300", attend, (300 * q, k, v), attend_vjp)
right("attention, bfloat16", attend, tuple(y.astype(ml_dtypes.bfloat16) for y in (q, k, v)),
      attend_vjp)
right("tanh, float16", np.tanh, x.astype(np.float16), lambda d, x: d * (1 - np.tanh(x) ** 2))
right("logsumexp of 1e4",
      lambda x: np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1), 1e4 + x,
      lambda d, x: d[..., None] * softmax(x))
right("square of 1e8", np.square, normal(5, 7, scale=1e8), lambda d, x: 2 * d * x)
right("square of 1e-12", np.square, normal(5, 7, scale=1e-12), lambda d, x: 2 * d * x)
right("square of 1e6, float32", np.square, normal(5, 7, scale=1e6, dtype=np.float32),
      lambda d, x: 2 * d * x)
right("reciprocal of 1e-3", np.reciprocal, 1e-3 * (abs(x) + 0.1), lambda d, x: -d / x**2)
right("root of 1e-10", np.sqrt, 1e-10 * (abs(x) + 0.1), lambda d, x: d / 2 / np.sqrt(x))
right("logarithm from 1e-10 to 1e10", np.log, 10.0 ** R.uniform(-10, 10, (3, 7)),
      lambda d, x: d / x)
right("1e10 + x", lambda x: 1e10 + np.sin(x), x, lambda d, x: d * np.cos(x))
right("inverse, condition 1e7", inverse, ill, lambda d, a: -inverse(a).T @ d @ inverse(a).T)
right("sine of 1e4 x", lambda x: np.sin(1e4 * x), x, lambda d, x: 1e4 * d * np.cos(1e4 * x))
right("softplus of 1e4 x", lambda x: np.logaddexp(0, 1e4 * x) / 1e4,
      np.concatenate([1e-4 * normal(5), normal(7)]),
      lambda d, x: d * np.exp(-np.logaddexp(0, -1e4 * x)))
right("fill of −1e9", lambda x: np.where(np.tri(5, 7, dtype=bool), x, -1e9), normal(5, 7),
      lambda d, x: d * np.tri(5, 7))
right("norm of 1e-9", lambda x: np.sqrt((x**2).sum(-1)), normal(5, 7, scale=1e-9),
      lambda d, x: d[:, None] * x / np.sqrt((x**2).sum(-1, keepdims=True)))
right("flat: exp(−1 / x²)", lambda x: np.exp(-1 / x**2), np.array([0.05, 0.1, 0.3, 1]),
      lambda d, x: 2 * d * np.exp(-1 / x**2) / x**3)
right("sum of 10007, float32", lambda x: np.sin(x).sum(keepdims=True),
      normal(10007, dtype=np.float32), lambda d, x: d * np.cos(x))
right("constant", lambda x: np.ones(3) + 0 * x[:3], normal(5), lambda d, x: 0 * x)
right("float32 inside", single(np.sin), x, lambda d, x: d * np.cos(x.astype(np.float32)))
right("dropout, global generator", drop, x, drop_vjp)
right("values with noise of 1e-10", lambda x: np.sin(x) + 1e-10 * clock.standard_normal(x.shape), x,
      lambda d, x: d * np.cos(x))
