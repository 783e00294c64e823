"""Mistakes in the online softmax and in tiles, forward and backward."""

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import TILE, Inputs
from npattn.mistakes.online import (
    Online,
    RunningSoftmax,
    Split,
    TileGradients,
    finite_pivot,
    load_rows,
    tile_of,
)
from npattn.mistakes.register import change, mistake, one_result
from npattn.problem.arrays import Array


@mistake("dk-copied-not-added", "tiled backward", "NVIDIA/TransformerEngine#1557", step="dv",
         where="T > 16")  # fmt: skip
class _DkCopiedNotAdded(Online):
    """dk and dv of a tile of keys are those of the last tile of queries instead of the sum."""

    def collect(self, name: str, into: Array, at: slice, x: Array) -> None:
        if name != "dq":
            into[..., at, :] = 0
        super().collect(name, into, at, x)


@mistake("dq-overwritten", "tiled backward", step="dq", where="S > 16")
class _DqOverwritten(Online):
    """dq is that of the last tile of keys instead of the sum over tiles."""

    def collect(self, name: str, into: Array, at: slice, x: Array) -> None:
        if name == "dq":
            into[..., at, :] = 0
        super().collect(name, into, at, x)


change("last-query-lost-in-backward", "tiled backward", "Backward leaves out the last query.",
       step="visible", where="backward: t = T − 1", of=Online,
       backward_tiles=lambda up, T:
           [slice(rows.start, min(rows.stop, T - 1)) for rows in up(T)])  # fmt: skip


@mistake("first-query-lost-in-dv", "tiled backward", step="dv", where="t = 0")
class _FirstQueryLostInDv(Online):
    """dv leaves out the first query."""

    def dv(self, w: Array, do: Array, seen: Array, rows: slice) -> Array:
        first = (rows.start + np.arange(TILE) == 0)[:, None]
        return super().dv(w, np.where(first, 0, do), seen, rows)


@mistake("delta-of-last-query-zero", "tiled backward", step="delta", where="t = T − 1")
class _DeltaOfLastQueryZero(Online):
    """Σ do·out of the last query is taken as 0."""

    def row_delta(self, do: Array, out: Array, c: Inputs) -> Array:
        delta = super().row_delta(do, out, c)
        delta[..., -1:, :] = 0
        return delta


change("delta-of-query-before", "tiled backward",
       "Each query uses Σ do·out of the query before it.", step="delta", where="T > 1", of=Online,
       row_delta=lambda up, do, out, c: np.roll(up(do, out, c), 1, axis=-2))  # fmt: skip


@mistake("padding-queries-nan", "tiled backward", "tile-ai/tilelang#2461", step="nan",
         where="T % 16 ≠ 0")  # fmt: skip
class _PaddingQueriesNaN(Online):
    """Padding queries of the last tile have a garbage maximum: 0 · NaN reaches dk and dv."""

    def rows_of(self, state: RunningSoftmax, rows: slice) -> RunningSoftmax:
        here = super().rows_of(state, rows)
        real = self.real_queries(rows.start + np.arange(TILE), rows)[:, None]
        return here._replace(m=np.where(real, here.m, np.nan))

    def tile_visible(self, c: Inputs, rows: slice, keys: slice) -> Array:
        return super().tile_visible(c, slice(rows.start, rows.start + TILE), keys)


@mistake("saved-state-of-other-layout", "tiled backward", "NVIDIA/cudnn-frontend#304", step="p",
         where="backward: H > 1 and T > 1")  # fmt: skip
class _SavedStateOfOtherLayout(Online):
    """Backward reads the saved row statistics as if their layout were (B, T, H)."""

    def saved_state(self, c: Inputs) -> RunningSoftmax:
        state = super().saved_state(c)
        m, total = (x.swapaxes(-2, -3).reshape(x.shape) for x in state[:2])
        return RunningSoftmax(m, total, state.acc)


@mistake("padding-over-next-head", "tiled backward", "flagos-ai/FlagGems#898", step="dv",
         where="h ≥ 1 and s < 16 − S % 16 and S % 16 ≠ 0")  # fmt: skip
class _PaddingOverNextHead(Online):
    """Padding of the last tile of keys overwrites dv of the next head."""

    def finish(self, sums: TileGradients) -> TileGradients:
        padding = -sums.dv.shape[-2] % TILE
        sums.dv[..., 1:, :padding, :] = 0
        return sums


@mistake("maximum-starts-finite", "online softmax", "flashinfer-ai/flashinfer#4401", step="p",
         where="contents")  # fmt: skip
class _MaximumStartsFinite(Online):
    """The running maximum starts at −5e4; rows with lower scores are wrong."""

    def start(self, c: Inputs) -> RunningSoftmax:
        state = super().start(c)
        m = np.maximum(state.m, np.float32(-5e4))
        return RunningSoftmax(m, np.exp(c.sinks - m), state.acc)


change("maximum-pinned-to-0", "online softmax",
       "If the first tile is hidden, the running maximum is stored as 0 and never falls below.",
       "Dao-AILab/flash-attention#2082", step="p", where="contents", of=Online,
       maximum=lambda up, m, s: finite_pivot(up(m, s)))  # fmt: skip
change("row-sum-not-rescaled", "online softmax",
       "The row sum is not rescaled when the running maximum rises.", step="p",
       where="S > 16 or sinks", of=Online,
       rescale=lambda up, state, shrink: state._replace(acc=state.acc * shrink))  # fmt: skip
change("accumulator-not-rescaled", "online softmax",
       "The accumulator is not rescaled when the running maximum rises.", step="p", where="S > 16",
       of=Online,
       rescale=lambda up, state, shrink: state._replace(total=state.total * shrink))  # fmt: skip
change("rescale-inverted", "online softmax",
       "The state is rescaled by exp(new maximum − old) instead of its inverse.",
       "Dao-AILab/flash-attention#991", step="p", where="S > 16", of=Online,
       shrink=lambda up, m, pivot: np.where(m == -np.inf, 0, np.exp(pivot - m)))  # fmt: skip


@mistake("scale-compounded", "online softmax", "flagos-ai/FlagGems#424", step="s", where="S > 16")
class _ScaleCompounded(Online):
    """The factor log₂ e is multiplied onto the scale again for each tile of keys."""

    def cut_tile(self, c: Inputs, rows: slice, keys: slice) -> Inputs:
        before = self.tile_range(c, rows)[1] - 1 - keys.start // TILE
        return super().cut_tile(c._replace(scale=c.scale / math.log(2) ** before), rows, keys)


@mistake("lse-before-last-rescale", "online softmax", step="lse", where="S > 16", equivalent=True)
class _LseBeforeLastRescale(Online):
    """lse adds the maximum before the last tile to the row sum after it."""

    def row_lse(self, state: RunningSoftmax, c: Inputs) -> Array:
        before = _AllButLastTile().states(c).m
        return super().row_lse(state._replace(m=np.where(before == -np.inf, state.m, before)), c)


class _AllButLastTile(Online):
    def key_tiles(self, c: Inputs, rows: slice) -> list[slice]:
        return super().key_tiles(c, rows)[:-1]


@mistake("hidden-tile-counted", "online softmax", step="p", where="mask")
class _HiddenTileCounted(Online):
    """A fully hidden tile of keys adds its number of keys to the row sum."""

    def add_tile(self, state: RunningSoftmax, tile: Inputs) -> RunningSoftmax:
        after = super().add_tile(state, tile)
        hidden = ~self.scores(tile)[1].any((-1, -2), keepdims=True)
        return after._replace(total=after.total + TILE * hidden)


change("tail-keys-skipped", "tiles",
       "The number of key tiles is rounded down: keys after the last whole tile are lost.",
       step="visible", where="s // 16 = S // 16 and S > 16", of=Online,
       tile_range=one_result(1, lambda end, c, rows:
           min(end, max(c.k.shape[-2] // TILE, 1))))  # fmt: skip
change("tail-padding-attended", "tiles",
       "The zeros that pad the last tile of keys take part in the softmax.",
       step="p", where="S % 16 ≠ 0", of=Online,
       real_keys=lambda up, s, c: np.ones(s.shape, bool))  # fmt: skip


@mistake("softcap-revives-padding", "tiles", "ggml-org/llama.cpp#29034", step="p",
         where="S % 16 ≠ 0 and softcap")  # fmt: skip
class _SoftcapRevivesPadding(Online):
    """Padding keys are hidden before the softcap, which makes their scores finite."""

    def real_keys(self, s: Array, c: Inputs) -> Array:
        return super().real_keys(s, c) | (c.softcap is not None)

    def cut_tile(self, c: Inputs, rows: slice, keys: slice) -> Inputs:
        padding = ~super().real_keys(keys.start + np.arange(TILE), c)
        tile = super().cut_tile(c, rows, keys)
        return tile._replace(bias=tile.bias - np.float32(c.softcap or 0) * padding)


change("tiles-overlap", "tiles",
       "A tile starts at the last key of the one before, which is counted twice.",
       step="p", where="s % 15 = 0 and s > 0", of=Online,
       key_tiles=lambda up, c, rows:
           [slice(n, n + TILE) for n in reversed(range(0, c.k.shape[-2], TILE - 1))])  # fmt: skip
change("key-between-tiles-lost", "tiles",
       "A tile starts one key too late: the key between two tiles is lost.",
       step="visible", where="s % 17 = 16", of=Online,
       key_tiles=lambda up, c, rows:
           [slice(n, n + TILE) for n in reversed(range(0, c.k.shape[-2], TILE + 1))])  # fmt: skip


@mistake("tail-values-shifted", "tiles", step="o", where="s // 16 = S // 16 and S > 16")
class _TailValuesShifted(Online):
    """The values of the last, partial tile are read one row too early."""

    def cut_tile(self, c: Inputs, rows: slice, keys: slice) -> Inputs:
        early = int(keys.start > 0 and keys.stop > c.k.shape[-2])
        v = load_rows(c.v, slice(keys.start - early, keys.stop - early))
        return super().cut_tile(c, rows, keys)._replace(v=v)


change("causal-tile-taken-as-whole", "tiles",
       "A diagonal tile is not masked if its last query sees all of it.",
       step="visible", where="S ≥ 16 and causal", of=Online,
       fully_visible=lambda up, c, rows, keys:
           up(c, slice(rows.stop - 1, rows.stop) if c.causal else rows, keys))  # fmt: skip


@mistake("causal-tile-skipped", "tiles", step="visible", where="t % 16 > 0 and causal")
class _CausalTileSkipped(Online):
    """With causal, a tile of queries stops at the last key tile visible to its first query."""

    def tile_range(self, c: Inputs, rows: slice) -> tuple[int, int]:
        begin, end = super().tile_range(c, rows)
        ends = super().tile_range(c, slice(rows.start, rows.start + 1))[1]
        return begin, ends if c.causal else end


change("window-tile-taken-as-whole", "tiles",
       "A tile at the left end of a window is not masked if its first query sees all of it.",
       step="visible", where="t % 16 > 0 and window", of=Online,
       fully_visible=lambda up, c, rows, keys:
           up(c, slice(rows.start, rows.start + 1) if c.window else rows, keys))  # fmt: skip
change("window-tile-skipped", "tiles",
       "A tile of queries starts at the first key tile in the window of its last query.",
       step="visible", where="t % 16 < 15 and S > 16 and window", of=Online,
       tile_range=lambda up, c, rows:
           (up(c, slice(rows.stop - 1, rows.stop))[0], up(c, rows)[1]))  # fmt: skip
change("dropout-of-first-tile", "tiles",
       "The dropout mask of the first tile of keys is used for every tile.",
       step="p", where="s ≥ 16 and dropout", of=Online,
       cut_tile=lambda up, c, rows, keys:
           up(c, rows, keys)._replace(keep=tile_of(c.keep, rows, slice(0, TILE))))  # fmt: skip


@mistake("merge-of-mixed-bases", "split keys", "vllm-project/vllm#43919", step="p", where="S > 16")
class _MergeOfMixedBases(Split):
    """Partial results have a base-2 lse but are merged as if it were natural."""

    def fold(self, c: Inputs, rows: slice, tiles: list[slice]) -> RunningSoftmax:
        state = super().fold(c, rows, tiles)
        if len(self.key_tiles(c, rows)) < 2:  # nothing to merge
            return state
        lse = super().row_lse(state, c) / np.float32(math.log(2))
        return RunningSoftmax(lse, np.isfinite(lse).astype(lse.dtype), self.divide(state))


change("merge-of-nothing-nan", "split keys",
       "Merging two fully masked partial results gives NaN: −inf − (−inf).",
       "vllm-project/vllm#39148", step="nan", where="rows that see no key",
       of=Split, merge_pivot=lambda up, m: m)  # fmt: skip
change("sink-in-every-split", "split keys",
       "The sink is counted in every split of the keys that is merged.", step="p", where="sinks",
       of=Split,
       second_half=lambda up, c: c)  # fmt: skip


@mistake("out-of-each-split-in-backward", "split keys", "tenstorrent/tt-metal#53205", step="delta",
         where="S > 1")  # fmt: skip
class _OutOfEachSplitInBackward(Split):
    """Backward of each half of the keys uses the out and lse of that half; only dv is right."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        S, lse = c.k.shape[-2], self.row_lse(self.states(c), c)
        halves, first = [], np.arange(S) < S // 2
        for half, sinks in ((first, c.sinks), (~first, self.second_half(c).sinks)):
            seen = self.visible(c) & half
            alone = c._replace(mask=seen, causal=False, window=None, sinks=sinks)
            share = np.exp(self.row_lse(self.states(alone), alone) - finite_pivot(lse))
            halves.append(super().gradients(alone, share * do, share * dlse, dw))
        return tuple(a + b for a, b in zip(*halves, strict=True))
