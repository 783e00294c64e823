"""Causes of what no candidate reproduces: exceptions, conduct, and the unexplained."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from npattn.mistakes import MISTAKES
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.diagnosis.evidence import Evidence, collect
from npattn.testing.diagnosis.mistakes import (
    breaks_alike,
    implementation_of,
    is_suspected_alike,
    predict_by,
)
from npattn.testing.levels import REQUIRED
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome
from npattn.testing.trial import GRADIENTS, Trial

CONDUCT = ("change", "bits", "moves", "after", "calls", "shape")
"""Kinds of failures that one call cannot show, or whose values are right."""
FAMILIES = ("dtype", "dtypes", "memory", "state", "cache")
"""Families of known mistakes that show in several calls, in views or in dtypes."""
ROUNDING = "precision"
"""Family of known mistakes whose errors may be smaller than the tolerance of each element."""
AFTER = "a call is right alone, and wrong after another one: something is kept between calls"
UNSTEADY = "two calls on the same problem give different results"
UNORDERED = (
    "two calls on the same problem differ in their last bits, within the tolerance: sums are added "
    "in no fixed order, as by atomic additions"
)
CALLS = 8
"""Number of calls on one problem that show whether results vary, and a mistake of some calls."""


def conduct_causes(
    trial: Trial,
    outcomes: Sequence[Outcome],
    wrong: Mapping[str, Evidence],
    without: Container[str],
    unsteady: Evidence | None = None,
) -> Iterator[Cause]:
    """Yield the causes of outcomes that no candidate reproduces.

    Parameters
    ----------
    trial : Trial
    outcomes : sequence of Outcome
    wrong : mapping of str to Evidence
        By rule, what is out of tolerance in a single call.
    without : container of str
        Names of known mistakes that are no candidates.
    unsteady : Evidence, optional
        Wrong results of a problem on which two calls give different results.
    """
    left = list(outcomes)
    yield from _exceptions(o for o in left if o.kind == "raised")
    left = [o for o in left if o.kind != "raised"]
    if unsteady is not None and left:
        named = (c for c in _mistakes(trial, left, without) if _recurs(c.name, unsteady))
        cause = next(named, Cause(UNSTEADY, (), "conduct", "unsteady"))
        yield replace(cause, rules=_ids(left))
        return
    # Other shapes may be wrong in single calls: that may be all there is to what comes after.
    alone = [o for o in left if o.rule not in wrong and not (wrong and o.kind == "after")]
    unordered = [o for o in alone if o.kind in CONDUCT and _varies_within_tolerance(trial, o)]
    if unordered:
        yield Cause(UNORDERED, _ids(unordered), "conduct", "unordered")
    left, alone = ([o for o in x if o not in unordered] for x in (left, alone))
    for cause in _mistakes(trial, alone, without):
        yield cause
        left, alone = ([o for o in x if o.id not in cause.rules] for x in (left, alone))
    conduct = [o for o in alone if o.kind in CONDUCT]
    for kind in dict.fromkeys(o.kind for o in conduct):
        group = [o for o in conduct if o.kind == kind]
        text = AFTER if kind == "after" else _first_line(group[0].message)
        yield Cause(text, _ids(group), "conduct", kind)
    left = [o for o in left if o not in conduct]
    for cause in _roundings(trial, [o for o in left if o.rule not in wrong], without):
        yield cause
        left = [o for o in left if o.id not in cause.rules]
    if left:
        yield Cause(_describe_rest(left, wrong), _ids(left), "unexplained", share=0.0)


def _exceptions(outcomes: Iterable[Outcome]) -> Iterator[Cause]:
    """Yield a cause for each type and place of an exception, whatever numbers its text has."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        line = _first_line(outcome.message)
        line = line if outcome.has_ended else re.sub(r"\d+", "", line)
        groups.setdefault(outcome.raised or line, []).append(outcome)
    for group in groups.values():
        text, origin = _first_line(group[0].message), group[0].raised
        place = origin.rpartition(" at ")[2]
        text += f" ({place})" if place and place not in text else ""
        text = text if group[0].has_ended else f"it raises: {text}"
        yield Cause(text, _ids(group), "raised", origin)


def _varies_within_tolerance(trial: Trial, outcome: Outcome) -> bool:
    """Return True if repeated calls on a problem are all correct, and differ in their bits."""
    alone = replace(outcome, kind="value")
    calls = [collect(trial, alone) for _ in range(CALLS)]
    correct = [call for call in calls if call is not None and not call.wrong]
    return len(correct) == CALLS and not all(call.equals(correct[0]) for call in correct)


def _recurs(name: str, evidence: Evidence) -> bool:
    """Return True if further calls on a problem return what repeated calls of a mistake return."""
    assert evidence.outcome is not None
    implementation = implementation_of(MISTAKES[name], evidence.trial.implementation)
    try:
        predicted = [[*predict_by(implementation, evidence)] for _ in range(CALLS)]
    except ImplementationError:
        return False
    calls = (collect(evidence.trial, evidence.outcome) for _ in range(CALLS // 2))
    return all(own is not None and any(map(own.reproduced_by, predicted)) for own in calls)


def _mistakes(
    trial: Trial, outcomes: Sequence[Outcome], without: Container[str]
) -> Iterator[Cause]:
    """Yield known mistakes that break the same rules in the same way."""
    known = [m for m in MISTAKES.values() if m.family in FAMILIES and m.name not in without]
    left = [o for o in outcomes if o.kind in CONDUCT]
    while left:
        alike = [m for m in known if breaks_alike(m, trial, left[0])]
        groups = {m.name: [o for o in left if breaks_alike(m, trial, o)] for m in alike}
        if groups:
            name, *others = sorted(groups, key=lambda name: -len(groups[name]))
            also = tuple(n for n in others if groups[n] == groups[name])
            text = MISTAKES[name].sentence.rstrip(".")
            yield Cause(text, _ids(groups[name]), "mistake", name, also=also)
            left = [o for o in left if o not in groups[name]]
        left = left if groups else left[1:]


def _roundings(
    trial: Trial, outcomes: Sequence[Outcome], without: Container[str]
) -> Iterator[Cause]:
    """Yield known mistakes of rounding that are suspected as an outcome is."""
    known = [m for m in MISTAKES.values() if m.family == ROUNDING and m.name not in without]
    for outcome in (o for o in outcomes if o.status == "suspect"):
        alike = [m for m in known if is_suspected_alike(m, trial, outcome)]
        if alike:
            text, also = alike[0].sentence.rstrip("."), tuple(m.name for m in alike[1:])
            yield Cause(text, _ids([outcome]), "mistake", alike[0].name, also=also)


def _describe_rest(outcomes: Sequence[Outcome], wrong: Mapping[str, Evidence]) -> str:
    required = [o for o in outcomes if o.level in REQUIRED] or outcomes
    names = {name for o in required if o.rule in wrong for name in wrong[o.rule].wrong}
    results = [name for name in ("o", "lse", "weights", "max_score", *GRADIENTS) if name in names]
    if not results:
        return f"no known mistake reproduces this: {_first_line(outcomes[0].message)}"
    states: dict[str, list[str]] = {}
    for name in results:
        states.setdefault(_describe_values(required, name), []).append(name)
    texts = "; ".join(f"{', '.join(own)} {state}" for state, own in states.items())
    return f"no known mistake reproduces this: {texts}"


def _describe_values(outcomes: Sequence[Outcome], name: str) -> str:
    """Say whether the worst values of a result are numbers."""
    got = [c.got for o in outcomes for c in o.comparisons if c.name == name]
    return "NaN" if got and all(math.isnan(abs(x)) for x in got) else "out of tolerance"


def _first_line(message: str) -> str:
    return message.splitlines()[0] if message else ""


def _ids(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    return tuple(o.id for o in outcomes)
