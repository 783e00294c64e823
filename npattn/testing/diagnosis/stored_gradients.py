"""Candidates of gradients of 8 bits: that of an input as it is stored, and not as it is meant."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from npattn.problem.descales import spread
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.comparison import compare_arrays
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence

WORDS = {
    1: "d{0} is multiplied by {1}: it is that of {0} as it is stored",
    -1: "d{0} is divided by {1}",
}
"""Words for a gradient by the power of the factor that it has too much."""


def stored_gradient_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield inputs whose gradient may have their factor, or its reciprocal, too much."""
    f = evidence.trial.implementation
    if f.quantized is None or not f.has_gradients:
        return
    theirs = {meaning: name for name, meaning in f.signature.meanings.items()}
    for x, meaning in f.quantized.meanings.items():
        if set(evidence.wrong) != {f"d{x}"}:
            continue
        for power, words in WORDS.items():
            text = words.format(x, theirs[meaning])
            yield Candidate(text, text, partial(_explains, x, power), f"d{x}")


def _explains(x: str, power: int, evidence: Evidence) -> bool:
    """Return True if the gradient is right without the factor, and so is every other result."""
    quantized, name = evidence.trial.implementation.quantized, f"d{x}"
    assert quantized is not None
    if set(evidence.wrong) - {name}:
        return False
    _, factors = quantized.split(evidence.problem)
    exact, tolerance = evidence.exact[name], evidence.tolerance[name]
    own = spread(quantized.by_input(factors)[x], exact.shape, quantized.rows.get(x))
    times = own.astype(np.float64) ** power
    return all(
        got.shape == exact.shape
        and compare_arrays(
            name, got.astype(np.float64) / times, exact, tolerance + half_ulp(got) / times
        ).passed
        for got in evidence.observed[name]
    )
