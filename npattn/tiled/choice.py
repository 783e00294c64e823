"""Choice of the faster engine, by scores and by blocks of queries."""

from __future__ import annotations

import math

from npattn.problem import Problem
from npattn.tiled.tiling import choose_queries

__all__ = ["choice"]

LARGE = 240_000
"""Number of scores from which the tiled engine is the faster one, if one block computes them all.

Source: benchmarks/speed/scripts/engines.py, of this number and the others.
"""
BLOCK = {4: 5000, 8: 3500}
"""Number of scores on which it saves as much time as a block of queries takes to begin.

By bytes of a number.
"""
SINGLE = 3
"""Scores that one of a single query counts for: reading keys and values is all the work then."""
SHARED = 16
"""The same where query heads share keys, which the dense engine repeats. Source: the script
benchmarks/speed/scripts/variants.py."""


def choice(problem: Problem) -> str:
    """Return the faster engine: "dense" or "tiled".

    The number of threads has no say in it, so that results keep their bits with any number.
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
