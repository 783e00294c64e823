"""Candidates that reproduce the failing problems are told apart by further ones."""

from dataclasses import replace

import pytest

from npattn.mistakes import MISTAKES
from npattn.testing.diagnosis.apart import tell_apart
from npattn.testing.diagnosis.evidence import collect
from npattn.testing.diagnosis.mistakes import mistake_candidates
from npattn.testing.diagnosis.steps import step_candidates
from npattn.testing.report.cause import Cause
from npattn.testing.report.words import alternatives
from tests.testing.diagnosis import failures
from tests.testing.diagnosis.failures import RECIPES, fail, trial_of

DROPPED = replace(RECIPES["causal"], dropout=0.25)


def failing(name, recipe, monkeypatch):
    """Return the evidence of one problem on which a mistake fails."""
    monkeypatch.setitem(failures.RECIPES, "failing", recipe)
    mistake = MISTAKES[name]
    trial = trial_of(mistake.forward, mistake.backward)
    evidence = collect(trial, fail(trial, ["failing"])[0])
    assert evidence.wrong
    return evidence


def rivals(evidence):
    candidates = [*step_candidates(evidence), *mistake_candidates(evidence)]
    near = [c for c in candidates if c.topic in ("causal", "diagonal")]
    return [c for c in near if c.explains(evidence)]


def test_mistake_of_two_options_is_told_from_that_of_one(monkeypatch):
    evidence = failing("causal-ignored-with-dropout", DROPPED, monkeypatch)
    before = rivals(evidence)
    assert "causal is ignored" in [c.name for c in before]
    names = [c.name for c in tell_apart(before, [evidence])]
    assert names == ["causal-ignored-with-dropout"]


def test_the_same_mistake_in_other_words_stays(monkeypatch):
    evidence = failing("causal-offset-unsigned", replace(RECIPES["causal"], T=7), monkeypatch)
    names = [c.name for c in tell_apart(rivals(evidence), [evidence])]
    assert names[0] == "the offset S − T of the diagonal is not negative with T > S"
    assert "causal-offset-unsigned" in names


def test_rivals_that_all_miss_stay(monkeypatch):
    evidence = failing("causal-ignored-with-dropout", DROPPED, monkeypatch)
    wrong = [c for c in step_candidates(evidence) if c.topic == "dropout"][:2]
    assert tell_apart(wrong, [evidence]) == wrong


@pytest.mark.parametrize(
    ("kind", "count", "text"),
    [
        ("mistake", 0, ""),
        ("step", 2, ""),
        ("mistake", 2, "or: n0, n1, with the same results"),
        ("mistake", 5, "or: n0, n1, n2 and 2 more, with the same results"),
    ],
)
def test_alternatives_are_named_beside_a_mistake(kind, count, text):
    assert alternatives(Cause("", (), kind, also=tuple(f"n{i}" for i in range(count)))) == text
