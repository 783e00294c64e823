"""Mutant: a mistake and the rules of the judge that must find it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from npattn.mistakes import Mistake


@dataclass(frozen=True)
class Mutant(Mistake):
    """A mistake, and the rules that must find it.

    Attributes
    ----------
    killed_by : tuple of str
        Rule ids; the judge finds the mutant if any of them fails it.
    """

    killed_by: tuple[str, ...] = field(kw_only=True)

    @classmethod
    def of(cls, mistake: Mistake, *killed_by: str) -> Mutant:
        """Return `mistake` as a mutant that any of the rules `killed_by` must fail."""
        known = {f.name: getattr(mistake, f.name) for f in fields(Mistake)}
        return cls(**known, killed_by=killed_by)
