"""The answer in words: how two implementations differ, in a few lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from npattn.testing.comparison import short
from npattn.testing.difference.factors import PLAIN, REORDERED
from npattn.testing.difference.measure import Measurement
from npattn.testing.difference.precision import EXPLAINED
from npattn.testing.difference.record import Change, ConventionDifference, ResultDifference
from npattn.testing.difference.wrong import Wrong

EXPLAINS = "the difference is explained"
NEARER = 1.5
"""Least ratio of the errors of two implementations at which one of them is called nearer."""
PASSES = {"forward": "the forward pass", "gradients": "the gradients"}


def describe_conventions(
    differing: Sequence[ConventionDifference], wrong: Sequence[Wrong]
) -> Iterator[str]:
    """Say which conventions differ, and which are followed without being declared."""
    if differing:
        names = ", ".join(one.topic for one in differing)
        yield f"They follow different conventions: {names}. Where these matter nothing is compared."
    for name, side in zip("AB", wrong, strict=True):
        if side.follows:
            yield f"{name} follows {side.follows}, which it does not declare."


def describe_distance(measured: Measurement) -> Iterator[str]:
    """Say how far the results are apart, and which are nearer to the exact ones."""
    results = measured.results()
    problems = f"{measured.problems} problems" if measured.problems != 1 else "1 problem"
    if not any(one.elements for one in results):
        yield f"Nothing could be compared on {problems}."
        return
    names = _join([one.name for one in results])
    if all(one.same == one.elements for one in results):
        yield f"They agree bit by bit in {names} on {problems}."
        return
    worst = max(results, key=lambda one: (one.ratio, one.ulps))
    if math.isinf(worst.ratio) and worst.place is None:
        yield f"They return {worst.name} in different shapes."
    elif math.isinf(worst.ratio):
        yield f"They differ in {worst.name}, where one is a number and the other is not."
    else:
        size = f"{short(worst.ratio)} of the tolerance, {short(worst.ulps)} ulps, in {worst.name}"
        yield f"They differ by at most {size} ({problems}; compared: {names})."
    if all(x.a_ratio <= 1 and x.b_ratio <= 1 for x in results):
        yield from _nearer(results)


def _nearer(results: Sequence[ResultDifference]) -> Iterator[str]:
    """Yield a sentence on the side with the smaller error over all results; none if both are 0."""
    a = math.sqrt(sum(x.elements * x.a_rms**2 for x in results))
    b = math.sqrt(sum(x.elements * x.b_rms**2 for x in results))
    if min(a, b) == 0:
        if a != b:
            yield f"{'A' if a == 0 else 'B'} has no error at all."
        return
    if max(a, b) >= NEARER * min(a, b):
        factor = short(float(f"{max(a, b) / min(a, b):.2g}"))
        yield f"{'A' if a < b else 'B'} is {factor} times nearer to the exact values."
    else:
        yield "Both are as near to the exact values."


def describe_wrong(
    results: Sequence[ResultDifference], wrong: Sequence[Wrong], explained: bool
) -> Iterator[str]:
    """Say which results are out of tolerance, and why; a precision only if no step explains it."""
    for name, side in zip("AB", wrong, strict=True):
        ratios = {x.name: x.a_ratio if name == "A" else x.b_ratio for x in results}
        bad = {x: ratio for x, ratio in ratios.items() if not ratio <= 1}
        if not bad:
            continue
        largest = max(bad.values())
        finite = f"up to {short(largest)} × tolerance"
        size = "NaN, inf or another shape" if math.isinf(largest) else finite
        causes = "; ".join((*side.causes, *side.steps, *(() if explained else side.precision)))
        yield f"{name} is wrong in {_join(list(bad))} ({size}){causes and ': '}{causes}."


def describe_explanation(
    explained: Sequence[Mapping[str, str]],
    unexplained: Mapping[str, float | None],
    factors: Sequence[Change],
    right: bool,
) -> Iterator[str]:
    """Say which rounding of which side explains the difference, or that an order does.

    Of wrong results, not `right`, other causes are searched for.
    """
    silent = []
    for name, text in PASSES.items():
        share = unexplained.get(name)
        if share is None:
            continue
        if share > 1 - EXPLAINED:
            silent.append(text)
            continue
        found = zip("AB", (by_name.get(name) for by_name in explained), strict=True)
        causes = [f"in {side} {one}" for side, one in found if one]
        percent = short(math.floor(1000 * (1 - share)) / 10)
        yield f"In {text} {EXPLAINS} ({percent} %): {'; '.join(causes)}."
    if silent and right:
        yield f"In {_join(silent)} no rounding of one step explains it{_order(factors)}."


def _order(factors: Sequence[Change]) -> str:
    """Say whether another order of keys moves one of them half as far as the two are apart."""
    by_factor = {one.factor: one for one in factors}
    apart = by_factor[PLAIN].apart if factors else ""
    if isinstance(apart, str):
        return ""
    unit = 0 if apart[0] else 1  # in ulps, where both are within the rounding of the result
    moves = {"A": by_factor[REORDERED].a, "B": by_factor[REORDERED].b}
    far = [n for n, x in moves.items() if not isinstance(x, str) and 2 * x[unit] >= apart[unit]]
    sums = f"; another order of keys moves {' and '.join(far)} as far"
    return f"{sums}: it has the size of roundings" if far else ""


def describe_factors(factors: Sequence[Change]) -> Iterator[str]:
    """Say of each side which factors change its bits."""
    moved: dict[str, list[str]] = {}
    for name in "AB":
        moves = {x.factor: x.a if name == "A" else x.b for x in factors}
        changes = [x for x, move in moves.items() if not isinstance(move, str) and move[1]]
        moved.setdefault(", ".join(changes), []).append(name)
    for text, names in moved.items() if factors else ():
        yield f"The bits of {' and '.join(names)} change with {text or 'no factor that was tried'}."


def describe_lost(measured: Measurement) -> Iterator[str]:
    """Say which problems were not answered."""
    for name, lines in zip("AB", measured.lost, strict=True):
        if lines:
            count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
            yield f"{name} did not answer {count}: {lines[0]}"


def _join(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
