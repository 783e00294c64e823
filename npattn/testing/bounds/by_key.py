"""dk and dv of some keys, from a given lse and out, a few queries at a time.

The gradient of one key sums over all queries: P = exp(s − lse), D = Σ do·out. The errors of lse and
out depend on all the keys of a row, and are known for rows that were evaluated whole (`Slack`); the
others are assumed to be off by no more. docs/spot.md explains the assumption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from npattn.engines import dense
from npattn.problem.arrays import Array
from npattn.testing.bounds.blocks import Block, ProblemInBlocks
from npattn.testing.bounds.by_row import (
    KeyBlock,
    KeyBlockVariance,
    RowLevel,
    Rows,
    RowVariances,
    width,
)
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.bounds.variance import DEVIATIONS, DISTINCT, FEW, Variance, count_rises
from npattn.testing.bounds.worst_case import VAST, WorstCase


class HeadResults(NamedTuple):
    """lse and out of all queries of one head, as the implementation returned them; cotangents."""

    lse: Array  # (T,) in units of `base`
    out: Array  # (T, E)
    do: Array  # (T, E)
    dlse: Array | None  # (T,)
    base: float = 1.0  # log 2, where lse is a binary logarithm


@dataclass
class Slack:
    """Largest errors of lse and D in the rows that were evaluated whole.

    Errors of D are counted in units of ‖do‖, to which they are proportional, except the loss by
    flushing, the only error of rows whose do is 0.
    """

    seen: int = 0  # number of rows that see a key
    generic: bool = True
    most: dict[str, float] = field(default_factory=dict)
    least_tilt: float = math.inf

    @np.errstate(all="ignore")
    def add(self, rows: Rows, more: Array) -> None:
        """Add rows with a cotangent; `more`, (rows,), is the error of lse by its change of base."""
        more = more[None, :, None]
        variance, do, limits = rows.variance, rows.do, rows.limits
        square = (do**2).sum(-1, keepdims=True)
        pulled = square > 0
        # The errors of the implementation's own rows, and of the given ones in place of the exact.
        e_out = (abs(do) * rows.worst_bounds["o"]).sum(-1, keepdims=True)
        var_out = (do**2 * (limits["o"] / DEVIATIONS) ** 2).sum(-1, keepdims=True)
        figures = {
            "rebuild": (1 + rows.rebuild) * np.exp(np.minimum(rows.t_lse + more, 100)) - 1,
            "e_D": np.where(pulled, (rows.worst_bounds["D"] + e_out) / np.sqrt(square), 0),
            "flush": np.where(pulled, 0, rows.worst_bounds["D"]),
            "online": variance.online,
            "query_shift": variance.query_shift,
            "var_l": variance.var_l + (limits["lse"] / DEVIATIONS) ** 2 + more**2,
            "var_D": np.where(pulled, (variance.var_D + var_out) / square, 0),
            "shift": variance.shift,
            "capped": variance.capped,
            "tilt": variance.tilt,
        }
        self.seen += int(rows.seen.sum())
        self.generic = self.generic and bool(variance.generic_rows(rows.D)[rows.seen[..., 0]].all())
        for name, x in figures.items():
            x = np.broadcast_to(x, rows.seen.shape)
            top = float(np.max(x, initial=0, where=rows.seen & ~np.isnan(x)))
            self.most[name] = max(self.most.get(name, 0.0), top)
        tilt = np.broadcast_to(variance.tilt, rows.seen.shape)
        self.least_tilt = float(np.min(tilt, initial=self.least_tilt, where=rows.seen))


class QueryBlock(KeyBlock):
    """A block of queries; their row maxima are not known, but are within log S of lse."""

    keeps_maximum = False  # the backward is given lse

    def _shift(self, s: Array) -> Array:
        return super()._shift(s) + 2 * self.unit.u * math.log(self.S + 1)


class QueryBlockVariance(KeyBlockVariance):
    """The variances of a `QueryBlock`; its lse is given, and may be that of a sink."""

    has_sink: bool

    @property
    def leans(self) -> bool:
        return self.worst.bends or self.has_sink


class KeyGradients(WorstCase):
    """dk and dv of keys s of one query head, and their errors.

    ``exact``, ``worst`` and ``var``, ``lost`` hold dk and dv, (keys, D) and (keys, E).
    """

    @np.errstate(all="ignore")
    def __init__(
        self,
        blocks: ProblemInBlocks,
        at: tuple[tuple[int, ...], int, Array],
        rounding: Rounding,
        dtype: Any,
        results: HeadResults,
        slack: Slack,
    ) -> None:
        self.blocks_of, self.at, self.slack, self.results = blocks, at, slack, results
        none = self._block(np.arange(0), always=True)
        assert none is not None
        self._set_options(none.canonical, rounding, dtype, none.original, blocks.block_conventions)
        self.set_lengths(blocks.problem.T, blocks.keys)
        self._set_residuals(dense.forward(none.canonical)[2])
        E, D, n = self.problem.E, self.problem.D, self.problem.S
        self.totals: list[list[Any]] = [
            [np.zeros((1, n, D)), np.zeros((1, n, E))],  # exact
            [np.zeros((1, n, x)) for x in (D, D, E, E)],  # worst, and masses
            [np.zeros((1, n, x)) for x in (D, D, D, D, D, 1, E, E, E, E)],  # variances
        ]
        self.vast = np.zeros((), bool)
        self.scores: list[Array] = []
        step = width(n, max(D, E))
        for t0 in range(0, self.T, step):
            t = np.arange(t0, min(t0 + step, self.T))
            block = self._block(t)
            if block is not None:
                self._add(block, t)
        self._finish()

    def _block(self, t: Array, *, always: bool = False) -> Block | None:
        lead, h, s = self.at
        return self.blocks_of.block(lead, np.full_like(t, h), t, s, always=always)

    def _add(self, block: Block, t: Array) -> None:
        """Add a block of queries t, (n,), to the totals."""
        worst = QueryBlock(block, self, self._row_attributes(t))
        worst._through_slope(worst._ds_error(worst._dp_error(worst.do, 0.0), worst.dl))
        variance = QueryBlockVariance(worst, self._variance_attributes(t))
        variance.tilt = self._tilt(worst)
        variance._through_slope(variance._ds_variance(variance._dp_variance()))
        turn = worst.r.live.swapaxes(-1, -2)
        w = np.where(worst.r.live, worst.r.p * worst.z, 0)
        exact = (
            worst.problem.scale * dense.sum_live(worst.dx.swapaxes(-1, -2), worst.r.q, turn),
            dense.sum_live(w.swapaxes(-1, -2), worst.do, turn),
        )
        errors = (*worst._dk_sums(), *worst._dv_sums())
        variances = (*variance._dk_sums(), *variance._dv_sums())
        for total, more in zip(self.totals, (exact, errors, variances), strict=True):
            for i, x in enumerate(more):
                total[i] = total[i] + x
        self.vast = self.vast | (worst.A > VAST).any()
        self.scores.append(np.where(turn, worst.s.swapaxes(-1, -2), np.nan).astype(np.float32))

    def _tilt(self, worst: WorstCase) -> Array:
        """Return Σ p slope of a known row: for each slope, the one that is farthest from it."""
        most, least = self.slack.most["tilt"], self.slack.least_tilt
        return np.where(worst.slope > (least + most) / 2, least, most)

    def _row_attributes(self, t: Array) -> RowLevel:
        """Return the row-level attributes of queries t, (n,), as `KeyBlock` takes them."""
        results, most = self.results, self.slack.most
        lse, out, do = (np.asarray(x[t], float)[None] for x in results[:3])
        lse = results.base * lse
        # The largest score is between lse and lse − log S: there, where it is the larger number.
        least = lse - math.log(self.S + 1)
        m = np.where(abs(lse) < abs(least), least, lse)[..., None]
        norm = np.sqrt((do**2).sum(-1, keepdims=True))
        ulp_lse, ulp_out = self._ulps(t)
        D = (do * out).sum(-1, keepdims=True)
        dl = np.zeros((1, 1, 1)) if results.dlse is None else results.dlse[t].astype(float)
        return {
            "lse": lse,
            "m": m,
            "total": np.exp(lse[..., None] - m),
            "sink": None,
            "p_sink": None,
            "do": do,
            "dl": dl.reshape(1, -1, 1) / results.base,
            "D": D,
            "rebuild": (1 + most["rebuild"]) * np.exp(ulp_lse) - 1,
            "e_D": most["e_D"] * norm + most["flush"] + (abs(do) * ulp_out).sum(-1, keepdims=True),
        }

    def _ulps(self, t: Array) -> tuple[Array, Array]:
        """Return the largest rounding errors of the given lse and out."""
        results = self.results
        return results.base * half_ulp(results.lse[t])[None, :, None], half_ulp(results.out[t])[
            None
        ]

    def _variance_attributes(self, t: Array) -> RowVariances:
        """Return variances of the rows of queries t, (n,), as `QueryBlockVariance` takes them."""
        results, most = self.results, self.slack.most
        do = np.asarray(results.do[t], float)[None]
        ulp_lse, ulp_out = self._ulps(t)
        square, var_out = do**2, do**2 * ulp_out**2 / 3
        return {
            "has_sink": self.blocks_of.problem.sinks is not None,
            "online": np.full((1, 1, 1), most["online"]),
            "query_shift": np.full((1, 1, 1), most["query_shift"]),
            "shift": most["shift"],
            "capped": most["capped"],
            "var_l": most["var_l"] + ulp_lse**2 / 3,
            "var_D": (most["var_D"] * square + var_out).sum(-1, keepdims=True),
        }

    def _finish(self) -> None:
        """Set exact, worst, var and lost of dk, (keys, D), and dv, (keys, E), from the totals."""
        exact, (t_dk, mass_k, t_dv, mass_v), var = self.totals
        self.exact = {"dk": exact[0][0], "dv": exact[1][0]}
        worst = {
            "dk": self._add_storage(t_dk, mass_k, self.problem.k, shared=True)[0],
            "dv": self._add_storage(t_dv, mass_v, self.problem.v, shared=True)[0],
        }
        self.worst = {n: np.where(self.vast, np.inf, t) for n, t in worst.items()}
        variance = Variance(self)
        pairs = {
            "dk": variance._dk_variance(tuple(var[:6])),
            "dv": variance._dv_variance(tuple(var[6:])),
        }
        self.var = {n: v[0] for n, (v, _) in pairs.items()}
        self.lost = {n: lost[0] for n, (_, lost) in pairs.items()}
        self.variance = variance

    @property
    def generic(self) -> bool:
        """True if the roundings of rows, and of the queries of each key, are as good as random."""
        if not self.slack.generic or self.vast:
            return False
        if not self.scores:
            return True
        values = np.concatenate(self.scores, -1)
        count = (~np.isnan(values)).sum(-1)
        return bool(((count_rises(values) + 1 >= DISTINCT * count) | (count <= FEW)).all())

    def copies(self, mass: Array, of: Array, shared: bool) -> tuple[float, float]:
        return self.blocks_of.group, self.blocks_of.group


def sum_heads(keys: list[KeyGradients]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Sum dk and dv, and their tolerances, over the heads that share the keys."""
    exact, tolerances = {}, {}
    every = np.asarray(all(c.generic for c in keys))
    for name in ("dk", "dv"):
        exact[name] = np.sum([c.exact[name] for c in keys], 0)
        worst, var, lost = (
            np.sum([getattr(c, kind)[name] for c in keys], 0) for kind in ("worst", "var", "lost")
        )
        tolerances[name] = np.fmin(worst, keys[0].variance.limit(var, every, lost))
    return exact, tolerances
