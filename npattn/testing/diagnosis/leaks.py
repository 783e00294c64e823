"""NaN that leaks from hidden positions: weights of 0 are multiplied, not left out."""

from __future__ import annotations

import numpy as np

from npattn.testing.bounds.ulp import real
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence

BY_QUERY = frozenset({"o", "lse", "weights", "max_score", "dq"})
"""Results of which each query has rows of its own."""


def leaks_nan(evidence: Evidence) -> bool:
    """Return True if inputs hold a NaN or inf, and NaN is all that is wrong in some result."""
    problem = evidence.problem
    q, k, v = (np.isfinite(real(x).astype(float)).all() for x in (problem.q, problem.k, problem.v))
    if q and k and v:
        return False
    if k and v and not BY_QUERY.isdisjoint(evidence.wrong):
        return False  # NaN of one query in the row of another comes by no hidden position
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
