"""Causes that no single call shows: exceptions, state between calls, views, sums in any order.

Also a function that is not attention at all: one sentence in place of causes that explain nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from npattn.errors import NpattnError
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.diagnosis.borders import Neighbours, draw_again
from npattn.testing.diagnosis.elements import (
    Asked,
    hides_nothing,
    list_hiding,
    say_problems,
)
from npattn.testing.diagnosis.evidence import collect
from npattn.testing.diagnosis.explore import tame
from npattn.testing.diagnosis.place import EVERYWHERE
from npattn.testing.diagnosis.sentences import STATE
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules import RULES
from npattn.testing.trial import Trial, Violation

CONDUCT = ("change", "bits", "moves", "after", "calls", "shape")
"""Kinds of failures that one call cannot show, or whose values are right."""
STEPS = {"change": "state", "after": "state", "calls": "state", "bits": "state", "shape": "layout"}
SECONDS = 2.0
"""Processor time in which it is asked on which problems a rule on conduct fails."""
CALLS = 8
"""Number of calls on one problem that show whether results vary."""


def state_cause(outcomes: Sequence[Outcome], name: str) -> Cause:
    """Return the cause of outcomes that depend on other calls."""
    where, amount = _where(outcomes), "depends on earlier calls"
    return Cause(STATE[name], ids(outcomes), "state", where, amount, name=name)


def _where(outcomes: Iterable[Outcome]) -> str:
    """Return "everywhere" if a problem without options fails; "" if none does."""
    is_plain = any(o.sampled is None or not options_on(o.sampled) for o in outcomes)
    return EVERYWHERE if is_plain else ""


def _ask_rule(trial: Trial, outcomes: Sequence[Outcome]) -> Asked | None:
    """Ask the rule of the first outcome on which problems it fails; None if it cannot be asked."""
    outcome = outcomes[0]
    rule, recipe = RULES.get(outcome.rule), outcome.sampled
    if rule is None or recipe is None or "then changed" in outcome.recipe:
        return None

    def breaks(recipe: Recipe) -> bool | None:
        try:
            rule.check(trial.fresh(), recipe)
            problem = trial.fresh().problem(recipe)
        except Violation as err:
            return err.kind == outcome.kind or None
        except (ImplementationError, NpattnError):
            return None
        idle = (hides_nothing(trial, problem, name) for name in list_hiding(problem))
        return None if any(idle) else False

    def fails(recipe: Recipe) -> bool | None:
        if not trial.space.takes(recipe) or trial.refuses_recipe(recipe):
            return None
        answers = map(breaks, (recipe, *draw_again(recipe)))
        return next((x for x in answers if x is not None), None)

    asked = Asked.of(Neighbours(trial, recipe, ask=fails), [], SECONDS)
    if asked is not None and any(asked.fails_on(o.sampled) is False for o in outcomes):
        asked = replace(asked, held=False)
    return asked


def exception_causes(outcomes: Iterable[Outcome]) -> Iterator[Cause]:
    """Yield a cause for each type and place of an exception, whatever numbers its text has."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        line = first_line(outcome.message)
        line = line if outcome.has_ended else re.sub(r"\d+", "", line)
        groups.setdefault(outcome.raised or line, []).append(outcome)
    for key, group in groups.items():
        text, origin = first_line(group[0].message), group[0].raised
        place = origin.rpartition(" at ")[2]
        text += f" ({place})" if place and place not in text else ""
        text = text if group[0].has_ended else f"it raises: {text}"
        yield Cause(text, ids(group), "refusal", name=origin or key)


def conduct_causes(trial: Trial, outcomes: Iterable[Outcome]) -> Iterator[Cause]:
    """Yield the causes of outcomes whose values are right in a call of their own."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in [o for o in outcomes if o.kind in CONDUCT]:
        kind = "unordered" if _varies_within_tolerance(trial, outcome) else outcome.kind
        groups.setdefault(kind, []).append(outcome)
    for kind, group in groups.items():
        if kind in STATE:
            cause = state_cause(group, kind)
        else:
            text = first_line(group[0].message).rstrip(":")
            step = "precision" if " has dtype " in text else STEPS.get(kind, "")
            like = [o for other in groups for o in groups[other] if STEPS.get(other) == step]
            cause = Cause(text, ids(group), step, _where(like or group), name=f"{kind}: {text}")
        asked = None if cause.where else _ask_rule(trial, group)
        if asked is not None:
            where, pair = say_problems(asked), asked.near.pair(asked.place)
            text = f"{cause.text} (where {where})" if where else cause.text
            cause = replace(cause, text=text, where=where, passes_when=asked.condition, pair=pair)
        yield cause


def _varies_within_tolerance(trial: Trial, outcome: Outcome) -> bool:
    """Return True if repeated calls on a problem are all correct, and differ in their bits."""
    alone = replace(outcome, kind="value")
    calls = [collect(trial, alone) for _ in range(CALLS)]
    correct = [call for call in calls if call is not None and not call.wrong]
    return len(correct) == CALLS and not all(call.equals(correct[0]) for call in correct)


def first_line(message: str) -> str:
    """Return the first line of a message."""
    return message.splitlines()[0] if message else ""


def ids(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """Return the ids of outcomes."""
    return tuple(o.id for o in outcomes)


PLAIN_PROBLEMS = 12
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
    cases = trial.cases(Pools(trial.space), 0, 20 * PLAIN_PROBLEMS)
    plain = (tame(r) for r in cases if not options_on(r))
    for recipe in islice(plain, PLAIN_PROBLEMS):
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
