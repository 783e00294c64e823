"""Contrasts that idle processes find during the search for causes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from npattn.testing.report.outcome import Outcome
from npattn.testing.trial import Trial

if TYPE_CHECKING:
    from npattn.testing.diagnosis.contrasts import Contrast


Submit = Callable[..., "Future[Any] | None"]
"""(function, trial, *args) → the future of function(trial, *args) in an idle process, which has a
copy of the implementation; None if no process is idle."""


def nobody(*_: object) -> None:
    """Return None: there is no other process."""


class Contrasts:
    """Contrasts of outcomes, some of them begun in idle processes before they are needed.

    The others are computed here, so that the answers do not depend on the number of processes.
    """

    def __init__(self, submit: Submit = nobody) -> None:
        self._submit = submit
        self._begun: dict[tuple[int, str], Future[Contrast]] = {}

    def begin(self, trial: Trial, outcome: Outcome) -> None:
        """Begin to compute the contrast of an outcome, if a process is idle."""
        future = self._submit(_contrast, trial, outcome)
        if future is not None:
            self._begun[id(trial), outcome.id] = future

    def find(self, trial: Trial, outcome: Outcome) -> Contrast:
        """Return `contrast(trial, outcome)`.

        If the other process failed, compute it here: a defect then raises here too.
        """
        future = self._begun.pop((id(trial), outcome.id), None)
        if future is None or future.cancel() or future.exception() is not None:
            return _contrast(trial, outcome)
        return future.result()

    def close(self) -> None:
        """Cancel those that no process has begun."""
        for future in self._begun.values():
            future.cancel()


def _contrast(trial: Trial, outcome: Outcome) -> Contrast:
    from npattn.testing.diagnosis.contrasts import contrast  # slow to load, and seldom needed

    return contrast(trial, outcome)
