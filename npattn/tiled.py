"""Attention tile by tile: the results of `dense` on all cores, never holding T × S numbers.

    B batch   H query heads   K key/value heads   T queries   S keys
    D query/key size   E value size
    A tile is a block of queries against a strip of keys, small enough to stay in a core's cache.
    Threads take blocks of queries (forward) or heads (backward), each with one thread of BLAS.

Two things make it fast. A score is exponentiated as it is: a floating-point number keeps its
relative precision at any size, so that the row maximum is looked for only where the sum of a row
leaves the range of the dtype (`_block`). And in the backward pass do is divided by that sum, and
Σ do·o is one more column of a product, [do, −Σ do·o] [v, 1]ᵀ, so that exp and one multiplication
are all that is left to do element by element (`_add_fast`). Derivation: docs/derivations/tiled.md.
Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn import biases, dense, masks, threads
from npattn.arrays import Array, BiasLike, Tile, sum_to
from npattn.biases.bias import Dense
from npattn.masks.bands import Band
from npattn.problem import Gradients, Problem

__all__ = ["Saved", "backward", "choice", "forward", "jvp", "max_score", "visible_tiles", "weights"]

QUERIES = 512
"""Queries in a block, half as many where there would be fewer blocks than ENOUGH."""
KEYS = 512
"""Keys in a strip: with QUERIES, what the cache of a core about holds, in float32."""
ENOUGH = 16
"""Blocks that keep all cores busy to the end."""
CELL = 256
"""Keys in the smallest part of a strip that a mask is asked about."""
LARGE = {4: 2**18, 8: 2**19}
"""Number of scores from which this engine is the faster one, by bytes of a number.

Source: benchmarks/engines.py.
"""


class Saved(NamedTuple):
    """Results that backward and jvp need, in the dtype of the computation, with a head axis."""

    out: Array  # (..., H, T, E)
    shift: Array  # (..., H, T) subtracted before exp: lse alone would lose the small terms
    log: Array  # (..., H, T) of the sum of exp(s − shift): lse is the sum of the two


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]  # a dict of literals
def forward(problem: Problem) -> tuple[Array, Array, Saved]:
    """Compute out (..., H, T, E), lse (..., H, T) and the results that backward needs."""
    call = _Call(problem)
    out = np.empty((*problem.lead, problem.H, problem.T, problem.E), problem.dtype)
    shift, log = np.zeros(out.shape[:-1], problem.dtype), np.empty(out.shape[:-1], problem.dtype)

    def work(block: tuple[tuple[int, ...], int, int], space: _Space) -> None:
        plane, t0, t1 = block
        _block(call, plane, t0, t1, space, *(x[plane][t0:t1] for x in (out, shift, log)))

    threads.each(call.blocks(), lambda: _Space(call), work)
    saved, lse = Saved(out, shift, log), shift + log
    return (out[0], lse[0], saved) if problem.headless else (out, lse, saved)


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]
def backward(
    problem: Problem,
    saved: Saved,
    do: Array,
    dlse: Array | None = None,
    dweights: Array | None = None,
) -> Gradients:
    """Gradients of Σ do·out + Σ dlse·lse + Σ dweights·weights: forward, read upwards."""
    call = _Call(problem)
    pull = _Pull(call, saved, do, dlse, dweights)
    if dweights is not None:
        threads.each(call.blocks(), lambda: _Space(call), pull.add_mean_of_dweights)
    threads.each(pull.items, lambda: _Space(call), pull.gradients)
    return pull.result()


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]
def jvp(
    problem: Problem,
    saved: Saved,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    dbias: Array | BiasLike | None = None,
    dsinks: Array | None = None,
) -> tuple[Array, Array]:
    """Directional derivative (do, dlse) of (out, lse): forward, line by line."""
    call = _Call(problem)
    call.careful = call.careful or not all(_finite(x) for x in (dq, dk, dv) if x is not None)
    saved = saved._replace(log=np.where(saved.log == -np.inf, 0, saved.log))  # [8]
    do, dlse = np.zeros_like(saved.out), np.zeros_like(saved.log)
    moved_bias = None if dbias is None else biases.of(dbias)
    along = {
        name: None if x is None else call.operand(x, heads)
        for name, x, heads in (("q", dq, problem.H), ("k", dk, problem.K), ("v", dv, problem.K))
    }

    def work(block: Block, space: _Space) -> None:
        _add_jvp(call, saved, block, space, along, moved_bias, dsinks, do, dlse)

    threads.each(call.blocks(), lambda: _Space(call), work)
    return (do[0], dlse[0]) if problem.headless else (do, dlse)


def weights(problem: Problem, saved: Saved) -> Array:
    """Weights (..., H, T, S), as large as everything that this module avoids."""
    return dense.forward(problem)[2].p


def max_score(problem: Problem, _: Saved) -> Array:
    """Largest score of each row, (..., H, T) with a head axis."""
    call = _Call(problem)
    top = np.empty((*problem.lead, problem.H, problem.T), problem.dtype)

    def work(block: Block, space: _Space) -> None:
        plane, t0, t1 = block
        q = call.scaled_queries(plane, t0, t1, space)
        top[plane][t0:t1] = _maxima(call, plane, q, t0, t1, space)

    threads.each(call.blocks(), lambda: _Space(call), work)
    return top


def choice(problem: Problem) -> str:
    """Return the faster engine: "dense" or "tiled"."""
    least = LARGE.get(problem.dtype.itemsize)
    if problem.dtype.kind != "f" or problem.storage is not None or least is None:
        return "dense"
    scores = problem.H * math.prod(problem.lead) * problem.T * problem.S
    return "tiled" if scores >= least else "dense"


def visible_tiles(problem: Problem) -> list[list[tuple[int, int, int, int, int, int]]]:
    """Tiles of each block of queries that are computed at all, for a problem with one batch.

    Each is (query head, key/value head, t0, t1, s0, s1). The benchmarks compare with them.
    """
    call = _Call(problem)
    return [
        [(plane[-1], call.kv_plane(plane)[-1], *part[:4]) for part in call.parts(plane, t0, t1)]
        for plane, t0, t1 in call.blocks()
    ]


# --- what all tiles of a problem have in common ---------------------------------------------------

Plane = tuple[int, ...]
Block = tuple[Plane, int, int]
Part = tuple[int, int, int, int, bool]


class _Call:
    """Operands in the dtype of the computation, and their visible parts."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.dtype = problem.dtype
        self.scale = 1.0 if problem.scale is None else problem.scale  # Problem has put it there
        self.sizes = (problem.lead, problem.H, problem.T, problem.S)
        self.planes = list(np.ndindex(*problem.lead, problem.H))
        few = len(self.planes) * problem.T < ENOUGH * QUERIES
        self.queries = -(-QUERIES // 2) if few else QUERIES
        self.q = self.operand(problem.q, problem.H)
        self.k = self.operand(problem.k, problem.K)
        self.v = self.operand(problem.v, problem.K)
        self.mask = _visible(problem)
        self.mask_lead = () if self.mask is None else self.mask.shape(*self.sizes)[:-2]
        self.known: dict[tuple[Plane, int], list[Part]] = {}
        self.limits: dict[tuple[int, ...], Array] = {}
        self.bias = None if problem.bias is None else biases.of(problem.bias)
        self.keep = None if problem.dropout_mask is None else masks.of(problem.dropout_mask)
        self.sinks = None if problem.sinks is None else problem.sinks.astype(self.dtype)
        # Where something is not finite, each product asks what is live: 0 · NaN is NaN.  [10]
        self.largest = {name: _largest(getattr(self, name)) for name in ("q", "k", "v")}
        self.careful = not all(math.isfinite(x) for x in self.largest.values())

    def operand(self, x: Array, heads: int) -> Array:
        """Convert an array to the dtype of the computation, with every leading axis."""
        x = x.astype(self.dtype, copy=False)
        if x.strides[-1] != x.itemsize:
            x = np.ascontiguousarray(x)  # once, not in each product
        x = x[None] if x.ndim == 2 else x
        return np.broadcast_to(x, (*self.problem.lead, heads, *x.shape[-2:]))

    def blocks(self) -> list[Block]:
        """List the blocks of queries, (plane, t0, t1); under causal, the longest first."""
        T, n = self.problem.T, self.queries
        starts = list(range(0, T, n))[::-1]
        return [(plane, t0, min(t0 + n, T)) for plane in self.planes for t0 in starts]

    def kv_plane(self, plane: Plane) -> Plane:
        """Index of the key/value head that a query head uses [1]."""
        return (*plane[:-1], plane[-1] * self.problem.K // self.problem.H)

    def tile(self, plane: Plane, t0: int, t1: int, s0: int, s1: int) -> Tile:
        return Tile(*self.sizes, plane, t0, t1, s0, s1)

    def parts(self, plane: Plane, t0: int, t1: int) -> list[Part]:
        """List the parts (t0, t1, s0, s1, partial) that a block of queries sees anything of."""
        S = self.problem.S
        if self.mask is None:
            return [(t0, t1, s0, min(s0 + KEYS, S), False) for s0 in range(0, S, KEYS)]
        own = plane[len(plane) - len(self.mask_lead) :]
        own = tuple(i if n > 1 else 0 for i, n in zip(own, self.mask_lead, strict=True))
        parts = self.known.get((own, t0))
        if parts is None:
            parts = self.known[own, t0] = self._parts(plane, t0, t1)
        return parts

    def _parts(self, plane: Plane, t0: int, t1: int) -> list[Part]:
        """List cells, each without the hidden rows and keys at its edges.

        Cells that are visible as a whole are joined to strips.
        """
        assert self.mask is not None
        lo, hi = self.mask.hull(self.tile(plane, t0, t1, 0, self.problem.S))
        parts: list[Part] = []
        for c0 in range(lo, hi, CELL):
            c1 = min(c0 + CELL, hi)
            seen = self.mask.tile(self.tile(plane, t0, t1, c0, c1))
            if seen is False:
                continue
            rows, keys, partial = slice(0, t1 - t0), slice(0, c1 - c0), False
            if seen is not True:
                rows, keys = (_extent(np.asarray(seen.any(axis))) for axis in (1, 0))
                partial = not seen[rows, keys].all()
            part = (t0 + rows.start, t0 + rows.stop, c0 + keys.start, c0 + keys.stop, partial)
            last = parts[-1] if parts else None
            if last and _are_adjacent(last, part):
                parts[-1] = (*last[:3], part[3], False)
            else:
                parts.append(part)
        return parts

    def scaled_queries(self, plane: Plane, t0: int, t1: int, space: _Space) -> Array:
        """Multiply a block of queries by scale."""
        q = self.q[plane][t0:t1]
        scaled: Array = np.multiply(q, self.scale, out=space("q", *q.shape))
        return scaled

    def hide(self, tile: Tile, s: Array, space: _Space) -> None:
        """Turn hidden scores into −inf, in place, and a visible NaN into inf.

        The row is NaN with either. The minimum of a score and ±inf takes a tenth of the time of a
        masked copy.
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
        self, tile: Tile, s: Array, partial: bool, space: _Space, slope: bool = False
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


class _Scores(NamedTuple):
    """Final scores of a tile."""

    tile: Tile
    rows: slice  # of the block
    partial: bool  # some are hidden
    s: Array
    slope: Array | None  # their derivative by the products, where asked for and not scale


class _Space:
    """Work space of one thread: nothing is allocated for a tile."""

    def __init__(self, call: _Call):
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


def _visible(problem: Problem) -> masks.Mask | None:
    """Combine mask, causal and window [5-7]."""
    mask = None if problem.mask is None else masks.of(problem.mask)
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0
    if left is None and right is None:
        return mask
    band = masks.window(left, right, alignment=problem.alignment or "bottom_right")
    return band if mask is None else mask & band


def _extent(visible: Array) -> slice:
    """Range from the first True to the last; there is at least one."""
    indices = np.flatnonzero(visible)
    return slice(int(indices[0]), int(indices[-1]) + 1)


def _are_adjacent(one: Part, other: Part) -> bool:
    """Return True if two parts are one strip: all visible, in the same rows, side by side."""
    whole = not one[-1] and not other[-1]
    return whole and one[:2] == other[:2] and one[3] == other[2] and other[3] - one[2] <= KEYS


def _largest(x: Array) -> float:
    """Largest |x|, or NaN if there is one."""
    return float(np.maximum(x.max(initial=0), -x.min(initial=0)))


def _finite(x: Array) -> bool:
    return math.isfinite(_largest(x))


# --- forward --------------------------------------------------------------------------------------


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]  # each thread has its own
def _block(
    call: _Call,
    plane: Plane,
    t0: int,
    t1: int,
    space: _Space,
    out: Array,
    shift: Array,
    log: Array,
) -> None:
    """Fill out (n, E), shift (n,) and log (n,) of a block of queries."""
    q = call.scaled_queries(plane, t0, t1, space)
    sink = None if call.sinks is None else call.sinks[plane[-1]]
    total = _sums(call, plane, q, t0, t1, space, None, out)
    total = total if sink is None else total + np.exp(sink)
    # A sum that is not tiny has lost none of its terms that count to underflow.
    good = (total > np.finfo(call.dtype).eps) & np.isfinite(total) & np.isfinite(out).all(-1)
    if not good.all():
        m = _maxima(call, plane, q, t0, t1, space)
        m = m if sink is None else np.maximum(m, sink)
        shift[...] = np.where(good | (m == -np.inf), 0, m)  # no row depends on other rows
        total = _sums(call, plane, q, t0, t1, space, shift, out)
        total = total if sink is None else total + np.exp(sink - shift)
    np.log(total, out=log)
    total[total == 0] = 1  # a query that sees nothing  [8]
    out /= total[:, None]


def _scores(
    call: _Call,
    plane: Plane,
    q: Array,
    t0: int,
    t1: int,
    space: _Space,
    keys: tuple[int, int] | None = None,
    slope: bool = False,
) -> Iterator[_Scores]:
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
        yield _Scores(tile, rows, partial, s[:, own], rate)


def _empty_rows(call: _Call) -> Array:
    """Mask of the queries that see no key: (..., H, T)."""
    problem, space = call.problem, _Space(call)
    empty = np.ones((*problem.lead, problem.H, problem.T), bool)
    for plane, t0, t1 in call.blocks():
        q = call.scaled_queries(plane, t0, t1, space)
        for _, rows, _, s, _ in _scores(call, plane, q, t0, t1, space):
            empty[plane][t0:t1][rows] &= (s == -np.inf).all(-1)
    return empty


def _sums(
    call: _Call,
    plane: Plane,
    q: Array,
    t0: int,
    t1: int,
    space: _Space,
    shift: Array | None,
    out: Array,
) -> Array:
    """Return Σ exp(s − shift) of each row, and write Σ exp(s − shift) v to out."""
    v = call.v[call.kv_plane(plane)]
    total = np.zeros(t1 - t0, call.dtype)
    out[...] = 0
    for tile, rows, _, s, _ in _scores(call, plane, q, t0, t1, space):
        live = call.live(s)
        if shift is not None:
            s -= shift[rows, None]
        p = np.exp(s, out=s)
        total[rows] += p @ np.ones(p.shape[1], call.dtype)
        if call.keep is not None:
            p *= call.dropout_factor(tile)
        out[rows] += call.sum(p, v[tile.s0 : tile.s1], live, space("o", *out[rows].shape))
    return total


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]  # each thread has its own
def _maxima(call: _Call, plane: Plane, q: Array, t0: int, t1: int, space: _Space) -> Array:
    m = np.full(t1 - t0, -np.inf, call.dtype)
    for _, rows, _, s, _ in _scores(call, plane, q, t0, t1, space):
        m[rows] = np.maximum(m[rows], s.max(-1))
    return m


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]
def _add_jvp(
    call: _Call,
    saved: Saved,
    block: Block,
    space: _Space,
    along: dict[str, Array | None],
    dbias: biases.Bias | None,
    dsinks: Array | None,
    do: Array,
    dlse: Array,
) -> None:
    """Add Σ p ds of each row to dlse, and Σ w (ds − dlse) v + Σ w dv to do."""
    plane, t0, t1 = block
    own, scale = call.kv_plane(plane), call.scale
    k, v = call.k[own], call.v[own]
    dq, dk, dv = along["q"], along["k"], along["v"]
    scaled = call.scaled_queries(plane, t0, t1, space)
    # The mean of ds first, then ds less it: where one weight is almost 1, that is little.
    for centred in (False, True):
        for tile, part, _, s, slope in _scores(call, plane, scaled, t0, t1, space, slope=True):
            rows: Any = (*plane, slice(tile.t0, tile.t1))
            keys = slice(tile.s0, tile.s1)
            live = s != -np.inf
            p = np.exp(s - saved.shift[rows][:, None] - saved.log[rows][:, None])
            p = np.where(live, p, 0)
            ds = np.zeros_like(p)
            if dq is not None:
                ds += scale * dq[rows] @ k[keys].T
            if dk is not None:
                ds += scaled[part] @ dk[own][keys].T
            ds = ds if slope is None else ds * slope
            ds = ds if dbias is None else ds + dbias.tile(tile).astype(call.dtype, copy=False)
            if not centred:
                dlse[rows] += np.where(live, p * ds, 0).sum(-1)
                continue
            ds = np.where(live, p * (ds - dlse[rows][:, None]), 0)
            keep, asked = call.dropout_factor(tile), live if call.careful else None
            o = space("o", tile.t1 - tile.t0, v.shape[1])
            do[rows] += call.sum(ds * keep, v[keys], asked, o)
            if dv is not None:
                do[rows] += call.sum(p * keep, dv[own][keys], asked, o)
        if dsinks is not None and not centred:  # one more key, without a value
            assert call.sinks is not None
            at: Any = (*plane, slice(t0, t1))
            p_sink = np.exp(call.sinks[plane[-1]] - saved.shift[at] - saved.log[at])
            dlse[at] += p_sink * dsinks[plane[-1]]


# --- backward -------------------------------------------------------------------------------------


class _Pull:
    """Backward pass: cotangents in, gradients out."""

    def __init__(
        self, call: _Call, saved: Saved, do: Array, dlse: Array | None, dweights: Array | None
    ):
        problem = self.problem = call.problem
        self.call, self.dweights = call, dweights
        self.do = do if do.strides[-1:] == (do.itemsize,) else np.ascontiguousarray(do)
        empty = saved.log == -np.inf
        self.shift, self.log = saved.shift, np.where(empty, 0, saved.log)
        largest = _largest(do)
        # A query that sees nothing has 0, whatever its cotangent is.  [8]
        asked = call.sinks is not None and not math.isfinite(largest)
        unseen = _empty_rows(call) if asked else empty
        # Σ p dp of each row, without p: from o = w v.
        self.delta = np.where(unseen, 0, np.einsum("...e,...e->...", do, saved.out))
        if dlse is not None:  # from lse = log Σ exp(s)
            self.delta -= np.where(empty, 0, dlse)
        finite = math.isfinite(largest) and _finite(self.log) and _finite(self.delta)
        call.careful = call.careful or not finite
        # p = exp(s) / sum: do and delta are divided by the sum, where it is neither below 1, so
        # that they cannot overflow, nor so large that they might underflow.
        safe = (self.log >= 0) & (self.log <= -np.log(np.finfo(call.dtype).eps))
        self.late = (self.shift != 0) | ~safe
        self.late_log = np.where(self.late, self.log, 0)
        self.over_sum = np.exp(self.late_log - self.log)
        # do vᵀ − delta cannot overflow, nor can it where a key is hidden.
        reach = problem.E * largest * call.largest["v"] + _largest(self.delta)
        self.bounded = reach < np.finfo(call.dtype).max
        self.fast = not call.careful and dweights is None
        self.fast = self.fast and call.keep is None
        self.fast = self.fast and problem.softcap is None and problem.score_mod is None
        self.dq = np.zeros((*problem.lead, problem.H, problem.T, problem.D), call.dtype)
        self.dk = np.zeros((*problem.lead, problem.K, problem.S, problem.D), call.dtype)
        self.dv = np.zeros((*problem.lead, problem.K, problem.S, problem.E), call.dtype)
        self._share_out()

    def _share_out(self) -> None:
        """Divide the work into items that write to different numbers.

        They are heads, or ranges of keys with a dq of their own if there are fewer heads than
        threads.
        """
        groups: dict[Plane, list[Plane]] = {}
        bias = self.call.bias
        leads = [] if bias is None else [p.shape(*self.call.sizes)[:-2] for p in bias.parts]
        for plane in self.call.planes:
            key = self.call.kv_plane(plane)
            for lead in leads:  # heads that share a bias add to the same gradient
                own = (1,) * (len(key) - len(lead)) + tuple(lead)
                key = tuple(i if n > 1 else 0 for i, n in zip(key, own, strict=True))
            groups.setdefault(key, []).append(plane)
        S = self.problem.S
        pieces = max(1, min(-(-threads.count() // max(len(groups), 1)), -(-S // KEYS)))
        edges = [round(i * S / pieces) for i in range(pieces + 1)]
        ranges = list(itertools.pairwise(edges))
        self.items = [
            (n, planes, *keys) for planes in groups.values() for n, keys in enumerate(ranges)
        ]
        self.dqs = [self.dq, *(np.zeros_like(self.dq) for _ in ranges[1:])]
        self.dbias: list[Any] = []
        if bias is not None:
            by_key = isinstance(bias, Dense) and bias.array.shape[-1] != 1
            count = 1 if by_key else len(ranges)
            self.dbias = [bias.zeros(*self.call.sizes, dtype=self.call.dtype) for _ in range(count)]
            self.dbias *= len(ranges) // count

    @np.errstate(**dense.QUIET)  # type: ignore[arg-type]
    def add_mean_of_dweights(self, block: Block, space: _Space) -> None:
        """Add Σ p dweights of each row to delta: the share of the returned weights."""
        assert self.dweights is not None
        plane, t0, t1 = block
        q = self.call.scaled_queries(plane, t0, t1, space)
        delta = self.delta[plane][t0:t1]
        for tile, rows, _, s, _ in _scores(self.call, plane, q, t0, t1, space):
            p = self._weights(tile, s, s != -np.inf)
            dw = self.dweights[plane][tile.t0 : tile.t1, tile.s0 : tile.s1]
            delta[rows] += np.where(p == 0, 0, p * dw).sum(-1)

    @np.errstate(**dense.QUIET)  # type: ignore[arg-type]
    def gradients(self, item: tuple[int, list[Plane], int, int], space: _Space) -> None:
        """Add the gradients through the keys lo ≤ s < hi of some heads."""
        piece, planes, lo, hi = item
        for plane in planes:
            own = self.call.kv_plane(plane)
            k, v = self.call.k[own], self.call.v[own]
            if self.fast:
                v = _with_column(v, 1, space("v1", len(v), v.shape[1] + 1))
            dq, dbias = self.dqs[piece][plane], self.dbias[piece] if self.dbias else None
            add = self._add_fast if self.fast else self._add
            for t0 in range(0, self.problem.T, self.call.queries):
                t1 = min(t0 + self.call.queries, self.problem.T)
                q = self.call.scaled_queries(plane, t0, t1, space)
                do = self.do[plane][t0:t1]
                if self.fast:
                    do = _with_column(do, -self.delta[plane][t0:t1],
                                      space("do1", len(do), do.shape[1] + 1))  # fmt: skip
                    do *= self.over_sum[plane][t0:t1, None]
                for part in _scores(self.call, plane, q, t0, t1, space, (lo, hi), slope=True):
                    keys = slice(part.tile.s0, part.tile.s1)
                    add(part, q[part.rows], do[part.rows], k[keys], v[keys], dq, dbias, space)

    def _add_fast(
        self, part: _Scores, q: Array, do: Array, k: Array, v: Array,
        dq: Array, dbias: Any, space: _Space,
    ) -> None:  # fmt: skip
        """Add the gradients of a tile by products, exp, and little else element by element."""
        call, (tile, _, partial, p, _), n, m = self.call, part, len(q), len(k)
        rows: Any = (*tile.plane, slice(tile.t0, tile.t1), None)
        if self.late[rows].any():
            p -= self.shift[rows]
            p -= self.late_log[rows]
        np.exp(p, out=p)
        E = v.shape[1] - 1
        own = call.kv_plane(tile.plane)
        dv, dk = self.dv[own], self.dk[own]
        dv[tile.s0 : tile.s1] += np.matmul(p.T, do[:, :E], out=space("dv", m, E))
        dp = np.matmul(do, v.T, out=space("dp", n, m))  # do vᵀ − delta
        ds = np.multiply(p, dp, out=p)
        if partial and not self.bounded:
            assert call.mask is not None
            np.copyto(ds, 0, where=~np.asarray(call.mask.tile(tile)))  # 0 · inf is NaN
        if call.bias is not None:
            call.bias.add(dbias, tile, ds)
        dk[tile.s0 : tile.s1] += np.matmul(ds.T, q, out=space("dk", m, k.shape[1]))
        dq[tile.t0 : tile.t1] += np.matmul(ds, k, out=space("dq", n, k.shape[1]))

    def _add(
        self, part: _Scores, q: Array, do: Array, k: Array, v: Array,
        dq: Array, dbias: Any, space: _Space,
    ) -> None:  # fmt: skip
        """Add the gradients of a tile with every option, line by line as in dense.backward."""
        call, (tile, _, _, s, slope), n, m = self.call, part, len(q), len(k)
        live = s != -np.inf
        asked = live if call.careful else None
        turned = None if asked is None else asked.T
        p, keep = self._weights(tile, s, live), call.dropout_factor(tile)
        own = call.kv_plane(tile.plane)
        dv, dk = self.dv[own], self.dk[own]
        dv[tile.s0 : tile.s1] += call.sum((p * keep).T, do, turned, space("dv", m, v.shape[1]))
        dp = np.matmul(do, v.T, out=space("dp", n, m)) * keep
        if self.dweights is not None:
            dp += self.dweights[tile.plane][tile.t0 : tile.t1, tile.s0 : tile.s1]
        dp -= self.delta[tile.plane][tile.t0 : tile.t1, None]
        ds = np.where(live, p * dp, 0)
        if call.bias is not None:
            call.bias.add(dbias, tile, ds)
        dx = ds if slope is None else np.where(live, ds * slope, 0)
        dk[tile.s0 : tile.s1] += call.sum(dx.T, q, turned, space("dk", m, k.shape[1]))
        dq[tile.t0 : tile.t1] += call.sum(dx, k, asked, space("dq", n, k.shape[1]))

    def _weights(self, tile: Tile, s: Array, live: Array) -> Array:
        rows = (*tile.plane, slice(tile.t0, tile.t1), None)
        return np.where(live, np.exp(s - self.shift[rows] - self.log[rows]), 0)

    def result(self) -> Gradients:
        problem, bias = self.problem, self.call.bias
        for other in self.dqs[1:]:
            self.dq += other
        self.dq *= self.call.scale
        dsinks = None
        if self.call.sinks is not None:  # one more key, with dp = 0
            p_sink = np.exp(self.call.sinks[:, None] - self.shift - self.log)
            dsinks = sum_to(-p_sink * self.delta, (problem.H, 1))[:, 0]
        return Gradients(
            q=sum_to(self.dq, problem.q.shape),
            k=sum_to(self.dk, problem.k.shape),
            v=sum_to(self.dv, problem.v.shape),
            bias=None if bias is None else _sum_accumulators(self.dbias),
            sinks=dsinks,
        )


def _with_column(x: Array, column: Array | int, out: Array) -> Array:
    out[:, :-1] = x
    out[:, -1] = column
    return out


def _sum_accumulators(accumulators: list[Any]) -> Any:
    """Sum the per-thread accumulators, arrays or tuples of them (a shared one counts once)."""
    first, *others = accumulators
    if isinstance(first, tuple):
        return tuple(_sum_accumulators(list(parts)) for parts in zip(*accumulators, strict=True))
    for other in others:
        if other is not first:
            first += other
    return first
