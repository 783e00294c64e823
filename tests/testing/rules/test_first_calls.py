"""First calls that are wrong, and right when made again, are reported; others are left alone."""

from dataclasses import replace

import numpy as np
import pytest

from npattn.testing import check
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets.numpy import flash
from npattn.testing.trial import Violation
from tests.testing.rules.relations import trial_of

RULE = PROPERTIES["first-calls"]


def outcome_of(f, **kwargs):
    report = check(f, only=["first-calls"], examples=2, diagnosis=False, **kwargs)
    return next(o for o in report.outcomes if o.rule == "first-calls")


def test_function_that_warms_up_fails():
    calls = []

    def attention(q, k, v):
        calls.append(q.shape)
        return flash(q, k, v) * np.float32(1 if len(calls) > 5 else 2)

    outcome = outcome_of(attention)
    assert outcome.status == "failed"
    assert outcome.message.startswith("the first calls were wrong, and right when made again: ")
    assert "call 1 before the others:\no[" in outcome.message
    assert outcome.worst > 1000


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_call_that_finds_out_the_framework_is_judged(dtype):
    """It is in float32, and no probe is wrong."""
    calls = []

    def attention(q, k, v):
        calls.append(q.shape)
        return flash(q, k, v) * q.dtype.type(1 if len(calls) > 1 else 2)

    outcome = outcome_of(attention, dtypes=(dtype, "float64"))
    assert outcome.status == "failed"
    assert ": 1 of the first " in outcome.message
    calls.append(())  # with a framework named there is no such call
    assert outcome_of(attention, framework="numpy").status == "passed"


def test_later_dtypes_have_first_calls_of_their_own():
    calls = []

    def attention(q, k, v):
        calls.append(q.shape)
        return flash(q, k, v) * q.dtype.type(1 if len(calls) > 1 else 2)

    report = check(
        attention, only=["first-calls"], examples=2, dtypes=("float32", "float64"), diagnosis=False
    )
    assert [o.dtype for o in report.outcomes if o.failed] == ["float32"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_call_in_another_layout_is_right(dtype):
    def attention(q, k, v):
        return flash(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)

    assert outcome_of(attention, layout="BTHD", dtypes=dtype).status == "passed"


def test_what_stays_wrong_is_left_to_other_rules():
    assert outcome_of(lambda q, k, v: 2 * flash(q, k, v), framework="numpy").status == "passed"


def test_wrong_call_is_named():
    trial = trial_of()
    recipe = trial.space.base()
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    right = trial.results(problem, cotangents)
    wrong = replace(right, pairs=tuple((n, 2 * x) for n, x in right.pairs))
    calls = [(problem, cotangents, x) for x in (right, right, wrong, wrong)]
    trial.first_calls = tuple(calls)
    with pytest.raises(Violation, match="2 of the first 4, call 3 before the others"):
        RULE.check(trial, recipe)
    trial.first_calls = tuple(calls[:2])
    assert RULE.check(trial, recipe) >= 0
    trial.first_calls = ()
    assert RULE.unless(trial) == "no first calls were recorded"
