"""Faults that a check would have seen, had there been any: how rare, and how late."""

from __future__ import annotations

from dataclasses import dataclass

CONFIDENCE = 0.99
"""Probability with which a fault at random is seen."""


@dataclass(frozen=True)
class Sensitivity:
    """Faults that a check would have seen, as far as they depend on chance and time alone.

    Examples
    --------
    >>> round(Sensitivity(judged=460, calls=1200, seconds=8.5).rate, 5)
    0.00996
    """

    # number of results that were compared with the oracle, each of one call or more; 1 or more
    judged: int
    # most calls that one process had answered, and its longest life, before a call whose results
    # were compared
    calls: int
    seconds: float

    @property
    def rate(self) -> float:
        """Least rate of faults per call that is seen with `CONFIDENCE`: (1 − rate)ⁿ = 0.01."""
        return float(1 - (1 - CONFIDENCE) ** (1 / self.judged))

    def __str__(self) -> str:
        return (
            f"this check would have seen a fault in one call of {int(1 / self.rate)} at random "
            f"({CONFIDENCE:.0%}), and one that sets in by call {self.calls + 1} or second "
            f"{int(self.seconds)} of a process"
        )
