"""Causes of results that are out of tolerance: conventions that are not declared, and mistakes.

If neither of two implementations is plain attention, B is judged by A, as by any reference.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from npattn.conventions import Conventions
from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import short
from npattn.testing.diagnosis.amount import describe
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.diagnosis.explore import PLAIN, Point
from npattn.testing.diagnosis.locate import locate
from npattn.testing.diagnosis.search import search
from npattn.testing.diagnosis.sentences import BACKWARD, say
from npattn.testing.difference.measure import Measurement
from npattn.testing.power import conclude, find_unjudged
from npattn.testing.reference.check import Found
from npattn.testing.reference.intermediates import Watched
from npattn.testing.reference.pairs import AttentionPair
from npattn.testing.reference.search import Time
from npattn.testing.reference.sides import Sides
from npattn.testing.reference.spread import ALARM
from npattn.testing.trial import Trial

FEW = 6
"""Problems on which the causes are searched for, the smallest."""


@dataclass(frozen=True)
class Wrong:
    """Why results of one implementation are out of tolerance."""

    # those that it follows, as far as its results tell: the declared ones but for `follows`
    conventions: Conventions
    follows: str = ""  # those that it does not declare, "causal=top_left"
    causes: tuple[str, ...] = ()  # what else reproduces its results, in words
    precision: tuple[str, ...] = ()  # formats whose roundings have the size of its errors, in words
    # those that are read to be wrong where nothing reproduces its results, in words
    steps: tuple[str, ...] = ()


def explain_wrong(trial: Trial, evidence: Sequence[Evidence]) -> Wrong:
    """Search for what reproduces wrong results, as reports on failures do."""
    declared = trial.conventions
    smallest = sorted(evidence, key=lambda e: e.size)[:FEW]
    found, rest = search(trial.fresh(), smallest) if smallest else ([], [])
    changes: dict[str, Any] = {}
    names = []
    for candidate in [c for c, _ in found if c.conventions is not None]:
        own = vars(candidate.conventions).items() - vars(declared).items()
        if not dict(own).keys() & changes.keys():
            changes |= dict(own)
            names.append(candidate.name)
    others = [c for c, _ in found if c.conventions is None]
    return Wrong(
        replace(declared, **changes),
        ", ".join(names),
        tuple(c.text for c in others if c.step != "precision"),
        tuple(c.text for c in others if c.step == "precision"),
        () if found else _read(rest),
    )


def _read(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    """Return the first step that is wrong on each problem, and by how much, in words."""
    steps: dict[tuple[str, bool], list[Point]] = {}
    for e in evidence:
        if (fault := locate(e)) is not None:
            steps.setdefault((fault.step, fault.backward), []).append(Point(PLAIN, e, fault))
    return tuple(
        say(step, BACKWARD if backward else "", describe(readings))
        for (step, backward), readings in steps.items()
    )


MOST = 0.5
"""Share of the problems beyond which a function with a wrong o is not plain attention."""
NEITHER = (
    "Neither is plain attention: o of both is wrong on most problems, and no known mistake or "
    "convention explains it. B is judged by A as its reference, on normal inputs."
)


def is_plain(measured: Measurement, wrong: Sequence[Wrong]) -> bool:
    """Return False if o of both is wrong nearly everywhere, and nothing known explains it."""
    shares = [sum("o" in e.wrong for e in side) for side in measured.evidence]
    unknown = not any(side.causes or side.follows or side.precision for side in wrong)
    return not (unknown and measured.problems and min(shares) > MOST * measured.problems)


def compare_pair(
    sides: Sides, recipes: Sequence[Recipe], accept: Collection[str] = ()
) -> tuple[bool, str, tuple[str, ...]]:
    """Compare two implementations with each other, on normal inputs.

    Returned are whether B agrees with A but for roundings, why there is no verdict ("" if there is
    one), and what that showed.
    """
    normal = dict.fromkeys(replace(r, distribution="normal", view="contiguous") for r in recipes)
    pair = AttentionPair(sides, Watched(sides.a.implementation.f, ""))
    found = Found(pair, sides.a.space.dtype, ALARM / max(len(normal), 1))
    found.ask(iter(normal), Time(len(normal), math.inf, 0.0))
    conclusion = conclude(
        failed=bool(found.failed),
        tested=bool(found.tried),
        unjudged=find_unjudged(found.union()),
        accept=accept,
    )
    return conclusion.passed, conclusion.reason, (NEITHER, *_describe(found))


def _describe(found: Found) -> Iterator[str]:
    """Yield sentences: they agree, or differ on a case, which is shrunk, and where."""
    if not found.tried:
        yield "Nothing could be compared."
        return
    if not found.failed:
        worst = max(found.worst.values(), default=0.0)
        yield (
            f"They agree on {found.tried} problems: {short(worst)} of what roundings explain, at "
            "most."
        )
        return
    found.shrink()
    case, comparison = max(found.failed.values(), key=lambda x: x[1].ratio)
    yield f"They differ on {found.wrong} of {found.tried} problems, beyond what roundings explain."
    yield f"{comparison}, sampled as {case!r}.problem()"
    place, _ = found.find_place()
    if place:
        yield f"It {place}."
