"""Rules about the first calls ever made, and what they were refused [15]."""

from __future__ import annotations

from dataclasses import replace

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.register import requires, rule
from npattn.testing.trial import Trial, Violation


def _plainest(trial: Trial, seed: int, examples: int) -> list[Recipe]:
    return [trial.space.base()]


@rule(
    "first-calls",
    "15",
    level="conduct",
    unless=requires(lambda t: t.first_calls, "no first calls were recorded"),
    recipes=_plainest,
    last=True,
)
def first_calls(trial: Trial, recipe: Recipe) -> float | None:
    """The first calls give results as right as later ones.

    They are a call that finds out the framework, where nothing else tells, and the judge's probes.
    Each is compared with the oracle. If one is wrong that is
    right when it is made again, its error is reported here; what stays wrong breaks other rules.
    Broken by autotuners that return a trial of theirs, by buffers that are filled later, by
    a lazy initialisation that the first calls do not wait for.
    """
    ratio, wrong, first = 0.0, 0, None
    for number, (problem, cotangents, results) in enumerate(trial.first_calls, 1):
        first_trial, dtype = trial, problem.q.dtype.name
        if dtype != trial.space.dtype:  # that in which the framework was found out
            space = replace(trial.space, dtype=dtype)
            first_trial = replace(trial, space=space, rounding=Rounding.undeclared(dtype), memo={})
        comparisons = first_trial.compare(results, problem, cotangents)
        failed = [c for c in comparisons.values() if not c.passed]
        if not failed:
            ratio = max([ratio, *(c.ratio for c in comparisons.values())])
            continue
        again = first_trial.against_oracle(problem, cotangents)
        if all(again[c.name].passed for c in failed):
            wrong += 1
            first = first or (number, problem, cotangents, failed)
    if first is None:
        return ratio
    number, problem, cotangents, failed = first
    text = f"the first calls were wrong, and right when made again: {wrong} of the first "
    text += f"{len(trial.first_calls)}, call {number} before the others"
    worst = max(c.ratio for c in failed)
    lines = "\n".join(str(c) for c in failed)
    raise Violation(f"{text}:\n{lines}", problem, cotangents, ratio=worst)


@rule(
    "refused-again",
    "15",
    level="conduct",
    unless=requires(lambda t: t.refusals, "nothing was refused"),
    recipes=_plainest,
    last=True,
)
def refused_again(trial: Trial, recipe: Recipe) -> float:
    """Calls that were refused once are refused whenever they are made.

    What is refused is not tested, so a refusal has to be kept. Broken by a limit on the number of
    calls, by a library that is loaded late, and by whoever refuses only while it is probed.
    """
    for problem, cotangents, view, text in trial.refusals:
        try:
            trial.implementation.forward(problem, view)
            if cotangents is not None:
                trial.implementation.gradients(problem, cotangents, view)
        except ImplementationError:
            continue
        message = f"refuses sometimes: it {text} first, and answered the same call later"
        raise Violation(message, problem, cotangents)
    return 0.0
