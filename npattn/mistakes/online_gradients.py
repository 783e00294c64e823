"""Mistakes in the tiled backward pass."""

from __future__ import annotations

import numpy as np

from npattn.mistakes.attention import TILE, Inputs
from npattn.mistakes.online import Online, RunningSoftmax, TileGradients
from npattn.mistakes.register import change, mistake
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


@mistake("last-query-lost-in-backward", "tiled backward", step="visible",
         where="backward: t = T − 1")  # fmt: skip
class _LastQueryLostInBackward(Online):
    """Backward leaves out the last query."""

    def backward_tiles(self, T: int) -> list[slice]:
        return [slice(rows.start, min(rows.stop, T - 1)) for rows in self.query_tiles(T)]


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
