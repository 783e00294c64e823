"""Calls of the probe: each is recorded, and what it raises is a refusal or an error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from npattn.problem import Cotangents, Problem
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.cases.classes import classes_of_recipe
from npattn.testing.cases.recipe import VIEWS, Recipe, repeat_for_view
from npattn.testing.levels import Level
from npattn.testing.trial import Refusal, Trial, Violation

FIRST_CALLS = 64
"""Calls, and refused calls, that are recorded, and made again by a rule."""


def level_of(structure: str) -> Level:
    """Return the level of the rules that structure belongs to, by its name."""
    if structure in VIEWS:
        return "conduct"
    if not structure.endswith("= 0"):
        return "values"
    return "edges" if structure[0] in "BTS" else "degenerate"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with what an implementation accepts."""

    rule: str  # "structure", "gradients", or "option-" and the option
    status: Literal["failed", "error", "crashed", "timed out", "not applicable"]
    message: str
    problem: Problem | None = None
    recipe: Recipe | None = None
    error: Exception | None = None
    examples: int = 0  # number of problems that show it
    level: Level = "values"  # one of `LEVELS`


@dataclass
class Probing:
    """State of the probe: the space narrowed so far, and the findings."""

    trial: Trial  # its space is narrowed step by step
    refused: list[str] = field(default_factory=list)  # lines of the report
    findings: list[Finding] = field(default_factory=list)
    # (Problem, Cotangents, Results): the first calls
    calls: list[tuple[Problem, Cotangents, Results]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)  # the first calls that were refused
    offered: frozenset[str] = field(init=False)  # structure to try; a profile may refuse the rest

    def __post_init__(self) -> None:
        self.offered = self.trial.space.structure

    def narrow(self, **changes: Any) -> None:
        """Change the space of the trial."""
        self.trial.space = replace(self.trial.space, **changes)

    def refuse(self, combinations: Iterable[frozenset[str]]) -> None:
        """Exclude classes of options that are refused together, or alone."""
        self.narrow(refused=self.trial.space.refused.union(combinations))

    def call(self, recipe: Recipe, *, gradients: bool = True) -> Results:
        """Return results of one problem, and record them if it is among the first."""
        problem, cotangents = self._arguments(recipe)
        f = self.trial.implementation
        try:
            results = f.forward(problem, recipe.view)
            if gradients and f.has_gradients:
                results += f.gradients(problem, cotangents, recipe.view)
        except ImplementationError as err:
            if err.is_refusal and len(self.refusals) < FIRST_CALLS:
                self.refusals.append(Refusal(problem, err.cotangents, recipe.view, str(err)))
            raise
        if recipe.view == "contiguous" and len(self.calls) < FIRST_CALLS:
            self.calls.append((problem, cotangents, results))
        return results

    def attempt(self, recipe: Recipe) -> ImplementationError | None:
        """Return what a call raises, or None."""
        try:
            self.call(recipe)
        except ImplementationError as err:
            return err
        return None

    def judge(self, recipe: Recipe) -> Violation | None:
        """Return how the answer is wrong, or None; raise what the call raises."""
        results = self.call(recipe)
        problem, cotangents = self._arguments(recipe)
        try:
            self.trial.check(self.trial.compare(results, problem, cotangents), problem, cotangents)
        except Violation as err:
            err.view = recipe.view
            return err
        return None

    def _arguments(self, recipe: Recipe) -> tuple[Problem, Cotangents]:
        problem = self.trial.problem(recipe)
        return repeat_for_view(recipe, problem, self.trial.cotangents(recipe, problem))

    def error(self, rule: str, recipe: Recipe, err: Exception, message: str, level: Level) -> None:
        """Report an exception that is no refusal."""
        problem = self.trial.problem(recipe)
        if isinstance(err, ImplementationError) and err.cotangents is None:
            err.cotangents = self.trial.cotangents(recipe, problem)
        status = err.status if isinstance(err, ImplementationError) else "error"
        self.findings.append(Finding(rule, status, message, problem, recipe, err, 0, level))

    def confirm(self, err: ImplementationError, others: Iterable[Recipe]) -> bool:
        """Return True if it is a refusal: others of its class raise the same, too."""
        if not err.is_refusal:
            return False
        kind = type(err.__cause__)
        raised = (self.attempt(recipe) for recipe in others)
        return all(e is not None and type(e.__cause__) is kind for e in raised)

    def at_other_sizes(self, recipe: Recipe) -> list[Recipe]:
        """Return the same problem at other sizes, round and within what is accepted."""
        space, found = self.trial.space, recipe
        if not {"T", "S"} & set(space.sizes) and recipe.T and recipe.S:
            found = replace(found, T=2 * recipe.T, S=2 * recipe.S)
        if "D" not in space.sizes and "E" not in space.sizes and recipe.D and recipe.E:
            found = replace(found, D=2 * recipe.D, E=2 * recipe.E)
        return [found] if found != recipe else []

    def allows(self, recipe: Recipe) -> bool:
        """Return True if nothing of the recipe is known to be refused."""
        return not self.trial.space.refuses(classes_of_recipe(recipe))
