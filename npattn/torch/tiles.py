"""Which scores are computed at once, and what of them is seen: groups of heads, tiles of each.

    A group is a rectangle of samples and heads that see the same. Its scores are computed in
    tiles: a block of queries against a strip of keys, for all of the group at once.

What is seen of a tile is found out once a problem. Bands (causal masks and windows) are computed on
the device, tensors stay there and are looked at once, everything else answers on the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from npattn import masks
from npattn.arrays import Array, Tile, band, diagonal
from npattn.torch.problem import Problem, moved

__all__ = ["Group", "Part", "Plan", "Rows", "flat", "piece", "plan_of"]

Tensor = torch.Tensor

TILE = {"cpu": 2**18}
"""Scores in a tile, by device: what stays in a cache while it is worked on."""
ELSEWHERE = 2**24  # a device must be busy for longer than it takes to be told what to do
QUERIES = 1024
"""Queries in a block, at most."""
SMALL = 2**12
"""Scores in a tile, at most, of which what a band shows is kept from call to call, on the CPU."""
CELL = 256
"""Keys in the smallest part of a strip that a mask is asked about, and the least of a strip."""


class Group(NamedTuple):
    """Samples b0 ≤ b < b1 and query heads h0 ≤ h < h1: whole groups of shared heads, or one."""

    b0: int
    b1: int
    h0: int
    h1: int
    mixed: bool  # they do not all see the same

    @property
    def planes(self) -> tuple[slice, slice]:
        return slice(self.b0, self.b1), slice(self.h0, self.h1)


class Part(NamedTuple):
    """Keys s0 ≤ s < s1, of which some rows may see only some."""

    s0: int
    s1: int
    partial: bool


class Rows(NamedTuple):
    """A block of queries of a group, and what it sees."""

    group: Group
    t0: int
    t1: int
    parts: list[Part]
    every: bool = False  # it is all queries of all heads

    @property
    def at(self) -> tuple[slice, slice, slice]:
        return (*self.group.planes, slice(self.t0, self.t1))


class Plan:
    """The tiles of a problem.

    Parameters
    ----------
    problem : Problem
    whole : bool
        Whether all scores are one tile.
    """

    def __init__(self, problem: Problem, whole: bool):
        # Not the problem itself, which holds this plan.
        self.sizes = (problem.lead, problem.H, problem.T, problem.S)
        self.lead, self.T, self.S, self.device = problem.lead, problem.T, problem.S, problem.device
        self.samples = math.prod(problem.lead)
        self.tile = TILE.get(problem.device.type, ELSEWHERE)
        self.bands, self.tensors, self.others = _pieces(problem)
        self.masked = bool(self.bands or self.tensors or self.others)
        self._bands: dict[Any, Tensor] = {}
        self._whole: Tensor | None = None
        T, S = problem.T, problem.S
        self.light = False  # it holds no tensors and no long lists: who likes may keep it
        if whole or self.samples * problem.H * T * S <= self.tile:
            small = self.device.type == "cpu" and T * S <= SMALL
            self.light = not (self.tensors or self.others or (self.bands and not small))
            self.rows = _one_tile(self.samples, problem.H, T, S, self.masked)
            return
        groups = list(self._groups(H := problem.H, H // problem.K))
        planes = max((g.b1 - g.b0) * (g.h1 - g.h0) for g in groups)
        self.m = min(T, QUERIES, max(1, math.isqrt(self.tile // planes)))
        self.n = max(CELL, self.tile // (planes * self.m) // CELL * CELL)
        seen = [] if groups[0].mixed else self._looked_at()
        self.rows = [
            Rows(group, t0, t1, self._parts(group, t0, t1, seen))
            for group in groups
            for t0, t1 in self._blocks(group)
        ]

    # --- groups and blocks ------------------------------------------------------------------------

    def _groups(self, H: int, G: int) -> Iterator[Group]:
        most = max(1, self.tile // (min(self.T, CELL) * min(self.S, CELL)))
        each = any(len(shape) > 2 and shape[-3] != 1 for shape in self._shapes())
        mixed = each and self.tile >= H * self.T * self.S
        count = 1 if each else max(1, most // H)
        heads = H if mixed else 1 if each else H if most >= H else max(1, most // G) * G
        for b0, b1 in self._runs():
            for b in range(b0, b1, count):
                for h in range(0, H, heads):
                    yield Group(b, min(b + count, b1), h, min(h + heads, H), mixed)

    def _runs(self) -> list[tuple[int, int]]:
        """Samples that see the same, one after the other."""
        own = np.zeros(self.samples, int)
        for shape in self._shapes():
            axes = shape[:-3]
            index = np.arange(math.prod(axes)).reshape(axes)
            index = np.broadcast_to(index, self.lead).ravel()
            own = own * (1 + math.prod(axes)) + index
        edges = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), self.samples]
        return list(itertools.pairwise(edges))

    def _shapes(self) -> list[tuple[int, ...]]:
        return [*(tuple(x.shape) for x in self.tensors),
                *(mask.shape(*self.sizes) for mask in self.others)]  # fmt: skip

    def _blocks(self, group: Group) -> Iterator[tuple[int, int]]:
        m = self.T if group.mixed else self.m
        return ((t0, min(t0 + m, self.T)) for t0 in range(0, self.T, m))

    # --- what a block sees ------------------------------------------------------------------------

    def _parts(self, group: Group, t0: int, t1: int, seen: list[Any]) -> list[Part]:
        S = self.S
        if group.mixed:
            return [Part(0, S, self.masked)]
        if not self.masked:
            return [Part(s, min(s + self.n, S), False) for s in range(0, S, self.n)]
        lo, hi = 0, S
        for mask in (*self.bands, *self.others):
            one = mask.hull(self._tile(group, t0, t1, 0, S))
            lo, hi = max(lo, one[0]), min(hi, one[1])
        found: list[Part] = []
        for s0 in range(lo - lo % CELL, hi, CELL):  # tensors were looked at in cells from 0
            s1 = min(s0 + CELL, S)
            whole = self._outright(group, t0, t1, s0, s1, seen)
            if whole is False:
                continue
            last, partial = found[-1] if found else None, whole is None
            if last and last.s1 == s0 and last.partial == partial and s1 - last.s0 <= self.n:
                found[-1] = Part(last.s0, s1, partial)
            else:
                found.append(Part(s0, s1, partial))
        return found

    def _outright(
        self, group: Group, t0: int, t1: int, s0: int, s1: int, seen: list[Any]
    ) -> bool | None:
        """True or False where all or nothing of a cell is seen, else None."""
        tile = self._tile(group, t0, t1, s0, s1)
        every: bool | None = True
        for mask in (*self.bands, *self.others):
            known = mask.outright(tile) if isinstance(mask, masks.Band) else mask.tile(tile)
            if known is False:
                return False
            if known is not True:
                every = None
        for some, all_ in seen:
            b, h = (i if n > 1 else 0 for n, i in zip(some.shape, group[:3:2], strict=False))
            at = (b, h, t0 // self.m, s0 // CELL)
            if not some[at]:
                return False
            if not all_[at]:
                every = None
        return every

    def _looked_at(self) -> list[Any]:
        """Of each mask tensor, whether some and whether all of each cell is visible."""
        looked = []
        for x in self.tensors:
            x = flat(x, self.lead)
            x = x.expand(*x.shape[:2], self.T, self.S)
            rows = [x[:, :, t : t + self.m] for t in range(0, self.T, self.m)]
            some = torch.stack([_cells(r.any(2)) for r in rows], 2)
            all_ = ~torch.stack([_cells(~r.all(2)) for r in rows], 2)
            looked.append(torch.stack([some, all_]))
        if not looked:
            return []
        # One wait for the device, whatever there is to look at.
        host = torch.cat([x.ravel() for x in looked]).cpu().numpy()
        ends = np.cumsum([x.numel() for x in looked])[:-1]
        return [
            h.reshape(tuple(x.shape)) for h, x in zip(np.split(host, ends), looked, strict=True)
        ]

    def _tile(self, group: Group, t0: int, t1: int, s0: int, s1: int) -> Tile:
        sample = np.unravel_index(group.b0, self.lead) if self.lead else ()
        return Tile(*self.sizes, (*map(int, sample), group.h0), t0, t1, s0, s1)

    # --- what of a partial tile is visible --------------------------------------------------------

    def visible(self, rows: Rows, part: Part) -> Tensor:
        """A bool tensor that broadcasts to the tile."""
        # What may be kept for other problems holds no tensor: it might be one of inference mode.
        if self.light or len(self.rows) > 1 or part.s1 - part.s0 < self.S:
            return self._visible(rows, part)
        if self._whole is None:
            self._whole = self._visible(rows, part)
        return self._whole

    def _visible(self, rows: Rows, part: Part) -> Tensor:
        group, t0, t1, s0, s1 = *rows[:3], part.s0, part.s1
        found: Tensor | None = None
        for mask in self.bands:
            found = _and(found, self._band(mask, t0, t1, s0, s1))
        for x in self.tensors:
            found = _and(found, piece(flat(x, self.lead), rows, part))
        for mask in self.others:
            found = _and(found, self._told(mask, group, t0, t1, s0, s1))
        assert found is not None
        return found

    def _band(self, mask: masks.Band, t0: int, t1: int, s0: int, s1: int) -> Tensor:
        """What a band shows of a tile, which depends on where it lies to the diagonal alone."""
        first = t0 + diagonal(self.T, self.S, mask.alignment) - s0
        key = (first, t1 - t0, s1 - s0, mask.left, mask.right)
        if self.device.type == "cpu" and (t1 - t0) * (s1 - s0) <= SMALL:
            return torch.from_numpy(_small_band(*key))
        found = self._bands.get(key)
        if found is None:
            arange, device = torch.arange, self.device
            beside = arange(first, first + t1 - t0, device=device)[:, None]
            s: Any = arange(s1 - s0, device=device)
            inside: Any = band(beside, s, mask.left, mask.right)  # type: ignore[arg-type]
            if len(self._bands) >= 8:
                self._bands.clear()
            found = self._bands[key] = inside
        return found

    def _told(self, mask: Any, group: Group, t0: int, t1: int, s0: int, s1: int) -> Tensor:
        """What a mask on the host says, for each sample and head for which it is another."""
        shape = (1,) * (3 - len(mask.shape(*self.sizes))) + mask.shape(*self.sizes)
        samples = range(group.b0, group.b1 if math.prod(shape[:-3]) > 1 else group.b0 + 1)
        heads = range(group.h0, group.h1 if shape[-3] > 1 else group.h0 + 1)
        told = np.empty((len(samples), len(heads), t1 - t0, s1 - s0), bool)
        for i, b in enumerate(samples):
            for j, h in enumerate(heads):
                told[i, j] = mask.tile(self._tile(Group(b, b, h, h, False), t0, t1, s0, s1))
        return moved(told, self.device)


def plan_of(problem: Problem, whole: bool) -> Plan:
    """The plan of a problem, made once; without tensors, once for all of its kind."""
    own = problem.__dict__
    key = (whole, TILE.get(problem.device.type, ELSEWHERE), QUERIES, CELL)
    plan: Plan | None = own["_shared"].get(key) or own["_plans"].get(key)
    if plan is None:
        plan = Plan(problem, whole)
        own["_shared" if plan.light else "_plans"][key] = plan
    return plan


def flat(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """What broadcasts against the scores with four axes, (B or 1, H or 1, T or 1, S or 1)."""
    if x.ndim == 4 and len(lead) == 1:
        return x
    x = x[(None,) * (3 - x.ndim)]
    axes = x.shape[:-3]
    if math.prod(axes) == 1:
        return x.reshape(1, *x.shape[-3:])
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def piece(x: Tensor, rows: Rows, part: Part) -> Tensor:
    """The tile of what is `flat`; its axes of 1 stay."""
    if rows.every and x.shape[3] in (1, part.s1 - part.s0):
        return x
    at = (*rows.at, slice(part.s0, part.s1))
    return x[tuple(a if n > 1 else slice(None) for a, n in zip(at, x.shape, strict=True))]


# --- the parts ------------------------------------------------------------------------------------


@lru_cache
def _small_band(first: int, m: int, n: int, left: int | None, right: int | None) -> Array:
    """What a band shows of a tile, for tensors that share its memory and are not written to."""
    return band(np.arange(first, first + m)[:, None], np.arange(n), left, right)


@lru_cache
def _one_tile(samples: int, H: int, T: int, S: int, masked: bool) -> list[Rows]:
    parts = [Part(0, S, masked)] if S else []
    rows = Rows(Group(0, samples, 0, H, True), 0, T, parts, every=True)
    return [rows] if samples * H * T else []


def _pieces(problem: Problem) -> tuple[list[masks.Band], list[Tensor], list[Any]]:
    """mask, causal and window as bands, tensors, and what answers on the host: all must agree."""
    bands: list[masks.Band] = []
    tensors: list[Tensor] = []
    others: list[Any] = []
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0
    if not (left is None and right is None):
        bands.append(masks.Band(left, right, problem.alignment or "bottom_right"))
    pending = [] if problem.mask is None else [problem.mask]
    while pending:
        mask = pending.pop()
        if isinstance(mask, Tensor):
            tensors.append(mask)
        elif isinstance(mask, masks.And):
            pending += [mask.one, mask.other]
        elif isinstance(mask, masks.Band):
            bands.append(mask)
        elif isinstance(mask, masks.Dense):
            tensors.append(moved(mask.array, problem.device))
        else:
            others.append(mask)
    return bands, tensors, others


def _and(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one & other


def _cells(x: Tensor) -> Tensor:
    """Whether any of each CELL keys is True: (..., S) → (..., ⌈S / CELL⌉)."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % CELL))
    return x.reshape(*x.shape[:-1], -1, CELL).any(-1)
