"""Evidence of a diagnosis: dtypes of predictions, and numbers added to hidden scores."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.testing import Implementation, check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.evidence import Evidence, _errors
from tests.testing.diagnosis.failures import trial_of


@pytest.mark.parametrize("predicted", ["float16", "float32"])
def test_rows_that_are_nan_tell_nothing_whatever_the_dtype(predicted):
    """bfloat16 and float16 have no common dtype in NumPy."""
    exact = np.array([[np.nan], [1.0]])
    evidence = SimpleNamespace(
        exact={"o": exact},
        tolerance={"o": np.array([[np.nan], [2.0**-8]])},
        rounding=2.0**-8,
        trial=SimpleNamespace(conventions=Conventions(empty_row="nan")),
    )
    got = np.array([[7.0], [1.0]]).astype(ml_dtypes.bfloat16)
    assert _errors(got, np.array([[3.0], [1.0]], predicted), evidence, "o")[0] == 0
    assert _errors(got, np.array([[3.0], [1.5]], predicted), evidence, "o")[0] > 1
    assert got[0, 0] == 7


@pytest.mark.parametrize(("factor", "reproduces"), [(11.3, False), (4.7, True)])
def test_what_is_predicted_is_closer_than_what_is_right(factor, reproduces):
    """Within a tolerance that grows with it, 11.3 times the right value is 4.7 times it too."""
    exact = np.array([[0.2], [0.01]])
    evidence = Evidence(
        trial=trial_of(lambda q, k, v: v, dtype="bfloat16"),
        problem=Recipe(dtype="bfloat16").problem(),
        cotangents=None,
        view="contiguous",
        observed={"dv": (4.7 * exact,)},
        exact={"dv": exact},
    )
    vars(evidence)["tolerance"] = {"dv": np.full((2, 1), 0.62)}
    assert evidence.wrong
    assert evidence.reproduces("dv", [factor * exact]) == reproduces


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_number_added_to_hidden_scores_needs_no_bias():
    """A function with a mask and no bias, whose scores are three times too large beside a mask."""

    def f(q, k, v, mask=None):
        s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
        s = s if mask is None else 3 * s + np.where(mask, 0, -1e9).astype(q.dtype)
        e = np.exp(s - s.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True)) @ v

    added = Conventions(hidden_add=-1e9, empty_row="mean")
    report = check(f, only=["agreement-o"], conventions=added, examples=10)
    (outcome,) = (o for o in report.outcomes if o.rule == "agreement-o")
    assert outcome.status == "failed"
    assert outcome.problem is not None
    assert outcome.problem.mask is not None
    assert report.causes


def test_defect_of_the_diagnosis_does_not_cost_the_report(monkeypatch):
    def fails(judged):
        raise AssertionError("a defect")

    monkeypatch.setattr("npattn.testing.diagnosis.causes.diagnose", fails)
    with pytest.warns(RuntimeWarning, match="the diagnosis failed, which is a defect of npattn"):
        report = check(lambda q, k, v: 2 * v.sum(-2, keepdims=True), only=["shape-dtype"])
    assert not report.passed
    line = fails.__code__.co_firstlineno + 1
    text = f"failed, a defect of npattn: AssertionError: a defect (test_evidence.py:{line})"
    assert report.settings["diagnosis"] == text
    assert "a defect of npattn" in " ".join(str(report).split())


def test_of_two_calls_one_may_be_right():
    """A kernel that falls back to another to give the gradient of the bias too."""
    right, wrong = np.ones((2, 3)), np.full((2, 3), 4.0)
    tolerance, exact = {"dv": np.full((2, 3), 0.1)}, {"dv": right}
    trial = SimpleNamespace(conventions=Conventions())
    evidence = Evidence(trial, None, None, "", {"dv": [right, wrong]}, exact)
    vars(evidence)["tolerance"] = tolerance
    with patch.object(Evidence, "rounding", 1e-6):
        assert evidence.reproduces("dv", [wrong])
        assert not evidence.reproduces("dv", [right])
        assert not evidence.reproduces("dv", [wrong + 1])
        assert not evidence.reproduces("dv", [wrong, wrong])  # each call has a prediction


def test_a_prediction_without_a_result_that_was_observed_explains_nothing():
    one = {"o": np.ones((2, 3)), "lse": np.ones(2)}
    trial = SimpleNamespace(conventions=Conventions())
    observed = {name: [x] for name, x in one.items()}
    evidence = Evidence(trial, None, None, "", observed, one)
    vars(evidence)["tolerance"] = {name: np.full(x.shape, 0.1) for name, x in one.items()}
    with patch.object(Evidence, "rounding", 1e-6):
        assert evidence.reproduced_by(observed)
        assert not evidence.reproduced_by({"o": observed["o"]})


def test_an_interrupt_of_the_diagnosis_leaves_the_outcomes(monkeypatch):
    def stop(judged):
        raise KeyboardInterrupt

    monkeypatch.setattr("npattn.testing.diagnosis.causes.diagnose", stop)
    with pytest.raises(KeyboardInterrupt) as caught:
        check(lambda q, k, v: 2 * v.sum(-2, keepdims=True), only=["shape-dtype"])
    report = caught.value.report
    assert report.interrupted
    assert "the causes (interrupted)" in report.untested
    assert not report.causes
    assert "shape-dtype" in {outcome.rule for outcome in report.outcomes if outcome.failed}


def test_what_the_diagnosis_gives_up_was_asked_before(monkeypatch):
    """The report says what no rule was asked."""
    lines = ["mask: not asked again"]

    def crash(judged):
        lines.append("bias: not asked again")
        return [outcome for _, outcomes in judged for outcome in outcomes], ()

    monkeypatch.setattr(Implementation, "given_up_lines", property(lambda self: list(lines)))
    monkeypatch.setattr("npattn.testing.diagnosis.causes.diagnose", crash)
    report = check(lambda q, k, v: 2 * v.sum(-2, keepdims=True), only=["shape-dtype"])
    assert len(lines) == 2
    assert not any("interrupted" in line for line in report.untested)
    assert [line for line in report.refused if "again" in line] == lines[:1]


def test_a_changed_problem_has_a_recipe_while_its_numbers_are_finite():
    trial = trial_of(lambda q, k, v: v)
    recipe = Recipe(lead=(2,), T=3, S=5, D=7, E=11)
    problem = recipe.problem()
    outcome = SimpleNamespace(recipe="Recipe(), then changed", sampled=recipe)
    shorter = problem.replace(k=problem.k[..., :4, :], v=problem.v[..., :4, :])
    bad = shorter.replace(v=np.where(shorter.v > 1, np.nan, shorter.v).astype("float32"))
    evidence = partial(Evidence, trial, cotangents=None, view="contiguous", observed={}, exact={})
    found = [evidence(problem=x, outcome=outcome).recipe for x in (problem, shorter, bad)]
    assert found == [recipe, replace(recipe, S=4), None]
