"""Operands of a problem, and its scores part by part, for every pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from npattn import biases, masks
from npattn.engines import dense, score_mod
from npattn.engines.tiled.tiling import Part, Plane, Tiling
from npattn.masks.bands import Band
from npattn.problem import Problem
from npattn.problem.arrays import Array, Tile


class Saved(NamedTuple):
    """Results that backward and jvp need, in the dtype of the computation, with a head axis."""

    out: Array  # (..., H, T, E)
    shift: Array  # (..., H, T) subtracted before exp, in the units of `Call.per_nat`
    log: Array  # (..., H, T) of the sum of exp(s − shift), in nats


class Call(Tiling):
    """Operands in the dtype of the computation, and their visible parts."""

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self.dtype = problem.dtype
        self.scale = 1.0 if problem.scale is None else problem.scale  # Problem has put it there
        self.exp, self.per_nat = _choose_exp(problem)
        self.q = self.operand(problem.q, problem.H)
        self.k = self.operand(problem.k, problem.K)
        self.v = self.operand(problem.v, problem.K)
        self.limits: dict[tuple[int, ...], Array] = {}
        self.bias = None if problem.bias is None else biases.of(problem.bias)
        self.keep = None if problem.dropout_mask is None else masks.of(problem.dropout_mask)
        self.sinks = None if problem.sinks is None else problem.sinks.astype(self.dtype)

    @cached_property
    def careful(self) -> bool:
        """True if an input is not finite: products then leave dead scores out, for 0 · NaN [10]."""
        return not all(map(is_finite, (self.q, self.k, self.v)))

    def operand(self, x: Array, heads: int) -> Array:
        """Convert an array to the dtype of the computation, with every leading axis."""
        x = x.astype(self.dtype, copy=False)
        if x.strides[-1] != x.itemsize:
            x = np.ascontiguousarray(x)  # once, not in each product
        x = x[None] if x.ndim == 2 else x
        return np.broadcast_to(x, (*self.problem.lead, heads, *x.shape[-2:]))

    def scaled_queries(
        self, plane: Plane, t0: int, t1: int, space: WorkSpace, per_nat: float | None = None
    ) -> Array:
        """Multiply a block of queries by the scale, and by the units of a score per nat."""
        per_nat = self.per_nat if per_nat is None else per_nat
        q = self.q[plane][t0:t1]
        scaled: Array = np.multiply(q, self.scale * per_nat, out=space(f"q{per_nat}", *q.shape))
        return scaled

    def hide(self, tile: Tile, s: Array, space: WorkSpace) -> None:
        """Turn hidden scores of a tile, (t, s), into −inf, in place, and a visible NaN into inf.

        An inf makes NaN of its row as a NaN does. The minimum of a score and ±inf takes a tenth of
        the time of a masked copy.
        """
        assert self.mask is not None
        if isinstance(self.mask, Band):  # all tiles on its edges are alike
            key = (*s.shape, self.mask.first(tile))
            limit = self.limits.get(key)
            if limit is None:
                limit = self.limits[key] = _limit(self.mask.tile(tile), np.empty_like(s))
        else:
            limit = _limit(self.mask.tile(tile), space("limit", *s.shape))
        np.fmin(s, limit, out=s)

    def finish_scores(
        self, tile: Tile, s: Array, part: Part, space: WorkSpace, slope: bool = False
    ) -> Array | None:
        """Turn scale · q kᵀ, (t, s), into the final scores, in place; return the slope [2-7]."""
        problem, rate = self.problem, None
        if problem.softcap is not None:
            s /= problem.softcap
            np.tanh(s, out=s)
            rate = 1 - s**2 if slope else None
            s *= problem.softcap
        if problem.score_mod is not None:
            if slope:
                mod_slope = score_mod.slope(problem, s, tile)
                rate = mod_slope if rate is None else rate * mod_slope
            s[...] = score_mod.call_score_mod(problem, s, tile)
        if self.bias is not None:
            np.add(s, self.bias.tile(tile), out=s, casting="same_kind")
        if part.partial:
            hides = slice(part.p0 - part.t0, part.p1 - part.t0)
            self.hide(tile._replace(t0=part.p0, t1=part.p1), s[hides], space)
        return rate

    def dropout_factor(self, tile: Tile) -> Array | float:
        """Factor of the weights [9]."""
        if self.keep is None:
            return 1.0
        return np.asarray(self.keep.tile(tile), self.dtype) / (1 - self.problem.dropout_rate)

    def sum(self, w: Array, x: Array, live: Array | None, out: Array) -> Array:
        """Compute w @ x over the live scores; None means that all are."""
        if live is None:
            return np.matmul(w, x, out=out)
        return dense.sum_live(w, x, live)


class Scores(NamedTuple):
    """Final scores of a tile."""

    tile: Tile
    rows: slice  # of the block
    partial: bool  # some are hidden
    s: Array
    slope: Array | None  # their derivative by the products, where asked for and not scale


class WorkSpace:
    """Work space of one thread: nothing is allocated for a tile."""

    def __init__(self, call: Call):
        self.dtype = call.dtype
        self.flat: dict[str, Array] = {}
        self.views: dict[tuple[str, int, int], Array] = {}
        self.ones = np.ones(max(call.keys, call.problem.E), call.dtype)

    def __call__(self, name: str, n: int, m: int) -> Array:
        view = self.views.get((name, n, m))
        if view is None:
            flat = self.flat.get(name)
            if flat is None or flat.size < n * m:
                self.views = {at: x for at, x in self.views.items() if at[0] != name}
                flat = self.flat[name] = np.empty(n * m, self.dtype)
            view = self.views[name, n, m] = flat[: n * m].reshape(n, m)
        return view


def _limit(visible: bool | Array, out: Array) -> Array:
    """Fill `out` with inf where a key is visible, −inf where it is hidden."""
    np.copyto(out, visible)
    out -= 0.5
    out *= np.inf
    return out


def scores(
    call: Call, plane: Plane, q: Array, t0: int, t1: int, space: WorkSpace,
    keys: tuple[int, int] | None = None, slope: bool = False,
) -> Iterator[Scores]:  # fmt: skip
    """Yield the final scores of each part of a block, cut to the `keys` lo ≤ s < hi.

    Every pass computes its scores here, a part as a whole: products of other shapes round
    differently, and the rounding of a score of 1e17 decides a whole weight.
    """
    k = call.k[call.kv_plane(plane)]
    lo, hi = keys or (0, len(k))
    for part in call.parts(plane, t0, t1):
        r0, r1, s0, s1, *_ = part
        if s1 <= lo or hi <= s0:
            continue
        rows = slice(r0 - t0, r1 - t0)
        s = np.matmul(q[rows], k[s0:s1].T, out=space("s", r1 - r0, s1 - s0))  # [1]
        tile = call.tile(plane, r0, r1, s0, s1)
        rate = call.finish_scores(tile, s, part, space, slope)
        if s0 < lo or hi < s1:
            visible_keys = slice(max(lo - s0, 0), min(hi, s1) - s0)
            tile = tile._replace(s0=s0 + visible_keys.start, s1=s0 + visible_keys.stop)
            s, rate = s[:, visible_keys], None if rate is None else rate[:, visible_keys]
        yield Scores(tile, rows, part.partial, s, rate)


def _choose_exp(problem: Problem) -> tuple[Any, float]:
    """Return the function that turns scores into weights, and the units of a score per nat.

    2^x takes half the time of e^x where NumPy has vector instructions for it. The factor log₂ e
    costs nothing if the scores are a product and nothing else.
    """
    scores = (problem.softcap, problem.score_mod, problem.bias)
    per_nat = 1 / math.log(2)
    factor = (problem.scale or 0) * per_nat
    plain = all(x is None for x in scores) and abs(factor) <= np.finfo(problem.dtype).max
    return (np.exp2, per_nat) if plain and _has_fast_exp2(problem.dtype.char) else (np.exp, 1.0)


@cache
def _has_fast_exp2(char: str) -> bool:
    """Return True if NumPy computes 2^x with vector instructions on this machine."""
    found = np.lib.introspect.opt_func_info(func_name="^exp2$").get("exp2", {}).get(2 * char, {})
    return not str(found.get("current", "baseline")).startswith("baseline")


def bound(x: Array) -> float:
    """Upper bound of |x|; inf or NaN if, and only if, x is not finite."""
    if x.flags.c_contiguous:
        # A fraction of the time of the maximum. Not by BLAS: its threads would wait for more of it
        # in a loop, on the cores that those of npattn.engines.threads need.
        flat = x.reshape(-1)
        norm = math.sqrt(np.einsum("i,i", flat, flat))
        if math.isfinite(norm):
            return norm
    return float(np.maximum(x.max(initial=0), -x.min(initial=0)))


def is_finite(x: Array) -> bool:
    return math.isfinite(bound(x))
