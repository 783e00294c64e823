"""Mutants: mistakes with the rules of the judge that must find them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from benchmarks.zoo.mutants.killers import KILLERS
from npattn.mistakes import MISTAKES, Mistake

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant(Mistake):
    """A mistake, and the rules of which one must fail it."""

    killed_by: tuple[str, ...] = field(kw_only=True)

    @classmethod
    def of(cls, mistake: Mistake, *killed_by: str) -> Mutant:
        """Return `mistake` as a mutant that any of the rules `killed_by` must fail."""
        known = {f.name: getattr(mistake, f.name) for f in fields(Mistake)}
        return cls(**known, killed_by=killed_by)


MUTANTS: dict[str, Mutant] = {
    name: Mutant.of(mistake, *KILLERS[name].split()) for name, mistake in MISTAKES.items()
}
"""All mutants by name, grouped by family."""
