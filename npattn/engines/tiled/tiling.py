"""Tiles of a problem: blocks of queries, and the parts of the scores that each block sees.

And the choice of the faster engine, by scores and by blocks.
"""

import itertools
import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

from npattn import masks
from npattn.masks.bands import Band
from npattn.problem import Problem
from npattn.problem.arrays import FAR, Array, Tile

QUERIES = 1024
"""Most queries in a block."""
FEWEST = 256
"""Queries of a block that is not halved any more to get more blocks."""
KEYS = 256
"""Keys in a strip: QUERIES × KEYS scores in float32 about fill the cache of a core."""
ENOUGH = 16
"""Blocks that keep all cores busy to the end."""
CELL = 128
"""Keys in the smallest part of a strip that a mask is asked about."""
ROUND = 16
"""The queries of a block are a multiple of it: products of other numbers of rows are slower."""

LARGE = 240_000
"""Number of scores from which the tiled engine is the faster one, if one block computes them all.

Source of this number and of the others: benchmarks/engines.py.
"""
BLOCK = {4: 5000, 8: 3500}
"""Number of scores that save as much time as a block of queries takes to begin.

By the bytes of a number.
"""
SINGLE = 3
"""Weight of a score if there is one query: reading keys and values is all the work then."""
SHARED = 16
"""The same weight if query heads share keys, which the dense engine repeats.

Source: benchmarks/speed/scripts/variants.py.
"""

Plane = tuple[int, ...]
Block = tuple[Plane, int, int]


class Part(NamedTuple):
    """Scores of a block that are computed in one go: t0 ≤ t < t1, s0 ≤ s < s1.

    Rows outside p0 ≤ t < p1 see all keys of the part.
    """

    t0: int
    t1: int
    s0: int
    s1: int
    p0: int
    p1: int

    @property
    def partial(self) -> bool:
        """True if some scores are hidden."""
        return self.p0 < self.p1


def choose_queries(planes: int, T: int) -> int:
    """Return the number of queries in a block: about equal blocks, and ENOUGH if possible."""
    n = QUERIES
    while n > FEWEST and planes * -(-T // n) < ENOUGH:
        n = -(-n // 2)
    blocks = max(1, -(-T // n))
    return max(1, min(n, -(-T // (blocks * ROUND)) * ROUND))


def choice(problem: Problem) -> str:
    """Return the faster engine: "dense" or "tiled".

    The choice, and so the bits of the results, do not depend on the number of threads.
    """
    block = BLOCK.get(problem.dtype.itemsize)
    if problem.dtype.kind != "f" or problem.storage is not None or block is None:
        return "dense"
    planes = problem.H * math.prod(problem.lead)
    single = SINGLE if problem.K == problem.H else SHARED
    scores = planes * problem.T * problem.S * (single if problem.T == 1 else 1)
    if scores < LARGE:
        return "dense"
    blocks = planes * -(-problem.T // choose_queries(planes, problem.T))
    return "tiled" if scores >= LARGE + block * blocks else "dense"


class Tiling:
    """Blocks of queries of a problem, and the parts of the scores that each block sees."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.sizes = (problem.lead, problem.H, problem.T, problem.S)
        planes = problem.H * math.prod(problem.lead)
        self.queries = choose_queries(planes, problem.T)
        # Few queries see more keys at once: each part takes its time, however small it is.
        longer = max(1, QUERIES // max(problem.T, 1))
        self.keys, self.cell = KEYS * longer, CELL * longer
        self.mask = _visible(problem)
        self.mask_lead = () if self.mask is None else self.mask.shape(*self.sizes)[:-2]
        self.kept_parts: dict[tuple[Plane, int], list[Part]] = {}

    @cached_property
    def planes(self) -> list[Plane]:
        """Indices of the query heads."""
        return list(itertools.product(*map(range, (*self.problem.lead, self.problem.H))))

    def blocks(self) -> list[Block]:
        """List the blocks of queries, (plane, t0, t1); under causal, the longest first."""
        T, n = self.problem.T, self.queries
        starts = list(range(0, T, n))[::-1]
        return [(plane, t0, min(t0 + n, T)) for plane in self.planes for t0 in starts]

    def kv_plane(self, plane: Plane) -> Plane:
        """Index of the key/value head that a query head uses [1]."""
        return (*plane[:-1], plane[-1] * self.problem.K // self.problem.H)

    def tile(self, plane: Plane, t0: int, t1: int, s0: int, s1: int) -> Tile:
        return Tile(*self.sizes, plane, t0, t1, s0, s1)

    def parts(self, plane: Plane, t0: int, t1: int) -> list[Part]:
        """List the parts of the scores in which a block of queries sees anything."""
        mask_plane = plane[len(plane) - len(self.mask_lead) :]
        mask_plane = tuple(
            i if n > 1 else 0 for i, n in zip(mask_plane, self.mask_lead, strict=True)
        )
        parts = self.kept_parts.get((mask_plane, t0))
        if parts is None:
            parts = self.kept_parts[mask_plane, t0] = self._parts(plane, t0, t1)
        return parts

    def _parts(self, plane: Plane, t0: int, t1: int) -> list[Part]:
        """List cells, each without the hidden rows and keys at its edges.

        Cells that are visible as a whole are joined to strips.
        """
        S, n = self.problem.S, self.keys
        if self.mask is None:
            return [Part(t0, t1, s0, min(s0 + n, S), t0, t0) for s0 in range(0, S, n)]
        lo, hi = self.mask.hull(self.tile(plane, t0, t1, 0, S))
        parts: list[Part] = []
        for c0 in range(lo, hi, self.cell):
            part = _trim(self.mask, self.tile(plane, t0, t1, c0, min(c0 + self.cell, hi)))
            if part is None:
                continue
            if parts and self._are_adjacent(parts[-1], part):
                parts[-1] = parts[-1]._replace(s1=part.s1)
            else:
                parts.append(part)
        return parts

    def _are_adjacent(self, one: Part, other: Part) -> bool:
        """Return True if two parts are one strip: all visible, in the same rows, side by side."""
        both_unmasked = not one.partial and not other.partial
        side_by_side = one[:2] == other[:2] and one.s1 == other.s0
        return both_unmasked and side_by_side and other.s1 - one.s0 <= self.keys


def visible_tiles(problem: Problem) -> list[list[tuple[int, int, int, int, int, int]]]:
    """Tiles that are computed, by block of queries, for a problem with one batch.

    Each is (query head, key/value head, t0, t1, s0, s1). The benchmarks compare with them.
    """
    tiling = Tiling(problem)
    return [
        [(plane[-1], tiling.kv_plane(plane)[-1], *part[:4]) for part in tiling.parts(plane, t0, t1)]
        for plane, t0, t1 in tiling.blocks()
    ]


def _visible(problem: Problem) -> masks.Mask | None:
    """Combine mask, causal and window [5-7]."""
    mask = None if problem.mask is None else masks.of(problem.mask)
    left_keys, right_keys = problem.window or (None, None)
    if problem.causal:
        right_keys = 0
    if left_keys is None and right_keys is None:
        return mask
    band = masks.window(left_keys, right_keys, alignment=problem.alignment or "bottom_right")
    return band if mask is None else mask & band


def _trim(mask: masks.Mask, cell: Tile) -> Part | None:
    """Part of a cell without the hidden rows and keys at its edges; None if it is all hidden."""
    if isinstance(mask, Band):
        return _trim_band(mask, cell)
    seen = mask.tile(cell)
    if isinstance(seen, bool):
        return Part(cell.t0, cell.t1, cell.s0, cell.s1, cell.t0, cell.t0) if seen else None
    rows, keys = (_extent(np.asarray(seen.any(axis))) for axis in (1, 0))
    unseen = np.asarray(~seen[slice(*rows), slice(*keys)].all(1))
    p0, p1 = _extent(unseen) if unseen.any() else (0, 0)
    at = cell.t0 + rows[0]
    return Part(at, cell.t0 + rows[1], cell.s0 + keys[0], cell.s0 + keys[1], at + p0, at + p1)


def _trim_band(band: Band, cell: Tile) -> Part | None:
    """Trim a cell as `_trim` does, from the two numbers of a band, without an array."""
    shift = band.first(cell) + cell.s0 - cell.t0  # beside query t is key t + shift
    left_keys, right_keys = (FAR if n is None else min(n, FAR) for n in (band.left, band.right))
    t0, t1 = max(cell.t0, cell.s0 - right_keys - shift), min(cell.t1, cell.s1 + left_keys - shift)
    s0, s1 = max(cell.s0, t0 + shift - left_keys), min(cell.s1, t1 + shift + right_keys)
    if t0 >= t1 or s0 >= s1:
        return None
    # Rows a ≤ t < b see all of these keys; those before a, or those from b on, only some.
    a, b = max(t0, s1 - 1 - right_keys - shift), min(t1, s0 + 1 + left_keys - shift)
    p0, p1 = (t0 if a > t0 else b), (t1 if b < t1 else a)
    return Part(t0, t1, s0, s1, p0, p1) if p0 < p1 else Part(t0, t1, s0, s1, t0, t0)


def _extent(true: Array) -> tuple[int, int]:
    """Range from the first True to after the last; there is at least one."""
    indices = np.flatnonzero(true)
    return int(indices[0]), int(indices[-1]) + 1
