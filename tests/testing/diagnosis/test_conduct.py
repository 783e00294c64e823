"""Causes of what one call does not show: order, state, and what only looks like it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from npattn.mistakes import MISTAKES, Attention
from npattn.mistakes.attention import same_signature
from npattn.testing import check
from npattn.testing.diagnosis import conduct
from npattn.testing.diagnosis.causes import _Diagnosis, diagnose
from npattn.testing.diagnosis.conduct import _varies_within_tolerance, conduct_causes
from npattn.testing.diagnosis.evidence import Evidence, collect
from npattn.testing.places import asking
from tests.testing.diagnosis.failures import RECIPES, attend, fail, trial_of


def causes_of(f, backward, *rules, examples=20):
    report = check(f, backward=backward, only=rules, examples=examples, framework="numpy")
    assert not report.passed
    return [(cause.step, cause.name, len(cause.rules)) for cause in report.causes]


class Turned:
    """Attention that adds the keys in another order at each call, and may be wrong at times."""

    def __init__(self, wrong=0.0):
        self.calls, self.wrong = 0, wrong

    def __call__(self, q, k, v):
        self.calls += 1
        order = np.random.default_rng(self.calls).permutation(k.shape[-2])
        k, v = k[..., order, :], v[..., order, :]
        s = q @ np.swapaxes(k, -1, -2) / np.sqrt(max(q.shape[-1], 1), dtype=q.dtype)
        p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
        o = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        for n in range(k.shape[-2]):
            o += p[..., n : n + 1] * v[..., n : n + 1, :]
        total = p.sum(-1, keepdims=True)
        return o / np.where(total == 0, 1, total) * q.dtype.type(1 + self.wrong * (self.calls % 3))


def test_exceptions_are_grouped_by_type_and_place():
    """Numbers in the text, the rule and the layout of the problem make no other cause."""

    def f(q, k, v):
        if k.shape[-2] > 16:
            kind = KeyError if k.shape[-2] > 64 else AttributeError  # no refusals
            raise kind(f"S is {k.shape[-2]}, T is {q.shape[-2]}")
        s = q @ np.swapaxes(k, -1, -2) / np.sqrt(max(q.shape[-1], 1), dtype=q.dtype)
        p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
        return p / np.maximum(p.sum(-1, keepdims=True), np.float32(1e-30)) @ v

    rules = ("agreement-o", "shape-dtype", "permute-keys", "model-sizes")
    report = check(f, only=rules, examples=40, framework="numpy", shrink=False)
    failed = [o for o in report.outcomes if o.rule in rules]
    assert {o.status for o in failed} == {"error"}
    assert len({o.message for o in failed}) > 1
    assert len(report.causes) == len({o.raised for o in failed}) <= 2
    for cause in report.causes:
        kind, place = cause.name.split(" at ")
        assert kind in cause.text
        assert place.startswith("test_conduct.py:")
        assert place in cause.text


@pytest.mark.thorough
def test_sums_in_no_fixed_order_are_no_state():
    """Bits differ between calls, and after another call, but all are within the tolerance."""
    rules = ("agreement-o", "repeatable", "after-other-dtype")
    ((step, name, count),) = causes_of(Turned(), None, *rules)
    assert (step, name) == ("state", "unordered")
    assert count >= 1


@pytest.mark.thorough
def test_results_that_are_wrong_at_times_are_not_unordered():
    rules = ("agreement-o", "repeatable")
    assert causes_of(Turned(wrong=0.1), None, *rules) == [("state", "unsteady", 2)]


@pytest.mark.parametrize(
    ("f", "expected"),
    [(Turned(), True), (Turned(wrong=0.1), False), (Attention().forward, False)],
    ids=["varies", "is wrong at times", "is steady"],
)
def test_only_right_results_that_vary_are_unordered(f, expected):
    trial = trial_of(f, features=())
    (outcome,) = fail(trial, ["longer"], kind="bits")
    assert _varies_within_tolerance(trial, outcome) == expected


class Accumulating(Attention):
    """dk is added to that of the calls before."""

    def __init__(self):
        self.sums = {}

    @same_signature(Attention.backward)
    def backward(self, *arrays, **options):
        grads = super().backward(*arrays, **options)
        dk = grads["k"] + self.sums.get(grads["k"].shape, np.zeros_like(grads["k"]))
        self.sums[dk.shape] = dk
        return grads | {"k": dk}


@pytest.mark.thorough
@pytest.mark.usefixtures("few_problems")
def test_a_sum_of_earlier_calls_is_state():
    wrong = Accumulating()
    ((step, name, _),) = causes_of(wrong.forward, wrong.backward, "agreement-dk", "repeatable")
    assert (step, name) == ("state", "unsteady")


@pytest.mark.parametrize(
    ("levels", "named"), [(("values", "non-finite"), "dq"), (("non-finite",), "o")]
)
def test_the_rest_names_results_of_what_is_required(levels, named):
    rules = {"values": "agreement-dq", "non-finite": "hidden-nan-k"}
    wrong = {
        "agreement-dq": SimpleNamespace(wrong={"dq": 3.0}),
        "hidden-nan-k": SimpleNamespace(wrong={"o": 3.0}),
    }
    outcomes = [SimpleNamespace(rule=rules[x], level=x, message="") for x in levels]
    diagnosis = _Diagnosis(None, [], wrong)
    assert diagnosis._describe_rest(outcomes) == f"no step was found: {named} out of tolerance"


@pytest.mark.parametrize(
    ("kind", "step"), [("change", "state"), ("after", "state"), ("shape", "layout"), ("range", "")]
)
def test_what_one_call_does_not_show_has_the_step_of_its_kind(kind, step):
    trial = trial_of(Attention().forward)
    outcomes = fail(trial, ["plain", "wide"], kind=kind, message="it depends on this:\no is wrong")
    found = [*conduct_causes(trial, outcomes)]
    assert [c.step for c in found] == [step] * bool(step)
    assert not any(c.text.endswith(":") for c in found)
    assert [rule for c in found for rule in c.rules] == [o.id for o in outcomes] * bool(step)
    assert {c.where for c in found} <= {"everywhere"}
    hidden = [*conduct_causes(trial, fail(trial, ["mask", "causal"], kind=kind))]
    assert {c.where for c in hidden} <= {""}  # no problem without options fails


def test_state_that_a_plain_problem_shows_is_everywhere():
    """The call that a thread spoils had options."""
    trial = trial_of(attend, features=("causal",))
    outcomes = fail(trial, ["plain"], rule="one", kind="change", message="q was written to")
    outcomes += fail(trial, ["causal"], rule="two", kind="calls", message="wrong in a thread")
    found = list(conduct.conduct_causes(trial, outcomes))
    assert [(c.step, c.where) for c in found] == [("state", "everywhere")] * 2


@pytest.mark.parametrize("name", [None, "mask-of-first-sample", "dk-unscaled"])
@pytest.mark.usefixtures("few_problems")
def test_a_call_that_is_wrong_alone_is_no_state(name):
    """A mistake of some shapes seems to be kept from a call of others."""
    wrong = MISTAKES[name] if name else Attention()
    trial = trial_of(wrong.forward, wrong.backward, features=("mask",))
    (plain,) = fail(trial, ["mask"])
    (after,) = fail(trial, ["mask"], rule="after-other-dtype", kind="after")
    _, found = diagnose([(trial, [plain, after])])
    assert {c.step for c in found} == ({wrong.step} if name else {"", "state"})


def test_problems_of_required_rules_are_repeated_first():
    pairs = ((2, "non-finite"), (3, "values"), (5, "values"))
    evidence = [SimpleNamespace(size=n, outcome=SimpleNamespace(level=x)) for n, x in pairs]
    assert [e.size for e in sorted(evidence, key=Evidence.rank.fget)] == [3, 5, 2]


def test_results_that_come_once_more_are_others():
    trial = trial_of(Attention().forward)
    evidence = collect(trial, fail(trial, ["plain"])[0])
    twice = replace(evidence, observed={n: [*x, *x] for n, x in evidence.observed.items()})
    assert evidence.equals(evidence)
    assert not evidence.equals(twice)
    assert not twice.equals(evidence)


def test_a_call_that_others_make_wrong_has_a_sentence():
    mistake = MISTAKES["value-scaled-with-key"]
    report = check(mistake.forward, only="aliased-inputs", examples=8, framework="numpy")
    assert [c.text for c in report.causes] == ["results are wrong where v is k"]


def writes_mask(**recipe):
    """Return the trial and outcomes of a function that writes causal and window into its mask."""
    trial = trial_of(MISTAKES["mask-changed"].forward)
    sampled = replace(RECIPES["mask"], mask="matrix", **recipe)
    (outcome,) = fail(trial, ["mask"], "inputs-unchanged", kind="change", message="mask is written")
    return trial, replace(outcome, rule="inputs-unchanged", sampled=sampled)


def test_the_rule_is_asked_on_which_problems_a_mask_is_written_to(monkeypatch):
    """A mask that hides the keys which causal hides tells nothing."""
    monkeypatch.setattr(conduct, "SECONDS", 60.0)
    monkeypatch.setattr(asking, "SLACK", 100.0)
    trial, outcome = writes_mask(window=(1, 0))
    (cause,) = conduct_causes(trial, [outcome])
    assert (cause.step, cause.where) == ("state", "mask and window or causal")
    assert cause.text == "mask is written (where mask and window or causal)"
    assert cause.pair.text.endswith("all else equal")


def test_a_place_that_an_outcome_refutes_is_not_said(monkeypatch):
    """Another problem failed without a mask."""
    monkeypatch.setattr(conduct, "SECONDS", 60.0)
    monkeypatch.setattr(asking, "SLACK", 100.0)
    trial, outcome = writes_mask(window=(1, 0))
    other = replace(outcome, sampled=replace(outcome.sampled, mask=None))
    (cause,) = conduct_causes(trial, [outcome, other])
    assert cause.where == ""


def test_a_rule_that_passes_now_has_no_place():
    trial, outcome = writes_mask()  # nothing but the mask hides keys
    (cause,) = conduct_causes(trial, [outcome])
    assert (cause.where, cause.pair) == ("", None)


def test_results_in_another_dtype_are_of_precision():
    def widen(q, k, v):
        return attend(q, k, v).astype(np.float64)

    report = check(widen, only=("shape-dtype",), examples=3, framework="numpy", shrink=False)
    assert [(c.step, c.where) for c in report.causes] == [("precision", "everywhere")]
