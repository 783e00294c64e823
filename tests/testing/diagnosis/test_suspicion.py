"""A suspicion belongs to the cause whose errors it shows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import npattn
from npattn.testing import check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis import causes
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
    assert not evidence.reproduces("o", [exact[..., 0]])  # as lse in the place of o has


def test_errors_larger_than_the_tolerance_are_not_hidden_by_it():
    assert suspect(trial_of(gained)).hides
    wrong = suspect(trial_of(lambda q, k, v: (npattn.attention(q, k, v) * 1.03).astype(q.dtype)))
    assert not wrong.hides
    assert causes._read_suspicion(wrong.trial, wrong.outcome) is None


def test_errors_of_rounding_are_no_suspicion():
    def right(q, k, v):
        return npattn.attention(q, k, v).astype(q.dtype)

    assert suspect(trial_of(right)) is None


def test_an_infinite_error_is_explained_by_no_finite_result():
    evidence = suspect(trial_of(lambda q, k, v: npattn.attention(q, k, v) * np.float32(np.inf)))
    assert evidence.wrong == {"o": np.inf}
    assert not evidence.reproduces("o", [evidence.exact["o"].astype(np.float32)])


def test_failures_as_large_as_the_excess_are_its_tail(monkeypatch):
    """Errors that are twice too large reach twice the tolerance at most."""
    one = Outcome("aggregate", "1", "", "bfloat16", "suspect", worst=4.0)
    worst = {"agreement-o": 1.9, "agreement-dv": 2.1, "agreement-dq": 0.9}
    bad = [one, *(Outcome(n, "1", "", "bfloat16", "failed", worst=x) for n, x in worst.items())]
    monkeypatch.setattr(causes, "collect_suspicion", lambda *_: SimpleNamespace(wrong={"o": 4.0}))
    assert [o.rule for o in causes._find_tail(trial_of(gained), one, bad)] == ["agreement-o"]
    monkeypatch.setattr(causes, "collect_suspicion", lambda *_: None)
    assert causes._find_tail(trial_of(gained), one, bad) == []


def percent(q, k, v):
    """Scores that are 1 % too large, which only errors taken together show in bfloat16."""
    return npattn.attention(q, k, v, scale=1.01 * max(q.shape[-1], 1) ** -0.5).astype(q.dtype)


def test_scale_that_is_a_percent_too_large_is_named():
    report = check(percent, framework="numpy", dtypes="bfloat16", only=["aggregate"], shrink=False)
    text = " ".join(str(report).split())
    assert "the scores s are wrong everywhere: q·k × 1.01" in text
