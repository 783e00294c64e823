"""Two implementations that are not plain attention: B is judged by A, as by any reference."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import short
from npattn.testing.difference.measure import Measurement
from npattn.testing.difference.wrong import Wrong
from npattn.testing.power import conclude, find_unjudged
from npattn.testing.reference.check import Found
from npattn.testing.reference.intermediates import Watched
from npattn.testing.reference.pairs import AttentionPair
from npattn.testing.reference.search import Time
from npattn.testing.reference.sides import Sides
from npattn.testing.reference.spread import ALARM

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
