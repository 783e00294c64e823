"""The search for a simpler case that fails, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")


def shrink(
    case: Case,
    smaller: Callable[[Case], Iterable[Case]],
    fails: Callable[[Case], bool],
    seconds: float,
    clock: Callable[[], float] = time.process_time,
) -> Case:
    """Return a simpler case that fails: the first simpler one of each, for so many seconds."""
    end, seen, candidates = clock() + seconds, {case}, iter(smaller(case))
    while clock() < end and (small := next(candidates, None)) is not None:
        if small not in seen:
            seen.add(small)
            if fails(small):
                case, candidates = small, iter(smaller(small))
    return case
