"""Verdicts of one rule on chosen recipes: does it fail there, within a number of calls."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.diagnosis.predicates import size_of
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import RULES
from npattn.testing.trial import Suspicion, Trial, Violation, WrongAnyway

CALLS = 400
"""Most problems that are tried; nearly all have a few hundred scores."""
SECONDS = 4.0
"""Most processor time of this process, in seconds."""
CONTENTS = 2
"""Number of different contents with which a problem must pass to count as one that passes."""


class Exhausted(Exception):
    """No call is left, or no time."""


@dataclass
class Verdicts:
    """Verdicts of one rule on recipes, each reached once.

    Parameters
    ----------
    trial : Trial
    outcome : Outcome
        A failed one: its rule is asked, and its kind of failure counts, an exception or a wrong
        result.
    """

    trial: Trial
    outcome: Outcome
    reached: dict[Recipe, bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.deadline = time.process_time() + SECONDS
        self.property = RULES.get(self.outcome.rule)
        if self.property is None:  # structure that is answered wrongly is not sampled otherwise
            space = replace(self.trial.space, structure=frozenset(STRUCTURE))
            self.trial = replace(self.trial, space=space)

    def fails(self, recipe: Recipe) -> bool | None:
        """Return True if the rule fails with one of several contents, None if it is not asked.

        Raises
        ------
        Exhausted
            If too many problems were tried, or it took too long.
        """
        verdicts = []
        for n in range(CONTENTS):  # every fourth seed has a sink of −inf: keep the remainder
            verdicts.append(self._verdict(replace(recipe, seed=recipe.seed + 4096 * n)))
            if verdicts[-1]:
                return True
        return None if None in verdicts else False

    def _verdict(self, recipe: Recipe) -> bool | None:
        if recipe not in self.reached:
            if len(self.reached) >= CALLS or time.process_time() > self.deadline:
                raise Exhausted
            self.reached[recipe] = self._judge(recipe)
            self.trial.memo.clear()  # no recipe comes twice
        return self.reached[recipe]

    def violation(self, recipe: Recipe) -> Outcome | None:
        """Return the outcome with another problem on which its rule fails; None if it does not."""
        if not self._asks(recipe):
            return None
        try:
            self._check(recipe)
        except (Suspicion, WrongAnyway, ImplementationError):
            return None
        except Violation as err:
            if self.property is not None and self.property.leaves(self.trial, recipe, err):
                return None
            return replace(
                self.outcome,
                sampled=recipe,
                problem=err.problem,
                cotangents=err.cotangents,
                kind=err.kind,
                view=err.view,
            )
        return None

    def _asks(self, recipe: Recipe) -> bool:
        """Return True if the rule may be asked of a recipe."""
        if not is_within(self.trial.space, recipe) or self.trial.refuses_recipe(recipe):
            return False
        if self.trial.skips(recipe, self.outcome.rule):
            return False
        return self.property is None or has_forced(self.property.draw(self.trial), recipe)

    def _judge(self, recipe: Recipe) -> bool | None:
        raised = self.outcome.kind == "raised"
        if not self._asks(recipe):
            return None
        try:
            ratio = self._check(recipe)
        except Suspicion:
            return None
        except WrongAnyway:
            return None
        except Violation as err:
            rule = self.property
            if raised or (rule is not None and rule.leaves(self.trial, recipe, err)):
                return None  # another failure than the one asked about
            return True
        except ImplementationError:
            return True if raised else None
        return None if ratio is None else False

    def _check(self, recipe: Recipe) -> float | None:
        """Check the rule; of findings of the probe, which have none, the agreement of all."""
        if self.property is not None:
            return self.property.check(self.trial, recipe)
        problem = self.trial.problem(recipe)
        cotangents = self.trial.cotangents(recipe, problem, weights=True)
        return self.trial.check(self.trial.agreement(recipe), problem, cotangents)


def has_forced(draw: dict[str, Any], recipe: Recipe) -> bool:
    """Return True if a recipe has every option that the sampling of a rule forces."""
    for name, values in draw.get("force", {}).items():
        offered = values if isinstance(values, tuple) else (values,)
        off = getattr(Recipe(), name, None)
        if getattr(recipe, name, None) == off and off not in offered:
            return False
    return True


def is_within(space: Space, recipe: Recipe) -> bool:
    """Return True if a space has the options, the structure and the sizes of a recipe."""
    structure = {
        "K < H": recipe.K < recipe.H,
        "E != D": recipe.E != recipe.D,
        "T != S": recipe.T != recipe.S,
        "T > S": recipe.T > recipe.S,
        "D % 8": bool(recipe.D % 8 or recipe.E % 8),
        "broadcast": recipe.broadcast,
        **{f"{letter} = 0": size_of(recipe, letter) == 0 for letter in "BHTSDE"},
    }
    options = {"dropout_mask" if name == "dropout" else name for name in options_on(recipe)}
    return (
        options <= space.features
        and {name for name, has in structure.items() if has} <= space.structure
        and all(size_of(recipe, letter) in sizes for letter, sizes in space.sizes.items())
        and (recipe.lead is not None or recipe.H == recipe.K == 1)
    )
