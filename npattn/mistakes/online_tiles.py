"""Mistakes in tiles: which keys they hold, and the merging of partial results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import TILE, Inputs
from npattn.mistakes.online import (
    Online,
    RunningSoftmax,
    Split,
    finite_pivot,
    load_rows,
    tile_of,
)
from npattn.mistakes.register import change, mistake, one_result
from npattn.problem.arrays import Array

# --- which tiles, and what is in them


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


# --- partial results


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
