"""A mistake that is no candidate for a rule's failure does not stop the diagnosis."""

from __future__ import annotations

import re
from dataclasses import replace

from npattn.mistakes import MISTAKES
from npattn.testing.diagnosis.evidence import collect
from npattn.testing.diagnosis.mistakes import breaks_alike, mistake_candidates
from npattn.testing.rules import PROPERTIES
from npattn.testing.runner.rounds import Judge
from tests.testing.diagnosis.failures import fail, trial_of


def test_mistake_wrong_in_every_call_breaks_no_rule_about_calls():
    mistake = MISTAKES["input-changed"]
    trial = trial_of(mistake.forward, mistake.backward)
    for outcome in fail(trial, ["plain", "wide"], kind="after"):
        object.__setattr__(outcome, "rule", "after-other-dtype")
        assert not breaks_alike(mistake, trial, outcome)


def test_a_mistake_that_gives_numbers_is_no_cause_of_nan():
    mistake = MISTAKES["cache-kept"]
    trial = trial_of(mistake.forward, mistake.backward, features=())
    judge = Judge(trial, 20, 0, lambda *_: None, shrinks=False)
    outcome = judge.judge(PROPERTIES["after-other-dtype"], trial)
    assert breaks_alike(mistake, trial, outcome)
    nan = re.sub(r"got [^,]+,", "got nan,", outcome.message)
    assert nan != outcome.message
    assert not breaks_alike(mistake, trial, replace(outcome, message=nan))


def test_what_the_first_call_left_is_a_known_mistake():
    mistake = MISTAKES["scale-of-first-call"]
    used = type(mistake.forward.__self__)()
    trial = trial_of(used.forward, used.backward, features=())
    first, later = fail(trial, ["wide", "plain"])
    results = trial.results(first.problem, first.cotangents)
    evidence = collect(trial, later)
    assert evidence.wrong
    (candidate,) = (c for c in mistake_candidates(evidence) if c.name == mistake.name)
    assert not candidate.explains(evidence)  # made alone, the call is right
    trial.first_calls = ((first.problem, first.cotangents, results),)
    assert candidate.explains(evidence)
