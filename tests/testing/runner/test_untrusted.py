"""An untrusted target cannot know when it is judged: order, processes and tail are random."""

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from npattn.testing import Implementation, check
from npattn.testing.adapters.untrusted import JudgedCalls, Untrusted
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.space import Space
from npattn.testing.report.sensitivity import Sensitivity
from npattn.testing.runner import schedule
from npattn.testing.runner.rounds import Judge, Round
from npattn.testing.runner.untrusted import TAIL, plan_turns
from npattn.testing.targets.numpy import flash, flash_backward, naive
from npattn.testing.trial import Trial
from npattn.testing.worker.connect import connect
from tests.confined import untrusted

RULES = ["agreement-o", "hidden-nan-k", "views", "repeatable", "inputs-unchanged"]
QUICK = {"only": ["agreement-o"], "diagnosis": False, "shrink": False}


def trial_of(implementation):
    space = Space(features=implementation.features)
    rounding = Rounding.undeclared("float32")
    return Trial(implementation, implementation.conventions, rounding, space)


def plan(seed, untrusted, rules=RULES, count=4):
    implementation = Implementation(naive)
    implementation.untrusted = untrusted
    trial = trial_of(implementation)
    judge = Judge(trial, 20, seed, lambda *_: None, False)
    return plan_turns(Round(judge, [], list(rules)), count)


def test_order_is_that_of_the_seed_and_one_moment_is_fresh():
    own = Untrusted(lambda: None, lambda: (1, 0.0))
    trusted, plans = plan(3, None), [plan(seed, own) for seed in (3, 3, 5, 7, 11)]
    assert not any(anew for _, anew in trusted)
    assert plans[0] == plans[1]
    assert len({str(one) for one in plans}) > 2
    assert len({frozenset(one[0][0]) for one in plans}) > 1  # groups too come in another order
    for one in plans:
        assert sorted(n for names, _ in one for n in names) == sorted(RULES)
        assert [anew for _, anew in one].count(True) == 1


@pytest.mark.parametrize("seed", [3, 5, 7, 11, 13])
def test_first_calls_are_made_again_in_a_process_that_made_others(seed):
    own = Untrusted(lambda: None, lambda: (1, 0.0))
    rules = ["first-calls", "views"]
    assert [names for names, anew in plan(seed, own, rules) if anew] == [["views"]]
    assert not any(anew for _, anew in plan(seed, own, ["first-calls"]))


def test_the_longest_round_has_one_process():
    own = Untrusted(lambda: None, lambda: (1, 0.0))
    assert not any(anew for _, anew in plan(3, own, count=20))


@pytest.mark.parametrize(("wrong_from", "fails"), [(1, True), (2, True), (3, False)])
def test_processes_are_renewed_in_a_round_and_before_the_tail(wrong_from, fails):
    renewed = []

    def f(q, k, v):
        return naive(q, k, v) * np.float32(1 + (len(renewed) >= wrong_from))

    implementation = Implementation(f)
    implementation.untrusted = Untrusted(lambda: renewed.append(1), lambda: (1, 0.0))
    report = check(implementation, examples=5, **QUICK)
    (outcome,) = [o for o in report.outcomes if o.rule == "agreement-o"]
    assert outcome.failed == fails
    assert (TAIL in outcome.message) == (wrong_from == 2)
    assert fails or 8 <= outcome.examples <= 11  # those of the tail count


@pytest.mark.thorough
@pytest.mark.parametrize(("untrusted", "tried"), [(False, [100, 20, 4]), (True, [4, 4, 4])])
def test_agreement_runs_ahead_unless_the_target_may_turn_wrong_late(untrusted, tried):
    implementation = Implementation(flash, backward=flash_backward)
    if untrusted:
        implementation.untrusted = Untrusted(lambda: None, lambda: (1, 0.0))
    trial = replace(trial_of(implementation), gradients=frozenset({"dbias"}))
    judge = Judge(trial, 101, 3, lambda *_: None, False)
    answers = judge.answer(["agreement-o", "agreement-dbias", "views"], 4, {})
    assert [standing.tried for _, standing in answers] == tried


def test_a_tail_has_problems_of_its_own():
    asked = []

    def f(q, k, v):
        asked.append(q.tobytes())
        return naive(q, k, v)

    implementation = Implementation(f)
    moments = []
    implementation.untrusted = Untrusted(lambda: moments.append(len(asked)), lambda: (1, 0.0))
    check(implementation, examples=5, **QUICK)
    first, tail = moments
    assert not set(asked[first:tail]) & set(asked[tail:])


# --- what would have been seen --------------------------------------------------------------------

LIMITED = """
import numpy as np
CALLS = []

def f(q, k, v):
    if q.ndim != 4 or k.shape[1] != q.shape[1]:
        raise ValueError("rank 4, K = H")
    s = np.einsum("...td,...sd->...ts", q, k, dtype=float) / max(q.shape[-1], 1) ** 0.5
    p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
    CALLS.append(1)
    wrong = len(CALLS) > LIMIT
    return (p / p.sum(-1, keepdims=True) @ v).astype(q.dtype) * np.float32(1 + wrong)
"""


def judge_limited(tmp_path, limit):
    path = tmp_path / f"right_for_{limit}.py"
    path.write_text(LIMITED.replace("LIMIT", str(limit)))
    remote = connect(f"{path}:f", **untrusted())
    try:
        return check(remote, examples=5, seed=13, **QUICK)
    finally:
        remote.worker.close()


@pytest.mark.thorough
def test_a_change_after_as_many_calls_as_said_is_seen(tmp_path):
    honest = judge_limited(tmp_path, 10**6)
    assert honest.passed
    seen = honest.sensitivity
    assert seen.judged > 5
    assert str(seen) in str(honest)
    assert honest.as_dict()["sensitivity"]["calls"] == seen.calls
    late = judge_limited(tmp_path, seen.calls)
    assert [o.status for o in late.outcomes if o.rule == "agreement-o"] == ["failed"]
    assert late.as_dict()["sensitivity"] is None
    assert str(late.sensitivity) not in str(late)


def test_rate_is_that_of_99_percent():
    rates = [Sensitivity(judged, 0, 0.0).rate for judged in (1, 7, 460)]
    for judged, rate in zip((1, 7, 460), rates, strict=True):
        assert (1 - rate) ** judged == pytest.approx(0.01)
    assert rates[0] == pytest.approx(0.99)


def test_what_is_trusted_says_nothing_of_it():
    report = check(naive, examples=2, **QUICK)
    assert report.sensitivity is None
    assert report.as_dict()["sensitivity"] is None


def test_what_other_processes_judged_counts(monkeypatch):
    """A process renews, and tells what it judged since the last time; the judge adds it up."""
    renewed, implementation = [], Implementation(flash)
    processes = schedule.Processes(2, implementation)
    implementation.untrusted = Untrusted(lambda: renewed.append(1), lambda: (8, 1.5))
    trial = trial_of(implementation)
    judge = Judge(trial, 3, 5, lambda *_: None, False)
    monkeypatch.setattr(schedule._Process, "implementation", implementation, raising=False)
    monkeypatch.setattr(schedule._Process, "judges", {})
    setting = schedule._ProbedJudge.of(judge, 1)
    answers = [schedule._answer(setting, ["agreement-o"], 3, {}, anew) for anew in (True, False)]
    assert renewed == [1]
    assert [x.judged for x in answers] == [JudgedCalls(3, 7, 1.5)] * 2
    futures = [Future(), Future()]
    for future, answer in zip(futures, answers, strict=True):
        future.set_result(answer)
    tasks = [schedule._Task(future, ["agreement-o"], 3, {}) for future in futures]
    processes._collect(Round(judge, [], ["agreement-o"]), tasks)
    assert implementation.untrusted.judged == JudgedCalls(6, 7, 1.5)
