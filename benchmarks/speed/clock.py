"""Seconds of a call beside others: made in turns, or next to threads that may still be awake."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

TURN = 0.02
"""Least seconds of a turn: shorter calls are repeated."""
MOST = 1000
"""Most calls in a turn."""
STEP = 0.005
"""Seconds between two checks for idle threads."""
REST = 0.1
"""Share of a processor below which threads count as idle."""
PATIENCE = 1.0
"""Most seconds to wait for idle threads."""


class Clock:
    """Wall-clock time, and processor time of this process."""

    def now(self) -> float:
        return time.perf_counter()

    def processor_time(self) -> float:
        return time.process_time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def settle(self) -> None:
        """Wait until all threads of this process are idle.

        Threads of OpenBLAS, OpenMP and XLA spin for 5 to 100 ms after a call, in case another one
        comes, and would take a core from the next contestant.
        """
        end = self.now() + PATIENCE
        while self.now() < end:
            start, before = self.now(), self.processor_time()
            self.sleep(STEP)
            if self.processor_time() - before < REST * (self.now() - start):
                return


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def times_in_turns(
    calls: Iterable[Callable[[], Any]],
    rounds: int,
    seconds: float = 0.0,
    clock: Callable[[], float] = time.process_time,
) -> list[list[float]]:
    """Return the times of each call, made in turns: so many rounds at least, for so many seconds.

    What disturbs one call disturbs all.
    """
    pairs = [(call, list[float]()) for call in calls]
    end, done = time.monotonic() + seconds, 0
    while done < rounds or time.monotonic() < end:
        done += 1
        for call, times in pairs:
            start = clock()
            call()
            times.append(clock() - start)
    return [times for _, times in pairs]


def turn(call: Callable[[], Any], clock: Clock) -> float:
    """Measure seconds of one call; a short one is repeated, and the first does not count."""
    clock.settle()
    start = clock.now()
    call()
    first = clock.now() - start
    if first >= TURN:
        return first
    # Caches are cold after a pause, and threads asleep.
    count = math.ceil(TURN / max(first, TURN / MOST))
    start = clock.now()
    for _ in range(count):
        call()
    return (clock.now() - start) / count
