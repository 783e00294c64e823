"""NaN that leaks from hidden positions: weights of 0 are multiplied, not left out."""

from __future__ import annotations

import numpy as np

from npattn.testing.bounds.ulp import real
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence

__all__ = ["LEAK", "leaks_nan"]


def leaks_nan(evidence: Evidence) -> bool:
    """Return True if inputs hold a NaN or inf, and NaN is all that is wrong in some result."""
    problem = evidence.problem
    if all(np.isfinite(real(x).astype(float)).all() for x in (problem.q, problem.k, problem.v)):
        return False
    return any(_leaks_into(evidence, name) for name in evidence.wrong)


def _leaks_into(evidence: Evidence, name: str) -> bool:
    exact = evidence.exact[name]
    for array in evidence.observed[name]:
        if array.shape != exact.shape:
            return False
        got = real(array).astype(float)
        with np.errstate(all="ignore"):
            off = ~(abs(got - exact) <= evidence.tolerance[name]) & np.isfinite(exact)
        if off.any():
            return bool(np.isnan(got[off]).all())
    return False


TEXT = "hidden positions are multiplied by 0 instead of left out: 0 · NaN is NaN"
"""As the step says it: both are one cause."""
LEAK = Candidate("step", TEXT, TEXT, leaks_nan, topic="hidden")
