"""Rule about many small errors together [1, 13]; `systematic_error` has the estimates."""

from __future__ import annotations

import math

from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.register import rule
from npattn.testing.rules.systematic_error import (
    excessive,
    fits,
    measure_errors,
    plain_recipes,
)
from npattn.testing.trial import Suspicion, Trial


def _plain_recipes(trial: Trial, seed: int, examples: int) -> list[Recipe]:
    return plain_recipes(trial.space, seed)[:examples]


def _correlated_errors(trial: Trial) -> str | None:
    """Return why errors under the rounding model are no matter of chance."""
    if trial.implementation.output is not None:
        return "o in 8 bits errs by half of their gap, whatever else is rounded"
    if trial.rounding.accumulator == "truncated":
        return "accumulators that cut off all err to one side"
    if trial.rounding.row_sum != "accumulator":
        return "a row sum that is stored again and again stops to grow"
    if trial.rounding.lse != "accumulator":
        return "a stored lse errs alike for all keys of a row"
    return None


@rule("aggregate", "1, 13", recipes=_plain_recipes, unless=_correlated_errors, last=True)
def aggregate(trial: Trial, recipe: Recipe) -> float:
    """Errors of plain inputs are as large as roundings make them, and look like no mistake.

    Roundings are as good as independent, so that thousands of elements have a mean square error
    near that of the model, and their errors are not those of a scale, gain or key that is slightly
    wrong. The rule finds mistakes that no single element shows: truncation for rounding, a scale
    that is wrong by a thousandth in bfloat16, a key of zeros that takes weight. A finding is a
    suspicion: the estimate rests on randomness, not on a worst case. Broken by weights cut off as
    they are stored, by constants with too few digits, by padding that is not hidden.
    """
    sample = measure_errors(trial, recipe)
    messages = []
    for name in sample.names():
        beyond = excessive(sample, name)
        if beyond is not None:
            size = f"{math.sqrt(beyond):.3g} × those that {trial.rounding.name} predicts"
            messages.append(f"{name}: errors are {size} (root mean square)")
    significant = (fit for fit in fits(sample, trial) if fit.significant)
    messages += map(str, sorted(significant, key=lambda fit: -fit.certainty)[:4])
    if messages:
        evaluation = sample.evaluation
        raise Suspicion("\n".join(messages), evaluation.problem, evaluation.cotangents)
    return 0.0
