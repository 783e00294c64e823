"""An implementation that nobody trusts: its process starts anew, and what was judged is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class JudgedCalls(NamedTuple):
    """Results compared with the oracle as soon as they came: their number, and how late."""

    times: int = 0
    # largest age of a process whose last call was judged so: calls before that one, and seconds
    calls: int = 0
    seconds: float = 0.0

    def merge(self, other: JudgedCalls) -> JudgedCalls:
        """Return what was judged here and there."""
        times = self.times + other.times
        return JudgedCalls(times, max(self.calls, other.calls), max(self.seconds, other.seconds))


@dataclass
class Untrusted:
    """Means against an implementation that knows when it is judged."""

    renew: Callable[[], object]  # end its process; the next call starts another
    # return the calls that its process has answered, and the seconds since it started
    age: Callable[[], tuple[int, float]]
    judged: JudgedCalls = field(default_factory=JudgedCalls)

    def note_judged(self) -> None:
        """Note that results which were just returned are compared with the oracle."""
        calls, seconds = self.age()
        self.add(JudgedCalls(1, calls - 1, seconds))

    def add(self, judged: JudgedCalls) -> None:
        """Add what was judged elsewhere."""
        self.judged = self.judged.merge(judged)

    def take(self) -> JudgedCalls:
        """Return what was judged since the last time."""
        judged, self.judged = self.judged, JudgedCalls()
        return judged
