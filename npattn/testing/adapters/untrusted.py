"""An implementation that nobody trusts: its process starts anew, and what was judged is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Untrusted"]


@dataclass
class Untrusted:
    """Means against an implementation that knows when it is judged.

    Attributes
    ----------
    renew : callable
        End its process; the next call starts another.
    age : callable
        Return the calls that its process has answered, and the seconds since it started.
    judged : int
        Number of times that results were compared with the oracle as soon as they were returned.
    calls, seconds : float
        Largest age of a process whose last call was judged so: calls before that one, and seconds.
    """

    renew: Callable[[], object]
    age: Callable[[], tuple[int, float]]
    judged: int = 0
    calls: int = 0
    seconds: float = 0.0

    def note_judged(self) -> None:
        """Note that results which were just returned are compared with the oracle."""
        calls, seconds = self.age()
        self.judged += 1
        self.calls, self.seconds = max(self.calls, calls - 1), max(self.seconds, seconds)
