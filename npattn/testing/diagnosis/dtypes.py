"""Candidates that round a result to a narrower dtype on the way: each element is a number of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.bounds.rounding import unit_roundoff
from npattn.testing.bounds.ulp import real
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence

NARROW = ("float32", "float16", "bfloat16")
"""Dtypes, the widest first: what is a number of one may be one of the next as well."""
ROUNDINGS = 8
"""Most roundings of partial sums by which such a result may be off."""


def dtype_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield each dtype that is narrower than that of the inputs, the narrowest first."""
    names = ", ".join(sorted(evidence.wrong))
    for dtype in reversed(NARROW):
        if unit_roundoff(dtype) > unit_roundoff(evidence.problem.q.dtype):
            text = f"{names} is rounded to {dtype} on the way: each element is a {dtype} number"
            yield Candidate(f"{names}: {dtype}", text, partial(_explains, dtype), "precision")


def _explains(dtype: str, evidence: Evidence) -> bool:
    return all(
        _is_rounded(array, evidence.exact[name], dtype)
        for name in evidence.wrong
        for array in evidence.observed[name]
    )


def _is_rounded(array: Array, exact: Array, dtype: str) -> bool:
    """Return True if each element is a number of a dtype, and near the exact one."""
    array = real(array)
    if array.shape != exact.shape or not np.isfinite(exact).all():
        return False
    with np.errstate(over="ignore"):
        same = array.astype(dtype).astype(array.dtype) == array
    allowed = ROUNDINGS * unit_roundoff(dtype) * abs(exact).max(initial=0.0)
    return bool(same.all() and (abs(array - exact) <= allowed).all())
