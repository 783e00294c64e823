"""A declared model that is too sharp is named, and a suspicion is read under a sharper one."""

from dataclasses import replace

import numpy as np
import pytest

from npattn.testing import check
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.diagnosis import roundings
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
