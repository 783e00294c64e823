"""Checks with a time limit, by a clock that the implementation moves."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.testing import check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.report.outcome import OUT_OF_TIME, Outcome
from npattn.testing.runner import rounds, search
from npattn.testing.runner.rounds import Judge, Round
from npattn.testing.targets.numpy import naive
from tests.testing.rules.relations import trial_of

FEW = {
    "only": ["agreement-o", "one-key"],
    "diagnosis": False,
    "seed": 11,
    "sizes": {"T": (3,), "S": (1, 5, 7), "D": (2,), "E": (2,)},
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves as its users say."""
    now = SimpleNamespace(seconds=0.0)
    time = SimpleNamespace(monotonic=lambda: now.seconds)
    for module in (sys.modules[check.__module__], rounds, search):
        monkeypatch.setattr(module, "time", time)
    return now


def outcomes_of(report):
    """Return the outcomes of the two rules."""
    return [outcome for outcome in report.outcomes if outcome.rule in FEW["only"]]


def ticking(clock, wrong=lambda _: False, seen=None):
    """Return a function that takes a second a call, and is wrong for some queries."""

    def f(q, k, v):
        clock.seconds += 1
        if seen is not None:
            seen.append(q.tobytes())
        return naive(q, k, v) * (1.5 if wrong(q) else 1.0)

    return f


@pytest.mark.thorough
def test_the_time_is_used_for_other_problems(clock):
    few, many = [], []
    check(ticking(clock, seen=few), **FEW, examples=7)
    clock.seconds = 0
    report = check(ticking(clock, seen=many), **FEW, examples=7, budget=120)
    assert len(set(many)) > 2 * len(set(few))
    assert 120 < clock.seconds < 130
    agreement = outcomes_of(report)[0]
    assert agreement.status == "passed"
    assert agreement.examples > 2 * 7
    assert report.settings["budget"] == "120 s"


def test_a_late_mistake_is_found_with_more_time(clock):
    f = ticking(clock, lambda _: clock.seconds > 90)
    assert check(f, **FEW, examples=7).passed
    clock.seconds = 0
    report = check(f, **FEW, examples=7, budget=300)
    assert [o.status for o in outcomes_of(report)] == ["failed", "failed"]
    assert clock.seconds < 200  # nothing is left to ask


def test_what_could_not_be_asked_does_not_pass(clock):
    report = check(ticking(clock), **FEW, budget=2)
    assert not report.passed
    assert report.incomplete == ("agreement-o[float32]", "one-key[float32]")
    assert [o.message for o in outcomes_of(report)] == [OUT_OF_TIME] * 2


def test_what_need_not_pass_may_be_left_out(clock):
    report = check(ticking(clock), budget=2, diagnosis=False)
    assert "agreement-o[float32]" in report.incomplete
    assert "same-bits-padded[float32]" not in report.incomplete
    assert report.reason == f"incomplete: {len(report.incomplete)} rules"


def test_without_a_budget_nothing_is_late():
    report = check(naive, only=["one-key"], examples=3, diagnosis=False)
    assert report.incomplete == ()
    assert "budget" not in report.settings


@pytest.mark.parametrize("budget", [0, -3, float("nan"), float("inf"), True])
def test_a_budget_is_a_number_of_seconds(budget):
    with pytest.raises(OptionError, match="must be a number of seconds > 0"):
        check(naive, budget=budget)


def test_a_sweep_ends_with_the_budget(clock, monkeypatch):
    sweep = pytest.importorskip("npattn.testing.device.sweep")
    one = object.__new__(sweep.Sweep)
    vars(one).update(trial=trial_of(), progress=lambda *_: None, deadline=7, powers={})
    monkeypatch.setattr(sweep, "time", sys.modules[check.__module__].time)
    monkeypatch.setattr(sweep.Asked, "of", lambda _: sweep.Asked())

    def judge(*_):
        clock.seconds += 3
        return 0.5, None

    one._judge_within_memory = judge
    recipes = [Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13, dtype="float32")] * 11
    assert one._judge_all("sweep", iter(recipes), 11).examples == 3  # at 0, 3 and 6 seconds
    late = one._judge_all("long", iter(recipes), 11)
    assert (late.status, late.message) == ("not applicable", OUT_OF_TIME)


def test_telling_rules_come_first_in_a_budget(clock):
    judge = Judge(trial_of(), 3, 0, lambda *_: None, True)
    names = ["rows-sum-to-one", "views", "same-bits-padded", "empty-row", "agreement-o"]
    unlimited = [group[0] for group in Round(judge, [], names).groups()]
    limited = [group[0] for group in Round(replace(judge, deadline=3), [], names).groups()]
    assert limited[:3] == ["agreement-o", "empty-row", "views"] != unlimited[:3]
    assert set(rounds.TELLING) <= set(rounds.RULES)


PASSED = Outcome("one-key", "5", "…", "float32", "passed", worst=0.25, examples=7)


@pytest.mark.parametrize(
    ("later", "status", "worst", "examples"),
    [
        (replace(PASSED, worst=0.5, examples=3), "passed", 0.5, 10),
        (replace(PASSED, worst=0.125, examples=3), "passed", 0.25, 10),
        (replace(PASSED, status="failed", worst=3.0, examples=2), "failed", 3.0, 9),
        (replace(PASSED, status="not applicable", examples=0), "passed", 0.25, 7),
    ],
)
def test_outcomes_of_two_rounds_are_merged(later, status, worst, examples):
    both = PASSED.merge(later)
    assert (both.status, both.worst, both.examples) == (status, worst, examples)


def test_what_failed_is_not_asked_again():
    done = Round(Judge(None, 4, 11, print, False), [], ["agreement-o", "one-key"])
    done.answers = {"agreement-o": replace(PASSED, status="failed"), "one-key": PASSED}
    again = done.again(13, 17)
    assert again.names == ["one-key"]
    assert (again.judge.seed, again.judge.examples) == (13, 17)


def test_an_outcome_takes_the_place_of_none():
    none = replace(PASSED, status="not applicable", message="…", examples=0, worst=0.0)
    assert none.merge(PASSED) == PASSED
    assert np.isfinite(none.merge(PASSED).worst)
