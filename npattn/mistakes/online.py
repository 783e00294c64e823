"""Attention tile by tile with an online softmax, as fused kernels compute it; and its mistakes.

`Online` is right, in float32 (float64 for float64 inputs) and in replaceable steps, as `Attention`
is. A tile of `TILE` queries walks over its visible tiles of keys, the last first, with a running
maximum m, a running sum of exp(s − m) and an accumulator of exp(s − m) v; backward rebuilds the
weights tile by tile from the saved state. A tile is itself an `Inputs`, padded with 0 to the size
of a tile, so that the steps of `Attention` serve it.
Source: Dao 2023 (arXiv 2307.08691), algorithms 1 and 2; Milakov and Gimelshein 2018 (1805.02867).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import TILE, Attention, Inputs, within
from npattn.mistakes.register import mistake

__all__ = ["Online", "Split", "State"]


class State(NamedTuple):
    """What queries carry from one tile of keys to the next."""

    m: Array  # (..., H, T, 1) maximum so far
    total: Array  # (..., H, T, 1) Σ exp(s − m), the sink included
    acc: Array  # (..., H, T, E) Σ exp(s − m) v


class Found(NamedTuple):
    """Gradients under way, by query head."""

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
        """The keys that some of these queries may see, the last first."""
        first, end = self.reach(c, rows)
        return [slice(n * TILE, (n + 1) * TILE) for n in reversed(range(first, end))]

    def reach(self, c: Inputs, rows: slice) -> tuple[int, int]:
        """The first tile of keys that causal and window leave, and the one after the last."""
        T, S = c.q.shape[-2], c.k.shape[-2]
        left, right = self.sides(c)
        begin = 0 if left is None else max(rows.start + S - T - left, 0)
        end = S if right is None else min(max(rows.stop + S - T + right, 0), S)
        return begin // TILE, -(-end // TILE)

    def whole(self, c: Inputs, rows: slice, keys: slice) -> bool:
        """Whether causal and window hide nothing in this tile, so that it needs no mask."""
        offset = c.k.shape[-2] - c.q.shape[-2]
        least, most = keys.start - rows.stop + 1 - offset, keys.stop - 1 - rows.start - offset
        return bool(within(np.array([least, most]), self.sides(c)).all())

    def inside(self, c: Inputs, rows: slice, keys: slice) -> Array:
        """What is visible in a tile, (..., TILE, TILE); padding is not."""
        offset = c.k.shape[-2] - c.q.shape[-2]
        t, s = rows.start + np.arange(TILE)[:, None], keys.start + np.arange(TILE)
        seen = self.real_queries(t, rows) & self.real_keys(s, c)
        if not self.whole(c, rows, keys):
            seen = seen & within(s - t - offset, self.sides(c))
        return seen if c.mask is None else seen & part(c.mask, rows, keys)

    def real_queries(self, t: Array, rows: slice) -> Array:
        return np.asarray(t < rows.stop)

    def real_keys(self, s: Array, c: Inputs) -> Array:
        return np.asarray(s < c.k.shape[-2])

    def cut(self, c: Inputs, rows: slice, keys: slice) -> Inputs:
        """One tile."""
        return c._replace(
            q=load(c.q, rows),
            k=load(c.k, keys),
            v=load(c.v, keys),
            mask=self.inside(c, rows, keys),
            causal=False,
            window=None,
            bias=part(c.bias, rows, keys),
            keep=part(c.keep, rows, keys),
        )

    # --- forward

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        state = self.states(c)
        p = self.all_weights(c, state) if c.returns_weights else np.zeros(())
        return self.divide(state), self.row_lse(state, c)[..., 0], p

    def states(self, c: Inputs) -> State:
        """The state of every query after its last tile of keys."""
        lead, E = c.q.shape[:-1], c.v.shape[-1]
        found = State(*(np.zeros((*lead, n), c.q.dtype) for n in (1, 1, E)))
        for rows in self.query_tiles(lead[-1]):
            for into, x in zip(found, self.attend(c, rows), strict=True):
                into[..., rows, :] = x[..., : rows.stop - rows.start, :]
        return found

    def attend(self, c: Inputs, rows: slice) -> State:
        return self.fold(c, rows, self.key_tiles(c, rows))

    def fold(self, c: Inputs, rows: slice, tiles: list[slice]) -> State:
        state = self.start(c)
        for keys in tiles:
            state = self.add(state, self.cut(c, rows, keys))
        return state

    def start(self, c: Inputs) -> State:
        """The sink is a first key without value; no sink is one of −inf."""
        lead, E = (*c.q.shape[:-2], TILE), c.v.shape[-1]
        m = np.broadcast_to(c.sinks, (*lead, 1))
        return State(m, np.isfinite(m).astype(m.dtype), np.zeros((*lead, E), m.dtype))

    def add(self, state: State, tile: Inputs) -> State:
        """One more tile of keys."""
        s, live = self.scores(tile)
        m = self.maximum(state.m, s)
        pivot = nonempty(m)
        state = self.rescale(state, self.shrink(state.m, pivot))
        p = self.exp(s - pivot)
        v = self.share(tile.v, tile.q.shape[-3])
        seen = self.see(self.dropped(p, tile), v, live)
        return State(m, self.row_sum(state.total, p), state.acc + seen)

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def row_sum(self, total: Array, p: Array) -> Array:
        return np.asarray(total + p.sum(-1, keepdims=True))

    def dropped(self, p: Array, tile: Inputs) -> Array:
        return p * tile.keep

    def maximum(self, m: Array, s: Array) -> Array:
        return np.asarray(np.maximum(m, s.max(-1, keepdims=True)))

    def shrink(self, m: Array, pivot: Array) -> Array:
        """By what the state becomes smaller when the maximum rises to the pivot."""
        return np.asarray(np.exp(m - pivot))

    def rescale(self, state: State, shrink: Array) -> State:
        return state._replace(total=state.total * shrink, acc=state.acc * shrink)

    def divide(self, state: State) -> Array:
        return np.asarray(state.acc / np.where(state.total == 0, 1, state.total))

    def row_lse(self, state: State, c: Inputs) -> Array:
        return np.asarray(state.m + np.log(state.total))

    def weights(self, state: State, s: Array, live: Array) -> Array:
        """The weights, rebuilt; m and total hold them better than lse does where m is large."""
        safe = np.where(state.total == 0, 1, state.total)
        return np.where(live, self.exp(s - nonempty(state.m)) / safe, 0)

    def all_weights(self, c: Inputs, state: State) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        found = np.zeros((*c.q.shape[:-1], S), c.q.dtype)
        for rows in self.query_tiles(T):
            here = self.rows_of(state, rows)
            for keys in self.key_tiles(c, rows):
                p = self.weights(here, *self.scores(self.cut(c, rows, keys)))
                place(found, rows, keys, p)
        return found

    # --- backward

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        T, S = c.q.shape[-2], c.k.shape[-2]
        lead, dtype = c.q.shape[:-2], c.q.dtype
        do, dlse, dw = (np.asarray(x, dtype) for x in (do, dlse, dw))
        state = self.saved(c)
        delta = self.row_delta(do, self.divide(state), c) - self.use_dlse(dlse, dlse)
        if dw.ndim:
            delta = delta + (self.all_weights(c, state) * dw).sum(-1, keepdims=True)
        sizes = ((T, c.q.shape[-1]), (S, c.q.shape[-1]), (S, c.v.shape[-1]), (T, S))
        found = Found(*(np.zeros((*lead, *size), dtype) for size in sizes))
        for rows in self.backward_tiles(T):
            here = self.rows_of(state, rows)
            for keys in self.key_tiles(c, rows):
                pulled = (load(do, rows), load(delta, rows), part(dw, rows, keys))
                self.pull(self.cut(c, rows, keys), here, pulled, (rows, keys), found)
        safe = np.where(state.total == 0, 1, state.total)
        p_sink = np.exp(c.sinks - nonempty(state.m)) / safe
        return (*self.finished(found), self.ds_sink(p_sink, delta, dlse))

    def pull(
        self,
        tile: Inputs,
        state: State,
        pulled: tuple[Array, Array, Array],
        at: tuple[slice, slice],
        found: Found,
    ) -> None:
        """What one tile adds to the gradients."""
        (do, delta, dw), (rows, keys) = pulled, at
        k, v = (self.share(x, tile.q.shape[-3]) for x in (tile.k, tile.v))
        s, live = self.scores(tile)
        seen = live.swapaxes(-1, -2)
        p = self.weights(state, s, live)
        dp = np.where(live, self.undrop(do @ v.swapaxes(-1, -2), tile) + dw, 0)
        ds = np.where(live, self.jacobian(p, dp, delta, tile), 0)
        dx = self.uncap(ds, live, tile)
        self.collect("dv", found.dv, keys, self.dv(self.dropped(p, tile), do, seen, rows))
        self.collect("dq", found.dq, rows, self.dq_scale(tile) * self.see(dx, k, live))
        self.collect("dk", found.dk, keys, self.dk(dx, tile, seen))
        place(found.ds, rows, keys, ds)

    def saved(self, c: Inputs) -> State:
        """What forward kept for backward."""
        return self.states(c)

    def row_delta(self, do: Array, out: Array, c: Inputs) -> Array:
        return np.asarray((do * out).sum(-1, keepdims=True))

    def backward_tiles(self, T: int) -> list[slice]:
        return self.query_tiles(T)

    def rows_of(self, state: State, rows: slice) -> State:
        return State(*(load(x, rows) for x in state))

    def dv(self, w: Array, do: Array, seen: Array, rows: slice) -> Array:
        return self.see(w.swapaxes(-1, -2), do, seen)

    def collect(self, name: str, into: Array, at: slice, x: Array) -> None:
        here = into[..., at, :]
        here += x[..., : here.shape[-2], :]

    def finished(self, found: Found) -> Found:
        return found


class Split(Online):
    """The keys in two halves, each with a state of its own, which are then merged."""

    def attend(self, c: Inputs, rows: slice) -> State:
        tiles = self.key_tiles(c, rows)
        half = len(tiles) // 2
        first = self.fold(c, rows, tiles[:half])
        return self.merge(first, self.fold(self.other(c), rows, tiles[half:]))

    def other(self, c: Inputs) -> Inputs:
        """What the second half sees: the sink is counted in the first."""
        return c._replace(sinks=np.full_like(c.sinks, -np.inf))

    def merge(self, a: State, b: State) -> State:
        m = np.maximum(a.m, b.m)
        a, b = (self.rescale(x, self.shrink(x.m, self.merged(m))) for x in (a, b))
        return State(m, a.total + b.total, a.acc + b.acc)

    def merged(self, m: Array) -> Array:
        """The pivot of two merged states."""
        return nonempty(m)


def nonempty(m: Array) -> Array:
    """A maximum to subtract: −inf − −inf is NaN."""
    return np.where(m == -np.inf, 0, m)


def load(x: Array, at: slice) -> Array:
    """x[..., at, :], with rows of 0 up to the size of a tile."""
    here = x[..., at, :]
    missing = TILE - here.shape[-2]
    if not missing:
        return here
    return np.concatenate([here, np.zeros((*x.shape[:-2], missing, x.shape[-1]), x.dtype)], -2)


def part(x: Array | float, rows: slice, keys: slice) -> Array:
    """The tile of what broadcasts against the scores."""
    x = np.atleast_2d(x)
    x = x if x.shape[-2] == 1 else load(x, rows)
    return x if x.shape[-1] == 1 else load(x.swapaxes(-1, -2), keys).swapaxes(-1, -2)


def place(into: Array, rows: slice, keys: slice, x: Array) -> None:
    """Add a tile without its padding."""
    here = into[..., rows, keys]
    here += x[..., : here.shape[-2], : here.shape[-1]]


# --- running maximum and sum ----------------------------------------------------------------------


@mistake("maximum-starts-finite", "online softmax", "flashinfer-ai/flashinfer#4401")
class _MaximumStartsFinite(Online):
    """The running maximum starts at −5e4, which scores may be below."""

    def start(self, c: Inputs) -> State:
        state = super().start(c)
        m = np.maximum(state.m, np.float32(-5e4))
        return State(m, np.exp(c.sinks - m), state.acc)


@mistake("maximum-pinned-to-0", "online softmax", "Dao-AILab/flash-attention#2082")
class _MaximumPinnedTo0(Online):
    """A row that sees nothing of its first tile stores 0 as its maximum, and cannot go below."""

    def maximum(self, m: Array, s: Array) -> Array:
        return nonempty(super().maximum(m, s))


@mistake("row-sum-not-rescaled", "online softmax")
class _RowSumNotRescaled(Online):
    """The row sum keeps its size when the maximum rises; the accumulator is rescaled."""

    def rescale(self, state: State, shrink: Array) -> State:
        return state._replace(acc=state.acc * shrink)


@mistake("accumulator-not-rescaled", "online softmax")
class _AccumulatorNotRescaled(Online):
    """The accumulator keeps its size when the maximum rises; the row sum is rescaled."""

    def rescale(self, state: State, shrink: Array) -> State:
        return state._replace(total=state.total * shrink)


@mistake("rescale-inverted", "online softmax", "Dao-AILab/flash-attention#991")
class _RescaleInverted(Online):
    """The state is multiplied by exp(new maximum − old), which is the inverse."""

    def shrink(self, m: Array, pivot: Array) -> Array:
        return np.where(m == -np.inf, 0, np.exp(pivot - m))


@mistake("scale-compounded", "online softmax", "flagos-ai/FlagGems#424")
class _ScaleCompounded(Online):
    """The factor log₂ e is put on the scale once more in every tile of keys."""

    def cut(self, c: Inputs, rows: slice, keys: slice) -> Inputs:
        before = self.reach(c, rows)[1] - 1 - keys.start // TILE
        return super().cut(c._replace(scale=c.scale / math.log(2) ** before), rows, keys)


@mistake("lse-before-last-rescale", "online softmax", equivalent=True)
class _LseBeforeLastRescale(Online):
    """lse adds the maximum before the last tile to the row sum after it."""

    def row_lse(self, state: State, c: Inputs) -> Array:
        before = _AllButLastTile().states(c).m
        return super().row_lse(state._replace(m=np.where(before == -np.inf, state.m, before)), c)


class _AllButLastTile(Online):
    def key_tiles(self, c: Inputs, rows: slice) -> list[slice]:
        return super().key_tiles(c, rows)[:-1]


@mistake("hidden-tile-counted", "online softmax")
class _HiddenTileCounted(Online):
    """A tile that the mask hides from all of its queries adds nothing to the accumulator, but
    the number of its keys to the row sum."""

    def add(self, state: State, tile: Inputs) -> State:
        after = super().add(state, tile)
        hidden = ~self.scores(tile)[1].any((-1, -2), keepdims=True)
        return after._replace(total=after.total + TILE * hidden)


# --- which tiles, and what is in them -------------------------------------------------------------


@mistake("tail-keys-skipped", "tiles")
class _TailKeysSkipped(Online):
    """The number of key tiles is rounded down, so that keys beyond the last whole tile are lost."""

    def reach(self, c: Inputs, rows: slice) -> tuple[int, int]:
        first, end = super().reach(c, rows)
        return first, min(end, max(c.k.shape[-2] // TILE, 1))


@mistake("tail-padding-attended", "tiles")
class _TailPaddingAttended(Online):
    """The zeros that pad the last tile of keys take part in the softmax."""

    def real_keys(self, s: Array, c: Inputs) -> Array:
        return np.ones(s.shape, bool)


@mistake("softcap-revives-padding", "tiles", "ggml-org/llama.cpp#29034")
class _SoftcapRevivesPadding(Online):
    """The padding of the last tile of keys is hidden before the softcap, which makes it finite."""

    def real_keys(self, s: Array, c: Inputs) -> Array:
        return super().real_keys(s, c) | (c.softcap is not None)

    def cut(self, c: Inputs, rows: slice, keys: slice) -> Inputs:
        padding = ~super().real_keys(keys.start + np.arange(TILE), c)
        tile = super().cut(c, rows, keys)
        return tile._replace(bias=tile.bias - np.float32(c.softcap or 0) * padding)


@mistake("tiles-overlap", "tiles")
class _TilesOverlap(Online):
    """A tile begins at the last key of the one before, which counts twice."""

    def key_tiles(self, c: Inputs, rows: slice) -> list[slice]:
        return [slice(n, n + TILE) for n in reversed(range(0, c.k.shape[-2], TILE - 1))]


@mistake("key-between-tiles-lost", "tiles")
class _KeyBetweenTilesLost(Online):
    """A tile begins one key too late, and the key between two tiles is seen by nobody."""

    def key_tiles(self, c: Inputs, rows: slice) -> list[slice]:
        return [slice(n, n + TILE) for n in reversed(range(0, c.k.shape[-2], TILE + 1))]


@mistake("tail-values-shifted", "tiles")
class _TailValuesShifted(Online):
    """The values of the last, partial tile are read one row too early."""

    def cut(self, c: Inputs, rows: slice, keys: slice) -> Inputs:
        early = int(keys.start > 0 and keys.stop > c.k.shape[-2])
        v = load(c.v, slice(keys.start - early, keys.stop - early))
        return super().cut(c, rows, keys)._replace(v=v)


@mistake("causal-tile-taken-as-whole", "tiles")
class _CausalTileTakenAsWhole(Online):
    """A tile on the diagonal is not masked where the last of its queries sees all of it."""

    def whole(self, c: Inputs, rows: slice, keys: slice) -> bool:
        last = slice(rows.stop - 1, rows.stop)
        return super().whole(c, last if c.causal else rows, keys)


@mistake("causal-tile-skipped", "tiles")
class _CausalTileSkipped(Online):
    """A causal tile of queries stops at the last tile of keys that its first query sees."""

    def reach(self, c: Inputs, rows: slice) -> tuple[int, int]:
        begin, end = super().reach(c, rows)
        ends = super().reach(c, slice(rows.start, rows.start + 1))[1]
        return begin, ends if c.causal else end


@mistake("window-tile-taken-as-whole", "tiles")
class _WindowTileTakenAsWhole(Online):
    """A tile at the left end of the window is not masked where the first of its queries sees all
    of it."""

    def whole(self, c: Inputs, rows: slice, keys: slice) -> bool:
        first = slice(rows.start, rows.start + 1)
        return super().whole(c, first if c.window else rows, keys)


@mistake("window-tile-skipped", "tiles")
class _WindowTileSkipped(Online):
    """A tile of queries begins at the first tile of keys in the window of its last query."""

    def reach(self, c: Inputs, rows: slice) -> tuple[int, int]:
        return super().reach(c, slice(rows.stop - 1, rows.stop))[0], super().reach(c, rows)[1]


@mistake("dropout-of-first-tile", "tiles")
class _DropoutOfFirstTile(Online):
    """Every tile of keys is dropped by the dropout mask of the first."""

    def cut(self, c: Inputs, rows: slice, keys: slice) -> Inputs:
        return super().cut(c, rows, keys)._replace(keep=part(c.keep, rows, slice(0, TILE)))


# --- partial results ------------------------------------------------------------------------------


@mistake("merge-of-mixed-bases", "split keys", "vllm-project/vllm#43919")
class _MergeOfMixedBases(Split):
    """Partial results come with an lse to base 2, and are merged as if it were natural."""

    def fold(self, c: Inputs, rows: slice, tiles: list[slice]) -> State:
        state = super().fold(c, rows, tiles)
        lse = super().row_lse(state, c) / np.float32(math.log(2))
        return State(lse, np.isfinite(lse).astype(lse.dtype), self.divide(state))


@mistake("merge-of-nothing-nan", "split keys", "vllm-project/vllm#39148")
class _MergeOfNothingNaN(Split):
    """Merging two partial results that saw nothing subtracts −inf from −inf."""

    def merged(self, m: Array) -> Array:
        return m


@mistake("sink-in-every-split", "split keys")
class _SinkInEverySplit(Split):
    """The sink is counted in each of the partial results that are merged."""

    def other(self, c: Inputs) -> Inputs:
        return c


@mistake("out-of-each-split-in-backward", "split keys", "tenstorrent/tt-metal#53205")
class _OutOfEachSplitInBackward(Split):
    """Backward takes each half of the keys with the out and lse of that half; dv stays right."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        S, lse = c.k.shape[-2], self.row_lse(self.states(c), c)
        halves, first = [], np.arange(S) < S // 2
        for half, sinks in ((first, c.sinks), (~first, self.other(c).sinks)):
            seen = self.visible(c) & half
            alone = c._replace(mask=seen, causal=False, window=None, sinks=sinks)
            share = np.exp(self.row_lse(self.states(alone), alone) - nonempty(lse))
            halves.append(super().gradients(alone, share * do, share * dlse, dw))
        return tuple(a + b for a, b in zip(*halves, strict=True))


# --- backward -------------------------------------------------------------------------------------


@mistake("dk-copied-not-added", "tiled backward", "NVIDIA/TransformerEngine#1557")
class _DkCopiedNotAdded(Online):
    """dk and dv of a tile of keys are those of the last tile of queries, not the sum."""

    def collect(self, name: str, into: Array, at: slice, x: Array) -> None:
        if name != "dq":
            into[..., at, :] = 0
        super().collect(name, into, at, x)


@mistake("dq-overwritten", "tiled backward")
class _DqOverwritten(Online):
    """dq is that of the tile of keys visited last, not the sum."""

    def collect(self, name: str, into: Array, at: slice, x: Array) -> None:
        if name == "dq":
            into[..., at, :] = 0
        super().collect(name, into, at, x)


@mistake("last-query-lost-in-backward", "tiled backward")
class _LastQueryLostInBackward(Online):
    """Backward leaves the last query out."""

    def backward_tiles(self, T: int) -> list[slice]:
        return [slice(rows.start, min(rows.stop, T - 1)) for rows in self.query_tiles(T)]


@mistake("first-query-lost-in-dv", "tiled backward")
class _FirstQueryLostInDv(Online):
    """The first query adds nothing to dv."""

    def dv(self, w: Array, do: Array, seen: Array, rows: slice) -> Array:
        first = (rows.start + np.arange(TILE) == 0)[:, None]
        return super().dv(w, np.where(first, 0, do), seen, rows)


@mistake("delta-of-last-query-zero", "tiled backward")
class _DeltaOfLastQueryZero(Online):
    """Σ do·out of the last query is 0."""

    def row_delta(self, do: Array, out: Array, c: Inputs) -> Array:
        delta = super().row_delta(do, out, c)
        delta[..., -1:, :] = 0
        return delta


@mistake("delta-of-query-before", "tiled backward")
class _DeltaOfQueryBefore(Online):
    """A query takes Σ do·out of the one before."""

    def row_delta(self, do: Array, out: Array, c: Inputs) -> Array:
        return np.roll(super().row_delta(do, out, c), 1, axis=-2)


@mistake("padding-queries-nan", "tiled backward", "tile-ai/tilelang#2461")
class _PaddingQueriesNaN(Online):
    """The maximum of the queries that pad the last tile is garbage, and 0 · NaN is NaN in dv."""

    def rows_of(self, state: State, rows: slice) -> State:
        here = super().rows_of(state, rows)
        real = self.real_queries(rows.start + np.arange(TILE), rows)[:, None]
        return here._replace(m=np.where(real, here.m, np.nan))

    def inside(self, c: Inputs, rows: slice, keys: slice) -> Array:
        return super().inside(c, slice(rows.start, rows.start + TILE), keys)


@mistake("saved-state-of-other-layout", "tiled backward", "NVIDIA/cudnn-frontend#304")
class _SavedStateOfOtherLayout(Online):
    """Backward reads what was saved a query as if it lay in memory as (B, T, H)."""

    def saved(self, c: Inputs) -> State:
        state = super().saved(c)
        m, total = (x.swapaxes(-2, -3).reshape(x.shape) for x in state[:2])
        return State(m, total, state.acc)


@mistake("padding-over-next-head", "tiled backward", "flagos-ai/FlagGems#898")
class _PaddingOverNextHead(Online):
    """The padding of the last tile of keys of a head is written over dv of the next head."""

    def finished(self, found: Found) -> Found:
        padding = -found.dv.shape[-2] % TILE
        found.dv[..., 1:, :padding, :] = 0
        return found
