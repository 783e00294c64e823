"""Properties: what many small errors say together."""

from __future__ import annotations

from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.register import rule
from npattn.testing.rules.systematic_error import chi_square, excessive, fits, plain, sampled
from npattn.testing.trial import Suspicion, Trial

__all__: list[str] = []


def _plain(trial: Trial, seed: int, examples: int) -> list[Recipe]:
    return plain(trial.space, seed)[:examples]


def _alike(trial: Trial) -> str | None:
    """Why the errors of this model are no matter of chance."""
    if trial.rounding.accumulator == "truncated":
        return "accumulators that cut off all err to one side"
    if trial.rounding.row_sum != "accumulator":
        return "a row sum that is stored again and again stops to grow"
    if trial.rounding.lse != "accumulator":
        return "a stored lse errs alike for all keys of a row"
    return None


@rule("aggregate", "1, 13", recipes=_plain, unless=_alike)
def aggregate(trial: Trial, recipe: Recipe) -> float:
    """Errors of plain inputs are as large as roundings make them, and look like no mistake.

    Roundings are as good as independent, so thousands of elements have a mean square error near
    what the model says, and their errors are not those of a scale, gain or key that is slightly
    wrong. It sees what no single element shows: truncation for rounding, a scale that is wrong by
    a thousandth in bfloat16, a key of zeros that takes weight. A finding is a suspicion: the
    estimate rests on randomness, not on a worst case. Broken by weights cut off as they are stored,
    by constants with too few digits, by padding that is not hidden.
    """
    sample = sampled(trial, recipe)
    told = []
    for name in sample.names():
        beyond = excessive(chi_square(sample, name))
        if beyond is not None:
            told.append(f"{name}: χ² {beyond:.3g} of what {trial.rounding.name} explains")
    found = sorted((f for f in fits(sample, trial) if f.found), key=lambda f: -f.certainty)
    told += [str(f) for f in found[:4]]
    if told:
        judged = sample.judged
        raise Suspicion("\n".join(told), judged.problem, judged.cotangents)
    return 0.0
