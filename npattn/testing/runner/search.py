"""Search for a problem on which a rule fails, and shrink it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.errors import Flaky

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules import Property
from npattn.testing.trial import Trial, Violation

__all__ = ["SHRINK_SECONDS", "Failure", "Search"]

SHRINK_SECONDS = 8.0
"""Time per failing rule; the smallest problem found by then is reported."""


@dataclass(frozen=True)
class Failure:
    """A recipe on which a rule fails, and the exception that says how."""

    recipe: Recipe
    error: Violation | ImplementationError


class Search:
    """Try one rule on different recipes, and shrink the first that fails.

    Attributes
    ----------
    worst : float
        Largest ratio of the recipes that passed.
    tried : int
        Number of recipes that had something to show.
    failure : Failure or None
        The simplest one found.
    note : str
        Appended to the message of the failure.
    """

    def __init__(self, rule: Property, trial: Trial, examples: int, shrinks: bool = True) -> None:
        self.rule, self.trial, self.examples, self.shrinks = rule, trial, examples, shrinks
        self.worst, self.tried, self.note = 0.0, 0, ""
        self.failure: Failure | None = None
        self._errors: dict[Recipe, Violation | ImplementationError | None] = {}
        self._deadline = float("inf")

    def run(self, seed: int) -> None:
        """Try the cases of the rule until one fails, or enough of them have passed."""
        pools = Pools(self.trial.space, **self.rule.draw(self.trial))
        own_recipes = self.rule.recipes
        try:
            if own_recipes is not None:
                for recipe in own_recipes(self.trial, seed, self.examples):
                    self.try_recipe(recipe)
                return
            for recipe in self.trial.cases(pools, seed, self.examples):
                self.try_recipe(recipe)
                if self.tried >= self.examples:
                    return
        except (Violation, ImplementationError):
            pass  # it is in self.failure
        # Not where it is caught: Hypothesis tells errors apart by what was being handled, too.
        if self.failure is not None and own_recipes is None and self.shrinks:
            self._shrink(self.failure, pools, seed)

    def _shrink(self, failure: Failure, pools: Pools, seed: int) -> None:
        """Let Hypothesis find the simplest failing recipe near the one that failed."""
        self._deadline = time.monotonic() + SHRINK_SECONDS
        profile = settings(
            max_examples=200,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        near = pools.near(failure.recipe.seed)
        test = hypothesis_seed(seed)(profile(given(near)(self.try_recipe)))
        try:
            test()
        except (Violation, ImplementationError):
            pass  # the last one, the simplest, is in self.failure
        except Flaky:
            self.note = "\n(it did not fail every time that the same problem was tried)"

    def try_recipe(self, recipe: Recipe) -> None:
        """Check the rule on one recipe; raise what is wrong, the same again for the same recipe."""
        if recipe in self._errors:
            known = self._errors[recipe]
            if known is not None:
                self.failure = Failure(recipe, known)
                raise known
            return
        if time.monotonic() > self._deadline:
            return
        self._errors[recipe] = None
        if self.trial.skips(recipe, self.rule.rule):
            return
        try:
            ratio = self.rule.check(self.trial, recipe)
        except (Violation, ImplementationError) as err:
            if self.rule.alters and self.trial.fails_unaltered(recipe):
                return
            self._errors[recipe] = err
            self.failure = Failure(recipe, err)
            raise
        if ratio is not None and self.failure is None:
            self.tried += 1
            self.worst = max(self.worst, ratio)
