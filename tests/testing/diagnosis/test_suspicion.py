"""A suspicion belongs to the cause whose errors it shows."""

from __future__ import annotations

import numpy as np

import npattn
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.suspicion import collect_suspicion
from npattn.testing.report.outcome import Outcome
from tests.testing.diagnosis.failures import trial_of

GAIN = 1 + 2.0**-18


def gained(q, k, v):
    return (npattn.attention(q, k, v) * GAIN).astype(q.dtype)


def suspect(trial):
    recipe = Recipe(lead=(1,), H=2, K=2, T=31, S=37, D=11, E=13)
    return collect_suspicion(
        trial, Outcome("aggregate", "1", "", "float32", "suspect", sampled=recipe)
    )


def test_suspicion_is_explained_by_what_gives_its_errors():
    evidence = suspect(trial_of(gained))
    assert set(evidence.wrong) == {"o"}
    exact = evidence.exact["o"]
    assert evidence.reproduces("o", [(exact * GAIN).astype(np.float32)])
    assert not evidence.reproduces("o", [exact.astype(np.float32)])


def test_errors_of_rounding_are_no_suspicion():
    def right(q, k, v):
        return npattn.attention(q, k, v).astype(q.dtype)

    assert suspect(trial_of(right)) is None


def test_an_infinite_error_is_explained_by_no_finite_result():
    evidence = suspect(trial_of(lambda q, k, v: npattn.attention(q, k, v) * np.float32(np.inf)))
    assert evidence.wrong == {"o": np.inf}
    assert not evidence.reproduces("o", [evidence.exact["o"].astype(np.float32)])
