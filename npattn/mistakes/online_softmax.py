"""Mistakes in the online softmax: the running maximum, the row sum, the rescaling."""

from __future__ import annotations

import math

import numpy as np

from npattn.mistakes.attention import TILE, Inputs
from npattn.mistakes.online import Online, RunningSoftmax, finite_pivot
from npattn.mistakes.register import change, mistake
from npattn.problem.arrays import Array


@mistake(
    "maximum-starts-finite",
    "online softmax",
    "flashinfer-ai/flashinfer#4401",
    step="p",
    where="contents",
)
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
