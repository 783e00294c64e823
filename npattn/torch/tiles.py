"""Tiling plan of a problem: groups of heads, their tiles, and which tiles are visible.

    A group is a rectangle of samples and heads with the same visible keys. Its scores are computed
    in tiles: a block of queries against a strip of keys, for the whole group at once.

Visibility is determined once per problem. Bands (causal masks and windows) are computed on the
device, mask tensors stay there and are read once, every other mask is evaluated on the host.
"""

import functools
import itertools
import math
import operator
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from npattn.masks.bands import Band
from npattn.masks.mask import And, ArrayMask
from npattn.problem.arrays import Array, Tile, band, diagonal
from npattn.torch.problem import Problem
from npattn.torch.tensors import to_tensor

Tensor = torch.Tensor

TILE = {"cpu": 2**18}
"""Scores in a tile, by device: as many as stay in a cache."""
ELSEWHERE = 2**24  # computing a tile must take longer than launching it
QUERIES = 1024
"""Most queries in a block."""
SMALL = 2**12
"""Most scores in a tile whose band is kept from call to call, on the CPU."""
CELL = 256
"""Keys in a cell: the unit in which visibility is decided, and the shortest strip."""


class Group(NamedTuple):
    """Samples b0 ≤ b < b1 and query heads h0 ≤ h < h1: whole groups of shared heads, or one."""

    b0: int
    b1: int
    h0: int
    h1: int
    mixed: bool  # visible keys differ between them

    @property
    def planes(self) -> tuple[slice, slice]:
        return slice(self.b0, self.b1), slice(self.h0, self.h1)


class Strip(NamedTuple):
    """Keys s0 ≤ s < s1; partial if some of them are hidden from some rows."""

    s0: int
    s1: int
    partial: bool


class QueryRows(NamedTuple):
    """A block of queries of a group, and the strips that are visible to it."""

    group: Group
    t0: int
    t1: int
    strips: list[Strip]
    every: bool = False  # all queries of all heads

    @property
    def at(self) -> tuple[slice, slice, slice]:
        return (*self.group.planes, slice(self.t0, self.t1))


class TilePlan:
    """Tiles of a problem.

    Parameters
    ----------
    one_tile : bool
        Make all scores one tile.
    """

    def __init__(self, problem: Problem, one_tile: bool):
        # The problem itself holds this plan: a reference back would be a cycle.
        self.sizes = (problem.lead, problem.H, problem.T, problem.S)
        self.lead, self.T, self.S, self.device = problem.lead, problem.T, problem.S, problem.device
        self.samples = math.prod(problem.lead)
        self.tile = TILE.get(problem.device.type, ELSEWHERE)
        self.bands, self.tensors, self.others = _split_masks(problem)
        self.masked = bool(self.bands or self.tensors or self.others)
        self._bands: dict[Any, Tensor] = {}
        self._whole: Tensor | None = None
        T, S = problem.T, problem.S
        self.light = False  # no tensors and no long lists: cheap to keep for other problems
        self.H, self.K = problem.H, problem.K
        self.one_tile = one_tile or self.samples * self.H * T * S <= self.tile
        if self.one_tile:
            small = self.device.type == "cpu" and T * S <= SMALL
            self.light = not (self.tensors or self.others or (self.bands and not small))

    @cached_property
    def rows(self) -> list[QueryRows]:
        """Blocks of queries with their strips; what computes all at once needs none."""
        if self.one_tile:
            return _one_tile(self.samples, self.H, self.T, self.S, self.masked)
        groups = list(self._groups(self.H, self.H // self.K))
        planes = max((g.b1 - g.b0) * (g.h1 - g.h0) for g in groups)
        self.m = min(self.T, QUERIES, max(1, math.isqrt(self.tile // planes)))
        self.n = max(CELL, self.tile // (planes * self.m) // CELL * CELL)
        cells = [] if groups[0].mixed else self._read_mask_tensors()
        return [
            QueryRows(group, t0, t1, self._strips(group, t0, t1, cells))
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
        """Split the samples into runs with the same visible keys."""
        labels = np.zeros(self.samples, int)
        for shape in self._shapes():
            axes = shape[:-3]
            index = np.arange(math.prod(axes)).reshape(axes)
            index = np.broadcast_to(index, self.lead).ravel()
            labels = labels * (1 + math.prod(axes)) + index
        edges = [0, *(np.flatnonzero(np.diff(labels)) + 1).tolist(), self.samples]
        return list(itertools.pairwise(edges))

    def _shapes(self) -> list[tuple[int, ...]]:
        return [*(tuple(x.shape) for x in self.tensors),
                *(mask.shape(*self.sizes) for mask in self.others)]  # fmt: skip

    def _blocks(self, group: Group) -> Iterator[tuple[int, int]]:
        m = self.T if group.mixed else self.m
        return ((t0, min(t0 + m, self.T)) for t0 in range(0, self.T, m))

    # --- visible strips ---------------------------------------------------------------------------

    def _strips(self, group: Group, t0: int, t1: int, cells: list[Any]) -> list[Strip]:
        """Return the strips of keys that queries t0 ≤ t < t1 may see; one if the group is mixed."""
        S = self.S
        if group.mixed:
            return [Strip(0, S, self.masked)]
        if not self.masked:
            return [Strip(s, min(s + self.n, S), False) for s in range(0, S, self.n)]
        lo, hi = 0, S
        for mask in (*self.bands, *self.others):
            first, end = mask.hull(host_tile(self.sizes, group.b0, group.h0, t0, t1, 0, S))
            lo, hi = max(lo, first), min(hi, end)
        strips: list[Strip] = []
        for s0 in range(lo - lo % CELL, hi, CELL):  # tensors were read in cells from 0
            s1 = min(s0 + CELL, S)
            visible = self._cell(group, t0, t1, s0, s1, cells)
            if visible is False:
                continue
            last, partial = strips[-1] if strips else None, visible is None
            if last and last.s1 == s0 and last.partial == partial and s1 - last.s0 <= self.n:
                strips[-1] = Strip(last.s0, s1, partial)
            else:
                strips.append(Strip(s0, s1, partial))
        return strips

    def _cell(
        self, group: Group, t0: int, t1: int, s0: int, s1: int, cells: list[Any]
    ) -> bool | None:
        """Return True if all of a cell is visible, False if nothing is, else None."""
        tile = host_tile(self.sizes, group.b0, group.h0, t0, t1, s0, s1)
        every: bool | None = True
        for mask in (*self.bands, *self.others):
            inside = mask.outright(tile) if isinstance(mask, Band) else mask.tile(tile)
            if inside is False:
                return False
            if inside is not True:
                every = None
        for some, all_ in cells:
            b, h = (i if n > 1 else 0 for n, i in zip(some.shape, group[:3:2], strict=False))
            at = (b, h, t0 // self.m, s0 // CELL)
            if not some[at]:
                return False
            if not all_[at]:
                every = None
        return every

    def _read_mask_tensors(self) -> list[Any]:
        """Return, for each mask tensor, where some and where all of a cell is visible."""
        pairs = []
        for x in self.tensors:
            x = flatten(x, self.lead)
            x = x.expand(*x.shape[:2], self.T, self.S)
            rows = [x[:, :, t : t + self.m] for t in range(0, self.T, self.m)]
            some = torch.stack([_cells(r.any(2)) for r in rows], 2)
            all_ = ~torch.stack([_cells(~r.all(2)) for r in rows], 2)
            pairs.append(torch.stack([some, all_]))
        if not pairs:
            return []
        # One wait for the device, however many tensors there are.
        host = torch.cat([x.ravel() for x in pairs]).cpu().numpy()
        ends = np.cumsum([x.numel() for x in pairs])[:-1]
        return [h.reshape(tuple(x.shape)) for h, x in zip(np.split(host, ends), pairs, strict=True)]

    # --- visible scores of a partial tile ---------------------------------------------------------

    def visible(self, rows: QueryRows, strip: Strip) -> Tensor:
        """Return a bool tensor that broadcasts to the tile."""
        # A plan kept for other problems holds no tensor: it might be one of inference mode.
        if self.light or len(self.rows) > 1 or strip.s1 - strip.s0 < self.S:
            return self._visible(rows, strip)
        if self._whole is None:
            self._whole = self._visible(rows, strip)
        return self._whole

    def _visible(self, rows: QueryRows, strip: Strip) -> Tensor:
        group, t0, t1, s0, s1 = *rows[:3], strip.s0, strip.s1
        masks = [self._band(mask, t0, t1, s0, s1) for mask in self.bands]
        masks += [tile_of(flatten(x, self.lead), rows, strip) for x in self.tensors]
        masks += [self._host_mask(mask, group, t0, t1, s0, s1) for mask in self.others]
        return functools.reduce(operator.and_, masks)

    def _band(self, mask: Band, t0: int, t1: int, s0: int, s1: int) -> Tensor:
        """Visible scores of a tile of a band; they depend only on its place beside the diagonal."""
        first = t0 + diagonal(self.T, self.S, mask.alignment) - s0
        key = (first, t1 - t0, s1 - s0, mask.left, mask.right)
        if self.device.type == "cpu" and (t1 - t0) * (s1 - s0) <= SMALL:
            return torch.from_numpy(_small_band(*key))
        inside: Any = self._bands.get(key)
        if inside is None:
            arange, device = torch.arange, self.device
            on_diagonal = arange(first, first + t1 - t0, device=device)[:, None]
            s: Any = arange(s1 - s0, device=device)
            inside = band(on_diagonal, s, mask.left, mask.right)  # type: ignore[arg-type]
            if len(self._bands) >= 8:
                self._bands.clear()
            self._bands[key] = inside
        return inside  # type: ignore[no-any-return]

    def _host_mask(self, mask: Any, group: Group, t0: int, t1: int, s0: int, s1: int) -> Tensor:
        """Evaluate a mask on the host, once for each sample and head that it distinguishes."""
        shape = (1,) * (3 - len(mask.shape(*self.sizes))) + mask.shape(*self.sizes)
        samples = range(group.b0, group.b1 if math.prod(shape[:-3]) > 1 else group.b0 + 1)
        heads = range(group.h0, group.h1 if shape[-3] > 1 else group.h0 + 1)
        visible = np.empty((len(samples), len(heads), t1 - t0, s1 - s0), bool)
        for i, b in enumerate(samples):
            for j, h in enumerate(heads):
                visible[i, j] = mask.tile(host_tile(self.sizes, b, h, t0, t1, s0, s1))
        return to_tensor(visible, self.device)


def host_tile(
    sizes: tuple[tuple[int, ...], int, int, int], b: int, h: int, t0: int, t1: int, s0: int, s1: int
) -> Tile:
    """Return a tile of query head h of sample b, for objects that are evaluated on the host."""
    sample = np.unravel_index(b, sizes[0]) if sizes[0] else ()
    return Tile(*sizes, (*map(int, sample), h), t0, t1, s0, s1)


def plan_of(problem: Problem, one_tile: bool) -> TilePlan:
    """Return the plan of a problem, made once; without tensors, once for all of its kind."""
    fields = problem.__dict__
    key = (one_tile, TILE.get(problem.device.type, ELSEWHERE), QUERIES, CELL)
    plan: TilePlan | None = fields["_shared"].get(key) or fields["_plans"].get(key)
    if plan is None:
        plan = TilePlan(problem, one_tile)
        fields["_shared" if plan.light else "_plans"][key] = plan
    return plan


def flatten(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Reshape x, which broadcasts against the scores, to (B or 1, H or 1, T or 1, S or 1)."""
    if x.ndim == 4 and len(lead) == 1:
        return x
    x = x[(None,) * (3 - x.ndim)]
    axes = x.shape[:-3]
    if math.prod(axes) == 1:
        return x.reshape(1, *x.shape[-3:])
    return x.expand(*lead, *x.shape[-3:]).reshape(math.prod(lead), *x.shape[-3:])


def tile_of(x: Tensor, rows: QueryRows, strip: Strip) -> Tensor:
    """Take a tile of a tensor with four axes; its axes of 1 stay."""
    if rows.every and x.shape[3] in (1, strip.s1 - strip.s0):
        return x
    at = (*rows.at, slice(strip.s0, strip.s1))
    return x[tuple(a if n > 1 else slice(None) for a, n in zip(at, x.shape, strict=True))]


@lru_cache
def _small_band(first: int, m: int, n: int, left_keys: int | None, right_keys: int | None) -> Array:
    """Visible scores of a tile of a band, as an array that tensors share and nothing writes to."""
    return band(np.arange(first, first + m)[:, None], np.arange(n), left_keys, right_keys)


@lru_cache
def _one_tile(samples: int, H: int, T: int, S: int, masked: bool) -> list[QueryRows]:
    strips = [Strip(0, S, masked)] if S else []
    rows = QueryRows(Group(0, samples, 0, H, True), 0, T, strips, every=True)
    return [rows] if samples * H * T else []


def _split_masks(problem: Problem) -> tuple[list[Band], list[Tensor], list[Any]]:
    """Split mask, causal and window into bands, tensors and host masks, all of which must agree."""
    bands: list[Band] = []
    tensors: list[Tensor] = []
    others: list[Any] = []
    left_keys, right_keys = problem.window or (None, None)
    if problem.causal:
        right_keys = 0
    if not (left_keys is None and right_keys is None):
        bands.append(Band(left_keys, right_keys, problem.alignment or "bottom_right"))
    pending = [] if problem.mask is None else [problem.mask]
    while pending:
        mask = pending.pop()
        if isinstance(mask, Tensor):
            tensors.append(mask)
        elif isinstance(mask, And):
            pending += [mask.one, mask.other]
        elif isinstance(mask, Band):
            bands.append(mask)
        elif isinstance(mask, ArrayMask):
            tensors.append(to_tensor(mask.array, problem.device))
        else:
            others.append(mask)
    return bands, tensors, others


def _cells(x: Tensor) -> Tensor:
    """Reduce each CELL keys by any: (..., S) → (..., ⌈S / CELL⌉)."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % CELL))
    return x.reshape(*x.shape[:-1], -1, CELL).any(-1)
