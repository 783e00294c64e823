"""dk and dv of some keys, from a given lse and out, a few queries at a time.

The gradient of one key sums over all queries: P = exp(s − lse), D = Σ do·out. By how much lse and
out are off depends on all the keys of a row, and is known of rows that were looked at whole
(`Slack`); the others are taken to be off by no more. docs/spot.md says what that means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from npattn import dense
from npattn.arrays import Array
from npattn.testing.bounds.blocks import Block, Blocks
from npattn.testing.bounds.by_row import NoisePart, Part, Rows, width
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.bounds.variance import DEVIATIONS, DISTINCT, FEW, Noise, rises
from npattn.testing.bounds.worst_case import VAST, Hard

__all__ = ["Columns", "Delivered", "Slack", "of_keys"]


class Delivered(NamedTuple):
    """Of all queries of one head: what is given, and its cotangents."""

    lse: Array  # (T,) in units of `base`
    out: Array  # (T, E)
    do: Array  # (T, E)
    dlse: Array | None  # (T,)
    base: float = 1.0  # log 2, where lse is a binary logarithm


@dataclass
class Slack:
    """How far lse and D of a row may be off: the most that it is of rows seen whole.

    Errors of D are counted in units of ‖do‖, to which they are proportional, but for what is
    flushed, which is all that there is of rows whose do is 0.
    """

    seen: int = 0  # rows that see a key
    generic: bool = True
    most: dict[str, float] = field(default_factory=dict)

    @np.errstate(all="ignore")
    def add(self, rows: Rows, more: Array) -> None:
        """Look at rows with a cotangent; `more`, (rows,), is what delivering lse may add to its
        error."""
        more = more[None, :, None]
        likely, do, sharp = rows.likely, rows.do, rows.sharp
        square = (do**2).sum(-1, keepdims=True)
        pulled = square > 0
        # What an implementation's own rows are off by, and what the given ones are, which stand in
        # for the exact ones.
        e_out = (abs(do) * rows.found["o"]).sum(-1, keepdims=True)
        var_out = (do**2 * (sharp["o"] / DEVIATIONS) ** 2).sum(-1, keepdims=True)
        figures = {
            "rebuild": (1 + rows.rebuild) * np.exp(np.minimum(rows.t_lse + more, 100)) - 1,
            "e_D": np.where(pulled, (rows.found["D"] + e_out) / np.sqrt(square), 0),
            "flush": np.where(pulled, 0, rows.found["D"]),
            "online": likely.online,
            "var_l": likely.var_l + (sharp["lse"] / DEVIATIONS) ** 2 + more**2,
            "var_D": np.where(pulled, (likely.var_D + var_out) / square, 0),
        }
        self.seen += int(rows.seen.sum())
        self.generic = self.generic and bool(likely.generic(rows.D)[rows.seen[..., 0]].all())
        for name, x in figures.items():
            top = float(np.max(x, initial=0, where=rows.seen & ~np.isnan(x)))
            self.most[name] = max(self.most.get(name, 0.0), top)


class ColumnPart(Part):
    """A part whose row maxima are not known, but that they are within log S of lse."""

    def _shift(self, s: Array) -> Array:
        return super()._shift(s) + 2 * self.unit.u * math.log(self.S + 1)


class Columns(Hard):
    """dk and dv of keys s of one query head: exact, and what they may be off by.

    ``exact``, ``worst`` and ``var``, ``lost`` hold dk and dv, (keys, D) and (keys, E).
    """

    @np.errstate(all="ignore")
    def __init__(
        self,
        blocks: Blocks,
        at: tuple[tuple[int, ...], int, Array],
        rounding: Rounding,
        dtype: Any,
        given: Delivered,
        slack: Slack,
    ) -> None:
        self.blocks_of, self.at, self.slack, self.delivered = blocks, at, slack, given
        none = self._block(np.arange(0), always=True)
        assert none is not None
        self._begin(none.canonical, rounding, dtype, none.given, blocks.meaning)
        self._count(blocks.problem.T, blocks.keys)
        self._hold(dense.forward(none.canonical)[2])
        E, D, n = self.problem.E, self.problem.D, self.problem.S
        self.totals: list[list[Any]] = [
            [np.zeros((1, n, D)), np.zeros((1, n, E))],  # exact
            [np.zeros((1, n, x)) for x in (D, D, E, E)],  # worst, and masses
            [np.zeros((1, n, x)) for x in (D, D, D, D, D, E, E, E, E)],  # variances
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
        """The parts of these queries."""
        part = ColumnPart(block, self, self._known(t))
        part._through_slope(part._dscores(part._dweights(part.do, 0.0), part.dl))
        noise = NoisePart(part, self._likely(t))
        noise._through_slope(noise._dscores(noise._dweights()))
        turn = part.r.live.swapaxes(-1, -2)
        w = np.where(part.r.live, part.r.p * part.z, 0)
        exact = (
            part.problem.scale * dense.sum_live(part.dx.swapaxes(-1, -2), part.r.q, turn),
            dense.sum_live(w.swapaxes(-1, -2), part.do, turn),
        )
        worst = (*part._dk_sums(), *part._dv_sums())
        var = (*noise._dk_sums(), *noise._dv_sums())
        for total, more in zip(self.totals, (exact, worst, var), strict=True):
            for i, x in enumerate(more):
                total[i] = total[i] + x
        self.vast = self.vast | (part.A > VAST).any()
        self.scores.append(np.where(turn, part.s.swapaxes(-1, -2), np.nan).astype(np.float32))

    def _known(self, t: Array) -> dict[str, Any]:
        """What parts have to know of their rows."""
        given, most = self.delivered, self.slack.most
        lse, out, do = (np.asarray(x[t], float)[None] for x in given[:3])
        lse = given.base * lse
        # The largest score is between lse and lse − log S: there, where it is the larger number.
        least = lse - math.log(self.S + 1)
        m = np.where(abs(lse) < abs(least), least, lse)[..., None]
        norm = np.sqrt((do**2).sum(-1, keepdims=True))
        ulp_lse, ulp_out = self._ulps(t)
        D = (do * out).sum(-1, keepdims=True)
        dl = np.zeros((1, 1, 1)) if given.dlse is None else given.dlse[t].astype(float)
        return {
            "lse": lse,
            "m": m,
            "total": np.exp(lse[..., None] - m),
            "sink": None,
            "p_sink": None,
            "do": do,
            "dl": dl.reshape(1, -1, 1) / given.base,
            "D": D,
            "rebuild": (1 + most["rebuild"]) * np.exp(ulp_lse) - 1,
            "e_D": most["e_D"] * norm + most["flush"] + (abs(do) * ulp_out).sum(-1, keepdims=True),
        }

    def _ulps(self, t: Array) -> tuple[Array, Array]:
        """What the rounding of the given lse and out may be."""
        given = self.delivered
        return given.base * half_ulp(given.lse[t])[None, :, None], half_ulp(given.out[t])[None]

    def _likely(self, t: Array) -> dict[str, Any]:
        given, most = self.delivered, self.slack.most
        do = np.asarray(given.do[t], float)[None]
        ulp_lse, ulp_out = self._ulps(t)
        square, var_out = do**2, do**2 * ulp_out**2 / 3
        return {
            "online": np.full((1, 1, 1), most["online"]),
            "var_l": most["var_l"] + ulp_lse**2 / 3,
            "var_D": (most["var_D"] * square + var_out).sum(-1, keepdims=True),
        }

    def _finish(self) -> None:
        exact, (t_dk, mass_k, t_dv, mass_v), var = self.totals
        self.exact = {"dk": exact[0][0], "dv": exact[1][0]}
        worst = {
            "dk": self._stored(t_dk, mass_k, self.problem.k, shared=True)[0],
            "dv": self._stored(t_dv, mass_v, self.problem.v, shared=True)[0],
        }
        self.worst = {n: np.where(self.vast, np.inf, t) for n, t in worst.items()}
        likely = Noise(self)
        pairs = {"dk": likely._of_dk(tuple(var[:5])), "dv": likely._of_dv(tuple(var[5:]))}
        self.var = {n: v[0] for n, (v, _) in pairs.items()}
        self.lost = {n: lost[0] for n, (_, lost) in pairs.items()}
        self.likely = likely

    @property
    def generic(self) -> bool:
        """Whether the roundings of rows, and of the queries of each key, are as good as random."""
        if not self.slack.generic or self.vast:
            return False
        if not self.scores:
            return True
        values = np.concatenate(self.scores, -1)
        count = (~np.isnan(values)).sum(-1)
        return bool(((rises(values) + 1 >= DISTINCT * count) | (count <= FEW)).all())

    def copies(self, mass: Array, of: Array, shared: bool) -> tuple[float, float]:
        return self.blocks_of.group, self.blocks_of.group


def of_keys(columns: list[Columns]) -> tuple[dict[str, Array], dict[str, Array]]:
    """dk and dv of keys, and what is allowed of them, summed over the heads that share the keys."""
    exact, allowed = {}, {}
    every = np.asarray(all(c.generic for c in columns))
    for name in ("dk", "dv"):
        exact[name] = np.sum([c.exact[name] for c in columns], 0)
        worst, var, lost = (
            np.sum([getattr(c, what)[name] for c in columns], 0)
            for what in ("worst", "var", "lost")
        )
        allowed[name] = np.fmin(worst, columns[0].likely.sharp(var, every, lost))
    return exact, allowed
