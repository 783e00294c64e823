"""Two implementations that are not plain attention, compared with each other.

The tolerance is that of another function then. On normal inputs, results of the same function
differ by roundings of their sums: by (D + E + S + T) u of the largest element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.bounds.ulp import real
from npattn.testing.cases.recipe import Recipe
from npattn.testing.compare import short
from npattn.testing.diagnosis.evidence import rounding_of
from npattn.testing.diagnosis.explore import explore_by, sample
from npattn.testing.diagnosis.place import EVERYWHERE, Sample, learn_and_confirm
from npattn.testing.difference.measure import Measurement, share_cotangents
from npattn.testing.difference.sides import Sides
from npattn.testing.difference.wrong import Wrong

MOST = 0.5
"""Share of the problems beyond which a function with a wrong o is not plain attention."""
LARGE = 2**16
"""Scores of the largest problem that is varied to find out where they differ."""


def is_plain(measured: Measurement, wrong: Sequence[Wrong]) -> bool:
    """Return False if o of both is wrong nearly everywhere, and nothing known explains it."""
    shares = [sum("o" in e.wrong for e in own) for own in measured.evidence]
    unknown = not any(own.causes or own.follows or own.precision for own in wrong)
    return not (unknown and measured.problems and min(shares) > MOST * measured.problems)


@dataclass
class Gap:
    """Largest difference of two implementations on a problem, in units of the largest element."""

    name: str = ""
    size: float = 0.0
    allowed: float = 0.0
    line: str = ""

    @property
    def ratio(self) -> float:
        return self.size / self.allowed if self.allowed else 0.0


def compare_pair(sides: Sides, recipes: Sequence[Recipe]) -> tuple[bool, tuple[str, ...]]:
    """Compare two implementations with each other, on normal inputs.

    Returns
    -------
    bool
        True if they agree but for roundings.
    tuple of str
        What that showed.
    """
    normal = [replace(r, distribution="normal", view="contiguous") for r in recipes]
    gaps = {r: gap for r in dict.fromkeys(normal) if (gap := _measure(sides, r)) is not None}
    lines = [
        "Neither is plain attention: o of both is wrong on most problems, and no known mistake or "
        "convention explains it. They are compared with each other, on normal inputs."
    ]
    if not gaps:
        return False, (*lines, "Nothing could be compared.")
    worst = max(gaps.values(), key=lambda gap: gap.ratio)
    size = f"{short(worst.size)} of the largest value of {worst.name}"
    different = [r for r, gap in gaps.items() if gap.ratio > 1]
    if not different:
        text = f"They agree on {len(gaps)} problems: they differ by at most {size}"
        return True, (*lines, f"{text}, as roundings of the sums do.")
    text = f"They differ on {len(different)} of {len(gaps)} problems, by up to {size}"
    lines += [f"{text}: roundings of the sums explain {short(worst.allowed)}.", worst.line]
    return False, (*lines, *_find_place(sides, different))


def _measure(sides: Sides, recipe: Recipe) -> Gap | None:
    """Return the largest difference on a problem; None if one of them does not answer it."""
    cotangents = share_cotangents(sides, recipe)
    answers: list[Results] = []
    for trial in (sides.a, sides.b):
        try:
            with trial.implementation.framework.one_thread():
                answers.append(trial.results(trial.problem(recipe), cotangents))
        except ImplementationError:
            return None
    problem, gap = sides.a.problem(recipe), Gap()
    allowed = rounding_of(sides.a, problem)
    for name in (n for n in answers[0] if n in answers[1]):
        first, second = (real(x[name]).astype(np.float64) for x in answers)
        own = _compare(name, first, second, allowed)
        if own.ratio >= gap.ratio:
            gap = replace(own, line=f"{own.line}, sampled as {recipe!r}.problem()")
    return gap


def _compare(name: str, a: Array, b: Array, allowed: float) -> Gap:
    """Compare one result; a NaN of one alone is infinitely far away."""
    if a.shape != b.shape:
        return Gap(name, np.inf, allowed, f"{name} has shape {a.shape} of A, {b.shape} of B")
    if not a.size:
        return Gap(name, 0.0, allowed)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0, abs(a - b))
    apart = np.where(np.isnan(apart), np.inf, apart)
    index = np.unravel_index(int(apart.argmax()), apart.shape)
    top = float(np.max(abs(a), initial=0.0, where=np.isfinite(a))) or 1.0
    place = ", ".join(map(str, map(int, index)))
    line = f"{name}[{place}]: A {a[index]:.9g}, B {b[index]:.9g}"
    return Gap(name, float(apart[index]) / top, allowed, line)


# --- where they differ ----------------------------------------------------------------------------


def _find_place(sides: Sides, different: Sequence[Recipe]) -> Iterator[str]:
    """Say where they differ, if a condition separates such problems from the others."""
    base = min(different, key=lambda r: (r.T * r.S, r.D))
    if base.T * base.S > LARGE or sides.a.space.few_shapes:
        return
    trial = sides.a.fresh()

    def look(recipe: Recipe) -> Sample | None:
        if not trial.space.takes(recipe) or trial.refuses_recipe(recipe):
            return None
        gap = _measure(sides, recipe)
        if gap is None:
            return None
        own = np.asarray(gap.ratio > 1), np.asarray(True)
        return sample(trial, recipe, trial.problem(recipe), "", *own)

    first = look(base)
    samples = [] if first is None else [first, *explore_by(look, trial, base)]
    place = learn_and_confirm(samples)
    if place is not None and place.text != EVERYWHERE and not place.errors_on(samples):
        yield f"They differ only where {place.text}."
