"""Candidates that reproduce the failing problems are told apart by further ones."""

from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest

from npattn.mistakes import MISTAKES
from npattn.testing.cases.pairwise import options_on
from npattn.testing.diagnosis.apart import CONFIRMING, is_confirmed, tell_apart
from npattn.testing.diagnosis.candidates import Candidate
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


# --- further failing problems ---------------------------------------------------------------------


def candidate(explains):
    return Candidate("mistake", "made up", "It is wrong", explains)


@pytest.mark.parametrize("name", ["causal-ignored-with-dropout", "causal-before-scale"])
def test_a_mistake_reproduces_what_fails_with_its_options(name, monkeypatch):
    evidence = failing(name, replace(DROPPED, scale=-0.75), monkeypatch)
    (own,) = (c for c in mistake_candidates(evidence) if c.name == name)
    assert own.explains(evidence)
    assert is_confirmed(own, [evidence])


def test_a_candidate_of_one_size_is_not_confirmed(monkeypatch):
    evidence = failing("causal-ignored-with-dropout", DROPPED, monkeypatch)
    lone = candidate(lambda e: e.problem.k.shape == evidence.problem.k.shape)
    assert lone.explains(evidence)
    assert not is_confirmed(lone, [evidence])
    evidence.trial.space = replace(evidence.trial.space, few_shapes=True)
    assert is_confirmed(lone, [evidence])  # each shape would be compiled


@pytest.mark.parametrize(
    "recipe", [DROPPED, replace(DROPPED, T=7), replace(DROPPED, H=4, E=DROPPED.D)]
)
def test_further_problems_differ_in_sizes_and_contents_alone(recipe, monkeypatch):
    evidence, seen = failing("causal-ignored-with-dropout", recipe, monkeypatch), []
    assert is_confirmed(candidate(lambda e: not seen.append(e)), [evidence])
    assert len(seen) == CONFIRMING
    sizes = attrgetter("lead", *"HKTSDE")
    assert all(sizes(e.outcome.sampled) != sizes(recipe) for e in seen)
    for own in seen:
        p, base = own.problem, evidence.problem
        assert options_on(own.outcome.sampled) == options_on(recipe)
        assert np.sign(p.T - p.S) == np.sign(base.T - base.S)
        assert (p.K < p.H, p.E != p.D) == (base.K < base.H, base.E != base.D)
        assert own.observed.keys() == own.wrong.keys()  # what is right has no say
