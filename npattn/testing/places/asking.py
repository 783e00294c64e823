"""Ask a function whether it fails on a problem: once for each problem, within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any

Value = Any
"""Of a size an int; of an option a bool or one of its choices, as "top_left"."""
Sample = Mapping[str, Value]
"""A problem: sizes and options by their letters and names, in any order."""
Answer = bool | None
"""True: it fails; False: it passes; None: it is refused, which tells nothing."""


SLACK = 3.0
"""Seconds on the wall for each second of processor time that a search may take."""


class Spent(Exception):
    """The questions or the seconds of a search are spent."""


class Asking:
    """A function of problems that is asked each of them once."""

    def __init__(
        self,
        fails: Callable[[dict[str, Value]], Answer],  # takes a problem; returns an `Answer`
        questions: int,  # how many problems may be asked; `Spent` is raised by the next
        # how long the search may take, in seconds of processor time of this process, or `SLACK`
        # times as long on the wall: a busy machine is not to change what is found
        seconds: float,
        # (problem, Answer): answers that are known already, and cost nothing
        known: Iterable[tuple[Sample, Answer]] = (),
        # asks with other numbers than `fails`
        again: Callable[[dict[str, Value]], Answer] | None = None,
    ) -> None:
        self._fails, self._again = fails, again
        # By key, the problem with its sizes in their order, so that a seed gives the same search.
        self._answers = {_key(problem): (dict(problem), answer) for problem, answer in known}
        self._known = len(self._answers)
        self._questions, self._seconds = questions, seconds
        self._start = time.process_time(), time.perf_counter()
        self._skips: Callable[[Sample], bool] = lambda problem: False

    @property
    def count(self) -> int:
        """How many problems were asked."""
        return len(self._answers) - self._known

    @property
    def left(self) -> int:
        """How many questions are left, by number and by the time that those before took."""
        took = self._seconds_spent
        by_time = (self._seconds - took) / (took / self.count) if self.count > 2 else 1e9
        return max(0, min(self._questions - self.count, int(min(by_time, 1e9))))

    def is_known(self, problem: Sample) -> bool:
        """Return True if the answer for a problem costs nothing."""
        return _key(problem) in self._answers

    def outside(self, skips: Callable[[Sample], bool]) -> Asking:
        """Return the same questions and answers; problems that `skips` holds for tell nothing."""
        other = copy(self)
        other._skips = skips
        return other

    def list_answers(self) -> list[tuple[dict[str, Value], Answer]]:
        """Return all problems whose answer is known, with it."""
        return [*self._answers.values()]

    def __call__(self, problem: Sample) -> Answer:
        if self._skips(problem):
            return None
        key = _key(problem)
        if key not in self._answers:
            if self.count >= self._questions or self._seconds_spent > self._seconds:
                raise Spent
            self._answers[key] = (dict(problem), self._fails(dict(problem)))
        return self._answers[key][1]

    def fails_again(self, problem: Sample) -> bool:
        """Return True if a problem that passed fails with other numbers: that is its answer now."""
        if self._again is None or self._again(dict(problem)) is not True:
            return False
        self._answers[_key(problem)] = (dict(problem), True)
        return True

    @property
    def _seconds_spent(self) -> float:
        used, passed = time.process_time(), time.perf_counter()
        return max(used - self._start[0], (passed - self._start[1]) / SLACK)


def _key(problem: Sample) -> frozenset[tuple[str, Value]]:
    # 1 == True in Python; a letter is a size or an option, and never both.
    return frozenset(problem.items())


def is_size(value: Value) -> bool:
    """Return True for the value of a size; a bool is that of an option."""
    return isinstance(value, int) and not isinstance(value, bool)
