"""Mutants: mistakes with the rules of the judge that must find them."""

from benchmarks.zoo.mutants.killers import KILLERS
from benchmarks.zoo.mutants.mutant import Mutant
from npattn.mistakes import MISTAKES

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: dict[str, Mutant] = {
    name: Mutant.of(mistake, *KILLERS[name].split()) for name, mistake in MISTAKES.items()
}
"""All mutants by name, grouped by family."""
