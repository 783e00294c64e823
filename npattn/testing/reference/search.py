"""Search for a case on which a function fails: sample in time, stop, shrink."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.search import shrink
from npattn.testing.comparison import Comparison
from npattn.testing.power import Power
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.reproducer import write_docstring

SHRINK_SECONDS = 6.0
"""Processor time for the search for the smallest failing case."""
FEW = 3
"""Examples that are asked whatever the time, and of which the cost is measured."""


@dataclass
class Time:
    """Plan of the examples of a dtype, by the cost of its first ones."""

    examples: int  # number that is wanted
    budget: float  # seconds from the start of the check to the end of this dtype
    start: float
    least: int = 10**9  # smallest number that the plan has returned
    clock: Callable[[], float] = time.process_time  # seconds that have passed

    @property
    def deadline(self) -> float:
        return self.start + self.budget

    @property
    def is_over(self) -> bool:
        return self.clock() > self.deadline

    def afford(self, cost: float, share: float = 1.0) -> int:
        """Return how many examples to ask, of `cost` seconds each, in a share of the time left."""
        seconds = share * (self.deadline - self.clock())
        count = int(min(self.examples, max(FEW, seconds / cost))) if cost else self.examples
        self.least = min(self.least, count)
        return count

    def describe(self, dtype: str) -> list[str]:
        """Return a line where fewer were asked."""
        if self.least >= self.examples:
            return []
        return [f"{self.examples - self.least} of {self.examples} examples in {dtype}, {NO_TIME}"]


NO_TIME = "for which there is no time (budget= gives more)"


class Answer(NamedTuple):
    """Comparisons of a case, or the exception that the function raised there."""

    case: Any
    comparisons: Sequence[Comparison]
    error: str = ""

    @property
    def wrong(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if not c.passed)


@dataclass
class Search:
    """A search, and what it found."""

    # case → comparisons; ImplementationError if the function gives none
    judge: Callable[[Any], Sequence[Comparison]]
    # the first stands: a function that differs between two calls may not confuse a search
    answers: dict[Any, Answer] = field(default_factory=dict)
    worst: float = 0.0  # largest error / tolerance, over cases that passed
    failure: Answer | None = None  # of the smallest failing case

    def run(
        self,
        choices: Mapping[str, Sequence[Any]],
        build: Callable[[dict[str, Any]], Any],
        examples: int,
        seed: int,
    ) -> None:
        """Judge cases with fields sampled from `choices` until one fails, then simpler ones.

        The values of each field stand with the simplest first; `build` makes a case of fields.
        """

        def fails(places: tuple[int, ...]) -> bool:
            fields = zip(choices.items(), places, strict=True)
            return self._fails(build({name: values[i] for (name, values), i in fields}))

        rng = np.random.default_rng(seed)
        # Each value of a field occurs as often as others, in an order that is no other field's.
        columns = [
            np.concatenate([rng.permutation(len(x)) for _ in range(examples // len(x) + 1)])
            for x in choices.values()
        ]
        for number in range(examples):
            places = tuple(int(column[number]) for column in columns)
            if fails(places):
                shrink(places, _simpler, fails, SHRINK_SECONDS)
                return

    def _fails(self, case: Any) -> bool:
        """Judge a case once; return True if it is wrong or raises, and else keep its ratios."""
        if case not in self.answers:
            try:
                self.answers[case] = Answer(case, self.judge(case))
            except ImplementationError as err:
                self.answers[case] = Answer(case, (), str(err))
        answer = self.answers[case]
        if answer.error or answer.wrong:
            self.failure = answer
            return True
        self.worst = max([self.worst, *(c.ratio for c in answer.comparisons)])
        return False

    def powers(self) -> dict[str, list[Power]]:
        """Return the powers of each result."""
        powers: dict[str, list[Power]] = {}
        for c in chain.from_iterable(x.comparisons for x in self.answers.values()):
            if c.power is not None:
                powers.setdefault(c.name, []).append(c.power)
        return powers

    def conclude(self, outcome: Outcome, write_script: Callable[[Any, str], str]) -> Outcome:
        """Return the outcome with what was found; the script is of a case and a message."""
        outcome = replace(outcome, status="passed", worst=self.worst, examples=len(self.answers))
        if self.failure is None:
            return outcome
        # Results before gradients: a wrong output makes these wrong.
        wrong = sorted(self.failure.wrong, key=lambda c: (c.name.startswith("d"), -c.ratio))
        case, _, error = self.failure
        message = error or "\n".join(map(str, wrong))
        return replace(
            outcome,
            status="error" if error else "failed",
            worst=wrong[0].ratio if wrong else 0.0,
            message=message,
            comparisons=tuple(wrong),
            recipe=repr(case),
            script_text=write_script(case, message),
            kind="raised" if error else "",
        )


def _simpler(places: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the places of values in their fields, one of them nearer to the simplest value."""
    for at, place in enumerate(places):
        for less in dict.fromkeys((0, place // 2, place - 1)) if place else ():
            yield (*places[:at], less, *places[at + 1 :])


def write_replay(headline: str, message: str, setup: str, case: Any, arguments: str) -> str:
    """Return a Python file that shows a failing case by the function `replay` of `setup`."""
    return (
        write_docstring(f"{headline}\n\n{message}")
        + f"\n\n{setup}\ncase = {case!r}\n"
        + f"for comparison in replay({arguments}):\n    print(comparison)\n"
    )
