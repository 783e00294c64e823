"""Scores that are all wrong by one factor, which is fitted: a scale, or log₂e, with few digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.problem.arrays import Array
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.evidence import Evidence
from npattn.testing.diagnosis.ratios import format_factor
from npattn.testing.diagnosis.steps.step import Step, candidate_of, replaces

MOST = 40
"""Most times that o is computed for a fit: near 1 a handful is enough."""


def _scale_by(factor: float) -> dict[str, Any]:
    def inputs(self: Attention, *arrays: Any, **options: Any) -> Inputs:
        c = Attention.inputs(self, *arrays, **options)
        return c._replace(scale=factor * c.scale)

    return {"inputs": inputs}


def _final_by(factor: float) -> dict[str, Any]:
    def final(self: Attention, x: Array, visible: Array, c: Inputs) -> Array:
        return np.asarray(factor * Attention.final(self, x, visible, c))

    return {"final": final}


FACTORS = {
    "the scale is {} times what it should be": _scale_by,
    "the scores are multiplied by {} before the softmax, as by a log₂e with few digits": _final_by,
}
"""The mistake in words → the methods of `Attention` that make it, for a factor."""


def factor_candidates(evidence: Evidence) -> Iterator[Candidate]:
    """Yield the factors of the scores that explain a problem best.

    Parameters
    ----------
    evidence : Evidence
        A plain problem, which has many elements: the factor has to fit other problems within their
        tolerance.
    """
    if "o" not in evidence.wrong or not _may_be_weighted(evidence):
        return
    factor = _fit(evidence)
    for text, methods in FACTORS.items():
        step = Step("scale", text.format(format_factor(factor)), replaces(**methods(factor)))
        yield candidate_of(step, kind="factor")


def _may_be_weighted(evidence: Evidence) -> bool:
    """Return True if o may be a mean of v: it is, whatever factor the scores have."""
    got, exact = evidence.observed["o"][0], evidence.exact["o"]
    if got.shape != exact.shape or np.iscomplexobj(got) or not np.isfinite(got).all():
        return False
    largest = abs(evidence.problem.v).astype(float).max() + evidence.tolerance["o"].max()
    return bool((abs(got.astype(float)) <= largest).all())


def _fit(evidence: Evidence) -> float:
    """Return the factor of the scale that brings o closest to the one observed."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    got = evidence.observed["o"][0].astype(float)
    problem, trial = evidence.problem, replace(evidence.trial, gradients=frozenset())
    assert problem.scale is not None
    scale = problem.scale

    def miss(factor: Array) -> Array:
        changed = problem.replace(scale=scale * float(factor[0]))
        return np.asarray(trial.exact(changed, evidence.cotangents)["o"] - got).ravel()

    eps = np.finfo(float).eps
    limits = {"ftol": eps, "xtol": eps, "gtol": eps, "max_nfev": MOST}
    return float(least_squares(miss, [1.0], method="lm", **limits).x[0])
