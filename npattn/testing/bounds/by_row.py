"""Some rows of one key/value head, exactly and with their tolerance, a few keys at a time.

Four passes over the keys: the softmax, by merging blocks; the sums of weights whose exponents err;
the bounds of o, lse and D; dq and its bound. Between the passes the row-level formulas of
`WorstCase` and `Variance` work on the sums, which are the ones they take of a whole problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import numpy as np

from npattn.engines import dense
from npattn.problem.arrays import Array
from npattn.testing.bounds.blocks import Block, ProblemInBlocks
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.variance import Variance, Variety, count_rises, tile_maxima
from npattn.testing.bounds.worst_case import OutErrorSums, WeightSums, WorstCase, finite, row_sum

CELLS = 2**15
"""Number of scores in memory at a time: arrays of them stay in a cache."""


Sums = TypeVar("Sums", bound=tuple[Any, ...])

MERGE_WEIGHTS = WeightSums._make(
    [np.add, np.add, np.maximum, np.maximum, np.logaddexp, np.logaddexp, np.maximum]
)
MERGE_OUT = OutErrorSums._make([np.add, np.add, np.add, np.add, np.maximum, np.logical_or])


def width(rows: int, size: int) -> int:
    """Return the number of keys to take at a time, for so many rows: whole tiles of 16."""
    cells = min(CELLS // max(rows, 1), 8 * CELLS // max(size, 1))
    return max(cells // 16 * 16, 16)


def merge_sums(total: Sums | None, more: Sums, by: tuple[Any, ...] | None = None) -> Sums:
    """Merge sums over some keys with those over others; by default each is added."""
    if total is None:
        return more
    merges = by or (np.add,) * len(more)
    merged: Sums = type(more)(*(f(x, y) for f, x, y in zip(merges, total, more, strict=True)))
    return merged


class RowLevel(TypedDict, total=False):
    """Attributes of `WorstCase` that all keys of a row decide: (1, rows, 1) unless said.

    Each pass over the keys finds some, and the blocks of the next pass take them.
    """

    # From merging the blocks.
    m: Array  # largest score
    total: Array  # Σ e^(s − m)
    o: Array  # (1, rows, E)
    lse: Array  # (1, rows)
    sink: Array | None
    p_sink: Array | None
    # From the sums of the weights; `_normalise` sets them.
    up: Array
    down: Array
    vast: Array
    log_down: Array
    last: Array
    R_sink: Array
    high: Array
    row_sum: float
    merge: Array
    rebuild: Array
    # Of the cotangents, and of D, which they decide with o.
    do: Array  # (1, rows, E)
    dl: Array
    D: Array
    D_out: Array
    e_D: Array


class RowVariances(TypedDict, total=False):
    """Attributes of `Variance` that all keys of a row decide, as `RowLevel` has the others."""

    has_sink: bool
    online: Array
    query_shift: Array
    tilt: Any
    shift: Any
    capped: Any
    var_l: Array
    var_D: Array


class KeyBlock(WorstCase):
    """The worst case of a block of keys, in rows whose sums over all keys are known.

    Parameters
    ----------
    rows : WorstCase
        The rows of the block, with its rounding model and the lengths of the whole problem.
    """

    total: Array

    def __init__(self, block: Block, rows: WorstCase, row_level: RowLevel) -> None:
        self._set_options(
            block.canonical, rows.rounding, rows.dtype, block.original, rows.conventions
        )
        self.set_lengths(rows.T, rows.S)
        for name, value in row_level.items():
            setattr(self, name, value)
        problem = block.canonical
        live = np.ones((1, 1), bool) if problem.visible is None else problem.visible
        none = np.broadcast_to(0.0, (1, problem.T, problem.S))
        keep = dense.dropout_factor(problem)
        operands, top = dense.operands(problem), none[..., :1]
        self._set_residuals(
            dense.Residuals(*operands, None, None, live, none, self.p_sink, keep, top)
        )
        self.s, error = self._score_errors()
        live = live & (self.s != -np.inf)
        p = np.where(live, np.exp(self.s - self.m) / self.total, 0)
        self._set_residuals(self.r._replace(live=live, p=p))
        self.A = np.where(live, error + self._shift(self.s) + self._hidden_error(), 0)
        self._perturb_weights(self.A)

    def _others_live(self) -> Array | bool:
        return True  # in other blocks, maybe


class KeyBlockVariance(Variance):
    """The variances of a `KeyBlock`."""

    def __init__(self, worst: KeyBlock, row_variances: RowVariances) -> None:
        super().__init__(worst)
        for name, value in row_variances.items():
            setattr(self, name, value)
        var_a, _ = self._argument_variance()
        self.var_p = self._weight_variance(var_a)

    def _online_variance(self) -> Array:
        return self.online


class RowValues:
    """The numbers of each row, in float32 to tell them apart, and their spread."""

    def __init__(self) -> None:
        self.values: list[Array] = []
        self.number: Any = 0
        self.moments: tuple[Any, ...] = (0.0, 0.0, 0.0, 0.0)

    def add(self, x: Array, centre: Array, live: Array, p: Array) -> None:
        if live.any():
            self.values.append(np.where(live, x, np.nan).astype(np.float32))
        self.number = self.number + live.sum(-1)
        x = np.where(live, x, 0)
        away = np.where(live, x - centre, 0)
        sums = row_sum(p), row_sum(p * away), row_sum(p * away**2), row_sum(p * x**2)
        self.moments = tuple(a + b for a, b in zip(self.moments, sums, strict=True))

    @property
    def norm(self) -> Array:
        return np.asarray(np.sqrt(self.moments[3]))

    def variety(self) -> Variety:
        total, mean, square, _ = self.moments
        spread = np.sqrt(np.maximum(square - mean**2 / np.where(total > 0, total, 1), 0))
        count = np.asarray(self.number)
        steps = np.zeros_like(count)
        if self.values:
            values = np.concatenate(self.values, -1)
            self.values = []
            steps = np.stack([count_rises(row) for row in values[0]])[None]
        return Variety(steps + (count > 0), count, spread[..., 0])


class ExactRows(NamedTuple):
    """Exact results of rows: (rows, E), (rows,) and, with a cotangent, (rows, D)."""

    o: Array
    lse: Array
    dq: Array | None


class Rows(WorstCase):
    """Rows of heads that share their keys: their results, ``exact``, and their ``tolerances()``."""

    @np.errstate(all="ignore")
    def __init__(
        self,
        blocks: ProblemInBlocks,
        lead: tuple[int, ...],  # index into the leading axes
        h: Array,  # (rows,): heads, all of one key/value head, and queries
        t: Array,
        rounding: Rounding,
        dtype: Any,
        # (rows, E), (rows,): cotangents. With do, D is bounded, and with `gradient` dq too.
        do: Array | None = None,
        dlse: Array | None = None,
        *,
        gradient: bool = False,
    ) -> None:
        self.blocks_of, self.at, self.dtype = blocks, (lead, h, t), dtype
        none = blocks.block(lead, h, t, slice(0, 0), always=True)
        assert none is not None
        self.none = none
        self._set_options(none.canonical, rounding, dtype, none.original, blocks.block_conventions)
        self.set_lengths(blocks.problem.T, blocks.keys)
        self.width = width(len(t), max(self.problem.D, self.problem.E))
        self.row_level: RowLevel = {}
        self._merge()
        self._sum_weights()
        self.worst_bounds: dict[str, Array] = {}
        self.limits: dict[str, Array] = {}
        if do is not None:
            self.do = do[None]
            self.dl = np.zeros((1, 1, 1)) if dlse is None else dlse[None, :, None]
            self.D_out = self.D = row_sum(self.do * self.o)
        self._forward(do is not None)
        if gradient:
            self._backward()

    def share(self, **attributes: Unpack[RowLevel]) -> None:
        """Set attributes here, and in the blocks of these rows."""
        self.row_level |= attributes
        for name, value in attributes.items():
            setattr(self, name, value)

    def _all_blocks(self) -> Iterator[Block | None]:
        """Iterate over all blocks of keys; None for a block without visible keys."""
        (lead, h, t), S = self.at, self.blocks_of.problem.S
        for s0 in range(0, S, self.width):
            yield self.blocks_of.block(lead, h, t, slice(s0, min(s0 + self.width, S)))

    def visible_blocks(self) -> Iterator[Block]:
        """Iterate over the blocks with visible keys; if there is none, one without keys."""
        blank = True
        for block in self._all_blocks():
            if block is not None:
                blank = False
                yield block
        if blank:
            yield self.none

    # --- the passes -------------------------------------------------------------------------------

    def _merge(self) -> None:
        """Merge o, lse and the largest score of the blocks; a sink is one more."""
        outs, most, totals = [], [], []
        unseen = np.full((1, len(self.at[2]), 1), -np.inf)
        for block in self._all_blocks():
            if block is None:
                continue
            out, lse, r = dense.forward(block.canonical)
            top = r.p.max(-1, keepdims=True, initial=0)
            outs.append(out[None])
            # The row's largest score and its sum relative to that: where every visible key has a
            # bias of −1e38, lse no longer tells how many keys it is the sum of.
            most.append(lse[None, :, None] + np.log(top))
            totals.append(np.where(top == 0, 0, 1 / top))
        # One more, without a value: the sink, or nothing.
        sinks = self.blocks_of.problem.sinks
        sink = None if sinks is None else sinks[self.at[1]].astype(float)[None, :, None]
        most.append(unseen if sink is None else sink)
        totals.append(np.ones_like(unseen))
        outs.append(np.zeros((*unseen.shape[:-1], self.problem.E)))
        m = np.max(most, 0)
        m = np.where(np.isneginf(m), 0, m)
        e = [w * np.exp(x - m) for w, x in zip(totals, most, strict=True)]
        total = np.sum(e, 0)
        lse = m + np.log(total)
        total = np.where(total == 0, 1, total)
        self.share(m=m, total=total)
        self.o = np.sum([w * o for w, o in zip(e, outs, strict=True)], 0) / total
        p_sink = None if sink is None else e[-1] / total
        self.share(o=self.o, lse=lse[..., 0], sink=sink, p_sink=p_sink)
        _, __, residuals = dense.forward(self.none.canonical)
        self._set_residuals(residuals._replace(p_sink=p_sink))
        self.variance = RowsVariance(self)

    def _sum_weights(self) -> None:
        """Set the error of lse, from weights summed over blocks of keys, and share the sums."""
        total: WeightSums | None = None
        tiles = []
        for block in self.visible_blocks():
            worst = KeyBlock(block, self, self.row_level)
            tiles.append(tile_maxima(np.where(worst.r.live, worst.s, -np.inf)))
            total = merge_sums(total, worst._weight_sums(worst.A), MERGE_WEIGHTS)
        assert total is not None
        self.t_lse = self._normalise(total, self._sink_argument_error())
        self.variance.online = self.variance._rescale_variance(np.concatenate(tiles, -1))
        self.variance.var_sink = self.variance._sink_argument_variance()
        self.share(p_sink=self.p_sink, R_sink=self.R_sink, up=self.up, down=self.down)
        self.share(vast=self.vast, log_down=self.log_down, last=self.last, high=self.high)
        self.share(row_sum=self.row_sum, merge=self.merge, rebuild=self.rebuild)

    def _forward(self, has_cotangent: bool) -> None:
        """Set the bounds of o, lse and, with a cotangent, of D."""
        row_variances: RowVariances = {"online": self.variance.online}
        out = var_sums = delta = spread = None
        more: Any = 0.0
        if has_cotangent:
            self.share(do=self.do, dl=self.dl, D=self.D, D_out=self.D_out)
        for block in self.visible_blocks():
            worst = KeyBlock(block, self, self.row_level)
            worst._limit_weights()
            out = merge_sums(out, worst._out_sums(), MERGE_OUT)
            variance = KeyBlockVariance(worst, row_variances)
            var_sums = merge_sums(var_sums, variance._out_sums())
            live, p = worst.r.live, worst.r.p
            self.variance.scores.add(worst.s, self.m, live, p)
            if has_cotangent:
                e_dp = worst._dp_error(self.do, 0.0)
                delta = merge_sums(delta, worst._delta_sums(e_dp))
                spread = merge_sums(spread, variance._delta_sums(variance._dp_variance()))
                more = more + row_sum(p * np.where(live, worst.dp - self.D, 0))
                dp = self.do @ finite(worst.r.v).swapaxes(-1, -2)
                self.variance.pulls.add(dp, self.D, live, p)
        assert out is not None
        assert var_sums is not None
        self.worst_bounds = {"o": self._out_bound(out), "lse": self.t_lse}
        self.limits = self.variance._row_limits(var_sums)
        self.limits["lse"] = self.limits["lse"][..., None]
        if delta is not None and spread is not None:
            self.worst_bounds["D"] = e_D = self._delta_bound(delta)
            # One rounding is common to the row: a second pass takes it off.
            sink = 0.0 if self.p_sink is None else self.p_sink * self.D
            self.variance.var_D = self.variance._delta_variance(spread)
            self.share(D=self.D + more - sink, e_D=e_D)

    def _backward(self) -> None:
        """Set dq and its bound."""
        row_variances: RowVariances = {
            "online": self.variance.online,
            "var_l": self.variance.var_l,
            "query_shift": self.variance.query_shift,
            "tilt": self.variance.tilt,
            "shift": self.variance.shift,
            "capped": self.variance.capped,
        }
        sums = var_sums = top = var_top = None
        dl = np.where(self.seen, self.dl, 0)
        for block in self.visible_blocks():
            worst = KeyBlock(block, self, self.row_level)
            worst._limit_weights()
            e_ds = worst._ds_error(worst._dp_error(self.do, 0.0), dl)
            worst._through_slope(e_ds)
            top = merge_sums(top, worst._top_sums(e_ds))
            sums = merge_sums(sums, worst._dq_sums())
            variance = KeyBlockVariance(worst, row_variances)
            var_ds = variance._ds_variance(variance._dp_variance())
            variance._through_slope(var_ds)
            var_top = merge_sums(var_top, variance._top_sums(var_ds))
            var_sums = merge_sums(var_sums, variance._dq_sums())
        assert sums is not None
        assert var_sums is not None
        assert top is not None
        assert var_top is not None
        self.e_top = self._top_error(top)
        self.variance.var_top = self.variance._top_variance(var_top)
        scale = self.problem.scale
        assert scale is not None
        self.dq = scale * sums.signed
        self.worst_bounds["dq"] = self._dq_bound(sums)
        var, lost = self.variance._dq_variance(var_sums)
        generic = self.variance.generic_rows(self.D)[..., None]
        self.limits["dq"] = self.variance.limit(var, generic, lost)

    def copies(self, mass: Array, of: Array, shared: bool) -> tuple[float, float]:
        return 1.0, 1.0

    # --- results ----------------------------------------------------------------------------------

    @property
    def exact(self) -> ExactRows:
        dq = self.dq[0] if "dq" in self.worst_bounds else None
        return ExactRows(self.o[0], self.lse[0], dq)

    def tolerances(self) -> dict[str, Array]:
        """Return the tolerances of o (rows, E), lse (rows,) and dq (rows, D)."""
        bounds = {name: t for name, t in self.worst_bounds.items() if name != "D"}
        tolerances = {name: np.minimum(t, self.limits[name])[0] for name, t in bounds.items()}
        return tolerances | {"lse": tolerances["lse"][..., 0]}


class RowsVariance(Variance):
    """The variances of rows, from sums over their blocks."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.scores, self.pulls = RowValues(), RowValues()

    def generic_rows(self, dp: Array | None = None) -> Array:
        if not hasattr(self, "variety"):
            self.variety = self.scores.variety()
        pulls = None if dp is None else self.pulls.variety()
        return self.generic_from(self.variety, pulls, self.pulls.norm)
