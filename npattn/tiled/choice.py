"""Choice of the faster engine, by scores and by blocks of queries."""

from __future__ import annotations

import math

from npattn.problem import Problem
from npattn.tiled import tiling

__all__ = ["choice"]

LARGE = {4: 2**18, 8: 2**19}
"""Number of scores from which the tiled engine is the faster one, by bytes of a number.

Source: benchmarks/engines.py.
"""
BLOCK = 2**13
"""Number of scores on which it saves as much time as it takes to begin a block of queries."""


def choice(problem: Problem) -> str:
    """Return the faster engine: "dense" or "tiled".

    The number of threads has no say in it, so that results keep their bits with any number.
    """
    least = LARGE.get(problem.dtype.itemsize)
    if problem.dtype.kind != "f" or problem.storage is not None or least is None:
        return "dense"
    planes = problem.H * math.prod(problem.lead)
    blocks = planes * -(-problem.T // tiling.QUERIES)
    return "tiled" if planes * problem.T * problem.S >= least + BLOCK * blocks else "dense"
