"""The bounds hold for everything that rounds correctly, and not for what is wrong.

`Kernel` is a correct implementation of low precision in NumPy: every product and every addition is
rounded to the accumulator, one at a time, and what a `Rounding` says is stored low is rounded to
the dtype of the inputs through ml_dtypes. It shares no code with the oracle or with the bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npattn
from npattn.api import evaluate
from npattn.conventions import Conventions
from npattn.problem import Problem, finfo, sum_to
from npattn.testing.compare import compare_arrays, excess
from npattn.testing.recipe import Recipe
from npattn.testing.rounding import Rounding, unit_roundoff
from npattn.testing.strategies import Space, recipes
from npattn.testing.tolerance import bounds

Array = np.ndarray[Any, Any]

LOW = ("bfloat16", "float16", "float32")
GRADIENTS = ("q", "k", "v", "bias", "sinks")
LOG2E = 1 / math.log(2)


# --- correct implementations of low precision -----------------------------------------------------


def product(a: Array, b: Array, last_first: bool = False, flush: bool = False) -> Array:
    """a @ b in one order of summation; every product and every sum is rounded, or flushed."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    total = np.zeros((*lead, a.shape[-2], b.shape[-1]), a.dtype)
    order = range(a.shape[-1])
    for i in reversed(order) if last_first else order:
        total += flushed(a[..., :, i, None] * b[..., None, i, :], flush)
        total = flushed(total, flush)
    return total


def flushed(x: Array, flush: bool) -> Array:
    """What hardware makes of a result below the least normal number, where it is told to."""
    return np.where(abs(x) < np.finfo(x.dtype).tiny, x.dtype.type(0), x) if flush else x


class State(NamedTuple):
    """What the backward of a kernel gets from its forward, in the accumulator's dtype."""

    q: Array  # (..., H, T, D) with all leading axes
    k: Array  # (..., H, S, D) shared heads repeated
    v: Array  # (..., H, S, E) shared heads repeated
    s: Array  # (..., H, T, S) final scores, −inf where hidden
    slope: Array | float  # of the final scores in scale · q kᵀ
    live: Array  # (..., H, T, S) where a score takes part
    passes: Array  # (..., H, T, S) where it also passes its gradient on
    z: Array | float  # dropout multiplier
    m: Array  # (..., H, T, 1) row maximum, 0 on empty rows
    total: Array  # (..., H, T, 1) row sum relative to it, 1 on empty rows
    p: Array | None  # (..., H, T, S) stored weights of a kernel without tiles
    out: Array  # (..., H, T, E) as delivered


@dataclass(frozen=True)
class Kernel:
    """A correct implementation: what it rounds, and in which order it does what.

    With a `tile` the softmax is online, the weights are rounded before they are normalised, and
    backward rebuilds them from lse; without, rows are whole and normalised weights are stored.
    """

    rounding: Rounding
    tile: int | None = None  # keys a step
    last_first: bool = False  # sums and tiles run from the last to the first
    binary: bool = False  # exp2 of scores times log₂e
    sink_last: bool = False  # the sink joins after the last tile
    flush: bool = False  # results below the least normal number become 0
    parts: bool = False  # gradients through lse and through out are stored apart, then added
    forgets_delta: bool = False  # wrong: dS = P dP, without the rank-1 term
    conventions: Conventions = Conventions()

    @np.errstate(all="ignore")  # hidden scores may be anything
    def __call__(
        self, problem: Problem, dout: Array | None = None, dlse: Array | None = None
    ) -> dict[str, Array]:
        """o, lse and, with dout, the gradients, by name."""
        out, lse, state = self.forward(problem)
        found = {"o": out, "lse": lse}
        if dout is not None:
            found |= self.backward(problem, state, dout, dlse)
        head = 0 if problem.headless else ...
        return {n: x[head] if n in ("o", "lse") else x for n, x in found.items()}

    def forward(self, problem: Problem) -> tuple[Array, Array, State]:
        dtype, wide = problem.q.dtype, self.wide(problem)
        q, k, v = self.operands(problem)
        s, slope, visible = self.scores(problem, q, k)
        live = s != -np.inf
        keep, z = np.ones((1, 1), wide), wide(1)
        if problem.dropout_mask is not None:
            keep = np.broadcast_to(problem.dropout_mask, s.shape).astype(wide)
            z = wide(1) / (wide(1) - wide(problem.dropout_rate))
        sink = wide(-np.inf) if problem.sinks is None else problem.sinks.astype(wide)[:, None, None]
        sink = np.broadcast_to(sink, (*s.shape[:-1], 1))

        joins = -np.inf if self.sink_last else sink
        m, acc = np.broadcast_to(joins, sink.shape).astype(wide), np.zeros(v.shape[-1:], wide)
        total = np.where(m == -np.inf, wide(0), wide(1))
        for keys in self.tiles(problem.S):
            top = np.maximum(m, s[..., keys].max(-1, keepdims=True, initial=-np.inf))
            pivot = np.where(top == -np.inf, wide(0), top)
            shrink, p = self.exp(m, pivot), self.exp(s[..., keys], pivot)
            total = total * shrink + self.sum(p)
            if self.tile is not None:
                stored = self.store("weights", p, dtype) * np.broadcast_to(keep, s.shape)[..., keys]
                acc = acc * shrink + self.dot(stored, v[..., keys, :])
            m = top
        m = np.where(m == -np.inf, wide(0), m)
        empty = total == 0
        p_stored = None
        if self.tile is None:
            p = self.exp(s, m) / np.where(empty, wide(1), total)
            p_stored = self.store("weights", p, dtype)
            acc = self.dot(self.store("weights", p_stored * (keep * z), dtype), v)
            out = acc
        else:
            out = acc * z / np.where(empty, wide(1), total)
        lse = m + np.log(total)
        if self.sink_last and problem.sinks is not None:
            whole = np.logaddexp(lse, sink)
            out, lse = out * np.exp(lse - whole), whole
            m, total, empty = whole, np.ones_like(total), np.zeros_like(empty)
            p_stored = None if p_stored is None else self.store("weights", self.exp(s, m), dtype)
        if self.conventions.empty_row == "mean":
            mean = self.sum(v.swapaxes(-1, -2)).swapaxes(-1, -2) / wide(max(problem.S, 1))
            out = np.where(empty, mean, out)
        out = self.deliver(out, dtype)
        delivered = self.deliver(lse, wide)[..., 0]
        if self.conventions.lse_base == "2":
            delivered = delivered * wide(LOG2E)
        delivered = np.where(empty[..., 0], wide(self.conventions.lse_empty), delivered)
        state = State(
            q, k, v, s, slope, live, live & visible, keep * z, m,
            np.where(empty, wide(1), total), p_stored, out.astype(wide),
        )  # fmt: skip
        return out, delivered, state

    def backward(
        self, problem: Problem, state: State, dout: Array, dlse: Array | None
    ) -> dict[str, Array]:
        dtype, wide = problem.q.dtype, self.wide(problem)
        q, k, v, s, slope, live, passes, z, m, total, p, out = state
        do = dout.astype(wide).reshape(out.shape)
        dl = wide(0) if dlse is None else dlse.astype(wide).reshape(m.shape)
        if self.conventions.lse_base == "2":
            dl = dl * wide(LOG2E)
        if p is None:
            lse = m + np.log(total)
            # Beyond 2¹⁴ a float32 lse has lost the weights; then the maximum is kept beside it.
            p = np.where(abs(lse) < 2**14, self.exp(s, lse), self.exp(s, m) / total)
            p = np.where(live, p, wide(0))
        w = self.store("weights", self.store("weights", p, dtype) * z, dtype)
        dv = self.gradient(w.swapaxes(-1, -2), do, dtype)
        dp = self.store("dweights", self.dot(do, v.swapaxes(-1, -2)), dtype)
        dp = self.store("dweights", self.flushed(dp * z), dtype)
        delta = self.sum(self.flushed(do * out)) if self.rounding.delta_from == "out" else self.sum(self.flushed(p * dp))
        if self.forgets_delta:
            delta = np.zeros_like(delta)
        if self.parts:
            low = lambda x: self.store("dscores", x, dtype)  # noqa: E731  # a word for it
            ds = low(low(p * (dp - delta)) + low(p * dl))
        else:
            ds = self.store("dscores", self.flushed(p * self.flushed(dp - (delta - dl))), dtype)
        ds = np.where(passes, ds, wide(0))
        dx = self.store("dscores", ds * slope, dtype)
        scale = wide(problem.scale)
        if self.tile is None:
            dx, after = self.store("dscores", dx * scale, dtype), wide(1)
        else:
            after = scale
        dq = self.gradient(dx, k, dtype) * after
        dk = self.gradient(dx.swapaxes(-1, -2), q, dtype) * after
        if self.conventions.empty_row == "mean":
            rows = np.where(live.any(-1, keepdims=True), wide(0), do)
            dv = dv + self.sum(rows.swapaxes(-1, -2)).swapaxes(-1, -2) / wide(max(problem.S, 1))
        found = {
            "dq": self.deliver(self.merge(dq, problem.q.shape, dtype), dtype),
            "dk": self.deliver(self.merge(self.share(dk, problem, dtype), problem.k.shape), dtype),
            "dv": self.deliver(self.merge(self.share(dv, problem, dtype), problem.v.shape), dtype),
        }
        if problem.bias is not None:
            found["dbias"] = self.deliver(self.merge(ds, problem.bias.shape), problem.bias.dtype)
        if problem.sinks is not None:
            sink = problem.sinks.astype(wide)[:, None, None]
            if self.tile is None or self.sink_last:
                p_sink = self.exp(sink, m) / total
            else:
                p_sink = self.exp(sink, m + np.log(total))
            each = p_sink * (dl - delta)
            found["dsinks"] = self.merge(each, (problem.H, 1, 1))[:, 0, 0]
        return found

    # --- the parts

    def wide(self, problem: Problem) -> Any:
        return np.float64 if problem.q.dtype == np.float64 else np.float32

    def operands(self, problem: Problem) -> tuple[Array, Array, Array]:
        wide = self.wide(problem)
        q, k, v = (x.astype(wide) for x in (problem.q, problem.k, problem.v))
        if problem.headless:
            return q[None], k[None], v[None]
        q = np.broadcast_to(q, (*problem.lead, *q.shape[-3:]))
        group = problem.H // max(problem.K, 1)
        return q, np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)

    def scores(self, problem: Problem, q: Array, k: Array) -> tuple[Array, Array | float, Array]:
        dtype, wide = problem.q.dtype, self.wide(problem)
        low = lambda x: self.store("scores", x, dtype)  # noqa: E731  # a word for it
        scale, slope = wide(problem.scale), wide(1)
        if self.binary:
            s = self.dot(q * scale, k.swapaxes(-1, -2))
        else:
            s = low(scale * low(self.dot(q, k.swapaxes(-1, -2))))
        if problem.softcap is not None:
            c = wide(problem.softcap)
            t = low(self.inexact(np.tanh(low(s / c))))
            s, slope = low(c * t), low(1 - low(t * t))
        if problem.score_mod is not None:
            lead = np.arange(math.prod(problem.lead), dtype=wide).reshape(*problem.lead, 1, 1, 1)
            at = (x.astype(wide) for x in np.ogrid[: problem.H, : problem.T, : problem.S])
            step = np.result_type(wide, np.complex64).type(1e-18j)
            moved = problem.score_mod(s + step, lead, *at)
            s, slope = low(moved.real), slope * low(moved.imag / step.imag)
        if problem.bias is not None:
            s = low(s + problem.bias.astype(wide))
        visible = np.broadcast_to(True if problem.visible is None else problem.visible, s.shape)
        fill = self.conventions.hidden_fill
        return np.where(visible, s, wide(-np.inf if fill is None else fill)), slope, visible

    def tiles(self, S: int) -> list[slice]:
        step = self.tile or max(S, 1)
        tiles = [slice(i, i + step) for i in range(0, S, step)]
        return tiles[::-1] if self.last_first else tiles

    def dot(self, a: Array, b: Array) -> Array:
        return product(self.flushed(a), self.flushed(b), self.last_first, self.flush)

    def sum(self, x: Array) -> Array:
        return self.dot(x, np.ones((x.shape[-1], 1), x.dtype))

    def exp(self, s: Array, m: Array) -> Array:
        e = np.exp2(s * s.dtype.type(LOG2E) - m * m.dtype.type(LOG2E)) if self.binary else None
        return self.flushed(self.inexact(np.exp(s - m) if e is None else e))

    def inexact(self, x: Array) -> Array:
        """A fast exp or tanh: in error by all that is declared, up or down as its bits fall."""
        if self.rounding.exp_error is None:
            return x
        odd = np.ascontiguousarray(x).view(f"u{x.itemsize}") % 7 < 3
        error = np.where(odd, 0.99, -0.99) * self.rounding.exp_error
        return np.asarray(x * (1 + error).astype(x.dtype))

    def flushed(self, x: Array) -> Array:
        return flushed(x, self.flush)

    def deliver(self, x: Array, dtype: Any) -> Array:
        return self.flushed(x).astype(dtype)

    def store(self, what: str, x: Array, dtype: Any) -> Array:
        low = getattr(self.rounding, what) == "input"
        return x.astype(dtype).astype(x.dtype) if low else x

    def gradient(self, a: Array, b: Array, dtype: Any) -> Array:
        """a @ b, stored low after every block of the sum where that is declared."""
        block = self.rounding.gradient_block
        if block is None:
            return self.dot(a, b)
        total = np.zeros((), a.dtype)
        for i in range(0, a.shape[-1], block):
            step = slice(i, i + block)
            part = total + self.dot(a[..., step], b[..., step, :])
            total = part.astype(dtype).astype(a.dtype)
        return np.broadcast_to(total, (*a.shape[:-1], b.shape[-1]))

    def share(self, dx: Array, problem: Problem, dtype: Any) -> Array:
        """The sum over the query heads that share a head; stored once each without tiles."""
        if problem.headless or problem.H == problem.K:
            return dx
        if self.tile is None and self.rounding.scores == "input":
            dx = dx.astype(dtype).astype(dx.dtype)
        *lead, H, S, n = dx.shape
        return dx.reshape(*lead, problem.K, H // problem.K, S, n).sum(-3)

    def merge(self, dx: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
        return sum_to(dx, shape)


UPCAST, FUSED, EAGER = Rounding.upcast(), Rounding.fused(), Rounding.eager()
SUMMED = replace(UPCAST, delta_from="weights")
KERNELS = {
    "upcast": Kernel(SUMMED),
    "upcast, last first": Kernel(UPCAST, last_first=True, flush=True),
    "upcast, tiles": Kernel(replace(UPCAST, delta_from="out"), tile=17, binary=True),
    "fused": Kernel(FUSED, tile=17, binary=True),
    "fused, last first": Kernel(FUSED, tile=33, last_first=True, sink_last=True, flush=True),
    "eager": Kernel(replace(EAGER, delta_from="weights")),
    "eager, last first": Kernel(replace(EAGER, delta_from="weights"), last_first=True, parts=True),
}
