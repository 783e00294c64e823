"""A function that is not attention at all: one sentence in place of causes that explain nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.explore import tame
from npattn.testing.diagnosis.place import EVERYWHERE
from npattn.testing.report.cause import Cause
from npattn.testing.trial import Trial

PLAIN = 12
"""Problems without options that are asked."""
MOST = 0.75
"""Share of them with a wrong o beyond which it is no attention."""


def say_unlike(trial: Trial, causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes, or one in their place if the function is not attention at all.

    That is so if o is wrong on most plain problems, and its cause knows neither an amount nor a
    place: errors of the size of roundings have the step "precision", which is known.
    """
    about_o = [c for c in causes if any(x.startswith("agreement-o[") for x in c.rules)]
    known = [c for c in about_o if c.is_known and (c.amount or c.where not in ("", EVERYWHERE))]
    known += [c for c in about_o if c.step == "precision"]
    if not about_o or known or any(c.conventions is not None for c in causes):
        return list(causes)
    wrong = tried = 0
    plain = (tame(r) for r in trial.cases(Pools(trial.space), 0, 20 * PLAIN) if not options_on(r))
    for recipe in islice(plain, PLAIN):
        try:
            wrong += not trial.agreement(replace(recipe, view="contiguous"))["o"].passed
            tried += 1
        except ImplementationError:
            continue  # it refuses such a problem
    if wrong <= MOST * tried:
        return list(causes)
    text = (
        f"It is not attention: o is wrong on {wrong} of {tried} plain problems, by nothing that is "
        "known. A function of something else is judged by a right one: check(f, reference=g, "
        "inputs=...), or npattn check F --reference G [docs/how-to/with-a-reference.md]"
    )
    rules = tuple(rule for cause in causes for rule in cause.rules)
    return [replace(about_o[0], text=text, rules=rules)]
