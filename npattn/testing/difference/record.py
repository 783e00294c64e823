"""Difference of two profiles or two implementations: the record, its text and its JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npattn.testing.comparison import short
from npattn.testing.difference.smallest import Example, as_json
from npattn.testing.power import EXIT_CODES, Power

WIDTH = 100
Move = tuple[float, float]
"""A distance in units of the tolerance, and in ulps at the same place."""


@dataclass(frozen=True)
class ConventionDifference:
    """One convention in which A and B differ."""

    topic: str  # a field of `npattn.Conventions`, or "hidden scores"
    a: str  # what it is in each, in words
    b: str
    example: Example | None = None  # the smallest problem found on which it shows


@dataclass(frozen=True)
class Place:
    """One element of a result that A and B compute differently."""

    index: tuple[int, ...]
    a: float
    b: float
    exact: float
    recipe: str  # line that makes the problem, with ``from npattn.testing import Recipe``


@dataclass(frozen=True)
class ResultDifference:
    """One result of A and B on all problems."""

    name: str  # "o", "lse", "weights", "dq", ..
    elements: int  # number compared
    same: int  # number of those with the same bits
    # largest difference in units of the tolerance, roundings of the results themselves left out.
    # inf where one is a number and the other is not.
    ratio: float
    # that difference in ulps of the results' dtype, at the size of the largest element of the row
    ulps: float
    place: Place | None  # the element where it is; None if all bits are the same
    a_ratio: float  # largest error of each, in units of the tolerance: above 1 it is wrong
    b_ratio: float
    a_rms: float  # root mean square error of each, in units of the tolerance
    b_rms: float
    # number of elements that are not compared, as the conventions of A and B differ there
    by_convention: int = 0
    power: Power = field(default_factory=Power)  # differences that would have been seen
    defects: tuple[str, ...] = ()  # mistakes that were put into B and not found: npattn is wrong

    @classmethod
    def union(cls, parts: Sequence[ResultDifference]) -> ResultDifference:
        """Return the difference on all problems, from that on each."""
        worst = max(parts, key=lambda x: (x.ratio, x.ulps, x.place is not None))
        sums = {n: sum(getattr(x, n) for x in parts) for n in ("elements", "same", "by_convention")}
        most = {n: max(getattr(x, n) for x in parts) for n in ("a_ratio", "b_ratio")}
        for name in ("a_rms", "b_rms"):
            squares = (x.elements * getattr(x, name) ** 2 for x in parts)
            most[name] = math.sqrt(sum(squares) / max(sums["elements"], 1))
        power = Power.union(x.power for x in parts)
        return replace(worst, **sums, **most, power=power, defects=parts[0].defects)


@dataclass(frozen=True)
class Change:
    """Change of one factor that leaves the exact results as they are."""

    factor: str  # "the same call again", "keys in another order", ..
    # (float, float) or str: how far the results of each move, in units of the tolerance and in
    # ulps; words if it could not be tried
    a: Move | str
    b: Move | str
    apart: Move | str = ""  # (float, float) or str: how far B with this change is from A without it


@dataclass(frozen=True)
class Difference:
    """Difference of two profiles or of two implementations.

    Attributes
    ----------
    a, b : str
        Their names.
    kind : {"profiles", "implementations"}
    alike : bool
        Profiles: everything is the same. Implementations: the same conventions, and results within
        a tolerance of each other, which could have been out of it.
    reason : str
        Why there is no verdict: "nothing tested", "not judged: dq"; "" if they are alike or differ.
    answer : tuple of str
        The difference in a few lines of words.
    conventions : tuple of ConventionDifference
    beside : tuple of str
        Other differences, a line each: signature, layout, refusals, promises, options that only
        one takes.
    results : tuple of ResultDifference
        Empty for profiles.
    factors : tuple of Change
        Empty for profiles.
    settings : mapping
        Dtype, seed, number of problems.
    """

    a: str
    b: str
    kind: str
    alike: bool
    answer: tuple[str, ...]
    conventions: tuple[ConventionDifference, ...] = ()
    beside: tuple[str, ...] = ()
    results: tuple[ResultDifference, ...] = ()
    factors: tuple[Change, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    @property
    def exit_code(self) -> int:
        """Return 0 if they are alike, 1 if they differ, 2 if there is no verdict."""
        if self.reason:
            return EXIT_CODES["no verdict"]
        return EXIT_CODES["passed" if self.alike else "failed"]

    def __str__(self) -> str:
        """Return the answer, the conventions that differ, and the tables of results and factors."""
        settings = "".join(f", {name} {value}" for name, value in self.settings.items())
        parts = [
            [f"A is {self.a}, B is {self.b}: {self.kind}{settings}", *_wrap(self.answer)],
            *(_format_convention(one) for one in self.conventions),
            self._table() if self.results else (),
            self._factors() if self.factors else (),
            _wrap(self.beside),
        ]
        return "\n\n".join(filter(None, map("\n".join, parts)))

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON takes it; NaN and infinities are text."""
        return {name: as_json(x) for name, x in vars(self).items()}

    def _table(self) -> Iterator[str]:
        """Yield a line for each result, then the element that differs most and its recipe."""
        head = ("", "same bits", "difference", "ulps", "error of A", "error of B")
        rows: list[tuple[str, ...]] = [head]
        for one in self.results:
            share = f"{100 * one.same / max(one.elements, 1):.3g} %"
            sizes = (short(x) for x in (one.ratio, one.ulps, one.a_ratio, one.b_ratio))
            rows.append((one.name, share, *sizes))
        yield "largest difference and errors, in units of the tolerance (above 1: wrong):"
        yield from _align(rows)
        worst = max(self.results, key=lambda one: (one.ratio, one.ulps))
        if worst.place is not None:
            at, where = worst.place, ", ".join(map(str, worst.place.index))
            values = f"A {at.a:.9g}, B {at.b:.9g}, want {at.exact:.9g}"
            yield f"{worst.name}[{where}]: {values}, sampled as"
            yield f"  {at.recipe}"

    def _factors(self) -> Iterator[str]:
        yield "one factor at a time: how far it moves the results of each, in tolerances and ulps"
        rows: list[tuple[str, ...]] = [("", "A", "B", "B so from A")]
        rows += [(x.factor, *map(_format_move, (x.a, x.b, x.apart))) for x in self.factors]
        yield from _align(rows)


def _wrap(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ")


def _align(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _format_convention(one: ConventionDifference) -> Iterator[str]:
    yield one.topic
    yield from (f"  A: {one.a}", f"  B: {one.b}")
    if one.example is not None:
        note = "" if one.example.alone else " (other conventions have a share in it)"
        yield f"  {one.example}{note}"
        yield "    A: {}; B: {}".format(*one.example.values())


def _format_move(move: Move | str) -> str:
    if isinstance(move, str):
        return move
    ratio, ulps = move
    return f"{short(ratio)}, {short(ulps)} ulps" if ulps else "same bits"
