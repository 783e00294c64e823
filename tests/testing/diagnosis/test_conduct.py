"""Causes of what one call does not show: order, state, and what only looks like it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from npattn.mistakes import MISTAKES, Attention
from npattn.mistakes.attention import same_signature
from npattn.testing import check
from npattn.testing.compare import Comparison
from npattn.testing.diagnosis.candidates import Candidate
from npattn.testing.diagnosis.causes import _Diagnosis, _rank
from npattn.testing.diagnosis.conduct import (
    _describe_rest,
    _recurs,
    _varies_within_tolerance,
    conduct_causes,
)
from npattn.testing.diagnosis.evidence import collect
from tests.testing.diagnosis.failures import fail, trial_of


def causes_of(f, backward, *rules, examples=20):
    report = check(f, backward=backward, only=rules, examples=examples, framework="numpy")
    assert not report.passed
    return [(cause.kind, cause.name, len(cause.rules)) for cause in report.causes]


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
            kind = KeyError if k.shape[-2] > 64 else ValueError
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
    ((kind, name, count),) = causes_of(Turned(), None, *rules)
    assert (kind, name) == ("conduct", "unordered")
    assert count >= 1


@pytest.mark.thorough
def test_results_that_are_wrong_at_times_are_not_unordered():
    rules = ("agreement-o", "repeatable")
    assert causes_of(Turned(wrong=0.1), None, *rules) == [("conduct", "unsteady", 2)]


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


def wrong_call(forward, backward):
    """Return evidence of a call that is wrong, of one that may be right at other times."""
    trial = trial_of(forward, backward)
    (outcome,) = fail(trial, ["plain"])
    return next(e for e in (collect(trial, outcome) for _ in range(6)) if e.wrong)


def test_a_mistake_that_recurs_is_named_if_it_gives_what_is_seen():
    mistake, other = MISTAKES["update-lost"], Accumulating()
    assert _recurs("update-lost", wrong_call(mistake.forward, mistake.backward))
    assert not _recurs("update-lost", wrong_call(other.forward, other.backward))


@pytest.mark.thorough
def test_no_mistake_that_recurs_is_taken_for_another():
    wrong = Accumulating()
    ((kind, name, _),) = causes_of(wrong.forward, wrong.backward, "agreement-dk", "repeatable")
    assert (kind, name) == ("conduct", "unsteady")


@pytest.mark.thorough
def test_a_mistake_of_some_shapes_is_no_state():
    """The same content in a larger batch has another result, as if something were kept."""
    mistake = MISTAKES["mask-tiled-over-heads"]
    rules = ("agreement-o", "after-other-dtype")
    found = causes_of(mistake.forward, None, *rules, examples=200)
    assert found == [("mistake", mistake.name, 2)]


@pytest.mark.parametrize(
    ("levels", "named"),
    [(("values", "non-finite"), "dq"), (("non-finite",), "o")],
)
def test_the_rest_names_results_of_what_is_required(levels, named):
    rules = {"values": "agreement-dq", "non-finite": "hidden-nan-k"}
    wrong = {
        "agreement-dq": SimpleNamespace(wrong={"dq": 3.0}),
        "hidden-nan-k": SimpleNamespace(wrong={"o": 3.0}),
    }
    own = {"message": "", "comparisons": ()}
    outcomes = [SimpleNamespace(rule=rules[x], level=x, **own) for x in levels]
    text = f"no known mistake reproduces this: {named} out of tolerance"
    assert _describe_rest(outcomes, wrong) == text


def test_the_rest_says_nan_where_that_is_what_is_wrong():
    def outcome(rule, **got):
        comparisons = tuple(Comparison(n, 9.0, (0,), x, 1.0, 0.1, 1, 1) for n, x in got.items())
        return SimpleNamespace(rule=rule, level="values", message="", comparisons=comparisons)

    nan = float("nan")
    outcomes = [outcome("a", o=nan, dq=nan), outcome("b", o=nan, dq=3.0), outcome("c", dk=nan)]
    wrong = {o.rule: SimpleNamespace(wrong={c.name: 9.0 for c in o.comparisons}) for o in outcomes}
    text = "no known mistake reproduces this: o, dk NaN; dq out of tolerance"
    assert _describe_rest(outcomes, wrong) == text


def test_what_comes_after_is_no_state_where_single_calls_are_wrong():
    """The wrong call may be one of another shape, whatever came before."""
    trial = trial_of(lambda q, k, v: v.sum(-2, keepdims=True) + 0 * q[..., :1])
    (plain,) = fail(trial, ["plain"])
    (after,) = fail(trial, ["wide"], rule="after-other-dtype", kind="after")
    after = replace(after, rule="after-other-dtype")
    evidence = collect(trial, plain)
    wrong = {plain.rule: evidence}
    assert [c.kind for c in conduct_causes(trial, [plain, after], wrong, ())] == ["unexplained"]
    assert [c.kind for c in conduct_causes(trial, [after], {}, ())] != ["unexplained"]


def test_a_candidate_is_alone_only_if_it_explains_a_wrong_call():
    mistake = MISTAKES["dk-unscaled"]
    for forward, backward, wrong in (
        (mistake.forward, mistake.backward, True),
        (Attention().forward, Attention().backward, False),
    ):
        trial = trial_of(forward, backward)
        (after,) = fail(trial, ["plain"], kind="after")
        diagnosis = _Diagnosis(trial, [after], ())
        for explains in (True, False):
            candidate = Candidate("mistake", "made up", "", lambda _, explains=explains: explains)
            assert diagnosis._explains_alone(candidate, after) == (wrong and explains)


def test_problems_of_required_rules_are_repeated_first():
    pairs = ((2, "non-finite"), (3, "values"), (5, "values"))
    evidence = [SimpleNamespace(size=n, outcome=SimpleNamespace(level=x)) for n, x in pairs]
    assert [e.size for e in sorted(evidence, key=_rank)] == [3, 5, 2]


def test_results_that_come_once_more_are_others():
    trial = trial_of(Attention().forward)
    evidence = collect(trial, fail(trial, ["plain"])[0])
    twice = replace(evidence, observed={n: [*x, *x] for n, x in evidence.observed.items()})
    assert evidence.equals(evidence)
    assert not evidence.equals(twice)
    assert not twice.equals(evidence)
