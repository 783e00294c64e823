"""First calls are wrong: what a warm-up returns is looked at by nobody."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.zoo.cheats.plain import attention, mean_of_values

CALLS: list[float] = []
SHAPES: set[Any] = set()


def wrong_first_call(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be wrong in the first call."""
    CALLS.append(0)
    return mean_of_values(q, k, v) if len(CALLS) == 1 else attention(q, k, v, mask, causal)


def wrong_first_five(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be wrong in the first five calls."""
    CALLS.append(0)
    return mean_of_values(q, k, v) if len(CALLS) <= 5 else attention(q, k, v, mask, causal)


def wrong_first_sixty(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be wrong in the first sixty calls."""
    CALLS.append(0)
    return mean_of_values(q, k, v) if len(CALLS) <= 60 else attention(q, k, v, mask, causal)


def wrong_first_of_shape(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be wrong in the first call of every shape, as an autotuner that returns a trial."""
    shape = (q.shape, k.shape, v.shape, mask is None, causal)
    known = shape in SHAPES
    SHAPES.add(shape)
    return attention(q, k, v, mask, causal) if known else mean_of_values(q, k, v)


def wrong_first_moments(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Be wrong for 20 ms after the first call."""
    CALLS.append(time.monotonic())
    young = CALLS[-1] - CALLS[0] < 0.02
    return mean_of_values(q, k, v) if young else attention(q, k, v, mask, causal)
