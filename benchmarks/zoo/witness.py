"""Witness of a mutant: a problem on which it is wrong far beyond the tolerance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from benchmarks.zoo.mutants import Mutant
from npattn.conventions import Conventions
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.capabilities import probe
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules import PROPERTIES, Property
from npattn.testing.trial import Trial, Violation, WrongAnyway

ENOUGH = 10.0
"""Error / tolerance that makes a problem a witness."""


def witness(mutant: Mutant, *, seed: int = 0, tries: int = 300) -> tuple[Recipe, float] | None:
    """Return a sampled problem with an error beyond ten tolerances, and the ratio; or None.

    A rule that compares bits or finds NaN has the ratio inf.
    """
    dtype = mutant.dtypes[0]
    implementation = Implementation(mutant.forward, backward=mutant.backward)
    space = Space(features=implementation.features, dtype=dtype)
    model = mutant.rounding or Rounding.undeclared(dtype)
    model = Rounding.from_name(model) if isinstance(model, str) else model
    trial = Trial(implementation, Conventions(), model, space)
    capabilities = probe(trial)
    trial = capabilities.trial
    for finding in capabilities.findings:
        if finding.status == "failed" and finding.rule in mutant.killed_by:
            return space.base(), math.inf
    for rule, recipe in interleave_recipes(trial, mutant.killed_by, seed, tries):
        try:
            rule.check(trial, recipe)
        except Violation as err:
            if err.ratio > ENOUGH:
                return recipe, err.ratio
        except (WrongAnyway, ImplementationError):
            continue  # a crash is no witness
    return None


def interleave_recipes(
    trial: Trial, names: Iterable[str], seed: int, tries: int
) -> Iterator[tuple[Property, Recipe]]:
    """Yield each rule that applies with its first recipe, then each with its second."""
    rules = [PROPERTIES[name] for name in names if name in PROPERTIES]
    rules = [rule for rule in rules if rule.unless(trial) is None]
    draws: list[Iterable[Recipe]] = []
    for rule in rules:
        drawn: Iterable[Recipe] = trial.cases(Pools(trial.space, **rule.draw(trial)), seed, tries)
        if rule.recipes is not None:
            drawn = rule.recipes(trial, seed, tries)
        draws.append(itertools.islice(drawn, tries))
    for turn in itertools.zip_longest(*draws):
        yield from ((rule, r) for rule, r in zip(rules, turn, strict=True) if r is not None)
