"""Other rounding models: a declared one that is too sharp, and one that is sharp enough to see by.

A declared model that an implementation does not keep is no mistake of its arithmetic: if all its
failures are within a looser model, and their mean square is that of its roundings, that model is
named and no step. The other way round, errors that are suspect together, too large or too alike to
be roundings, hide within the tolerance of an undeclared model: under a sharper one single elements
fail, and their cause can be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome, add_reproducer
from npattn.testing.rules import RULES
from npattn.testing.rules.systematic_error import (
    CERTAIN,
    ErrorSample,
    chi_square,
    excessive,
    measure_errors,
    plain_recipes,
)
from npattn.testing.trial import Suspicion, Trial, Violation


@dataclass(frozen=True, eq=False, kw_only=True)
class Suspected(Evidence):
    """Evidence whose errors are compared by their mean square, in units of their variance."""

    errors: ErrorSample

    @cached_property
    def wrong(self) -> dict[str, float]:
        """Mean square error of each result in which it is excessive."""
        names = [name for name in self.errors.names() if name in self.observed]
        squares = {name: excessive(self.errors, name) for name in names}
        return {name: square for name, square in squares.items() if square is not None}

    @property
    def hides(self) -> bool:
        """True if the errors are less than the tolerance, which then hides them."""
        pairs = ((self.observed[n][0] - self.exact[n], self.tolerance[n]) for n in self.wrong)
        return all(np.square(error).sum() <= np.square(allowed).sum() for error, allowed in pairs)

    def reproduces(self, name: str, predicted: Sequence[Array]) -> bool:
        """Return True if what a prediction leaves of the errors is no more than roundings.

        The variance is computed of exact results: where they are far from the observed, errors
        that become insignificant beside what they were are enough.
        """
        if name not in self.errors.sigma:
            return True
        if predicted[0].shape != self.exact[name].shape:
            return False
        exact: Mapping[str, Array] = {name: predicted[0].astype(np.float64)}
        evaluation = replace(self.errors.evaluation, exact=exact)
        rest = replace(self.errors, evaluation=evaluation)
        before = self.wrong.get(name, np.inf)
        left = float(np.nanmean(chi_square(rest, name)))
        if np.isfinite(left) and left <= before / CERTAIN**4:
            return True
        return excessive(rest, name) is None and left <= before / 2


def collect_suspicion(trial: Trial, outcome: Outcome) -> Suspected | None:
    """Measure the errors of a suspect again; None if their mean square is not what it shows."""
    if outcome.sampled is None:
        return None
    try:
        errors = measure_errors(trial, outcome.sampled)
    except ImplementationError:
        return None
    evaluation = errors.evaluation
    found = Suspected(
        trial,
        evaluation.problem,
        evaluation.cotangents,
        outcome.view,
        {name: [evaluation.results[name]] for name in errors.names()},
        evaluation.exact,
        outcome,
        errors=errors,
    )
    return found if found.wrong else None


SHARP = ("upcast", "fused")
"""Presets under which a suspicion is read, the sharper first."""
LOOSE = ("fused", "eager")
CONFIRMED = 10
"""Further problems on which a looser model must hold."""
SEARCHED = 40
"""Problems among which one that fails under a sharper model is looked for."""
AGREEMENT = ("agreement-o", "agreement-dv", "agreement-dq", "agreement-dk")


def find_looser_model(trial: Trial, outcomes: Sequence[Outcome]) -> Cause | None:
    """Return the preset under which all that failed passes; None if the errors are no roundings.

    The trial has the declared model; `outcomes` are all that failed, or are suspect, in its dtype.
    """
    if not outcomes or trial.rounding == Rounding.undeclared(trial.space.dtype):
        return None
    if any(o.kind == "raised" or o.sampled is None or o.rule not in RULES for o in outcomes):
        return None
    for name in LOOSE:
        if name != trial.rounding.name and _holds(_under(trial, name), outcomes):
            text = (
                f"the errors are larger than those of {trial.rounding.name} may be, and as large "
                f"as those of {name}: passes with --rounding {name}"
            )
            rules = tuple(o.id for o in outcomes)
            where = "everywhere" if any(_is_plain(o.sampled) for o in outcomes) else ""
            return Cause(text, rules, "precision", where, name, name="rounding")
    return None


def _is_plain(recipe: Recipe | None) -> bool:
    """Return True if a problem has no option, and no key head is shared: it fails for neither."""
    return recipe is not None and not options_on(recipe) and recipe.H == recipe.K


def _under(trial: Trial, name: str) -> Trial:
    return replace(trial.fresh(), rounding=Rounding.from_name(name), memo={})


def _holds(trial: Trial, outcomes: Sequence[Outcome]) -> bool:
    """Return True if all rules that failed, and their mean square, pass under a trial's model."""
    for outcome in outcomes:
        rule = RULES[outcome.rule]
        others = (
            rule.recipes(trial, 0, CONFIRMED)
            if rule.recipes is not None
            else trial.cases(Pools(trial.space, **rule.draw(trial)), 1, CONFIRMED)
        )
        recipes = [outcome.sampled, *islice(others, CONFIRMED)]
        if any(_violates(trial, outcome.rule, r) for r in recipes if r is not None):
            return False
    return not any(_violates(trial, "aggregate", r) for r in plain_recipes(trial.space, 0))


def _violates(trial: Trial, rule: str, recipe: Recipe) -> Violation | ImplementationError | None:
    """Return how a rule fails on a recipe; None if it passes, or has nothing to show."""
    if trial.refuses_recipe(recipe):
        return None
    try:
        RULES[rule].check(trial, recipe)
    except (Violation, ImplementationError) as err:
        return err
    return None


def find_sharper_failures(
    trial: Trial, outcome: Outcome
) -> tuple[str, Trial, list[Outcome]] | None:
    """Return a sharper preset, the trial with it, and failures under it; None if there are none.

    The trial has no declared model; the outcome is one of rule aggregate, and suspect.
    """
    if outcome.rule != "aggregate" or trial.rounding != Rounding.undeclared(trial.space.dtype):
        return None
    for name in SHARP:
        sharp, found = _under(trial, name), []
        for rule in AGREEMENT:
            if RULES[rule].unless(sharp) is not None:
                continue
            for recipe in islice(sharp.cases(Pools(sharp.space), 0, SEARCHED), SEARCHED):
                err = _violates(sharp, rule, recipe)
                if isinstance(err, Violation) and not isinstance(err, Suspicion):
                    failed = replace(outcome, rule=rule, status="failed", message=str(err))
                    problem = err.problem or sharp.problem(recipe)
                    found.append(add_reproducer(failed, sharp, problem, recipe, err))
                    break
        if found:
            return name, sharp, found
    return None
