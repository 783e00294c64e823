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
    """Possible cause of failures."""

    name: str  # unique among the candidates
    text: str  # the cause in words, for the user who made the mistake
    explains: Callable[[Evidence], bool]  # evidence → True if it reproduces what was observed
    step: str  # as of a `Cause`
    where: str = "everywhere"
    amount: str = ""
    conventions: Conventions | None = None  # Conventions under which the results would be right
    # number of fields that differ from the declared conventions; a single one is preferred
    changes: int = 1


Found = list[tuple[Candidate, list[Evidence]]]
"""Candidates, each with what it explains."""
