"""Search for a problem on which a rule fails, a part of the problems at a time, and shrink it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from npattn.testing.adapters.base import Crash, ImplementationError, NotAsked, TimedOut
from npattn.testing.capabilities import blame_condition, blame_structure
from npattn.testing.cases.asked import Asked
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.power import PlainPowers
from npattn.testing.rules import Property
from npattn.testing.trial import Trial, Violation, WrongAnyway

SHRINK_SECONDS = 8.0
"""Time per failing rule; the smallest problem found by then is reported."""


@dataclass(frozen=True)
class Failure:
    """A recipe on which a rule fails, and the exception that says how."""

    recipe: Recipe
    error: Violation | ImplementationError


@dataclass
class Standing(PlainPowers):
    """Progress of one rule, between rounds."""

    position: int = 0  # number of recipes taken from those of the rule
    tried: int = 0  # number of recipes that had something to show, and passed
    left: int = 0  # number of recipes that are wrong unaltered too, and are left to other rules
    # results that were wrong there, where a relation failed
    left_to: frozenset[str] = field(default_factory=frozenset)
    worst: float = 0.0  # largest ratio of the recipes that passed
    # sizes of the recipes that were accepted, the first failing one included
    asked: Asked = field(default_factory=Asked)


class RuleSearch:
    """Try one rule on different recipes, and shrink the first that fails.

    Attributes
    ----------
    standing : Standing
    failure : Failure or None
        The simplest one found.
    note : str
        Appended to the message of the failure.
    """

    def __init__(
        self,
        rule: Property,
        trial: Trial,
        examples: int,
        shrinks: bool = True,
        standing: Standing | None = None,
        *,
        most: int | None = None,
        leaves: bool = True,
        deadline: float = math.inf,
        tell: Callable[[Recipe], object] = lambda _: None,
    ) -> None:
        """Begin, or go on from a standing; `leaves` leaves what agreement finds wrong to it.

        It samples as rules do that are asked all examples, and stops at `most`.

        Nothing is tried after the deadline, a time of `time.monotonic`; `tell` is told of each
        recipe before it is tried.
        """
        self.rule, self.trial, self.examples, self.shrinks = rule, trial, examples, shrinks
        self.standing, self.leaves, self.note = standing or Standing(), leaves, ""
        self.most = examples if most is None else most
        self.deadline, self.tell = deadline, tell
        self.failure: Failure | None = None
        self._errors: dict[Recipe, Violation | ImplementationError | None] = {}
        self._accepted: list[Recipe] = []
        self._shrinks_until = deadline

    def run(self, seed: int, count: int | None = None) -> None:
        """Try the recipes of the rule until one fails, or `count` of them are done.

        Once `count` reaches the examples, a rule with recipes of its own tries them all.

        Raises StructureRefusedError if plain structure is answered where other structure, accepted
        before, raises.
        """
        count = self.most if count is None else min(count, self.most)
        if self.rule.last and count < self.examples:
            return
        pools = Pools(self.trial.space, **self.rule.draw(self.trial))
        with suppress(Violation, ImplementationError):  # it is in self.failure
            self._try(self._recipes(pools, seed), count)
        # Not where it is caught: Hypothesis tells errors apart by what was being handled, too.
        failure = self.failure
        if (
            failure is not None
            and self.shrinks
            and self.rule.recipes is None
            and not isinstance(failure.error, (Crash, TimedOut))  # each one more takes long
        ):
            self._shrink(failure, pools, seed)
        if self.failure is not None and isinstance(self.failure.error, Violation):
            self._accepted.append(self.failure.recipe)
        self.standing.asked = Asked.union([self.standing.asked, Asked.of(self._accepted)])

    def _recipes(self, pools: Pools, seed: int) -> Iterator[Recipe]:
        if self.rule.recipes is not None:
            return iter(self.rule.recipes(self.trial, seed, self.examples))
        return self.trial.cases(pools, seed, self.examples)

    def _try(self, recipes: Iterator[Recipe], count: int) -> None:
        """Try recipes until `count` are judged; an exception may become a refusal of structure."""
        standing = self.standing
        for recipe in islice(recipes, standing.position):
            self._errors[recipe] = None  # tried in an earlier round
        for recipe in recipes:
            tries_all = self.rule.recipes is not None and count >= self.examples
            if not tries_all and standing.tried + standing.left >= count:
                return
            if time.monotonic() > self.deadline:
                return
            standing.position += 1
            try:
                self.try_recipe(recipe)
            except ImplementationError as err:
                refusal = blame_structure(self.trial, recipe, err)
                refusal = refusal or blame_condition(self.trial, recipe, err)
                if refusal is not None:
                    raise refusal from None
                raise

    def _shrink(self, failure: Failure, pools: Pools, seed: int) -> None:
        """Let Hypothesis find the simplest failing recipe near the one that failed."""
        from hypothesis import HealthCheck, Phase, given, settings  # slow to load
        from hypothesis import seed as hypothesis_seed
        from hypothesis.errors import Flaky

        self._shrinks_until = min(time.monotonic() + SHRINK_SECONDS, self.deadline)
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
            error = self._errors[recipe]
            if error is not None:
                self.failure = Failure(recipe, error)
                raise error
            return
        if time.monotonic() > self._shrinks_until:
            return
        self._errors[recipe] = None
        if self.trial.skips(recipe, self.rule.rule) or self.trial.refuses_recipe(recipe):
            return
        self.tell(recipe)
        self.trial.powers = {}
        try:
            ratio = self.rule.check(self.trial, recipe)
        except WrongAnyway:
            self._leave()
            return
        except NotAsked:
            return
        except (Violation, ImplementationError) as err:
            if isinstance(err, ImplementationError) and self.trial.has_refused(err, recipe):
                return  # the rule made of it a problem that is known to be refused
            if isinstance(err, ImplementationError) and err.refuses and self.failure is not None:
                return  # what shrinks a failure leaves what is taken
            asks = self.leaves or self.rule.alters
            if asks and self.rule.leaves(self.trial, recipe, err):
                self._leave(getattr(err, "related", frozenset()))
                return
            self._errors[recipe] = err
            self.failure = Failure(recipe, err)
            raise
        if ratio is not None and self.failure is None:
            self._accepted.append(recipe)
            self.standing.tried += 1
            self.standing.worst = max(self.standing.worst, ratio)
            self.standing.note_powers(self.trial.powers, plain=recipe.has_plain_scores)

    def _leave(self, names: frozenset[str] = frozenset()) -> None:
        if self.failure is None:
            self.standing.left += 1
            self.standing.left_to |= names
