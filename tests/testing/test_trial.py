"""A trial calls an implementation once per recipe, and computes tolerances only when needed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from npattn.conventions import Conventions
from npattn.oracle.api import evaluate
from npattn.problem import Cotangents, Problem
from npattn.testing import Implementation, Recipe, Rounding
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools, recipes
from npattn.testing.comparison import compare_arrays
from npattn.testing.targets.numpy import flash, flash_backward
from npattn.testing.trial import Trial

RECIPE = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13, seed=17)


def trial_of(f=flash, backward=None, **space):
    implementation = Implementation(f, backward=backward)
    space = Space(features=implementation.features, **space)
    return Trial(implementation, Conventions(), Rounding.undeclared("float32"), space)


# --- against the oracle ---------------------------------------------------------------------------


def test_result_of_wrong_shape_has_infinite_ratio():
    def flat(q, k, v):
        return flash(q, k, v)[..., :1]

    comparisons = trial_of(flat).agreement(RECIPE)
    assert comparisons["o"].ratio == np.inf
    assert "o has shape (2, 3, 5, 1), want (2, 3, 5, 13)" in str(comparisons["o"])


@pytest.mark.parametrize("kind", [int, bool, complex])
def test_numbers_of_another_kind_are_left_to_shape_dtype(kind):
    trial = trial_of(lambda q, k, v: flash(q, k, v).astype(kind))
    assert "o" not in trial.evaluation(RECIPE).results
    assert "o" in trial_of().evaluation(RECIPE).results


def test_unrequested_results_are_not_compared():
    trial = trial_of(flash, flash_backward)
    trial.gradients = frozenset({"dk"})
    assert set(trial.agreement(RECIPE)) == {"o", "lse", "dk"}


def test_raising_on_plain_problem_fails_unaltered():
    def refuses(q, k, v):
        raise ValueError("never")

    assert trial_of(refuses).fails_unaltered(RECIPE)
    assert not trial_of().fails_unaltered(RECIPE)


def test_results_are_memoized():
    calls = []

    def counted(q, k, v):
        calls.append(q.shape)
        return flash(q, k, v)

    trial = trial_of(counted)
    calls.clear()  # what framework it is was tried
    assert trial.evaluation(RECIPE) is trial.evaluation(RECIPE)
    assert trial.agreement(RECIPE) is trial.agreement(RECIPE)
    assert len(calls) == 2  # one for each of the two


def test_cotangents_match_what_implementation_takes():
    with_lse = trial_of(flash, flash_backward)
    problem = with_lse.problem(RECIPE)
    assert with_lse.cotangents(RECIPE, problem).dlse is not None

    def plain(q, k, v):
        return flash(q, k, v)

    dout, dlse = trial_of(plain).cotangents(RECIPE, problem, weights=True)
    assert dout.shape == (2, 3, 5, 13)
    assert dlse is None


# --- the memo -------------------------------------------------------------------------------------


def test_a_fresh_trial_remembers_nothing():
    trial = trial_of()
    problem = trial.problem(RECIPE)
    assert trial.problem(RECIPE) is problem
    assert trial.fresh().problem(RECIPE) is not problem


def test_tolerances_are_computed_once_and_when_needed(monkeypatch):
    calls = []
    tolerance = Trial.tolerance
    monkeypatch.setattr(Trial, "tolerance", lambda *a: calls.append(a) or tolerance(*a))
    evaluation = trial_of().evaluation(RECIPE)
    assert calls == []
    assert evaluation.tolerance["o"].shape == replace(evaluation).tolerance["o"].shape
    assert len(calls) == 1


@pytest.mark.thorough
def test_cases_are_memoized_by_all_their_inputs():
    trial = trial_of()
    pools = Pools(trial.space)
    planned = list(trial.cases(pools, 3, 10))
    assert planned == list(pools.cases(3, 10))
    again = trial.cases(Pools(trial.space), 3, 10)
    assert all(x is y for x, y in zip(again, planned, strict=True))
    for others in (
        trial.cases(pools, 5, 10),
        trial.cases(pools, 3, 11),
        trial.cases(Pools(trial.space, force={"T": 7}), 3, 10),
        trial.cases(Pools(trial.space, forbid=frozenset({"mask"})), 3, 10),
        trial.cases(Pools(trial.space, nonempty=True), 3, 10),
    ):
        assert list(others) != planned


@pytest.mark.parametrize("scale", [None, 0.5, 0.0, -0.75])
@pytest.mark.parametrize("bias", ["-inf rows", "-inf padding", "alibi", None])
def test_a_bias_of_minus_infinity_is_not_asked_where_a_scale_makes_plus_infinity_of_it(scale, bias):
    recipe = replace(RECIPE, scale=scale, bias=bias)
    trial = trial_of()
    scaled = replace(trial, conventions=Conventions(bias="before_scale"))
    assert not trial.skips(recipe, "one-key")
    wrong = scale is not None and scale <= 0 and bias in ("-inf rows", "-inf padding")
    assert scaled.skips(recipe, "one-key") == wrong


def test_a_float64_result_that_is_near_its_tolerance_is_held_against_an_oracle_without_rounding():
    recipe = replace(RECIPE, dtype="float64")

    def off(q, k, v):
        problem = Problem(q, k, v)
        exact, cotangents = evaluate(problem, engine="extended").out, Cotangents(np.zeros(()), None)
        plain = trial.exact(problem, cotangents)
        return exact + 0.75 * trial.tolerance(problem, cotangents, plain)["o"]

    trial = trial_of(off, dtype="float64")
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    plain, exact = (trial.exact(problem, cotangents, engine=x) for x in ("dense", "extended"))
    allowed = trial.tolerance(problem, cotangents, plain)["o"]
    got = off(problem.q, problem.k, problem.v)
    near, far = (compare_arrays("o", got, x["o"], allowed).ratio for x in (exact, plain))
    assert near != far
    assert trial.agreement(recipe)["o"].ratio == near


def test_an_oracle_that_would_keep_what_float64_rounds_away_decides_nothing():
    """With "min" added to all its scores a row is the mean of the values."""
    conventions = Conventions(hidden_add="min")
    recipe = replace(RECIPE, dtype="float64", mask="empty rows")

    def off(q, k, v, mask):
        problem = Problem(q, k, v, mask=mask)
        cotangents = Cotangents(np.zeros(()), None)
        plain = trial.exact(problem, cotangents)
        return plain["o"] + 0.75 * trial.tolerance(problem, cotangents, plain)["o"]

    trial = replace(trial_of(off, dtype="float64"), conventions=conventions)
    trial.space = replace(trial.space, features=frozenset({"mask"}))
    assert not trial.problem(recipe).mask_array.any(-1).all()
    assert 0.7 < trial.agreement(recipe)["o"].ratio < 0.8


# --- rows that see nothing ------------------------------------------------------------------------

CONVENTIONS = [
    Conventions(),
    Conventions(bias="before_scale"),
    Conventions(softcap="after_bias"),
    Conventions(softcap="after_mask"),
    Conventions(hidden_fill=-1e4),
]


@pytest.mark.parametrize("conventions", CONVENTIONS, ids=str)
@given(recipe=recipes())
def test_empty_rows_are_those_whose_lse_is_minus_infinity(conventions, recipe):
    trial = replace(trial_of(), conventions=conventions)
    problem = trial.problem(recipe)
    plain = trial._without_fill.canonical(problem).replace(sinks=None)
    empty = trial.empty(problem)
    np.testing.assert_array_equal(empty, evaluate(plain, engine="dense").lse == -np.inf)


def test_a_product_of_minus_infinity_empties_a_row():
    q, k, v = np.full((1, 2, 1), 1e200), np.full((1, 3, 1), -1e200), np.ones((1, 3, 1))
    problem = Problem(q, k, v)
    assert trial_of().empty(problem).all()
    assert not trial_of().empty(problem.replace(q=-q)).any()
