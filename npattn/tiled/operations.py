"""Operands of a problem, and its scores part by part, for every pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from npattn import biases, dense, masks
from npattn.arrays import Array, Tile
from npattn.problem import Problem
from npattn.tiled.tiling import Plane, Tiling

__all__ = ["Call", "Saved", "Scores", "Space", "is_finite", "largest", "scores"]


class Saved(NamedTuple):
    """Results that backward and jvp need, in the dtype of the computation, with a head axis."""

    out: Array  # (..., H, T, E)
    shift: Array  # (..., H, T) subtracted before exp: lse alone would lose the small terms
    log: Array  # (..., H, T) of the sum of exp(s − shift): lse is the sum of the two


class Call(Tiling):
    """Operands in the dtype of the computation, and their visible parts."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.dtype = problem.dtype
        self.scale = 1.0 if problem.scale is None else problem.scale  # Problem has put it there
        self.q = self.operand(problem.q, problem.H)
        self.k = self.operand(problem.k, problem.K)
        self.v = self.operand(problem.v, problem.K)
        self.limits: dict[tuple[int, ...], Array] = {}
        self.bias = None if problem.bias is None else biases.of(problem.bias)
        self.keep = None if problem.dropout_mask is None else masks.of(problem.dropout_mask)
        self.sinks = None if problem.sinks is None else problem.sinks.astype(self.dtype)
        # Where something is not finite, each product asks what is live: 0 · NaN is NaN.  [10]
        self.largest = {name: largest(getattr(self, name)) for name in ("q", "k", "v")}
        self.careful = not all(math.isfinite(x) for x in self.largest.values())

    def operand(self, x: Array, heads: int) -> Array:
        """Convert an array to the dtype of the computation, with every leading axis."""
        x = x.astype(self.dtype, copy=False)
        if x.strides[-1] != x.itemsize:
            x = np.ascontiguousarray(x)  # once, not in each product
        x = x[None] if x.ndim == 2 else x
        return np.broadcast_to(x, (*self.problem.lead, heads, *x.shape[-2:]))

    def scaled_queries(self, plane: Plane, t0: int, t1: int, space: Space) -> Array:
        """Multiply a block of queries by scale."""
        q = self.q[plane][t0:t1]
        scaled: Array = np.multiply(q, self.scale, out=space("q", *q.shape))
        return scaled

    def hide(self, tile: Tile, s: Array, space: Space) -> None:
        """Turn hidden scores into −inf, in place, and a visible NaN into inf.

        The row is NaN with either. The minimum of a score and ±inf takes a tenth of the time of a
        masked copy.
        """
        assert self.mask is not None
        if isinstance(self.mask, masks.Band):  # all tiles on its edges are alike
            key = (*s.shape, self.mask.first(tile))
            limit = self.limits.get(key)
            if limit is None:
                limit = self.limits[key] = _limit(self.mask.tile(tile), np.empty_like(s))
        else:
            limit = _limit(self.mask.tile(tile), space("limit", *s.shape))
        np.fmin(s, limit, out=s)

    def finish_scores(
        self, tile: Tile, s: Array, partial: bool, space: Space, slope: bool = False
    ) -> Array | None:
        """Turn scale · q kᵀ into the final scores, in place, and return the slope [2-7]."""
        problem, rate = self.problem, None
        if problem.softcap is not None:
            s /= problem.softcap
            np.tanh(s, out=s)
            rate = 1 - s**2 if slope else None
            s *= problem.softcap
        if problem.score_mod is not None:
            if slope:
                own = dense.slope(problem, s, tile)
                rate = own if rate is None else rate * own
            s[...] = dense.call_score_mod(problem, s, tile)
        if self.bias is not None:
            np.add(s, self.bias.tile(tile), out=s, casting="same_kind")
        if partial:
            self.hide(tile, s, space)
        return rate

    def dropout_factor(self, tile: Tile) -> Array | float:
        """Factor of the weights [9]."""
        if self.keep is None:
            return 1.0
        return np.asarray(self.keep.tile(tile), self.dtype) / (1 - self.problem.dropout_rate)

    def sum(self, w: Array, x: Array, live: Array | None, out: Array) -> Array:
        """Compute w @ x, in which x counts only where it is live."""
        if live is None:
            return np.matmul(w, x, out=out)
        return dense.sum_live(w, x, live)

    def live(self, s: Array) -> Array | None:
        """Mask of the scores in the softmax; None if it is enough that others have weight 0."""
        return s != -np.inf if self.careful else None


class Scores(NamedTuple):
    """Final scores of a tile."""

    tile: Tile
    rows: slice  # of the block
    partial: bool  # some are hidden
    s: Array
    slope: Array | None  # their derivative by the products, where asked for and not scale


class Space:
    """Work space of one thread: nothing is allocated for a tile."""

    def __init__(self, call: Call):
        self.dtype = call.dtype
        self.flat: dict[str, Array] = {}

    def __call__(self, name: str, *shape: int) -> Array:
        size = math.prod(shape)
        flat = self.flat.get(name)
        if flat is None or flat.size < size:
            flat = self.flat[name] = np.empty(size, self.dtype)
        return flat[:size].reshape(shape)


def _limit(visible: bool | Array, out: Array) -> Array:
    """Fill `out` with inf where a key is visible, −inf where it is hidden."""
    np.copyto(out, visible)
    out -= 0.5
    out *= np.inf
    return out


def scores(
    call: Call,
    plane: Plane,
    q: Array,
    t0: int,
    t1: int,
    space: Space,
    keys: tuple[int, int] | None = None,
    slope: bool = False,
) -> Iterator[Scores]:
    """Yield the final scores of each part of a block, as far as they are of `keys` lo ≤ s < hi.

    Every pass takes them from here, and a part as a whole: products of other shapes round
    otherwise, and where a score is 1e17, a rounding of it is all of a weight.
    """
    k = call.k[call.kv_plane(plane)]
    lo, hi = keys or (0, len(k))
    for r0, r1, s0, s1, partial in call.parts(plane, t0, t1):
        if s1 <= lo or hi <= s0:
            continue
        rows = slice(r0 - t0, r1 - t0)
        s = np.matmul(q[rows], k[s0:s1].T, out=space("s", r1 - r0, s1 - s0))  # [1]
        rate = call.finish_scores(call.tile(plane, r0, r1, s0, s1), s, partial, space, slope)
        own = slice(max(lo - s0, 0), min(hi, s1) - s0)
        rate = None if rate is None else rate[:, own]
        tile = call.tile(plane, r0, r1, s0 + own.start, s0 + own.stop)
        yield Scores(tile, rows, partial, s[:, own], rate)


def largest(x: Array) -> float:
    """Largest |x|, or NaN if there is one."""
    return float(np.maximum(x.max(initial=0), -x.min(initial=0)))


def is_finite(x: Array) -> bool:
    return math.isfinite(largest(x))
