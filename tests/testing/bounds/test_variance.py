"""Deviations match measured roundings, and are not claimed where roundings repeat."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import npattn
from benchmarks.zoo.correct import CORRECT
from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.testing.bounds.allowed import bounds, deviations, tolerance
from npattn.testing.bounds.rounding import Rounding, Units
from npattn.testing.bounds.ulp import excess
from npattn.testing.bounds.variance import DEVIATIONS, FEW, R2, storage_variance
from npattn.testing.cases.recipe import Recipe

UPCAST, FUSED = Rounding.upcast(), Rounding.fused()


def sample_problem(**kwargs: Any) -> tuple[Problem, dict[str, Any]]:
    sizes = {"lead": (2,), "H": 3, "K": 3, "T": 17, "S": 257, "D": 64, "E": 33}
    recipe = Recipe(**(sizes | {"dtype": "float32"} | kwargs))
    problem = recipe.problem()
    dout, dlse = recipe.cotangents(problem)
    assert dlse is not None
    return problem, {"dout": dout.astype(float), "dlse": dlse.astype(float)}


def judged_by_deviations(
    problem: Problem, dtype: str, rounding: Rounding, **kwargs: Any
) -> dict[str, Any]:
    """Return where the eight deviations are the tolerance."""
    less = tolerance(problem, dtype, rounding, **kwargs)
    worst_case = bounds(problem, dtype, rounding, **kwargs)
    return {name: less[name] < worst_case[name] for name in less}


def test_r2_is_that_of_a_log_uniform_significand() -> None:
    x = 2 ** np.random.default_rng(0).uniform(0, 1, 100_000)
    error = (x.astype(np.float32) - x) / (x * 2.0**-24)
    spread = np.std(error**2) / math.sqrt(len(x))
    assert abs(np.mean(error**2) - R2) < DEVIATIONS * spread


def test_few_worst_roundings_stay_below_the_limit() -> None:
    worst = 1 / math.sqrt(R2)  # of one, in its own deviations
    assert math.sqrt(FEW) * worst <= DEVIATIONS < math.sqrt(FEW + 1) * worst


@pytest.mark.parametrize("last_first", [False, True])
def test_variance_of_a_sum_is_close_to_measured(last_first: bool) -> None:
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
def test_long_generic_rows_are_judged_by_deviations(dtype: str) -> None:
    problem, cotangents = sample_problem(dtype=dtype)
    used = judged_by_deviations(problem, dtype, FUSED, **cotangents)
    for name in ("o", "dq", "dk"):
        assert used[name].mean() > 0.9, name


def test_float32_deviations_are_far_below_the_worst_case() -> None:
    problem, cotangents = sample_problem()
    less = tolerance(problem, "float32", UPCAST, **cotangents)
    worst_case = bounds(problem, "float32", UPCAST, **cotangents)
    for name in ("o", "dq", "dk", "dv"):
        assert np.median(worst_case[name] / less[name]) > 10, name


@pytest.mark.parametrize(
    "repeated",
    [
        {"distribution": "flat"},  # all scores are 0
        {"distribution": "duplicate keys"},
        {"scale": 0.0},
        {"scale": 2.0**-30},  # scores that are distinct, but whose weights round alike
    ],
)
def test_repeated_roundings_are_judged_by_the_worst_case(repeated: dict[str, Any]) -> None:
    problem, cotangents = sample_problem(**repeated)
    used = judged_by_deviations(problem, "float32", UPCAST, **cotangents)
    assert not any(used[name].any() for name in ("o", "lse", "dq", "dk", "dv"))


def test_equal_values_affect_gradients_alone() -> None:
    problem, cotangents = sample_problem()
    problem = problem.replace(v=np.ones_like(problem.v))
    used = judged_by_deviations(problem, "float32", UPCAST, **cotangents)
    assert used["lse"].any()
    assert not used["dq"].any()
    assert not used["dk"].any()


def test_row_of_few_keys_is_generic() -> None:
    problem, cotangents = sample_problem(S=FEW, distribution="flat")
    assert judged_by_deviations(problem, "float32", UPCAST, **cotangents)["o"].any()
    problem, cotangents = sample_problem(S=FEW + 1, distribution="flat")
    assert not judged_by_deviations(problem, "float32", UPCAST, **cotangents)["o"].any()


@pytest.mark.parametrize(
    "biased", [{"accumulator": "truncated"}, {"row_sum": "input"}], ids=lambda w: next(iter(w))
)
def test_biased_roundings_are_judged_by_the_worst_case(biased: dict[str, Any]) -> None:
    problem, cotangents = sample_problem(dtype="bfloat16")
    used = judged_by_deviations(problem, "bfloat16", replace(FUSED, **biased), **cotangents)
    assert not any(where.any() for where in used.values())


def test_deviations_are_finite_everywhere_on_request() -> None:
    problem, cotangents = sample_problem(distribution="flat")
    results = deviations(problem, "float32", UPCAST, **cotangents)
    assert all(np.isfinite(results[name]).all() for name in ("o", "lse"))


def test_small_weight_may_grow_within_eight_deviations() -> None:
    # Scores of about 150 that are stored in bfloat16 err by more than 1: the weights are anybody's.
    problem, cotangents = sample_problem(dtype="bfloat16", distribution="low", S=19)
    used = judged_by_deviations(problem, "bfloat16", Rounding.eager(), **cotangents)
    assert not used["o"].any()


def test_vanishing_squares_leave_the_worst_case() -> None:
    problem, _ = sample_problem(dtype="float64", S=65)
    assert judged_by_deviations(problem, "float64", UPCAST)["o"].all()
    small = problem.replace(v=problem.v * 2.0**-540)
    assert not judged_by_deviations(small, "float64", UPCAST)["o"].any()


def test_equal_queries_affect_gradients_of_keys_alone() -> None:
    problem, cotangents = sample_problem(S=65)
    q = np.broadcast_to(problem.q[..., :1, :], problem.q.shape)
    used = judged_by_deviations(problem.replace(q=q), "float32", UPCAST, **cotangents)
    assert used["dq"].all()
    assert not used["dk"].any()
    assert not used["dv"].any()


@pytest.mark.parametrize(("size", "vast"), [(2.0**9, False), (2.0**11, True)])
def test_vast_score_errors_are_judged_by_the_worst_case(size: float, vast: bool) -> None:
    problem, _ = sample_problem(S=65)
    q, k = 8 * problem.q, problem.k.copy()
    q[..., :32], k[..., :16], k[..., 16:32] = size, size, -size  # products that cancel
    used = judged_by_deviations(problem.replace(q=q, k=k), "float32", UPCAST)
    assert {used[name].any() for name in ("o", "lse", "weights")} == {not vast}


ALIKE = {
    "tf32": Recipe(lead=(3,), H=1, K=1, T=11, S=11, D=128, E=2, dtype="float32", seed=2866287054,
                   distribution="near ties", scale=0.5, sinks=True),
    "eager, scale on q": Recipe(lead=(1,), H=2, K=2, T=129, S=129, D=65, E=65, dtype="float16",
                                seed=2146567901, distribution="key offset", scale=1.7,
                                softcap=30.0),
}  # fmt: skip
"""Keys that have much in common: what rounds the query moves all their scores alike."""


@pytest.mark.parametrize("name", ALIKE)
def test_common_shift_of_scores_is_in_the_lse_tolerance(name: str) -> None:
    recipe, one = ALIKE[name], CORRECT[name]
    problem = recipe.problem()
    got = one.forward(problem.q, problem.k, problem.v, return_lse=True, **_options(problem))
    limit = tolerance(problem, problem.q.dtype, one.rounding)
    for result, expected in zip(got, (evaluate(problem).out, evaluate(problem).lse), strict=True):
        assert (excess(result, expected) <= limit["o" if result.ndim == 4 else "lse"]).all()


# --- what does not average out --------------------------------------------------------------------

# Each is a correct implementation that rounds one thing alone; all else is float64.


def single(*arrays: Any, **options: Any) -> Problem:
    """One head in float32, whose scores are q kᵀ."""
    options = {n: np.float32(x) if n == "bias" else x for n, x in options.items()}
    return Problem(*(np.float32(x) for x in arrays), **({"scale": 1.0} | options))


def within(
    name: str, got: Any, expected: Any, problem: Problem, model: Rounding, **kwargs: Any
) -> bool:
    """Return True if a result is within the worst case and the tolerance."""
    gap = excess(np.asarray(got).astype(np.float32), expected)
    assert (gap > 0).any()
    limits = [limit(problem, "float32", model, **kwargs)[name] for limit in (bounds, tolerance)]
    return bool(all((gap <= limit).all() for limit in limits))


def opposite_scores() -> tuple[Any, Any, Any]:
    """Scores of about ±30, what takes them out of the weights again, and values of their signs."""
    rng = np.random.default_rng(0)
    x = rng.choice([-30, 30], (1021, 1)) * (1 + rng.random((1021, 1)) / 8)
    return x, rng.standard_normal((1, 1021)) - x.T, np.sign(x)


def test_rounded_scale_moves_all_scores_alike() -> None:
    x, bias, v = opposite_scores()
    problem = single([[1]], x, v, bias=bias, scale=1 + 0.9 * 2.0**-24)  # 1 to a float32
    got = evaluate(problem.replace(scale=1.0)).out
    assert within("o", got, evaluate(problem).out, problem, UPCAST)


def test_tanh_error_moves_capped_scores_alike() -> None:
    (x, bias, v), error = opposite_scores(), 2.0**-11
    model = replace(UPCAST, exp_error=error)
    one_sided = single([[1]], 30 + bias.T, v, softcap=30.0)
    two_sided = single([[1]], x, v, softcap=30.0, bias=-30 * np.tanh(x.T / 30) + bias + x.T)
    for name, problem in (("lse", one_sided), ("o", two_sided)):
        s = 30 * np.tanh(problem.k.T.astype(float) / 30) * (1 + error)
        s = s if problem.bias is None else s + problem.bias.astype(float)
        e = np.exp(s)
        got = {"lse": np.log(e.sum(-1)), "o": e @ problem.v / e.sum(-1)}
        fwd = evaluate(problem)
        assert within(name, got[name], {"lse": fwd.lse, "o": fwd.out}[name], problem, model), name


def test_lse_of_merged_parts_is_a_factor_of_out() -> None:
    q, x = np.linspace(1, 1.1, 11)[:, None], np.random.default_rng(0).standard_normal((61, 1))
    problem = single(q, 1000 + x, np.ones((61, 1)))
    fwd = evaluate(problem)
    s = problem.q.astype(float) @ problem.k.T.astype(float)
    got = np.exp(s - fwd.lse.astype(np.float32)[:, None]).sum(-1, keepdims=True)
    assert within("o", got, fwd.out, problem, UPCAST)


def test_rounded_query_moves_keys_but_not_the_sink() -> None:
    rng, model = np.random.default_rng(0), replace(UPCAST, queries="bfloat16")
    q, k = 1 + rng.random((37, 1)), -4 + rng.standard_normal((1021, 1)) / 10
    problem = single(q, k, 1 + rng.standard_normal((1021, 1)) / 100, sinks=np.ones(1))
    stored = problem.replace(q=problem.q.astype("bfloat16").astype(np.float32))
    assert within("o", evaluate(stored).out, evaluate(problem).out, problem, model)


@pytest.mark.parametrize("seed", [1, 34])
@pytest.mark.parametrize("sinks", [None, np.ones(1, np.float32)])
def test_rounded_query_moves_keys_but_not_those_whose_cap_is_saturated(
    seed: int, sinks: Any
) -> None:
    rng, model = np.random.default_rng(seed), replace(UPCAST, queries="bfloat16")
    q, k = 1 + rng.random((1, 1)), 1 + rng.standard_normal((1021, 1)) / 4
    v = k + rng.standard_normal((1021, 1)) / 100
    problem, dout = single(q, k, v, softcap=1.0, sinks=sinks), np.ones((1, 1))
    stored = problem.replace(q=problem.q.astype("bfloat16").astype(np.float32))
    for name, got in _results(stored, dout).items():
        want = _results(problem, dout)[name]
        assert within(name, got, want, problem, model, dout=dout), name


def _results(problem: Problem, dout: Any) -> dict[str, Any]:
    fwd = evaluate(problem)
    grads = {f"d{n}": x for n, x in vars(npattn.backward(fwd, dout)).items() if x is not None}
    return {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights} | grads


def test_weight_of_a_sink_may_be_subnormal() -> None:
    rng, model = np.random.default_rng(0), replace(UPCAST, weights="float16")
    q, k = np.ones((1, 1)), 16 + rng.random((3, 1)) / 8
    problem, dout = single(q, k, rng.standard_normal((3, 1)), sinks=np.zeros(1)), np.ones((1, 1))
    fwd, dlse = evaluate(problem), np.full(1, 100.0)
    weight = np.exp(-fwd.lse).astype(np.float16).astype(float)
    got = -weight * (dout[0] * fwd.out[0] - dlse)
    want = npattn.backward(fwd, dout, dlse).sinks
    assert within("dsinks", got, want, problem, model, dout=dout, dlse=dlse)


def test_scaled_query_may_be_subnormal() -> None:
    rng, model = np.random.default_rng(0), replace(UPCAST, queries="float16")
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 17), (11, 17), (11, 5)))
    problem, dout = single(q * 2.0**-20, k, v, scale=0.3), np.ones((1, 5))
    scaled = (0.3 * problem.q.astype(float)).astype(np.float16).astype(float)
    got = npattn.backward(evaluate(problem), dout).k / problem.q.astype(float) * scaled / 0.3
    want = npattn.backward(evaluate(problem), dout).k
    assert within("dk", got, want, problem, model, dout=dout)


def test_exp_error_moves_a_sink_against_all_keys() -> None:
    rng, model = np.random.default_rng(0), replace(UPCAST, exp_error=2.0**-11)
    v = 1 + rng.standard_normal((1021, 1)) / 100
    problem = single([[1.5]], rng.standard_normal((1021, 1)), v, sinks=np.full(1, 8.0))
    moved = problem.replace(sinks=problem.sinks + np.log1p(2.0**-11))
    assert within("o", evaluate(moved).out, evaluate(problem).out, problem, model)


def test_saturated_cap_passes_errors_of_its_slope() -> None:
    # Most keys have the value 1, so that dS is its error. The others, in pairs about 1, spread dP.
    rng, T, S = np.random.default_rng(0), 127, 509
    pairs, sign = np.arange(S) // 2 < 24, np.where(np.arange(S) % 2, 1, -1)

    def alike(x: Any) -> Any:
        x[..., 1:48:2] = x[..., :48:2]
        return x

    x, far = alike(12 + rng.standard_normal(S) / 8), alike(1 + rng.random(S))
    v = 1 + np.where(pairs, sign * far / 8, 3e-4 * rng.standard_normal(S))
    bias, dout = alike(rng.standard_normal((T, S))), rng.random((T, 1)).astype(np.float32)
    problem = single(np.ones((T, 1)), x[:, None], v[:, None], bias=bias, softcap=2.0)
    model = replace(UPCAST, dweights="bfloat16", exp_error=2.0**-7, delta_from="out")
    fwd, do = evaluate(problem), 1 + dout.astype(float)
    dp = (do * problem.v.T).astype("bfloat16").astype(float)
    tanh = np.tanh(problem.k.T.astype(float) / 2) * (1 + rng.choice([-1, 1], (T, S)) * 2.0**-7)
    dx = fwd.weights * (dp - do * fwd.out) * (1 - tanh**2)
    expected = npattn.backward(fwd, do).k
    assert within("dk", dx.sum(0)[:, None], expected, problem, model, dout=do)


def _options(problem: Problem) -> dict[str, Any]:
    return {"scale": problem.scale, "softcap": problem.softcap, "sinks": problem.sinks}


def test_keys_equal_in_tf32_are_judged_by_the_worst_case() -> None:
    problem, _ = sample_problem(S=65)
    noise = np.random.default_rng(0).standard_normal(problem.k.shape) * 2.0**-16
    like = (problem.k[..., :1, :] * (1 + noise)).astype(np.float32)
    tf32 = replace(UPCAST, operands="tf32")
    assert judged_by_deviations(problem, "float32", tf32)["o"].any()
    assert not judged_by_deviations(problem.replace(k=like), "float32", tf32)["o"].any()


def test_maximum_rising_with_every_tile_costs_more() -> None:
    problem, _ = sample_problem(S=256, D=2)
    ramp = np.linspace(-4, 4, 256, dtype=np.float32)[:, None] + 0.01 * problem.k
    q = abs(problem.q) + 1
    rising = problem.replace(q=q, k=ramp)
    shuffled = rising.replace(k=ramp[..., np.random.default_rng(0).permutation(256), :])
    model = replace(UPCAST, exp_error=2.0**-16)
    results = [np.median(deviations(x, "float32", model)["o"]) for x in (rising, shuffled)]
    assert results[0] > 1.2 * results[1]


def test_storage_error_follows_the_gap_of_the_number() -> None:
    low = Units.of(Rounding.eager(), "bfloat16").low
    x = np.array([1.0, 1.999, 2.0])
    half = np.array([1.0, 1.0, 2.0]) * 2.0**-8
    np.testing.assert_allclose(storage_variance(x, low), half**2 / 3, rtol=1e-12)
    many = 2 ** np.random.default_rng(0).uniform(0, 1, 10**5)
    np.testing.assert_allclose(
        np.mean(storage_variance(many, low) / many**2), R2 * low.u**2, rtol=0.01
    )
