"""Choice of the faster engine."""

from __future__ import annotations

import math

from npattn.problem import Problem

__all__ = ["choice"]

LARGE = {4: 2**18, 8: 2**19}
"""Number of scores from which the tiled engine is the faster one, by bytes of a number.

Source: benchmarks/engines.py.
"""


def choice(problem: Problem) -> str:
    """Return the faster engine: "dense" or "tiled"."""
    least = LARGE.get(problem.dtype.itemsize)
    if problem.dtype.kind != "f" or problem.storage is not None or least is None:
        return "dense"
    scores = problem.H * math.prod(problem.lead) * problem.T * problem.S
    return "tiled" if scores >= least else "dense"
