"""Choice of the faster engine, by scores and by blocks of queries."""

import math

from npattn.engines.tiled.tiling import choose_queries
from npattn.problem import Problem

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
