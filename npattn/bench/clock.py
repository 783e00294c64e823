"""Seconds of a call, beside other calls whose threads may still be awake."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Clock", "turn"]

TURN = 0.02
"""Seconds that a turn lasts at least: shorter calls are repeated."""
MOST = 1000
"""Calls in a turn, at most."""
STEP = 0.005
"""Seconds between two looks at whether all threads rest."""
REST = 0.1
"""The share of a processor below which they do."""
PATIENCE = 1.0
"""Seconds after which nobody is waited for any longer."""


class Clock:
    """The time on the clock, and that of the processors that this process uses."""

    def now(self) -> float:
        return time.perf_counter()

    def used(self) -> float:
        return time.process_time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def settle(self) -> None:
        """Wait until no thread of this process computes any more.

        Threads of OpenBLAS, OpenMP and XLA spin for 5 to 100 ms after a call, in case another one
        comes, and would take a core from whoever is next.
        """
        end = self.now() + PATIENCE
        while self.now() < end:
            start, before = self.now(), self.used()
            self.sleep(STEP)
            if self.used() - before < REST * (self.now() - start):
                return


def turn(call: Callable[[], Any], clock: Clock) -> float:
    """Seconds of one call: of a short one the mean of several, after one that is not counted."""
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
