"""Errors that a declared rounding would see, where none is declared and little is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.power import Power, describe, union
from npattn.testing.report.outcome import Outcome
from npattn.testing.trial import Trial

PROBLEMS = 2
"""Plain problems on which the models are compared."""


def describe_sharper(trial: Trial, outcomes: Sequence[Outcome], seed: int, examples: int) -> str:
    """Return the errors that ``fused`` would see beside those that are seen; "" if these are small.

    Both are measured on the same plain problems, by their tolerances alone.
    """
    seen = union(o.powers for o in outcomes)
    if not describe(seen) or any(o.failed for o in outcomes):
        return ""
    cases = trial.cases(Pools(trial.space), seed, examples)
    plain = [*islice((recipe for recipe in cases if recipe.has_plain_scores), PROBLEMS)]
    now, then = (find_powers(trial, plain, x) for x in (trial.rounding, Rounding.fused()))
    both = [f"{n} {x.percent} instead of {now[n].percent}" for n, x in then.items() if n in seen]
    return f"{trial.space.dtype} with --rounding fused: {', '.join(both)}" if both else ""


def find_powers(trial: Trial, recipes: Sequence[Recipe], rounding: Rounding) -> dict[str, Power]:
    """Return the power of each result on these problems, by another rounding model."""
    sharper, powers = replace(trial, rounding=rounding, memo={}), []
    for recipe in recipes:
        problem = sharper.problem(recipe)
        cotangents = sharper.cotangents(recipe, problem)
        exact = sharper.exact(problem, cotangents)
        allowed = sharper.tolerance(problem, cotangents, exact)
        powers.append({n: Power.of(exact[n], allowed[n], sharper.space.dtype) for n in exact})
    return union(powers)
