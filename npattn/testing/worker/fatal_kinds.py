"""Kinds of problems on which an implementation has died often enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from npattn.problem import Problem
from npattn.testing.adapters.base import ImplementationError, NotAsked, TimedOut
from npattn.testing.cases.classes import classes_of_problem

CRASHES, TIMEOUTS = 3, 2
"""Ends of the process after which a kind of problem is not asked again."""
Kind = frozenset[str]


@dataclass
class GivenUp:
    """Options and structure, alone or in pairs, that ended the process whenever they were asked."""

    ends: Counter[Kind] = field(default_factory=Counter)  # number of ends, by kind
    # names of the kinds that are not asked again → how they ended the process; "" is every kind
    reasons: dict[str, str] = field(default_factory=dict)
    _answered: set[Kind] = field(default_factory=set)
    _wholes: set[Kind] = field(default_factory=set)
    _kinds: set[Kind] = field(default_factory=set)
    _last: Problem | None = None

    @property
    def lines(self) -> list[str]:
        """Return what is not asked again, with the reason, a line each."""
        names: dict[str, list[str]] = {}
        for name, reason in self.reasons.items():
            names.setdefault(reason, []).append(name)
        return [
            f"{', '.join(sorted(kinds))}: not asked again, its process ended too often ({reason})"
            if kinds != [""]
            else f"not asked again: nothing was ever answered ({reason})"
            for reason, kinds in names.items()
        ]

    def check(self, problem: Problem) -> None:
        """Raise `NotAsked` if the problem is of a kind that is not asked again."""
        if self._kinds:
            classes = classes_of_problem(problem)
            for kind in self._kinds - self._answered:
                if kind <= classes:
                    raise NotAsked(f"{_name(kind)} is not asked again")

    def note_answer(self, problem: Problem) -> None:
        """Note that a problem was answered: its kinds are not to blame."""
        if problem is self._last:  # most are asked several times in a row
            return
        self._last = problem
        classes = classes_of_problem(problem)
        if classes not in self._wholes:
            self._wholes.add(classes)
            self._answered.update(_kinds(classes))

    def note_end(self, problem: Problem, err: ImplementationError) -> None:
        """Note that a problem ended the process."""
        weight = CRASHES / TIMEOUTS if isinstance(err, TimedOut) else 1.0
        classes = classes_of_problem(problem)
        for kind in _kinds(classes):
            if kind not in self._answered:
                self.ends[kind] += weight  # type: ignore[assignment]
        worst = [kind for kind in _kinds(classes) if self.ends[kind] >= CRASHES]
        if worst and not self._answered:
            self._kinds.add(frozenset())
            self.reasons[""] = str(err)
        elif worst and not any(kind in self._kinds for kind in worst):
            least = min(len(kind) for kind in worst)
            found = [kind for kind in worst if len(kind) == least and kind not in self._answered]
            self._kinds.update(found)
            self.reasons |= {_name(kind): str(err) for kind in found}


def _kinds(classes: Kind) -> Iterator[Kind]:
    """Yield classes alone and in pairs."""
    names = sorted(classes)
    yield from (frozenset({name}) for name in names)
    yield from map(frozenset, combinations(names, 2))


def _name(kind: Kind) -> str:
    return " with ".join(sorted(kind))
