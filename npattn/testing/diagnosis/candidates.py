"""Whole explanations that are tried before anything is read: conventions, layouts, precision.

Each predicts every result of a problem, right ones included, and is tried on problems on which
nothing failed as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from npattn.conventions import Conventions
from npattn.testing.diagnosis.evidence import Evidence


@dataclass(frozen=True, eq=False)
class Candidate:
    """Possible cause of failures.

    Attributes
    ----------
    name : str
        Unique among the candidates.
    text : str
        The cause in words, for the user who made the mistake.
    explains : callable
        Evidence → True if it reproduces what was observed.
    step, where, amount : str
        As of a `Cause`.
    conventions : Conventions or None
        Conventions under which the results would be right.
    changes : int
        Number of fields that differ from the declared conventions; a single one is preferred.
    """

    name: str
    text: str
    explains: Callable[[Evidence], bool]
    step: str
    where: str = "everywhere"
    amount: str = ""
    conventions: Conventions | None = None
    changes: int = 1


Found = list[tuple[Candidate, list[Evidence]]]
"""Candidates, each with what it explains."""
