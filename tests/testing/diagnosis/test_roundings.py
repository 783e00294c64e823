"""A declared model that is too sharp is named, and a suspicion is read under a sharper one."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import npattn
from npattn.testing import check
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis import causes, roundings
from npattn.testing.diagnosis.roundings import collect_suspicion
from npattn.testing.report.outcome import Outcome
from tests.testing.diagnosis.failures import fail, trial_of

ONLY = ("agreement-o", "aggregate")


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def eager(q, k, v):
    """Round every step to float16."""
    scale = np.float16(max(q.shape[-1], 1) ** -0.5)
    s = (q.astype(np.float32) @ k.swapaxes(-1, -2).astype(np.float32)).astype(np.float16) * scale
    p = softmax(s.astype(np.float32)).astype(np.float16)
    return (p.astype(np.float32) @ v.astype(np.float32)).astype(np.float16)


def percent(q, k, v):
    """Compute in float32, with a scale that is off by 0.3 %."""
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) * np.float32(max(q.shape[-1], 1) ** -0.5 * 1.003)
    return (softmax(s) @ v).astype(np.float16)


def judge(f, **options):
    sizes = {"S": (9, 33, 64), "T": (5, 33, 64), "D": (16, 64)}  # roundings of some size
    own = {"dtypes": "float16", "framework": "numpy", "sizes": sizes, "only": ONLY}
    return check(f, shrink=False, examples=20, **own, **options)


@pytest.mark.thorough
def test_a_model_that_is_too_sharp_is_no_cause_of_a_step():
    report = judge(eager, rounding="upcast")
    assert not report.passed
    (cause,) = report.causes
    assert cause.text.endswith("passes with --rounding eager")
    assert cause.step == "precision"
    assert judge(eager, rounding="eager").passed


@pytest.mark.thorough
def test_a_mistake_is_not_taken_for_roundings():
    report = judge(percent, rounding="upcast")
    assert not report.passed
    assert report.causes[0].step == "s"


@pytest.mark.thorough
def test_a_suspicion_is_read_under_a_sharper_model():
    report = judge(percent)
    assert [o.status for o in report.outcomes if o.rule == "aggregate"] == ["suspect"], report
    assert "(--rounding upcast): the scores s are wrong everywhere: q·k × 1.003" in str(report)


@pytest.mark.parametrize("name", ["plain", "groups", "causal"])
def test_no_place_is_told_that_a_failure_at_hand_may_refute(name, monkeypatch):
    """Plain problems may pass where all that fail share key heads, or have an option."""
    monkeypatch.setattr(roundings, "_holds", lambda trial, outcomes: trial.rounding.name == "eager")
    trial = replace(trial_of(eager, dtype="float16"), rounding=Rounding.fused())
    outcomes = [replace(o, rule="agreement-o") for o in fail(trial, [name, "groups of 3"])]
    cause = roundings.find_looser_model(trial, outcomes)
    assert (cause.step, cause.where) == ("precision", "everywhere" if name == "plain" else "")


GAIN = 1 + 2.0**-18


def gain(q, k, v):
    return (npattn.attention(q, k, v) * GAIN).astype(q.dtype)


def suspect(trial):
    recipe = Recipe(lead=(1,), H=2, K=2, T=31, S=37, D=11, E=13)
    return collect_suspicion(
        trial, Outcome("aggregate", "1", "", "float32", "suspect", sampled=recipe)
    )


def test_suspicion_is_explained_by_what_gives_its_errors():
    evidence = suspect(trial_of(gain))
    assert set(evidence.wrong) == {"o"}
    exact = evidence.exact["o"]
    assert evidence.reproduces("o", [(exact * GAIN).astype(np.float32)])
    assert not evidence.reproduces("o", [exact.astype(np.float32)])
    assert not evidence.reproduces("o", [exact[..., 0]])  # as lse in the place of o has


def test_errors_larger_than_the_tolerance_are_not_hidden_by_it():
    assert suspect(trial_of(gain)).hides
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
    assert [o.rule for o in causes._find_tail(trial_of(gain), one, bad)] == ["agreement-o"]
    monkeypatch.setattr(causes, "collect_suspicion", lambda *_: None)
    assert causes._find_tail(trial_of(gain), one, bad) == []


def scale_by_percent(q, k, v):
    """Scores that are 1 % too large, which only errors taken together show in bfloat16."""
    return npattn.attention(q, k, v, scale=1.01 * max(q.shape[-1], 1) ** -0.5).astype(q.dtype)


def test_scale_that_is_a_percent_too_large_is_named():
    report = check(
        scale_by_percent, framework="numpy", dtypes="bfloat16", only=["aggregate"], shrink=False
    )
    text = " ".join(str(report).split())
    assert "the scores s are wrong everywhere: q·k × 1.01" in text
