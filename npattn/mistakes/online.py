"""Attention tile by tile with an online softmax, as fused kernels compute it: right.

`Online` is right, in float32 (float64 for float64 inputs) and in replaceable steps, as `Attention`
is. A tile of `TILE` queries walks over its visible tiles of keys, the last first, with a running
maximum m, a running sum of exp(s − m) and an accumulator of exp(s − m) v; backward rebuilds the
weights tile by tile from the saved state. A tile is itself an `Inputs`, padded with 0 to the size
of a tile, so that the steps of `Attention` serve it.
Source: Dao 2023 (arXiv 2307.08691), algorithms 1 and 2; Milakov and Gimelshein 2018 (1805.02867).
"""

from typing import Any, NamedTuple

import numpy as np

from npattn.mistakes.attention import TILE, Attention, Inputs, within
from npattn.problem.arrays import Array


class RunningSoftmax(NamedTuple):
    """Running state of the online softmax of some queries."""

    m: Array  # (..., H, T, 1) maximum so far
    total: Array  # (..., H, T, 1) Σ exp(s − m), the sink included
    acc: Array  # (..., H, T, E) Σ exp(s − m) v


class TileGradients(NamedTuple):
    """Sums of the gradients over the tiles visited so far, by query head."""

    dq: Array  # (..., H, T, D)
    dk: Array  # (..., H, S, D)
    dv: Array  # (..., H, S, E)
    ds: Array  # (..., H, T, S)


class Online(Attention):
    """Attention and its gradients tile by tile, in replaceable steps."""

    def read(self, x: Array) -> Array:
        return np.array(x, np.float64 if x.dtype == np.float64 else np.float32)

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        bias, keep = (np.asarray(x, c.q.dtype) for x in (c.bias, c.keep))
        return c._replace(bias=bias, keep=keep, sinks=c.sinks.astype(c.q.dtype))

    # --- tiles

    def query_tiles(self, T: int) -> list[slice]:
        return [slice(start, min(start + TILE, T)) for start in range(0, T, TILE)]

    def key_tiles(self, c: Inputs, rows: slice) -> list[slice]:
        """Return the tiles of keys visible to any of these queries, the last first."""
        first, end = self.tile_range(c, rows)
        return [slice(n * TILE, (n + 1) * TILE) for n in reversed(range(first, end))]

    def tile_range(self, c: Inputs, rows: slice) -> tuple[int, int]:
        """Return the first tile of keys that causal and window leave, and the end of the last."""
        T, S = c.q.shape[-2], c.k.shape[-2]
        left_keys, right_keys = self.sides(c)
        offset = self.offset(T, S)
        begin = 0 if left_keys is None else max(rows.start + offset - left_keys, 0)
        end = S if right_keys is None else min(max(rows.stop + offset + right_keys, 0), S)
        return begin // TILE, -(-end // TILE)

    def fully_visible(self, c: Inputs, rows: slice, keys: slice) -> bool:
        """Return True if causal and window hide nothing in this tile, which then needs no mask."""
        offset = self.offset(c.q.shape[-2], c.k.shape[-2])
        least, most = keys.start - rows.stop + 1 - offset, keys.stop - 1 - rows.start - offset
        return bool(within(np.array([least, most]), self.sides(c)).all())

    def tile_visible(self, c: Inputs, rows: slice, keys: slice) -> Array:
        """Return the visible positions of a tile, (..., TILE, TILE), without its padding."""
        offset = self.offset(c.q.shape[-2], c.k.shape[-2])
        t, s = rows.start + np.arange(TILE)[:, None], keys.start + np.arange(TILE)
        visible = self.real_queries(t, rows) & self.real_keys(s, c)
        if not self.fully_visible(c, rows, keys):
            visible = visible & within(s - t - offset, self.sides(c))
        return visible if c.mask is None else visible & tile_of(c.mask, rows, keys)

    def real_queries(self, t: Array, rows: slice) -> Array:
        return np.asarray(t < rows.stop)

    def real_keys(self, s: Array, c: Inputs) -> Array:
        return np.asarray(s < c.k.shape[-2])

    def cut_tile(self, c: Inputs, rows: slice, keys: slice) -> Inputs:
        """Return the inputs of one tile."""
        return c._replace(
            q=load_rows(c.q, rows), k=load_rows(c.k, keys), v=load_rows(c.v, keys),
            mask=self.tile_visible(c, rows, keys), causal=False, window=None,
            bias=tile_of(c.bias, rows, keys), keep=tile_of(c.keep, rows, keys),
        )  # fmt: skip

    # --- forward

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        state = self.states(c)
        p = self.all_weights(c, state) if c.returns_weights else np.zeros(())
        return self.divide(state), self.row_lse(state, c)[..., 0], p

    def states(self, c: Inputs) -> RunningSoftmax:
        """Return the state of every query after its last tile of keys."""
        lead, E = c.q.shape[:-1], c.v.shape[-1]
        states = RunningSoftmax(*(np.zeros((*lead, n), c.q.dtype) for n in (1, 1, E)))
        for rows in self.query_tiles(lead[-1]):
            for into, x in zip(states, self.attend(c, rows), strict=True):
                into[..., rows, :] = x[..., : rows.stop - rows.start, :]
        return states

    def attend(self, c: Inputs, rows: slice) -> RunningSoftmax:
        return self.fold(c, rows, self.key_tiles(c, rows))

    def fold(self, c: Inputs, rows: slice, tiles: list[slice]) -> RunningSoftmax:
        state = self.start(c)
        for keys in tiles:
            state = self.add_tile(state, self.cut_tile(c, rows, keys))
        return state

    def start(self, c: Inputs) -> RunningSoftmax:
        """Start with the sink, a first key without value; no sink is one of −inf."""
        lead, E = (*c.q.shape[:-2], TILE), c.v.shape[-1]
        m = np.broadcast_to(c.sinks, (*lead, 1))
        return RunningSoftmax(m, np.isfinite(m).astype(m.dtype), np.zeros((*lead, E), m.dtype))

    def add_tile(self, state: RunningSoftmax, tile: Inputs) -> RunningSoftmax:
        """Add a tile of keys to the state."""
        s, live = self.scores(tile)
        m = self.maximum(state.m, s)
        pivot = finite_pivot(m)
        state = self.rescale(state, self.shrink(state.m, pivot))
        p = self.exp(s - pivot)
        v = self.share(tile.v, tile.q.shape[-3])
        acc = state.acc + self.masked_matmul(self.drop(p, tile), v, live)
        return RunningSoftmax(m, self.row_sum(state.total, p), acc)

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def row_sum(self, total: Array, p: Array) -> Array:
        return np.asarray(total + p.sum(-1, keepdims=True))

    def drop(self, p: Array, tile: Inputs) -> Array:
        return p * tile.keep

    def maximum(self, m: Array, s: Array) -> Array:
        return np.asarray(np.maximum(m, s.max(-1, keepdims=True)))

    def shrink(self, m: Array, pivot: Array) -> Array:
        """Return the factor of the state when the maximum rises to the pivot."""
        return np.asarray(np.exp(m - pivot))

    def rescale(self, state: RunningSoftmax, shrink: Array) -> RunningSoftmax:
        return state._replace(total=state.total * shrink, acc=state.acc * shrink)

    def divide(self, state: RunningSoftmax) -> Array:
        return np.asarray(state.acc / np.where(state.total == 0, 1, state.total))

    def row_lse(self, state: RunningSoftmax, c: Inputs) -> Array:
        return np.asarray(state.m + np.log(state.total))

    def weights(self, state: RunningSoftmax, s: Array, live: Array) -> Array:
        """Rebuild the weights; m and total are more exact than lse if m is large."""
        safe = np.where(state.total == 0, 1, state.total)
        return np.where(live, self.exp(s - finite_pivot(state.m)) / safe, 0)

    def all_weights(self, c: Inputs, state: RunningSoftmax) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        weights = np.zeros((*c.q.shape[:-1], S), c.q.dtype)
        for rows in self.query_tiles(T):
            here = self.rows_of(state, rows)
            for keys in self.key_tiles(c, rows):
                p = self.weights(here, *self.scores(self.cut_tile(c, rows, keys)))
                add_at(weights, rows, keys, p)
        return weights

    # --- backward

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        """Return dq, dk, dv, ds and dsinks, summed tile by tile, for do (..., H, T, E)."""
        T, S = c.q.shape[-2], c.k.shape[-2]
        lead, dtype = c.q.shape[:-2], c.q.dtype
        do, dlse, dw = (np.asarray(x, dtype) for x in (do, dlse, dw))
        state = self.saved_state(c)
        delta = self.row_delta(do, self.divide(state), c) - self.use_dlse(dlse, dlse)
        if dw.ndim:
            delta = delta + (self.all_weights(c, state) * dw).sum(-1, keepdims=True)
        sizes = ((T, c.q.shape[-1]), (S, c.q.shape[-1]), (S, c.v.shape[-1]), (T, S))
        sums = TileGradients(*(np.zeros((*lead, *size), dtype) for size in sizes))
        for rows in self.backward_tiles(T):
            here = self.rows_of(state, rows)
            for keys in self.key_tiles(c, rows):
                cotangents = (load_rows(do, rows), load_rows(delta, rows), tile_of(dw, rows, keys))
                self.add_gradients(
                    self.cut_tile(c, rows, keys), here, cotangents, (rows, keys), sums
                )
        safe = np.where(state.total == 0, 1, state.total)
        p_sink = np.exp(c.sinks - finite_pivot(state.m)) / safe
        return (*self.finish(sums), self.ds_sink(p_sink, delta, dlse))

    def add_gradients(
        self, tile: Inputs, state: RunningSoftmax, cotangents: tuple[Array, Array, Array],
        at: tuple[slice, slice], sums: TileGradients,
    ) -> None:  # fmt: skip
        """Add the gradients of a tile to the sums, for do (..., H, t, E), delta (..., H, t, 1)."""
        (do, delta, dw), (rows, keys) = cotangents, at
        k, v = (self.share(x, tile.q.shape[-3]) for x in (tile.k, tile.v))
        s, live = self.scores(tile)
        seen = live.swapaxes(-1, -2)
        p = self.weights(state, s, live)
        dp = np.where(live, self.undrop(do @ v.swapaxes(-1, -2), tile) + dw, 0)
        ds = np.where(live, self.jacobian(p, dp, delta, tile), 0)
        dx = self.uncap(ds, live, tile)
        self.collect("dv", sums.dv, keys, self.dv(self.drop(p, tile), do, seen, rows))
        self.collect("dq", sums.dq, rows, self.dq_scale(tile) * self.masked_matmul(dx, k, live))
        self.collect("dk", sums.dk, keys, self.dk(dx, tile, seen))
        add_at(sums.ds, rows, keys, ds)

    def saved_state(self, c: Inputs) -> RunningSoftmax:
        """Return the state that forward saves for backward."""
        return self.states(c)

    def row_delta(self, do: Array, out: Array, c: Inputs) -> Array:
        return np.asarray((do * out).sum(-1, keepdims=True))

    def backward_tiles(self, T: int) -> list[slice]:
        return self.query_tiles(T)

    def rows_of(self, state: RunningSoftmax, rows: slice) -> RunningSoftmax:
        return RunningSoftmax(*(load_rows(x, rows) for x in state))

    def dv(self, w: Array, do: Array, seen: Array, rows: slice) -> Array:
        return self.masked_matmul(w.swapaxes(-1, -2), do, seen)

    def collect(self, name: str, into: Array, at: slice, x: Array) -> None:
        here = into[..., at, :]
        here += x[..., : here.shape[-2], :]

    def finish(self, sums: TileGradients) -> TileGradients:
        return sums


class Split(Online):
    """Online softmax over two halves of the keys, whose states are then merged."""

    def attend(self, c: Inputs, rows: slice) -> RunningSoftmax:
        tiles = self.key_tiles(c, rows)
        half = len(tiles) // 2
        first = self.fold(c, rows, tiles[:half])
        return self.merge(first, self.fold(self.second_half(c), rows, tiles[half:]))

    def second_half(self, c: Inputs) -> Inputs:
        """Return the inputs of the second half: the sink is counted in the first."""
        return c._replace(sinks=np.full_like(c.sinks, -np.inf))

    def merge(self, a: RunningSoftmax, b: RunningSoftmax) -> RunningSoftmax:
        m = np.maximum(a.m, b.m)
        a, b = (self.rescale(x, self.shrink(x.m, self.merge_pivot(m))) for x in (a, b))
        return RunningSoftmax(m, a.total + b.total, a.acc + b.acc)

    def merge_pivot(self, m: Array) -> Array:
        """Return the pivot of two merged states."""
        return finite_pivot(m)


def finite_pivot(m: Array) -> Array:
    """Replace −inf by 0 in a maximum to subtract, since −inf − −inf is NaN."""
    return np.where(m == -np.inf, 0, m)


def load_rows(x: Array, at: slice) -> Array:
    """Return x[..., at, :], padded with rows of 0 to the size of a tile."""
    here = x[..., at, :]
    missing = TILE - here.shape[-2]
    if not missing:
        return here
    return np.concatenate([here, np.zeros((*x.shape[:-2], missing, x.shape[-1]), x.dtype)], -2)


def tile_of(x: Array | float, rows: slice, keys: slice) -> Array:
    """Return the tile of an array that broadcasts against the scores."""
    x = np.atleast_2d(x)
    x = x if x.shape[-2] == 1 else load_rows(x, rows)
    return x if x.shape[-1] == 1 else load_rows(x.swapaxes(-1, -2), keys).swapaxes(-1, -2)


def add_at(into: Array, rows: slice, keys: slice, x: Array) -> None:
    """Add a tile, without its padding, to an array."""
    here = into[..., rows, keys]
    here += x[..., : here.shape[-2], : here.shape[-1]]
