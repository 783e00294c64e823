"""A flash-like kernel that can be told which mistake to make, and sixty mistakes.

    s = scale · q kᵀ + bias    m, l, acc: running maximum, row sum and Σ p v over tiles of 64 keys
    p = exp(s − m)             o = acc / l,  lse = m + log l
    P = exp(s − lse)           dS = P (dP − D),  dP = do vᵀ,  D = Σ do · o

Everything is float32, and P and dS are rounded to the dtype of q before they enter a product: what
`Rounding.fused` declares. A mistake changes what the kernel is given (`Given`), or one of its steps
(`Flash.steps`), forward or backward; the backward of a forward mistake is not looked at, and
backward mistakes start from a right out and lse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.problem import Problem

__all__ = ["CONTINUOUS", "DISCRETE", "Flash", "Given", "Mistake"]

Step = Callable[[Array, Any], Array]  # (what was computed, dtype of q) → what becomes of it
TILE = 64
LOG2E = np.float32(1 / math.log(2))


@dataclass(frozen=True, eq=False)
class Given:
    """What a kernel works on: q (H, T, D), k, v (K, S, D), all float32 that hold numbers of dtype.

    Attributes
    ----------
    heads : int array (H,)
        The key head of each query head.
    visible : bool array (H, T, S)
    bias : array, or 0
        Broadcasts against (H, T, S).
    keep : array, or 1
        1 where a weight is kept, 0 where it is dropped.
    """

    q: Array
    k: Array
    v: Array
    heads: Array
    visible: Array
    bias: Any
    keep: Any
    rate: float
    scale: float
    dtype: Any

    @classmethod
    def of(cls, problem: Problem) -> Given:
        """A problem without leading axes."""
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

    def change(self, **arrays: Any) -> Given:
        return replace(self, **arrays)


# --- steps ----------------------------------------------------------------------------------------


def stored(x: Array, dtype: Any) -> Array:
    return np.asarray(x.astype(dtype).astype(np.float32))


def truncated(x: Array, dtype: Any) -> Array:
    near = x.astype(dtype)
    zero = np.zeros((), dtype)
    cut = np.where(abs(near).astype(np.float32) > abs(x), np.nextafter(near, zero), near)
    return np.asarray(cut.astype(np.float32))


def exact(x: Array, dtype: Any) -> Array:
    return x


def times(factor: float) -> Step:
    return lambda x, dtype: x * np.float32(factor)


def plus(offset: float) -> Step:
    return lambda x, dtype: x + np.float32(offset)


RIGHT: dict[str, Step] = {"weights": stored, "dv weights": stored, "dscores": stored}
"""Steps that do something in the kernel without a mistake."""


@dataclass(frozen=True, kw_only=True)
class Flash:
    """The kernel.

    Attributes
    ----------
    steps : mapping
        What becomes of scores, exp, weights, sum, l, acc, out; of lse, delta, dp, dscores, dq sum,
        dv weights, heads, dq, dk, dv. Each is left as it is but for `RIGHT`.
    tile : int
        Keys a step.
    repeats : int
        Keys of the first tile that the second repeats.
    unscaled : {"", "l", "acc"}
        What is not rescaled in the second tile.
    product : callable, optional
        (q, k, dtype) → q kᵀ.
    """

    steps: Mapping[str, Step] = field(default_factory=dict)
    tile: int = TILE
    repeats: int = 0
    unscaled: str = ""
    product: Callable[[Array, Array, Any], Array] = lambda q, k, dtype: q @ k.swapaxes(-1, -2)

    def step(self, name: str, x: Array, given: Given) -> Array:
        return self.steps.get(name, RIGHT.get(name, exact))(x, given.dtype)

    def tiles(self, S: int) -> Iterator[tuple[int, slice]]:
        for number, start in enumerate(range(0, S, self.tile)):
            back = self.repeats if number == 1 else 0
            yield number, slice(start - back, min(start + self.tile, S))

    def scores(self, given: Given, keys: slice) -> Array:
        k = given.k[given.heads][:, keys]
        s = self.product(given.q, k, given.dtype) * np.float32(given.scale)
        bias = given.bias if np.ndim(given.bias) == 0 else given.bias[..., keys]
        s = self.step("scores", s + bias, given)
        return np.where(given.visible[..., keys], s, np.float32(-np.inf))

    @np.errstate(all="ignore")  # −inf − −inf where a tile shows nothing
    def forward(self, given: Given) -> tuple[Array, Array]:
        """out in the dtype of q, (H, T, E), and lse in float32, (H, T)."""
        (H, T, S), v = given.visible.shape, given.v[given.heads]
        m = np.full((H, T, 1), -np.inf, np.float32)
        total, acc = np.zeros_like(m), np.zeros((H, T, v.shape[-1]), np.float32)
        for number, keys in self.tiles(S):
            s = self.scores(given, keys)
            top = np.maximum(m, s.max(-1, keepdims=True))
            pivot = np.where(top == -np.inf, np.float32(0), top)
            p = self.step("exp", np.exp(s - pivot), given)
            shrink = self.step("exp", np.exp(m - pivot), given)
            one = np.ones_like(shrink)
            of_l, of_acc = (
                one if self.unscaled == x and number == 1 else shrink for x in ("l", "acc")
            )
            row = self.step("sum", p, given).sum(-1, keepdims=True)
            total = self.added("l", total * of_l, row, given)
            keep = given.keep if np.ndim(given.keep) == 0 else given.keep[..., keys]
            seen = (self.step("weights", p, given) * keep) @ v[:, keys]
            acc, m = self.added("acc", acc * of_acc, seen, given), top
        out = acc / np.where(total == 0, np.float32(1), total) / np.float32(1 - given.rate)
        out = self.step("out", out, given).astype(given.dtype)
        return out, (m + np.log(total))[..., 0]

    @np.errstate(all="ignore")
    def backward(self, given: Given, out: Array, lse: Array, dout: Array) -> dict[str, Array]:
        """dq, dk, dv in the dtype of q."""
        k, v, do = given.k[given.heads], given.v[given.heads], dout.astype(np.float32)
        s = self.scores(given, slice(None))
        lse = self.step("lse", lse, given)[..., None]
        p = np.where(s == -np.inf, np.float32(0), np.exp(s - lse))
        rate = np.float32(1 / (1 - given.rate))

        w = self.step("dv weights", p, given) * given.keep
        dv = w.swapaxes(-1, -2) @ do * rate
        dp = self.step("dp", do @ v.swapaxes(-1, -2), given) * self.kept(given) * rate
        delta = self.step("delta", (do * out.astype(np.float32)).sum(-1, keepdims=True), given)
        ds = self.step("dscores", p * (dp - delta), given)
        dq = np.zeros_like(given.q)
        for _, keys in self.tiles(s.shape[-1]):
            dq = self.added("dq sum", dq, ds[..., keys] @ k[:, keys], given)
        dk = ds.swapaxes(-1, -2) @ given.q
        scale = np.float32(given.scale)
        found = {"dq": dq * scale, "dk": self.shared(dk * scale, given)}
        found["dv"] = self.shared(dv, given)
        return {n: self.step(n, x, given).astype(given.dtype) for n, x in found.items()}

    def kept(self, given: Given) -> Any:
        return np.float32(1) if "every dp" in self.steps else given.keep

    def shared(self, dx: Array, given: Given) -> Array:
        """(H, S, n) → (K, S, n): the sum over the query heads that share one."""
        parts = dx.reshape(len(given.k), -1, *dx.shape[1:])
        if "heads" in self.steps:
            return self.steps["heads"](parts, given.dtype)
        return np.asarray(parts.sum(1))

    def added(self, name: str, total: Array, more: Array, given: Given) -> Array:
        """A sum that is kept from tile to tile; one of a lower dtype takes terms of that dtype."""
        if name in self.steps:
            total, more = self.step(name, total, given), self.step(name, more, given)
        return self.step(name, total + more, given)


# --- mistakes -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One way to be wrong.

    Attributes
    ----------
    name : str
    problem : str
        A name among the problems of detection.py.
    kernel : Flash
    given : callable
        What the wrong kernel is given, from what it should be given.
    backward : bool
        It is in the backward.
    narrow : bool
        It stores something in the dtype of q, which for float32 is no mistake.
    """

    name: str
    problem: str = "plain"
    kernel: Flash = Flash()
    given: Callable[[Given], Given] = lambda given: given
    backward: bool = False
    narrow: bool = False

    def results(self, right: Given, out: Array, lse: Array, dout: Array) -> dict[str, Array]:
        """o and lse, or the gradients from the right ones."""
        if self.backward:
            return self.kernel.backward(self.given(right), out, lse, dout)
        return dict(zip(("o", "lse"), self.kernel.forward(self.given(right)), strict=True))


def hides(*at: Any) -> Callable[[Given], Given]:
    """Rows and keys (indices into (H, T, S)) that are hidden though they should be seen."""

    def change(given: Given) -> Given:
        visible = given.visible.copy()
        visible[at] = False
        return given.change(visible=visible)

    return change


def zero_key(given: Given) -> Given:
    """One more key of zeros, as padding is."""
    k, v = (np.concatenate([x, np.zeros_like(x[:, :1])], 1) for x in (given.k, given.v))
    more = np.ones_like(given.visible[..., :1])
    return given.change(k=k, v=v, visible=np.concatenate([given.visible, more], -1))


def without_own_key(*rows: int) -> Callable[[Given], Given]:
    """Each query, or each of these, does not see the last key that it should."""

    def change(given: Given) -> Given:
        T = given.visible.shape[1]
        last = given.visible & ~np.roll(given.visible, -1, -1)
        last[..., -1] = given.visible[..., -1]
        chosen = np.isin(np.arange(T), rows or range(T))
        return given.change(visible=given.visible & ~(last & chosen[:, None]))

    return change


def shorter_window(given: Given) -> Given:
    """Nor the first."""
    first = given.visible & ~np.roll(given.visible, 1, -1)
    return given.change(visible=given.visible & ~first)


def wrong_head(given: Given) -> Given:
    heads = given.heads.copy()
    heads[1] = heads[-1]
    return given.change(heads=heads)


def next_value(given: Given) -> Given:
    """The value of the first key of a tile is read for the last key of the tile before."""
    v = given.v.copy()
    v[:, TILE - 1] = v[:, TILE]
    return given.change(v=v)


def without_last_channel(given: Given) -> Given:
    q = given.q.copy()
    q[..., -1] = 0
    return given.change(q=q)


def low_queries(given: Given) -> Given:
    """q · scale · log₂e is stored, as a kernel with exp2 may do."""
    q = stored(given.q * np.float32(given.scale) * LOG2E, given.dtype) / LOG2E
    return given.change(q=q, scale=1.0)


def capped_products(q: Array, k: Array, dtype: Any) -> Array:
    s = q @ k.swapaxes(-1, -2)
    return np.asarray(np.float32(50) * np.tanh(s / np.float32(50)))


def low_products(q: Array, k: Array, dtype: Any) -> Array:
    """q kᵀ in parts of 16 channels, stored after each."""
    s = np.zeros((*q.shape[:-1], k.shape[-2]), np.float32)
    for start in range(0, q.shape[-1], 16):
        part = slice(start, start + 16)
        s = stored(s + q[..., part] @ k[..., part].swapaxes(-1, -2), dtype)
    return s


def no_last_row(x: Array, dtype: Any) -> Array:
    return np.concatenate([x[:, :-1], np.zeros_like(x[:, -1:])], 1)


def no_first_row(x: Array, dtype: Any) -> Array:
    return np.concatenate([np.zeros_like(x[:, :1]), stored(x[:, 1:], dtype)], 1)


def rolled(x: Array, dtype: Any) -> Array:
    return np.roll(x, 1, 1)


def all_but_one(parts: Array, dtype: Any) -> Array:
    return np.asarray(parts[:, :-1].sum(1))


def one_by_one(parts: Array, dtype: Any) -> Array:
    """Heads are added in the dtype of q."""
    total = np.zeros_like(parts[:, 0])
    for part in parts.swapaxes(0, 1):
        total = stored(total + stored(part, dtype), dtype)
    return total


def _forward(name: str, problem: str = "plain", **words: Any) -> Mistake:
    kernel = words.pop("kernel", Flash())
    steps = words.pop("steps", None)
    kernel = kernel if steps is None else replace(kernel, steps=steps)
    return Mistake(name=name, problem=problem, kernel=kernel, **words)


def _backward(name: str, problem: str = "plain", **words: Any) -> Mistake:
    return _forward(f"bwd: {name}", problem, backward=True, **words)


LOW: dict[str, Any] = {"narrow": True}
EVERY = slice(None)
BY_16, REPEATS = Flash(tile=16), Flash(repeats=1)
DISCRETE: tuple[Mistake, ...] = (
    _forward("tail key missing, n=4096", "long", given=hides(..., -1)),
    _forward("tail key missing, one row, n=4096", "long", given=hides(0, -1, -1)),
    _forward("tail key missing, n=256", given=hides(..., -1)),
    _forward("first key missing, n=4096", "long", given=hides(..., 0)),
    _forward("one zero pad key attended, n=4096", "long", given=zero_key),
    _forward("one zero pad key attended, n=256", given=zero_key),
    _forward("causal off by one (all rows)", "causal", given=without_own_key()),
    _forward("causal off by one (row 63 only)", "causal", given=without_own_key(63)),
    _forward("window 64 -> 63", "window", given=shorter_window),
    _forward("dropout p=.1: rescale missing", "dropout .1", given=lambda x: x.change(rate=0.0)),
    _forward("dropout p=.001: rescale missing", "dropout .001", given=lambda x: x.change(rate=0.0)),
    _forward("GQA: wrong KV head, one query head", given=wrong_head),
    _forward(
        "GQA: tile instead of repeat",
        given=lambda x: x.change(heads=np.arange(len(x.heads)) % len(x.k)),
    ),
    _forward("acc in low dtype per block of 64", steps={"acc": stored}, **LOW),
    _forward("acc in low dtype per 16 keys", kernel=BY_16, steps={"acc": stored}, **LOW),
    _forward(
        "acc in low dtype per 16 keys, n=4096", "long", kernel=BY_16, steps={"acc": stored}, **LOW
    ),
    _forward("QK accumulated in low dtype per 16", kernel=Flash(product=low_products), **LOW),
    _forward("scores stored in low dtype", steps={"scores": stored}, **LOW),
    _forward("q*scale rounded to low dtype", given=low_queries, **LOW),
    _forward("row sum l in low dtype", steps={"l": stored}, **LOW),
    _forward("row sum l in low dtype, n=4096", "long", steps={"l": stored}, **LOW),
    _forward("l from rounded P", steps={"sum": stored}, **LOW),
    _forward("exp result rounded to low dtype", steps={"exp": stored}, **LOW),
    _forward("P truncated instead of rounded", steps={"weights": truncated}, **LOW),
    _forward("O truncated instead of rounded", steps={"out": truncated}, **LOW),
    _forward("rescale of l skipped in block 1", kernel=Flash(unscaled="l")),
    _forward("rescale of acc skipped in block 1", kernel=Flash(unscaled="acc")),
    _forward("key at block edge counted twice", kernel=REPEATS),
    _forward("key at block edge twice, n=4096", "long", kernel=REPEATS),
    _forward("V row at block edge shifted", given=next_value),
    _forward("V row at block edge shifted, n=4096", "long", given=next_value),
    _forward("softcap 50 applied though none", kernel=Flash(product=capped_products)),
    _forward("last head-dim element ignored in QK", given=without_last_channel),
    _backward("LSE saved in low dtype", steps={"lse": stored}, **LOW),
    _backward("D of last row = 0", steps={"delta": no_last_row}),
    _backward("D rows shifted by one", steps={"delta": rolled}),
    _backward("D stored in low dtype", steps={"delta": stored}, **LOW),
    _backward("dP stored in low dtype", steps={"dp": stored}, **LOW),
    _backward("tail key missing, n=4096", "long", given=hides(..., -1)),
    _backward("last query row missing", given=hides(EVERY, -1)),
    _backward("first row missing in dV", steps={"dv weights": no_first_row}),
    _backward("dS truncated", steps={"dscores": truncated}, **LOW),
    _backward("P truncated in dV", steps={"dv weights": truncated}, **LOW),
    _backward("dQ accumulated in low dtype", steps={"dq sum": stored}, **LOW),
    _backward("dQ accumulated low, n=4096", "long", steps={"dq sum": stored}, **LOW),
    _backward("GQA one head not summed", steps={"heads": all_but_one}),
    _backward(
        "GQA group of 8 summed in low dtype", "group of 8", steps={"heads": one_by_one}, **LOW
    ),
    _backward("dropout mask not applied to dP", "dropout .1", steps={"every dp": exact}),
)
"""Mistakes that are made, or not."""


def oscillating(size: float) -> Step:
    """exp in error by up to `size`, which changes sign twenty times in a unit of its argument."""
    return lambda p, dtype: p * (1 + np.float32(size) * np.sin(64 * np.log(np.maximum(p, 1e-30))))


def leaking(size: float) -> Step:
    """Hidden keys have this weight where the heaviest has 1."""
    return lambda p, dtype: np.where(p == 0, np.float32(size), p)


def rescaled(name: str, size: float) -> Callable[[Given], Given]:
    return lambda given: given.change(**{name: getattr(given, name) * (1 + size)})


Sized = Callable[[float], Mistake]


def _sized(name: str, make: Callable[[float], dict[str, Any]], problem: str = "plain") -> Sized:
    return lambda size: _forward(name, problem, backward=name.startswith("bwd"), **make(size))


CONTINUOUS: dict[str, Sized] = {
    name: _sized(name, *rest)
    for name, *rest in (
        ("fwd: scale x(1+e)", lambda e: {"given": rescaled("scale", e)}),
        ("fwd: output gain x(1+e)", lambda e: {"steps": {"out": times(1 + e)}}),
        ("fwd: constant offset e in O", lambda e: {"steps": {"out": plus(e)}}),
        ("fwd: exp wrong by e (oscillating)", lambda e: {"steps": {"exp": oscillating(e)}}),
        ("fwd: masked keys leak, weight e", lambda e: {"steps": {"exp": leaking(e)}}, "causal"),
        ("fwd: ALiBi slope x(1+e)", lambda e: {"given": rescaled("bias", e)}, "ALiBi"),
        ("bwd: D x(1+e)", lambda e: {"steps": {"delta": times(1 + e)}}),
        (
            "bwd: P recomputed with scale x(1+e)",
            lambda e: {"steps": {"scores": times(1 + e)}},
        ),
        ("bwd: LSE off by e", lambda e: {"steps": {"lse": plus(e)}}),
        ("bwd: dQ scale x(1+e)", lambda e: {"steps": {"dq": times(1 + e)}}),
        ("bwd: dK scale x(1+e)", lambda e: {"steps": {"dk": times(1 + e)}}),
        ("bwd: dV gain x(1+e)", lambda e: {"steps": {"dv": times(1 + e)}}),
    )
}
"""Mistakes of any size, by name."""
