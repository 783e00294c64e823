"""Backward pass: gradients, head by head."""

import itertools
import math
from typing import Any

import numpy as np

from npattn.biases.bias import ArrayBias
from npattn.engines import dense, threads
from npattn.engines.tiled.operations import Call, Saved, Scores, WorkSpace, bound, is_finite, scores
from npattn.engines.tiled.tiling import Block, Plane
from npattn.problem import Gradients, Problem
from npattn.problem.arrays import Array, Tile, sum_to

ITEMS = 4
"""Items of work that a problem of fewer heads is divided into, each with a dq of its own."""


@np.errstate(**dense.QUIET)  # type: ignore[arg-type]
def backward(
    problem: Problem, saved: Saved, do: Array, dlse: Array | None = None,
    dweights: Array | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of Σ do·out + Σ dlse·lse + Σ dweights·weights; shapes are as in dense.backward."""
    call = Call(problem)
    pull = Pull(call, saved, do, dlse, dweights)
    if dweights is not None:
        threads.each(call.blocks(), lambda: WorkSpace(call), pull.add_mean_of_dweights)
    threads.each(pull.items, lambda: WorkSpace(call), pull.gradients)
    return pull.result()


class Pull:
    """Backward pass: cotangents in, gradients out."""

    def __init__(
        self, call: Call, saved: Saved, do: Array, dlse: Array | None, dweights: Array | None
    ):
        problem = self.problem = call.problem
        self.call, self.dweights = call, dweights
        self.do = do if do.strides[-1:] == (do.itemsize,) else np.ascontiguousarray(do)
        empty = saved.log == -np.inf
        self.shift, self.log = saved.shift, np.where(empty, 0, saved.log)
        most = bound(do)
        # A query that sees nothing has 0, whatever its cotangent is.  [8]
        asked = call.sinks is not None and not math.isfinite(most)
        unseen = find_empty_rows(call) if asked else empty
        # Σ p dp of each row, without p: from o = w v.
        self.delta = np.where(unseen, 0, np.einsum("...e,...e->...", do, saved.out))
        if dlse is not None:  # from lse = log Σ exp(s)
            self.delta -= np.where(empty, 0, dlse)
        finite = math.isfinite(most) and is_finite(self.log) and is_finite(self.delta)
        self.careful = call.careful or not finite
        # p = exp(s) / sum: do and delta are divided by the sum, where it is neither below 1, so
        # that they cannot overflow, nor so large that they might underflow.
        safe = (self.log >= 0) & (self.log <= -np.log(np.finfo(call.dtype).eps))
        self.late = (self.shift != 0) | ~safe
        self.late_log = np.where(self.late, self.log, 0)
        self.over_sum = np.exp(self.late_log - self.log)
        self.late_log *= call.per_nat
        # do vᵀ − delta cannot overflow, nor can it where a key is hidden.
        reach = problem.E * most * bound(call.v) + bound(self.delta)
        self.bounded = reach < np.finfo(call.dtype).max
        self.fast = not self.careful and dweights is None
        self.fast = self.fast and call.keep is None
        self.fast = self.fast and problem.softcap is None and problem.score_mod is None
        # One more column of v costs a copy of it, which is more than a pass over few scores.
        self.column = self.fast and problem.T > problem.E
        self.dq = np.zeros((*problem.lead, problem.H, problem.T, problem.D), call.dtype)
        self.dk = np.zeros((*problem.lead, problem.K, problem.S, problem.D), call.dtype)
        self.dv = np.zeros((*problem.lead, problem.K, problem.S, problem.E), call.dtype)
        self._share_out()

    def _share_out(self) -> None:
        """Divide the work into items that write to different numbers.

        An item is a head. If there are fewer heads than ITEMS, an item is a range of the keys of a
        head, with a dq of its own.
        """
        groups: dict[Plane, list[Plane]] = {}
        bias = self.call.bias
        leads = [] if bias is None else [p.shape(*self.call.sizes)[:-2] for p in bias.parts]
        for plane in self.call.planes:
            key = self.call.kv_plane(plane)
            for lead in leads:  # heads that share a bias add to the same gradient
                lead_of_key = (1,) * (len(key) - len(lead)) + tuple(lead)
                key = tuple(i if n > 1 else 0 for i, n in zip(key, lead_of_key, strict=True))
            groups.setdefault(key, []).append(plane)
        ranges = self._share_keys(-(-ITEMS // max(len(groups), 1)))
        self.items = [
            (n, planes, *keys) for planes in groups.values() for n, keys in enumerate(ranges)
        ]
        self.dqs = [self.dq, *(np.zeros_like(self.dq) for _ in ranges[1:])]
        self.dbias: list[Any] = []
        if bias is not None:
            by_key = isinstance(bias, ArrayBias) and bias.array.shape[-1] != 1
            count = 1 if by_key else len(ranges)
            self.dbias = [bias.zeros(*self.call.sizes, dtype=self.call.dtype) for _ in range(count)]
            self.dbias *= len(ranges) // count

    def _share_keys(self, pieces: int) -> list[tuple[int, int]]:
        """Divide the keys into ranges that cost the same, about as many as `pieces`.

        The number of ranges, and so the bits of dq, do not depend on the number of threads.
        """
        call, S = self.call, self.problem.S
        steps = list(range(0, S, call.keys))
        if pieces == 1 or len(steps) <= 1 or not call.planes:
            return [(0, S)]
        edges = [*steps, S]
        cost = np.zeros(len(steps))
        first = call.planes[0]
        for t0 in range(0, self.problem.T, call.queries):
            for part in call.parts(first, t0, min(t0 + call.queries, self.problem.T)):
                cost[part.s0 // call.keys] += (part.t1 - part.t0) * (part.s1 - part.s0)
        done = np.cumsum(cost) / max(cost.sum(), 1)
        ends = {1 + int(np.argmin(abs(done - (i + 1) / pieces))) for i in range(pieces - 1)}
        cuts = [0, *(edges[i] for i in sorted(ends) if i < len(steps)), S]
        return list(itertools.pairwise(cuts))

    @np.errstate(**dense.QUIET)  # type: ignore[arg-type]
    def add_mean_of_dweights(self, block: Block, space: WorkSpace) -> None:
        """Add Σ p dweights of each row to delta: the share of the returned weights."""
        assert self.dweights is not None
        plane, t0, t1 = block
        q = self.call.scaled_queries(plane, t0, t1, space)
        delta = self.delta[plane][t0:t1]
        for tile, rows, _, s, _ in scores(self.call, plane, q, t0, t1, space):
            p = self._weights(tile, s, s != -np.inf)
            dw = self.dweights[plane][tile.t0 : tile.t1, tile.s0 : tile.s1]
            delta[rows] += np.where(p == 0, 0, p * dw).sum(-1)

    @np.errstate(**dense.QUIET)  # type: ignore[arg-type]
    def gradients(self, item: tuple[int, list[Plane], int, int], space: WorkSpace) -> None:
        """Add the gradients through the keys lo ≤ s < hi of some heads."""
        piece, planes, lo, hi = item
        for plane in planes:
            kv_plane = self.call.kv_plane(plane)
            k, v = self.call.k[kv_plane], self.call.v[kv_plane]
            if self.column:
                v = _with_column(v, 1, space("v1", len(v), v.shape[1] + 1))
            dq, dbias = self.dqs[piece][plane], self.dbias[piece] if self.dbias else None
            add = self._add_fast if self.fast else self._add
            for t0 in range(0, self.problem.T, self.call.queries):
                t1 = min(t0 + self.call.queries, self.problem.T)
                q = self.call.scaled_queries(plane, t0, t1, space)
                scaled = self.call.scaled_queries(plane, t0, t1, space, 1.0)
                do = self.do[plane][t0:t1]
                if self.column:
                    do = _with_column(do, -self.delta[plane][t0:t1],
                                      space("do1", len(do), do.shape[1] + 1))  # fmt: skip
                if self.fast:
                    over_sum = self.over_sum[plane][t0:t1, None]
                    do = np.multiply(do, over_sum, out=space("do", *do.shape))
                fresh = t0 == 0 and plane is planes[0]
                for part in scores(self.call, plane, q, t0, t1, space, (lo, hi), slope=True):
                    keys = slice(part.tile.s0, part.tile.s1)
                    rows = part.rows
                    add(part, scaled[rows], do[rows], k[keys], v[keys], dq, dbias, fresh, space)

    def _add_fast(
        self, part: Scores, q: Array, do: Array, k: Array, v: Array,
        dq: Array, dbias: Any, fresh: bool, space: WorkSpace,
    ) -> None:  # fmt: skip
        """Add the gradients of a tile by products, exp, and little else element by element.

        q is (n, D), do (n, E), k (m, D), v (m, E), dq (T, D); do and v have a column more if
        self.column.
        """
        call, (tile, _, partial, p, _), n, m = self.call, part, len(q), len(k)
        rows: Any = (*tile.plane, slice(tile.t0, tile.t1), None)
        if np.count_nonzero(self.late[rows]):  # a tenth of the time of any()
            p -= self.shift[rows]
            p -= self.late_log[rows]
        call.exp(p, out=p)
        kv_plane, keys, E = call.kv_plane(tile.plane), slice(tile.s0, tile.s1), self.problem.E
        dv, dk = self.dv[kv_plane][keys], self.dk[kv_plane][keys]
        _add_product(p.T, do[:, :E], dv, fresh, space)
        dp = np.matmul(do, v.T, out=space("dp", n, m))  # do vᵀ − delta
        if not self.column:
            dp -= self.delta[rows] * self.over_sum[rows]
        ds = np.multiply(p, dp, out=p)
        if partial and not self.bounded:
            assert call.mask is not None
            np.copyto(ds, 0, where=~np.asarray(call.mask.tile(tile)))  # 0 · inf is NaN
        if call.bias is not None:
            call.bias.add(dbias, tile, ds)
        _add_product(ds.T, q, dk, fresh, space)
        _add_product(ds, k, dq[tile.t0 : tile.t1], False, space)

    def _add(
        self, part: Scores, q: Array, do: Array, k: Array, v: Array,
        dq: Array, dbias: Any, fresh: bool, space: WorkSpace,
    ) -> None:  # fmt: skip
        """Add a tile's gradients line by line as dense.backward, in the shapes of _add_fast."""
        call, (tile, _, _, s, slope), n, m = self.call, part, len(q), len(k)
        live = s != -np.inf
        asked = live if self.careful else None
        turned = None if asked is None else asked.T
        p, keep = self._weights(tile, s, live), call.dropout_factor(tile)
        kv_plane = call.kv_plane(tile.plane)
        dv, dk = self.dv[kv_plane], self.dk[kv_plane]
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
        log = self.call.per_nat * self.log[rows]
        return np.where(live, self.call.exp(s - self.shift[rows] - log), 0)

    def result(self) -> Gradients:
        """Return the sums of all threads, each in the shape of its input, and add dsinks."""
        problem, bias = self.problem, self.call.bias
        for other in self.dqs[1:]:
            self.dq += other
        self.dq *= self.call.scale
        dsinks = None
        if self.call.sinks is not None:  # one more key, with dp = 0
            shift = self.shift / self.call.per_nat
            p_sink = np.exp(self.call.sinks[:, None] - shift - self.log)
            dsinks = sum_to(-p_sink * self.delta, (problem.H, 1))[:, 0]
        return Gradients(
            q=sum_to(self.dq, problem.q.shape),
            k=sum_to(self.dk, problem.k.shape),
            v=sum_to(self.dv, problem.v.shape),
            bias=None if bias is None else _sum_accumulators(self.dbias),
            sinks=dsinks,
        )


def find_empty_rows(call: Call) -> Array:
    """Mask of the queries that see no key: (..., H, T)."""
    problem, space = call.problem, WorkSpace(call)
    empty = np.ones((*problem.lead, problem.H, problem.T), bool)
    for plane, t0, t1 in call.blocks():
        q = call.scaled_queries(plane, t0, t1, space)
        for _, rows, _, s, _ in scores(call, plane, q, t0, t1, space):
            empty[plane][t0:t1][rows] &= (s == -np.inf).all(-1)
    return empty


def _add_product(x: Array, y: Array, total: Array, fresh: bool, space: WorkSpace) -> None:
    """Add x @ y to a total, or overwrite the total if it is fresh, with nothing in it."""
    if fresh:
        np.matmul(x, y, out=total)
    else:
        total += np.matmul(x, y, out=space("product", *total.shape))


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
