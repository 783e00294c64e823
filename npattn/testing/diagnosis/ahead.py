"""Contrasts that processes without work find while the causes are searched for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from npattn.testing.diagnosis.contrasts import contrast
from npattn.testing.report.outcome import Outcome
from npattn.testing.trial import Trial

__all__ = ["Contrasts", "Submit", "nobody"]

Submit = Callable[..., "Future[Any] | None"]
"""(function, trial, *args) → the future of function(trial, *args) in another process, whose trial
is of its own implementation; None where there is no process."""


def nobody(*_: object) -> None:
    """Return None: no other process computes anything."""


class Contrasts:
    """Contrasts of outcomes, begun before it is known whether they are asked for.

    What no process has begun by then is found here, so that the answers are the same without any.
    """

    def __init__(self, submit: Submit = nobody) -> None:
        self._submit = submit
        self._begun: dict[tuple[int, str], Future[str]] = {}

    def begin(self, trial: Trial, outcome: Outcome) -> None:
        """Let another process find the contrast of an outcome, if there is one."""
        future = self._submit(contrast, trial, outcome)
        if future is not None:
            self._begun[id(trial), outcome.id] = future

    def find(self, trial: Trial, outcome: Outcome) -> str:
        """Return `contrast(trial, outcome)`.

        Where another process has failed, which may lack what is here, it is found here: a defect
        shows again.
        """
        future = self._begun.pop((id(trial), outcome.id), None)
        if future is None or future.cancel() or future.exception() is not None:
            return contrast(trial, outcome)
        return future.result()

    def close(self) -> None:
        """Give up what nobody has begun."""
        for future in self._begun.values():
            future.cancel()
