"""Answers to the same rules on different problems."""

import pytest

from npattn.testing.report.outcome import Outcome
from npattn.testing.runner.journal import answer_of
from npattn.testing.runner.merge import merge_answers


def entry(status="passed", worst=0.0, examples=7, sizes=None, **more):
    values = {"rule": "views", "semantics": "1", "about": "", "dtype": "float32", "message": ""}
    values |= {"status": status, "worst": worst, "examples": examples, "level": "conduct"}
    outcome = {**values, "left_to": [], "asked": {"ranges": sizes or {}, "models": []}}
    outcome["powers"] = {}
    return {"dtype": "float32", "answer": "views", "outcome": outcome, **more}


def merge(*entries):
    (merged,) = merge_answers([[one] for one in entries])
    answer = answer_of(merged)
    assert isinstance(answer, Outcome)
    return answer, merged


def test_examples_add_up_and_the_largest_ratio_stays():
    answer, _ = merge(entry(worst=0.25, examples=7), entry(worst=0.125, examples=11))
    assert (answer.status, answer.worst, answer.examples) == ("passed", 0.25, 18)


def test_ranges_of_sizes_are_joined():
    parts = entry(sizes={"S": [3, 5], "T": [2, 7]}), entry(sizes={"S": [2, 11]})
    answer, _ = merge(*parts)
    assert answer.asked.ranges == {"S": (2, 11), "T": (2, 7)}


def test_the_first_failure_stays():
    wrong = entry("failed", 3.0, 2, recipe={"seed": 5})
    later = entry("failed", 9.0, 3, recipe={"seed": 13})
    answer, merged = merge(entry(), wrong, later, entry())
    assert (answer.status, answer.worst, answer.examples) == ("failed", 3.0, 9)
    assert merged["recipe"] == {"seed": 5}


@pytest.mark.parametrize("first", [True, False])
def test_what_exercised_nothing_changes_nothing(first):
    nothing = entry("not applicable", examples=0)
    pair = [nothing, entry(worst=0.5)] if first else [entry(worst=0.5), nothing]
    answer, _ = merge(*pair)
    assert (answer.status, answer.worst, answer.examples) == ("passed", 0.5, 7)


def test_texts_are_those_of_the_first():
    texts = [{"dtype": "float32", "answer": "behaviour", "text": x} for x in "ab"]
    assert merge_answers([[one] for one in texts]) == (texts[0],)


def test_rules_and_dtypes_stay_apart():
    other = {**entry(), "dtype": "float64"}
    assert merge_answers([[entry(), other]]) == (entry(), other)
