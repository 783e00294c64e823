"""Deviations are what roundings come to, and are not claimed where roundings repeat."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from npattn.problem import Problem
from npattn.testing.noise import DEVIATIONS, FEW, R2
from npattn.testing.recipe import Recipe
from npattn.testing.rounding import Rounding
from npattn.testing.tolerance import allowed, bounds, deviations

UPCAST, FUSED = Rounding.upcast(), Rounding.fused()


def drawn(**words: Any) -> tuple[Problem, dict[str, Any]]:
    sizes = {"lead": (2,), "H": 3, "K": 3, "T": 17, "S": 257, "D": 64, "E": 33}
    recipe = Recipe(**(sizes | {"dtype": "float32"} | words))
    problem = recipe.problem()
    dout, dlse = recipe.cotangents(problem)
    assert dlse is not None
    return problem, {"dout": dout.astype(float), "dlse": dlse.astype(float)}


def sharp(problem: Problem, dtype: str, rounding: Rounding, **words: Any) -> dict[str, Any]:
    """Where the eight deviations are what is allowed."""
    less = allowed(problem, dtype, rounding, **words)
    hard = bounds(problem, dtype, rounding, **words)
    return {name: less[name] < hard[name] for name in less}


def test_the_mean_square_of_a_rounding_error_is_that_of_a_log_uniform_significand() -> None:
    x = 2 ** np.random.default_rng(0).uniform(0, 1, 100_000)
    error = (x.astype(np.float32) - x) / (x * 2.0**-24)
    spread = np.std(error**2) / math.sqrt(len(x))
    assert abs(np.mean(error**2) - R2) < DEVIATIONS * spread


def test_few_roundings_at_their_worst_do_not_come_to_the_limit() -> None:
    worst = 1 / math.sqrt(R2)  # of one, in its own deviations
    assert math.sqrt(FEW) * worst <= DEVIATIONS < math.sqrt(FEW + 1) * worst


@pytest.mark.parametrize("last_first", [False, True])
def test_a_sum_of_random_terms_errs_by_no_more_than_its_variance_and_by_much_of_it(
    last_first: bool,
) -> None:
    n = 257
    x = np.random.default_rng(1).standard_normal((4000, n)).astype(np.float32)
    total = np.zeros(len(x), np.float32)
    for column in x.T[::-1] if last_first else x.T:
        total += column
    exact = x.astype(float).sum(-1)
    variance = R2 * 2.0**-48 * (n / 3 * exact**2 + n / 2 * (x.astype(float) ** 2).sum(-1))
    chi_square = np.mean((total - exact) ** 2 / variance)
    assert 0.2 < chi_square < 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_long_rows_of_generic_inputs_are_judged_by_deviations(dtype: str) -> None:
    problem, cotangents = drawn(dtype=dtype)
    used = sharp(problem, dtype, FUSED, **cotangents)
    for name in ("o", "dq", "dk"):
        assert used[name].mean() > 0.9, name


def test_in_float32_eight_deviations_are_far_below_the_worst_case() -> None:
    problem, cotangents = drawn()
    less = allowed(problem, "float32", UPCAST, **cotangents)
    hard = bounds(problem, "float32", UPCAST, **cotangents)
    for name in ("o", "dq", "dk", "dv"):
        assert np.median(hard[name] / less[name]) > 10, name


@pytest.mark.parametrize(
    "repeated",
    [
        {"distribution": "flat"},  # all scores are 0
        {"distribution": "duplicate keys"},
        {"scale": 0.0},
        {"scale": 2.0**-30},  # scores that are distinct, but whose weights round alike
    ],
)
def test_rows_in_which_roundings_repeat_are_judged_by_the_worst_case(
    repeated: dict[str, Any],
) -> None:
    problem, cotangents = drawn(**repeated)
    used = sharp(problem, "float32", UPCAST, **cotangents)
    assert not any(used[name].any() for name in ("o", "lse", "dq", "dk", "dv"))


def test_equal_values_close_the_gradients_but_not_the_result() -> None:
    problem, cotangents = drawn()
    problem = problem.replace(v=np.ones_like(problem.v))
    used = sharp(problem, "float32", UPCAST, **cotangents)
    assert used["lse"].any()
    assert not used["dq"].any()
    assert not used["dk"].any()


def test_a_row_of_few_keys_is_generic_whatever_they_are() -> None:
    problem, cotangents = drawn(S=FEW, distribution="flat")
    assert sharp(problem, "float32", UPCAST, **cotangents)["o"].any()
    problem, cotangents = drawn(S=FEW + 1, distribution="flat")
    assert not sharp(problem, "float32", UPCAST, **cotangents)["o"].any()


@pytest.mark.parametrize(
    "biased", [{"accumulator": "truncated"}, {"row_sum": "input"}], ids=lambda w: next(iter(w))
)
def test_what_errs_to_one_side_is_judged_by_the_worst_case(biased: dict[str, Any]) -> None:
    problem, cotangents = drawn(dtype="bfloat16")
    used = sharp(problem, "bfloat16", replace(FUSED, **biased), **cotangents)
    assert not any(where.any() for where in used.values())


def test_deviations_are_given_everywhere_when_they_are_asked_for() -> None:
    problem, cotangents = drawn(distribution="flat")
    found = deviations(problem, "float32", UPCAST, **cotangents)
    assert all(np.isfinite(found[name]).all() for name in ("o", "lse"))


def test_a_weight_that_is_small_now_may_not_be_after_eight_deviations() -> None:
    # Scores of about 150 that are stored in bfloat16 err by more than 1: the weights are anybody's.
    problem, cotangents = drawn(dtype="bfloat16", distribution="low", S=19)
    used = sharp(problem, "bfloat16", Rounding.eager(), **cotangents)
    assert not used["o"].any()


def test_where_squares_vanish_the_worst_case_counts() -> None:
    problem, cotangents = drawn(dtype="float64", distribution="low", S=65)
    less = allowed(problem, "float64", UPCAST, **cotangents)
    hard = bounds(problem, "float64", UPCAST, **cotangents)
    tiny = (hard["dv"] > 0) & (hard["dv"] < 1e-150)
    assert tiny.any()
    assert (less["dv"][tiny] == hard["dv"][tiny]).all()
