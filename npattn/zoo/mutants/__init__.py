"""Mutants: mistakes with the rules of the judge that must find them."""

from npattn.mistakes import MISTAKES
from npattn.zoo.mutants.blind_killers import BLIND_KILLERS
from npattn.zoo.mutants.killers import KILLERS
from npattn.zoo.mutants.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: dict[str, Mutant] = {
    name: Mutant.of(mistake, *(KILLERS | BLIND_KILLERS)[name].split())
    for name, mistake in MISTAKES.items()
}
"""All mutants by name, grouped by family."""
