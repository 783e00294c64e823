"""Candidate for the cause of failures: a test of what was observed, and a sentence for the user."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from npattn.conventions import Conventions
from npattn.testing.diagnosis.evidence import Evidence

KINDS = (
    "storage",
    "descale",
    "convention",
    "layout",
    "ratio",
    "dtype",
    "step",
    "mistake",
    "precision",
    "factor",
)
"""Kinds of candidates, those that say most first."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Possible cause of failures.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    name : str
        Unique among the candidates of its kind.
    text : str
        The cause in words, for the user who made the mistake.
    explains : callable
        Evidence → True if it reproduces what was observed.
    topic : str
        Part of attention that it is about: "window", "softcap".
    conventions : Conventions or None
        Conventions under which the results would be right.
    changes : int
        Number of fields that differ from the declared conventions.
    also : tuple of str
        Known mistakes that give the same results on all problems tried.
    """

    kind: str
    name: str
    text: str
    explains: Callable[[Evidence], bool]
    topic: str = ""
    conventions: Conventions | None = None
    changes: int = 1
    also: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """Place of its kind among `KINDS`: what says most comes first."""
        return KINDS.index(self.kind)


Found = list[tuple[Candidate, list[Evidence]]]
"""Candidates, each with what it explains."""
