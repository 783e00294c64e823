"""Candidates that leave out or change one step of attention, in both passes or in backward."""

from npattn.testing.diagnosis.steps import (  # noqa: F401  they register
    backward,
    dropout,
    forward,
    heads,
    options,
    precision,
)
from npattn.testing.diagnosis.steps.factor import factor_candidates
from npattn.testing.diagnosis.steps.step import step_candidates

__all__ = ["factor_candidates", "step_candidates"]
