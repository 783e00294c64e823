"""Evidence of a suspicion: errors within tolerance, too large or too alike to be roundings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.report.outcome import Outcome
from npattn.testing.rules.systematic_error import (
    CERTAIN,
    ErrorSample,
    chi_square,
    excessive,
    measure_errors,
)
from npattn.testing.trial import Trial


@dataclass(frozen=True, eq=False, kw_only=True)
class Suspected(Evidence):
    """Evidence whose errors are compared by their mean square, in units of their variance."""

    errors: ErrorSample

    @cached_property
    def wrong(self) -> dict[str, float]:
        """Mean square error of each result in which it is excessive."""
        names = [name for name in self.errors.names() if name in self.observed]
        squares = {name: excessive(self.errors, name) for name in names}
        return {name: square for name, square in squares.items() if square is not None}

    @property
    def hides(self) -> bool:
        """True if the errors are less than the tolerance, which then hides them."""
        pairs = ((self.observed[n][0] - self.exact[n], self.tolerance[n]) for n in self.wrong)
        return all(np.square(error).sum() <= np.square(allowed).sum() for error, allowed in pairs)

    def reproduces(self, name: str, predicted: Sequence[Array]) -> bool:
        """Return True if what a prediction leaves of the errors is no more than roundings.

        The variance is that of the exact results: where they are far from those observed, errors
        that become insignificant beside what they were are enough.
        """
        if name not in self.errors.sigma:
            return True
        if predicted[0].shape != self.exact[name].shape:
            return False
        exact: Mapping[str, Array] = {name: predicted[0].astype(np.float64)}
        evaluation = replace(self.errors.evaluation, exact=exact)
        rest = replace(self.errors, evaluation=evaluation)
        before = self.wrong.get(name, np.inf)
        left = float(np.nanmean(chi_square(rest, name)))
        if np.isfinite(left) and left <= before / CERTAIN**4:
            return True
        return excessive(rest, name) is None and left <= before / 2


def collect_suspicion(trial: Trial, outcome: Outcome) -> Suspected | None:
    """Measure the errors of a suspect again; None if their mean square is not what it shows."""
    if outcome.sampled is None:
        return None
    try:
        errors = measure_errors(trial, outcome.sampled)
    except ImplementationError:
        return None
    evaluation = errors.evaluation
    found = Suspected(
        trial,
        evaluation.problem,
        evaluation.cotangents,
        outcome.view,
        {name: [evaluation.results[name]] for name in errors.names()},
        evaluation.exact,
        outcome,
        errors=errors,
    )
    return found if found.wrong else None
