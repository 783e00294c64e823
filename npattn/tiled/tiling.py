"""Tiles of a problem: blocks of queries, and the strips of keys that each of them sees."""

from __future__ import annotations

import numpy as np

from npattn import masks
from npattn.arrays import Array, Tile
from npattn.problem import Problem

__all__ = ["Block", "Part", "Plane", "Tiling", "visible_tiles"]

QUERIES = 512
"""Queries in a block, half as many where there would be fewer blocks than ENOUGH."""
KEYS = 512
"""Keys in a strip: with QUERIES, what the cache of a core about holds, in float32."""
ENOUGH = 16
"""Blocks that keep all cores busy to the end."""
CELL = 256
"""Keys in the smallest part of a strip that a mask is asked about."""

Plane = tuple[int, ...]
Block = tuple[Plane, int, int]
Part = tuple[int, int, int, int, bool]


class Tiling:
    """Blocks of queries of a problem, and the parts of the scores that each of them sees."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.sizes = (problem.lead, problem.H, problem.T, problem.S)
        self.planes = list(np.ndindex(*problem.lead, problem.H))
        few = len(self.planes) * problem.T < ENOUGH * QUERIES
        self.queries = -(-QUERIES // 2) if few else QUERIES
        self.mask = _visible(problem)
        self.mask_lead = () if self.mask is None else self.mask.shape(*self.sizes)[:-2]
        self.known: dict[tuple[Plane, int], list[Part]] = {}

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
        """List the parts (t0, t1, s0, s1, partial) that a block of queries sees anything of."""
        S = self.problem.S
        if self.mask is None:
            return [(t0, t1, s0, min(s0 + KEYS, S), False) for s0 in range(0, S, KEYS)]
        own = plane[len(plane) - len(self.mask_lead) :]
        own = tuple(i if n > 1 else 0 for i, n in zip(own, self.mask_lead, strict=True))
        parts = self.known.get((own, t0))
        if parts is None:
            parts = self.known[own, t0] = self._parts(plane, t0, t1)
        return parts

    def _parts(self, plane: Plane, t0: int, t1: int) -> list[Part]:
        """List cells, each without the hidden rows and keys at its edges.

        Cells that are visible as a whole are joined to strips.
        """
        assert self.mask is not None
        lo, hi = self.mask.hull(self.tile(plane, t0, t1, 0, self.problem.S))
        parts: list[Part] = []
        for c0 in range(lo, hi, CELL):
            c1 = min(c0 + CELL, hi)
            seen = self.mask.tile(self.tile(plane, t0, t1, c0, c1))
            if seen is False:
                continue
            rows, keys, partial = slice(0, t1 - t0), slice(0, c1 - c0), False
            if seen is not True:
                rows, keys = (_extent(np.asarray(seen.any(axis))) for axis in (1, 0))
                partial = not seen[rows, keys].all()
            part = (t0 + rows.start, t0 + rows.stop, c0 + keys.start, c0 + keys.stop, partial)
            last = parts[-1] if parts else None
            if last and _are_adjacent(last, part):
                parts[-1] = (*last[:3], part[3], False)
            else:
                parts.append(part)
        return parts


def visible_tiles(problem: Problem) -> list[list[tuple[int, int, int, int, int, int]]]:
    """Tiles of each block of queries that are computed at all, for a problem with one batch.

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
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0
    if left is None and right is None:
        return mask
    band = masks.window(left, right, alignment=problem.alignment or "bottom_right")
    return band if mask is None else mask & band


def _extent(visible: Array) -> slice:
    """Range from the first True to the last; there is at least one."""
    indices = np.flatnonzero(visible)
    return slice(int(indices[0]), int(indices[-1]) + 1)


def _are_adjacent(one: Part, other: Part) -> bool:
    """Return True if two parts are one strip: all visible, in the same rows, side by side."""
    whole = not one[-1] and not other[-1]
    return whole and one[:2] == other[:2] and one[3] == other[2] and other[3] - one[2] <= KEYS
