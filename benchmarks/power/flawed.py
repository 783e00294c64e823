"""A flash-like kernel with replaceable steps, and sixty mistakes.

    s = scale · q kᵀ + bias    m, l, acc: running maximum, row sum and Σ p v over tiles of 64 keys
    p = exp(s − m)             o = acc / l,  lse = m + log l
    P = exp(s − lse)           dS = P (dP − D),  dP = do vᵀ,  D = Σ do · o

Everything is float32, and P and dS are rounded to the dtype of q before they enter a product: what
`Rounding.fused` declares. A mistake changes the inputs of the kernel (`KernelInputs`) or one of its
steps (`Flash.steps`), forward or backward. The backward of a forward mistake is not judged, and
backward mistakes start from the right out and lse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array

Step = Callable[[Array, Any], Array]  # (result of the step, dtype of q) → its replacement
TILE = 64
LOG2E = np.float32(1 / math.log(2))


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """Inputs of a kernel: q (H, T, D), k, v (K, S, D), as float32 with values of dtype."""

    q: Array
    k: Array
    v: Array
    heads: Array  # (H,) key head of each query head
    visible: Array  # (H, T, S)
    bias: Any  # broadcasts against (H, T, S)
    keep: Any  # 1 for kept weights, 0 for dropped ones
    rate: float
    scale: float
    dtype: Any

    @classmethod
    def of(cls, problem: Problem) -> KernelInputs:
        """Return the inputs of a problem without leading axes."""
        assert problem.scale is not None
        wide, whole = np.float32, (problem.H, problem.T, problem.S)
        visible = True if problem.visible is None else problem.visible
        return cls(
            q=problem.q.astype(wide),
            k=problem.k.astype(wide),
            v=problem.v.astype(wide),
            heads=np.arange(problem.H) // (problem.H // problem.K),
            visible=np.broadcast_to(visible, whole).copy(),
            bias=wide(0) if problem.bias is None else problem.bias.astype(wide),
            keep=wide(1) if problem.dropout_mask is None else problem.dropout_mask.astype(wide),
            rate=problem.dropout_rate,
            scale=problem.scale,
            dtype=problem.q.dtype,
        )

    def change(self, **arrays: Any) -> KernelInputs:
        return replace(self, **arrays)


# --- steps ----------------------------------------------------------------------------------------


def store_as(x: Array, dtype: Any) -> Array:
    return np.asarray(x.astype(dtype).astype(np.float32))


def truncate(x: Array, dtype: Any) -> Array:
    near = x.astype(dtype)
    zero = np.zeros((), dtype)
    cut = np.where(abs(near).astype(np.float32) > abs(x), np.nextafter(near, zero), near)
    return np.asarray(cut.astype(np.float32))


def identity(x: Array, dtype: Any) -> Array:
    return x


def times(factor: float) -> Step:
    return lambda x, dtype: x * np.float32(factor)


def plus(offset: float) -> Step:
    return lambda x, dtype: x + np.float32(offset)


RIGHT: dict[str, Step] = {"weights": store_as, "dv weights": store_as, "dscores": store_as}
"""Roundings of the kernel without a mistake."""


@dataclass(frozen=True, kw_only=True)
class Flash:
    """Flash-like kernel."""

    # Replacements of scores, exp, weights, sum, l, acc, out; of lse, delta, dp, dscores, dq sum, dv
    # weights, heads, dq, dk, dv. A step without one is as in `RIGHT`, or exact
    steps: Mapping[str, Step] = field(default_factory=dict)
    tile: int = TILE  # keys per step
    repeats: int = 0  # keys of the first tile that the second repeats
    unscaled: str = ""  # sum that is not rescaled in the second tile: "", "l", "acc"
    # (q, k, dtype) → q kᵀ
    product: Callable[[Array, Array, Any], Array] = lambda q, k, dtype: q @ k.swapaxes(-1, -2)

    def step(self, name: str, x: Array, inputs: KernelInputs) -> Array:
        return self.steps.get(name, RIGHT.get(name, identity))(x, inputs.dtype)

    def tiles(self, S: int) -> Iterator[tuple[int, slice]]:
        for number, start in enumerate(range(0, S, self.tile)):
            back = self.repeats if number == 1 else 0
            yield number, slice(start - back, min(start + self.tile, S))

    def scores(self, inputs: KernelInputs, keys: slice) -> Array:
        k = inputs.k[inputs.heads][:, keys]
        s = self.product(inputs.q, k, inputs.dtype) * np.float32(inputs.scale)
        bias = inputs.bias if np.ndim(inputs.bias) == 0 else inputs.bias[..., keys]
        s = self.step("scores", s + bias, inputs)
        return np.where(inputs.visible[..., keys], s, np.float32(-np.inf))

    @np.errstate(all="ignore")  # −inf − −inf in a tile without visible keys
    def forward(self, inputs: KernelInputs) -> tuple[Array, Array]:
        """Return out in the dtype of q, (H, T, E), and lse in float32, (H, T)."""
        (H, T, S), v = inputs.visible.shape, inputs.v[inputs.heads]
        m = np.full((H, T, 1), -np.inf, np.float32)
        total, acc = np.zeros_like(m), np.zeros((H, T, v.shape[-1]), np.float32)
        for number, keys in self.tiles(S):
            s = self.scores(inputs, keys)
            top = np.maximum(m, s.max(-1, keepdims=True))
            pivot = np.where(top == -np.inf, np.float32(0), top)
            p = self.step("exp", np.exp(s - pivot), inputs)
            shrink = self.step("exp", np.exp(m - pivot), inputs)
            one = np.ones_like(shrink)
            of_l, of_acc = (
                one if self.unscaled == x and number == 1 else shrink for x in ("l", "acc")
            )
            row = self.step("sum", p, inputs).sum(-1, keepdims=True)
            total = self.accumulate("l", total * of_l, row, inputs)
            keep = inputs.keep if np.ndim(inputs.keep) == 0 else inputs.keep[..., keys]
            seen = (self.step("weights", p, inputs) * keep) @ v[:, keys]
            acc, m = self.accumulate("acc", acc * of_acc, seen, inputs), top
        out = acc / np.where(total == 0, np.float32(1), total) / np.float32(1 - inputs.rate)
        out = self.step("out", out, inputs).astype(inputs.dtype)
        return out, (m + np.log(total))[..., 0]

    @np.errstate(all="ignore")
    def backward(
        self, inputs: KernelInputs, out: Array, lse: Array, dout: Array
    ) -> dict[str, Array]:
        """Return dq, dk, dv in the dtype of q."""
        k, v, do = inputs.k[inputs.heads], inputs.v[inputs.heads], dout.astype(np.float32)
        s = self.scores(inputs, slice(None))
        lse = self.step("lse", lse, inputs)[..., None]
        p = np.where(s == -np.inf, np.float32(0), np.exp(s - lse))
        rate = np.float32(1 / (1 - inputs.rate))

        w = self.step("dv weights", p, inputs) * inputs.keep
        dv = w.swapaxes(-1, -2) @ do * rate
        dp = self.step("dp", do @ v.swapaxes(-1, -2), inputs) * self.dropout_of_dp(inputs) * rate
        delta = self.step("delta", (do * out.astype(np.float32)).sum(-1, keepdims=True), inputs)
        ds = self.step("dscores", p * (dp - delta), inputs)
        dq = np.zeros_like(inputs.q)
        for _, keys in self.tiles(s.shape[-1]):
            dq = self.accumulate("dq sum", dq, ds[..., keys] @ k[:, keys], inputs)
        dk = ds.swapaxes(-1, -2) @ inputs.q
        scale = np.float32(inputs.scale)
        grads = {"dq": dq * scale, "dk": self.sum_heads(dk * scale, inputs)}
        grads["dv"] = self.sum_heads(dv, inputs)
        return {n: self.step(n, x, inputs).astype(inputs.dtype) for n, x in grads.items()}

    def dropout_of_dp(self, inputs: KernelInputs) -> Any:
        return np.float32(1) if "every dp" in self.steps else inputs.keep

    def sum_heads(self, dx: Array, inputs: KernelInputs) -> Array:
        """(H, S, n) → (K, S, n): sum over the query heads that share a head."""
        parts = dx.reshape(len(inputs.k), -1, *dx.shape[1:])
        if "heads" in self.steps:
            return self.steps["heads"](parts, inputs.dtype)
        return np.asarray(parts.sum(1))

    def accumulate(self, name: str, total: Array, more: Array, inputs: KernelInputs) -> Array:
        """Add a term to a sum over tiles; a sum of a lower dtype takes terms of that dtype."""
        if name in self.steps:
            total, more = self.step(name, total, inputs), self.step(name, more, inputs)
        return self.step(name, total + more, inputs)


# --- mistakes -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake of the kernel."""

    name: str
    problem: str = "plain"  # name of a problem of detection.py
    kernel: Flash = Flash()
    # changes the inputs of the kernel
    inputs: Callable[[KernelInputs], KernelInputs] = lambda inputs: inputs
    backward: bool = False  # True for a mistake in backward
    # True if something is stored in the dtype of q, which is no mistake in float32
    narrow: bool = False

    def results(self, right: KernelInputs, out: Array, lse: Array, dout: Array) -> dict[str, Array]:
        """Return o and lse, or the gradients computed from the right ones."""
        if self.backward:
            return self.kernel.backward(self.inputs(right), out, lse, dout)
        return dict(zip(("o", "lse"), self.kernel.forward(self.inputs(right)), strict=True))


def hide(*at: Any) -> Callable[[KernelInputs], KernelInputs]:
    """Hide rows and keys, indices into (H, T, S), that should be visible."""

    def change(inputs: KernelInputs) -> KernelInputs:
        visible = inputs.visible.copy()
        visible[at] = False
        return inputs.change(visible=visible)

    return change


def zero_key(inputs: KernelInputs) -> KernelInputs:
    """Append a key of zeros, as padding does."""
    k, v = (np.concatenate([x, np.zeros_like(x[:, :1])], 1) for x in (inputs.k, inputs.v))
    more = np.ones_like(inputs.visible[..., :1])
    return inputs.change(k=k, v=v, visible=np.concatenate([inputs.visible, more], -1))


def without_own_key(*rows: int) -> Callable[[KernelInputs], KernelInputs]:
    """Hide the last visible key of every query, or of these rows."""

    def change(inputs: KernelInputs) -> KernelInputs:
        T = inputs.visible.shape[1]
        last = inputs.visible & ~np.roll(inputs.visible, -1, -1)
        last[..., -1] = inputs.visible[..., -1]
        affected = np.isin(np.arange(T), rows or range(T))
        return inputs.change(visible=inputs.visible & ~(last & affected[:, None]))

    return change


def shorter_window(inputs: KernelInputs) -> KernelInputs:
    """Hide the first visible key of every query."""
    first = inputs.visible & ~np.roll(inputs.visible, 1, -1)
    return inputs.change(visible=inputs.visible & ~first)


def wrong_head(inputs: KernelInputs) -> KernelInputs:
    heads = inputs.heads.copy()
    heads[1] = heads[-1]
    return inputs.change(heads=heads)


def next_value(inputs: KernelInputs) -> KernelInputs:
    """Read the value of the first key of a tile for the last key of the tile before."""
    v = inputs.v.copy()
    v[:, TILE - 1] = v[:, TILE]
    return inputs.change(v=v)


def without_last_channel(inputs: KernelInputs) -> KernelInputs:
    q = inputs.q.copy()
    q[..., -1] = 0
    return inputs.change(q=q)


def low_queries(inputs: KernelInputs) -> KernelInputs:
    """Store q · scale · log₂e, as a kernel with exp2 may do."""
    q = store_as(inputs.q * np.float32(inputs.scale) * LOG2E, inputs.dtype) / LOG2E
    return inputs.change(q=q, scale=1.0)


def capped_products(q: Array, k: Array, dtype: Any) -> Array:
    s = q @ k.swapaxes(-1, -2)
    return np.asarray(np.float32(50) * np.tanh(s / np.float32(50)))


def low_products(q: Array, k: Array, dtype: Any) -> Array:
    """Compute q kᵀ in parts of 16 channels, stored after each."""
    s = np.zeros((*q.shape[:-1], k.shape[-2]), np.float32)
    for start in range(0, q.shape[-1], 16):
        part = slice(start, start + 16)
        s = store_as(s + q[..., part] @ k[..., part].swapaxes(-1, -2), dtype)
    return s


def no_last_row(x: Array, dtype: Any) -> Array:
    return np.concatenate([x[:, :-1], np.zeros_like(x[:, -1:])], 1)


def no_first_row(x: Array, dtype: Any) -> Array:
    return np.concatenate([np.zeros_like(x[:, :1]), store_as(x[:, 1:], dtype)], 1)


def roll_rows(x: Array, dtype: Any) -> Array:
    return np.roll(x, 1, 1)


def all_but_one(parts: Array, dtype: Any) -> Array:
    return np.asarray(parts[:, :-1].sum(1))


def one_by_one(parts: Array, dtype: Any) -> Array:
    """Sum heads in the dtype of q."""
    total = np.zeros_like(parts[:, 0])
    for part in parts.swapaxes(0, 1):
        total = store_as(total + store_as(part, dtype), dtype)
    return total


def forward_mistake(name: str, problem: str = "plain", **kwargs: Any) -> Mistake:
    kernel = kwargs.pop("kernel", Flash())
    steps = kwargs.pop("steps", None)
    kernel = kernel if steps is None else replace(kernel, steps=steps)
    return Mistake(name=name, problem=problem, kernel=kernel, **kwargs)


def backward_mistake(name: str, problem: str = "plain", **kwargs: Any) -> Mistake:
    return forward_mistake(f"bwd: {name}", problem, backward=True, **kwargs)


LOW: dict[str, Any] = {"narrow": True}
EVERY = slice(None)
BY_16, REPEATS = Flash(tile=16), Flash(repeats=1)
DISCRETE: tuple[Mistake, ...] = (
    forward_mistake("tail key missing, n=4096", "long", inputs=hide(..., -1)),
    forward_mistake("tail key missing, one row, n=4096", "long", inputs=hide(0, -1, -1)),
    forward_mistake("tail key missing, n=256", inputs=hide(..., -1)),
    forward_mistake("first key missing, n=4096", "long", inputs=hide(..., 0)),
    forward_mistake("one zero pad key attended, n=4096", "long", inputs=zero_key),
    forward_mistake("one zero pad key attended, n=256", inputs=zero_key),
    forward_mistake("causal off by one (all rows)", "causal", inputs=without_own_key()),
    forward_mistake("causal off by one (row 63 only)", "causal", inputs=without_own_key(63)),
    forward_mistake("window 64 -> 63", "window", inputs=shorter_window),
    forward_mistake(
        "dropout p=.1: rescale missing", "dropout .1", inputs=lambda x: x.change(rate=0.0)
    ),
    forward_mistake(
        "dropout p=.001: rescale missing", "dropout .001", inputs=lambda x: x.change(rate=0.0)
    ),
    forward_mistake("GQA: wrong KV head, one query head", inputs=wrong_head),
    forward_mistake(
        "GQA: tile instead of repeat",
        inputs=lambda x: x.change(heads=np.arange(len(x.heads)) % len(x.k)),
    ),
    forward_mistake("acc in low dtype per block of 64", steps={"acc": store_as}, **LOW),
    forward_mistake("acc in low dtype per 16 keys", kernel=BY_16, steps={"acc": store_as}, **LOW),
    forward_mistake(
        "acc in low dtype per 16 keys, n=4096", "long", kernel=BY_16, steps={"acc": store_as}, **LOW
    ),
    forward_mistake(
        "QK accumulated in low dtype per 16", kernel=Flash(product=low_products), **LOW
    ),
    forward_mistake("scores stored in low dtype", steps={"scores": store_as}, **LOW),
    forward_mistake("q*scale rounded to low dtype", inputs=low_queries, **LOW),
    forward_mistake("row sum l in low dtype", steps={"l": store_as}, **LOW),
    forward_mistake("row sum l in low dtype, n=4096", "long", steps={"l": store_as}, **LOW),
    forward_mistake("l from rounded P", steps={"sum": store_as}, **LOW),
    forward_mistake("exp result rounded to low dtype", steps={"exp": store_as}, **LOW),
    forward_mistake("P truncated instead of rounded", steps={"weights": truncate}, **LOW),
    forward_mistake("O truncated instead of rounded", steps={"out": truncate}, **LOW),
    forward_mistake("rescale of l skipped in block 1", kernel=Flash(unscaled="l")),
    forward_mistake("rescale of acc skipped in block 1", kernel=Flash(unscaled="acc")),
    forward_mistake("key at block edge counted twice", kernel=REPEATS),
    forward_mistake("key at block edge twice, n=4096", "long", kernel=REPEATS),
    forward_mistake("V row at block edge shifted", inputs=next_value),
    forward_mistake("V row at block edge shifted, n=4096", "long", inputs=next_value),
    forward_mistake("softcap 50 applied though none", kernel=Flash(product=capped_products)),
    forward_mistake("last head-dim element ignored in QK", inputs=without_last_channel),
    backward_mistake("LSE saved in low dtype", steps={"lse": store_as}, **LOW),
    backward_mistake("D of last row = 0", steps={"delta": no_last_row}),
    backward_mistake("D rows shifted by one", steps={"delta": roll_rows}),
    backward_mistake("D stored in low dtype", steps={"delta": store_as}, **LOW),
    backward_mistake("dP stored in low dtype", steps={"dp": store_as}, **LOW),
    backward_mistake("tail key missing, n=4096", "long", inputs=hide(..., -1)),
    backward_mistake("last query row missing", inputs=hide(EVERY, -1)),
    backward_mistake("first row missing in dV", steps={"dv weights": no_first_row}),
    backward_mistake("dS truncated", steps={"dscores": truncate}, **LOW),
    backward_mistake("P truncated in dV", steps={"dv weights": truncate}, **LOW),
    backward_mistake("dQ accumulated in low dtype", steps={"dq sum": store_as}, **LOW),
    backward_mistake("dQ accumulated low, n=4096", "long", steps={"dq sum": store_as}, **LOW),
    backward_mistake("GQA one head not summed", steps={"heads": all_but_one}),
    backward_mistake(
        "GQA group of 8 summed in low dtype", "group of 8", steps={"heads": one_by_one}, **LOW
    ),
    backward_mistake("dropout mask not applied to dP", "dropout .1", steps={"every dp": identity}),
)
"""Mistakes without a size."""


def oscillating(size: float) -> Step:
    """Return an exp in error by up to `size`, with twenty sign changes per unit of its argument."""
    return lambda p, dtype: p * (1 + np.float32(size) * np.sin(64 * np.log(np.maximum(p, 1e-30))))


def leaking(size: float) -> Step:
    """Give hidden keys the weight `size` relative to the heaviest key."""
    return lambda p, dtype: np.where(p == 0, np.float32(size), p)


def rescale(name: str, size: float) -> Callable[[KernelInputs], KernelInputs]:
    return lambda inputs: inputs.change(**{name: getattr(inputs, name) * (1 + size)})


Sized = Callable[[float], Mistake]


def with_size(name: str, make: Callable[[float], dict[str, Any]], problem: str = "plain") -> Sized:
    return lambda size: forward_mistake(
        name, problem, backward=name.startswith("bwd"), **make(size)
    )


CONTINUOUS: dict[str, Sized] = {
    name: with_size(name, *rest)
    for name, *rest in (
        ("fwd: scale x(1+e)", lambda e: {"inputs": rescale("scale", e)}),
        ("fwd: output gain x(1+e)", lambda e: {"steps": {"out": times(1 + e)}}),
        ("fwd: constant offset e in O", lambda e: {"steps": {"out": plus(e)}}),
        ("fwd: exp wrong by e (oscillating)", lambda e: {"steps": {"exp": oscillating(e)}}),
        ("fwd: masked keys leak, weight e", lambda e: {"steps": {"exp": leaking(e)}}, "causal"),
        ("fwd: ALiBi slope x(1+e)", lambda e: {"inputs": rescale("bias", e)}, "ALiBi"),
        ("bwd: D x(1+e)", lambda e: {"steps": {"delta": times(1 + e)}}),
        ("bwd: P recomputed with scale x(1+e)", lambda e: {"steps": {"scores": times(1 + e)}}),
        ("bwd: LSE off by e", lambda e: {"steps": {"lse": plus(e)}}),
        ("bwd: dQ scale x(1+e)", lambda e: {"steps": {"dq": times(1 + e)}}),
        ("bwd: dK scale x(1+e)", lambda e: {"steps": {"dk": times(1 + e)}}),
        ("bwd: dV gain x(1+e)", lambda e: {"steps": {"dv": times(1 + e)}}),
    )
}
"""Mistakes of any size, by name."""
