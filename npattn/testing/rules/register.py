"""The register of rules: a function for each, and what the runner must know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from npattn.testing.cases.recipe import Recipe
from npattn.testing.levels import Level
from npattn.testing.trial import Trial, Violation

Check = Callable[[Trial, Recipe], "float | None"]
Condition = Callable[[Trial], "str | None"]
"""Trial → why a rule does not apply, or None."""
Sampling = Callable[[Trial], dict[str, Any]]
"""Trial → arguments of `Pools`: how to sample the recipes of a rule."""


def _always(trial: Trial) -> str | None:
    return None


def _anything(trial: Trial) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Property:
    """A rule, its conditions, and its check.

    Attributes
    ----------
    rule : str
        Its id, for ``--only`` and in reports.
    section : str
        Its numbers in docs/semantics.md.
    check : callable
        Its docstring states the rule, why it holds, and the bugs that break it.
    unless : callable
        Trial → why the rule does not apply, or None.
    draw : callable
        Trial → arguments of `Pools`.
    level : str
        One of `LEVELS`.
    alters : bool
        The check alters a problem and compares with the oracle: a problem that is wrong unaltered
        too is left to other rules.
    recipes : callable, optional
        (trial, seed, examples) → the recipes to check, all of them, instead of sampled ones.
    last : bool
        It is asked when the others have been: it needs many calls before it, or many samples.
    share : int
        It is asked one in so many of the examples of a check, 1 is all: most rules look for one
        kind of mistake, which shows soon if it is there.
    """

    rule: str
    section: str
    check: Check
    unless: Condition = _always
    draw: Sampling = _anything
    level: Level = "values"
    alters: bool = False
    recipes: Callable[[Trial, int, int], list[Recipe]] | None = None
    last: bool = False
    share: int = 10

    def leaves(self, trial: Trial, recipe: Recipe, err: Exception) -> bool:
        """Return True if an exception of the check is left to the rules on agreement.

        It is if the plain problem is wrong too, in the same results. A relation between two calls
        says something about right results alone: those of a gradient that is twice too large may
        differ by more than the tolerance of the right one, which may be 0.
        """
        if self.alters:
            return trial.fails_unaltered(recipe)
        related = err.related if isinstance(err, Violation) else frozenset()
        return bool(related) and related <= trial.disagreements(recipe)

    @property
    def about(self) -> str:
        """The rule in one line."""
        return (self.check.__doc__ or "").strip().splitlines()[0]


REGISTER: dict[str, Property] = {}
"""Every rule that an imported module has registered, by its id."""
ON_REQUEST: dict[str, Property] = {}
"""The same of rules that a check without `only` does not ask."""


def rule(
    name: str,
    section: str,
    *,
    unless: Condition = _always,
    draw: Sampling = _anything,
    level: Level = "values",
    alters: bool = False,
    recipes: Callable[[Trial, int, int], list[Recipe]] | None = None,
    last: bool = False,
    share: int = 10,
    on_request: bool = False,
) -> Callable[[Check], Check]:
    """Register the decorated function as the rule `name`; arguments as of `Property`.

    One `on_request` is asked by its name alone.
    """
    table = ON_REQUEST if on_request else REGISTER

    def register(check: Check) -> Check:
        table[name] = Property(
            name, section, check, unless, draw, level, alters, recipes, last, share
        )
        return check

    return register
