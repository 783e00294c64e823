"""Simpler cases: by Hypothesis of what it samples, or step by step of a case that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Case = TypeVar("Case")


def try_examples(
    attempt: Callable[[Any], None], strategy: Any, start: int, examples: int, **settings: Any
) -> None:
    """Let Hypothesis call `attempt` on values that it samples, and simplify one that raises.

    `start` is a seed; `settings` are more of Hypothesis'.
    """
    import hypothesis as h  # slow to load

    profile = h.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(h.Phase.generate, h.Phase.shrink),
        suppress_health_check=list(h.HealthCheck),
        print_blob=False,
        **settings,
    )

    @h.seed(start)
    @profile
    @h.given(strategy)
    def test(value: Any) -> None:
        attempt(value)

    test()


def shrink(
    case: Case,
    smaller: Callable[[Case], Iterable[Case]],
    fails: Callable[[Case], bool],
    seconds: float,
    clock: Callable[[], float] = time.process_time,
) -> Case:
    """Return a simpler case that fails: the first simpler one of each, for so many seconds."""
    end, seen, left = clock() + seconds, {case}, iter(smaller(case))
    while clock() < end and (small := next(left, None)) is not None:
        if small not in seen:
            seen.add(small)
            if fails(small):
                case, left = small, iter(smaller(small))
    return case
