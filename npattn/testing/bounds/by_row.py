"""Some rows of one key/value head, exactly and with what is allowed of them, a few keys at a time.

Four passes over the keys: the softmax by parts that are merged; what the weights come to where
their exponents err; the bounds of o, lse and D; dq and its bound. Between the passes row-level
formulas of `Hard` and `Noise` work on the sums, which are those that they take themselves of
problems that are held whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from npattn import dense
from npattn.arrays import Array
from npattn.testing.bounds import worst_case
from npattn.testing.bounds.blocks import Block, Blocks
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.variance import Noise, Variety, along, rises, tops
from npattn.testing.bounds.worst_case import Hard, Shares, finite

__all__ = ["CELLS", "Gathered", "NoisePart", "Part", "Rows", "width"]

CELLS = 2**15
"""Scores that are held at a time: arrays of them stay in a cache."""


Sums = TypeVar("Sums", bound=tuple[Any, ...])

SHARES = Shares(np.add, np.add, np.maximum, np.maximum, np.logaddexp, np.logaddexp)  # type: ignore[arg-type]
OUT = worst_case.OutSums(np.add, np.add, np.add, np.add, np.maximum, np.logical_or)  # type: ignore[arg-type]


def width(rows: int, size: int) -> int:
    """How many keys of that size are taken at a time, for so many rows: whole tiles of 16."""
    cells = min(CELLS // max(rows, 1), 8 * CELLS // max(size, 1))
    return max(cells // 16 * 16, 16)


def folded(total: Sums | None, more: Sums, how: tuple[Any, ...] | None = None) -> Sums:
    """Sums over some keys and over others, as those over all; by default each is added."""
    if total is None:
        return more
    ways = how or (np.add,) * len(more)
    folded: Sums = type(more)(*(way(a, b) for way, a, b in zip(ways, total, more, strict=True)))
    return folded


class Part(Hard):
    """Scores of a block, as `Hard` has them, with what is known of their rows as a whole.

    `known` has row-level attributes of `Hard`: lse, m, and what passes before this one found.
    """

    total: Array  # Σ e^(s − m), (1, rows, 1)

    def __init__(self, block: Block, whole: Hard, known: dict[str, Any]) -> None:
        self._begin(block.canonical, whole.rounding, whole.dtype, block.given, whole.meaning)
        self._count(whole.T, whole.S)
        self.__dict__.update(known)
        problem = block.canonical
        live = np.ones((1, 1), bool) if problem.visible is None else problem.visible
        none = np.broadcast_to(0.0, (1, problem.T, problem.S))
        keep = dense.kept(problem)
        self._hold(
            dense.Residuals(*dense.operands(problem), None, None, live, none, self.p_sink, keep)
        )
        self.s, error = self._scores()
        live = live & (self.s != -np.inf)
        p = np.where(live, np.exp(self.s - self.m) / self.total, 0)
        self._hold(self.r._replace(live=live, p=p))
        self.A = np.where(live, error + self._shift(self.s), 0)
        self._move(self.A)


class NoisePart(Noise):
    """The deviations of a `Part`."""

    def __init__(self, part: Part, known: dict[str, Any]) -> None:
        super().__init__(part)
        self.__dict__.update(known)
        var_a, _ = self._argument()
        self.var_p = self._weights(var_a)

    def _online(self) -> Array:
        return self.online


class Gathered:
    """The numbers of each row, in float32 to tell them apart, and how far they spread."""

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
        sums = along(p), along(p * away), along(p * away**2), along(p * x**2)
        self.moments = tuple(a + b for a, b in zip(self.moments, sums, strict=True))

    @property
    def size(self) -> Array:
        return np.asarray(np.sqrt(self.moments[3]))

    def variety(self) -> Variety:
        total, mean, square, _ = self.moments
        spread = np.sqrt(np.maximum(square - mean**2 / np.where(total > 0, total, 1), 0))
        count = np.asarray(self.number)
        steps = np.zeros_like(count)
        if self.values:
            values = np.concatenate(self.values, -1)
            self.values = []
            steps = np.stack([rises(row) for row in values[0]])[None]
        return Variety(steps + (count > 0), count, spread[..., 0])


class Exact(NamedTuple):
    """What the rows are: (rows, E), (rows,) and, with a cotangent, (rows, D)."""

    o: Array
    lse: Array
    dq: Array | None


class Rows(Hard):
    """Rows of heads that share their keys: ``exact`` and ``allowed``, by name.

    Parameters
    ----------
    blocks : Blocks
    lead : tuple of int
        Index into the leading axes.
    h, t : int arrays (rows,)
        Heads, all of one key/value head, and queries.
    rounding, dtype
    do, dlse : array (rows, E), (rows,), optional
        Cotangents. With do, D is bounded, and with `gradient` dq too.
    """

    @np.errstate(all="ignore")
    def __init__(
        self,
        blocks: Blocks,
        lead: tuple[int, ...],
        h: Array,
        t: Array,
        rounding: Rounding,
        dtype: Any,
        do: Array | None = None,
        dlse: Array | None = None,
        *,
        gradient: bool = False,
    ) -> None:
        self.blocks_of, self.at, self.dtype = blocks, (lead, h, t), dtype
        none = blocks.block(lead, h, t, slice(0, 0), always=True)
        assert none is not None
        self.none = none
        self._begin(none.canonical, rounding, dtype, none.given, blocks.meaning)
        self._count(blocks.problem.T, blocks.keys)
        self.width = width(len(t), max(self.problem.D, self.problem.E))
        self.known: dict[str, Any] = {}
        self._merge()
        self._shares_of_rows()
        self.found: dict[str, Array] = {}
        self.sharp: dict[str, Array] = {}
        if do is not None:
            self.do = do[None]
            self.dl = np.zeros((1, 1, 1)) if dlse is None else dlse[None, :, None]
            self.D_out = self.D = along(self.do * self.o)
        self._forward(do is not None)
        if gradient:
            self._backward()

    def learn(self, **known: Any) -> None:
        """Keep what parts have to know of their rows."""
        self.__dict__.update(known)
        self.known.update(known)

    def _spans(self) -> Iterator[Block | None]:
        """Every part of the keys; None where none of them is seen."""
        (lead, h, t), S = self.at, self.blocks_of.problem.S
        for s0 in range(0, S, self.width):
            yield self.blocks_of.block(lead, h, t, slice(s0, min(s0 + self.width, S)))

    def parts(self) -> Iterator[Block]:
        """Those that are seen, or one without keys."""
        blank = True
        for block in self._spans():
            if block is not None:
                blank = False
                yield block
        if blank:
            yield self.none

    # --- the passes -------------------------------------------------------------------------------

    def _merge(self) -> None:
        """o, lse and the largest score, from those of parts of the keys; a sink is one more."""
        outs, most, totals, tiles = [], [], [], []
        unseen = np.full((1, len(self.at[2]), 1), -np.inf)
        for block in self._spans():
            if block is None:
                tiles.append(unseen)
                continue
            out, lse, r = dense.forward(block.canonical)
            high = tops(r.p)
            top = high.max(-1, keepdims=True, initial=0)
            scores = np.log(high) + lse[None, :, None]
            outs.append(out[None])
            # The row's largest score and its sum relative to that: where a bias of −1e38 is all
            # that there is to see, lse no longer tells how many keys it is the sum of.
            most.append(lse[None, :, None] + np.log(top))
            totals.append(np.where(top == 0, 0, 1 / top))
            tiles.append(np.where(np.isnan(scores), -np.inf, scores))
        # One more, without a value: the sink, or nothing.
        sink = self._sink_of_rows()
        most.append(unseen if sink is None else sink)
        totals.append(np.ones_like(unseen))
        outs.append(np.zeros((*unseen.shape[:-1], self.problem.E)))
        m = np.max(most, 0)
        m = np.where(np.isneginf(m), 0, m)
        e = [w * np.exp(x - m) for w, x in zip(totals, most, strict=True)]
        total = np.sum(e, 0)
        lse = m + np.log(total)
        total = np.where(total == 0, 1, total)
        self.learn(m=m, total=total)
        self.o = np.sum([w * o for w, o in zip(e, outs, strict=True)], 0) / total
        p_sink = None if sink is None else e[-1] / total
        self.learn(o=self.o, lse=lse[..., 0], sink=sink, p_sink=p_sink)
        _, __, residuals = dense.forward(self.none.canonical)
        self._hold(residuals._replace(p_sink=p_sink))
        self.likely = RowsNoise(self)
        self.likely.online = self.likely._rescales(np.concatenate([*tiles, unseen[..., :0]], -1))
        self.likely.var_sink = self.likely._sink_argument()

    def _sink_of_rows(self) -> Array | None:
        sinks, (_, h, __) = self.blocks_of.problem.sinks, self.at
        return None if sinks is None else sinks[h].astype(float)[None, :, None]

    def _shares_of_rows(self) -> None:
        total: Shares | None = None
        for block in self.parts():
            part = Part(block, self, self.known)
            total = folded(total, part._shares(part.A), SHARES)
        assert total is not None
        self.t_lse = self._normalise(total, self._sink_argument())
        names = ("p_sink", "R_sink", "up", "down", "vast", "log_down", "last", "rebuild", "merge")
        self.learn(row_sum=self.row_sum, **{n: getattr(self, n) for n in names})

    def _forward(self, pulled: bool) -> None:
        """The bounds of o, lse and, where rows are pulled by a cotangent, of D."""
        known = {"online": self.likely.online}
        out = noise = delta = spread = None
        more: Any = 0.0
        if pulled:
            self.learn(do=self.do, dl=self.dl, D=self.D, D_out=self.D_out)
        for block in self.parts():
            part = Part(block, self, self.known)
            part._limit()
            out = folded(out, part._out_sums(), OUT)
            rough = NoisePart(part, known)
            noise = folded(noise, rough._out_sums())
            live, p = part.r.live, part.r.p
            self.likely.scores.add(part.s, self.m, live, p)
            if pulled:
                e_dp = part._dweights(self.do, 0.0)
                delta = folded(delta, part._delta_sums(e_dp))
                spread = folded(spread, rough._delta_sums(rough._dweights()))
                more = more + along(p * np.where(live, part.dp - self.D, 0))
                dp = self.do @ finite(part.r.v).swapaxes(-1, -2)
                self.likely.pulls.add(dp, self.D, live, p)
        assert out is not None
        assert noise is not None
        self.found = {"o": self._of_out(out), "lse": self.t_lse}
        self.sharp = self.likely._of_rows(noise)
        self.sharp["lse"] = self.sharp["lse"][..., None]
        if delta is not None and spread is not None:
            self.found["D"] = e_D = self._of_delta(delta)
            # One rounding is common to the row: a second look takes it off.
            sink = 0.0 if self.p_sink is None else self.p_sink * self.D
            self.likely.var_D = self.likely._of_delta(spread)
            self.learn(D=self.D + more - sink, e_D=e_D)

    def _backward(self) -> None:
        """dq and its bound."""
        known = {"online": self.likely.online, "var_l": self.likely.var_l}
        sums = noise = None
        dl = np.where(self.seen, self.dl, 0)
        for block in self.parts():
            part = Part(block, self, self.known)
            part._limit()
            part._through_slope(part._dscores(part._dweights(self.do, 0.0), dl))
            sums = folded(sums, part._dq_sums())
            rough = NoisePart(part, known)
            rough._through_slope(rough._dscores(rough._dweights()))
            noise = folded(noise, rough._dq_sums())
        assert sums is not None
        assert noise is not None
        scale = self.problem.scale
        assert scale is not None
        self.dq = scale * sums.signed
        self.found["dq"] = self._of_dq(sums)
        var, lost = self.likely._of_dq(noise)
        plain = self.likely.generic(self.D)[..., None]
        self.sharp["dq"] = self.likely.sharp(var, plain, lost)

    def copies(self, mass: Array, of: Array, shared: bool) -> tuple[float, float]:
        return 1.0, 1.0

    # --- what comes of them -----------------------------------------------------------------------

    @property
    def exact(self) -> Exact:
        dq = self.dq[0] if "dq" in self.found else None
        return Exact(self.o[0], self.lse[0], dq)

    def allowed(self) -> dict[str, Array]:
        """Of o (rows, E), lse (rows,) and dq (rows, D)."""
        found = {n: np.minimum(t, self.sharp[n])[0] for n, t in self.found.items() if n != "D"}
        return found | {"lse": found["lse"][..., 0]}


class RowsNoise(Noise):
    """The deviations of rows, from sums over their parts."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.scores, self.pulls = Gathered(), Gathered()

    def generic(self, dp: Array | None = None) -> Array:
        if not hasattr(self, "varied"):
            self.varied = self.scores.variety()
        pulls = None if dp is None else self.pulls.variety()
        return self.is_generic(self.varied, pulls, self.pulls.size)
