"""Row norms give a bound too, near the full form, which replaces it where it does not hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import npattn.testing.trial as trial_module
from benchmarks.zoo.mutants import MUTANTS
from npattn.mistakes import base, base_backward
from npattn.problem import Problem
from npattn.testing import check
from npattn.testing.bounds.allowed import bounds, tolerance
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.row_norms import RowNorms, covers
from npattn.testing.cases.recipe import Recipe

MODELS = (Rounding.upcast(), Rounding.fused(), Rounding.eager())
ODD = ({"softcap": 2.0}, {"score_mod": "distance"}, {"sinks": True}, {"dropout": 0.3})


def sample_problem(**kwargs: Any) -> tuple[Problem, dict[str, Any]]:
    sizes = {"lead": (2,), "H": 6, "K": 3, "T": 17, "S": 65, "D": 31, "E": 13}
    recipe = Recipe(**(sizes | {"dtype": "float32"} | kwargs))
    problem = recipe.problem()
    dout, dlse = recipe.cotangents(problem)
    assert dlse is not None
    return problem, {"dout": dout.astype(float), "dlse": dlse.astype(float)}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize(
    "option", [{}, {"causal": True}, {"mask": "padding"}, {"bias": "full"}, {"bias": "keys"}]
)
def test_bounds_are_near_the_full_form(dtype: str, model: Rounding, option: dict[str, Any]) -> None:
    problem, cotangents = sample_problem(dtype=dtype, **option)
    full = bounds(problem, dtype, model, **cotangents)
    row_norms = tolerance(problem, dtype, model, row_norms=True, **cotangents)
    assert row_norms.keys() | {"max_score"} == full.keys()
    for name in row_norms:
        t = full[name]
        ratio = row_norms[name][t > 0] / t[t > 0]
        # Neither is the other's limit: both take worst cases, of other things.
        assert ratio.min() > 0.5, name
        assert np.median(ratio) < 8, name


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_correct_implementation_passes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "LARGE", 0)
    report = check(base, backward=base_backward, dtypes=(dtype,), only=["agreement"], examples=20)
    assert report.passed, str(report)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["scale-twice", "dq-unscaled", "dbias-zero"])
def test_mutant_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "LARGE", 0)
    mutant = MUTANTS[name]
    report = check(
        mutant.forward,
        backward=mutant.backward,
        only=mutant.killed_by,
        examples=20,
        diagnosis=False,
    )
    assert not report.passed


@pytest.mark.parametrize("option", ODD, ids=lambda w: next(iter(w)))
def test_unsupported_options_use_the_full_form(option: dict[str, Any]) -> None:
    problem, cotangents = sample_problem(**option)
    assert not covers(problem)
    row_norms = tolerance(problem, "float32", row_norms=True, **cotangents)
    plain = tolerance(problem, "float32", **cotangents)
    assert all(np.array_equal(row_norms[name], t) for name, t in plain.items())


def test_large_exp_errors_use_the_full_form() -> None:
    problem, cotangents = sample_problem(dtype="bfloat16", distribution="one-hot")
    assert covers(problem)
    assert not RowNorms(problem, Rounding.eager(), "bfloat16").fits
    row_norms = tolerance(problem, "bfloat16", row_norms=True, **cotangents)
    plain = tolerance(problem, "bfloat16", **cotangents)
    assert all(np.array_equal(row_norms[name], t) for name, t in plain.items())


def test_fully_masked_row_has_zero_tolerance() -> None:
    problem, cotangents = sample_problem()
    visible = np.ones((problem.T, problem.S), bool)
    visible[3] = False
    problem = problem.replace(mask=visible)
    row_norms = tolerance(problem, "float32", row_norms=True, **cotangents)
    for name in ("o", "lse", "dq"):
        assert (row_norms[name][:, :, 3] == 0).all() or name == "dq", name
        assert (row_norms[name][:, :, 3] <= 1e-30).all(), name


def test_intermediate_roundings_cost_as_in_the_full_form() -> None:
    problem, cotangents = sample_problem(dtype="bfloat16")
    model = replace(Rounding.fused(), gradient_roundings=3, shared="input", gradient_block=7)
    plain = tolerance(problem, "bfloat16", Rounding.fused(), row_norms=True, **cotangents)
    more = tolerance(problem, "bfloat16", model, row_norms=True, **cotangents)
    full = bounds(problem, "bfloat16", model, **cotangents)
    for name in ("dq", "dk", "dv"):
        assert (more[name] > plain[name]).all(), name
        assert np.median(more[name] / full[name]) < 2, name


def test_broadcast_gradients_may_be_rounded_in_parts() -> None:
    model, sizes = Rounding.fused(), {"lead": (2, 3), "dtype": "bfloat16", "broadcast": True}
    problem, cotangents = sample_problem(**sizes)
    assert problem.k.shape[:-3] != (2, 3)
    row_norms = tolerance(problem, "bfloat16", model, row_norms=True, **cotangents)
    full = bounds(problem, "bfloat16", model, **cotangents)
    for name in ("dq", "dk", "dv"):
        assert row_norms[name].shape == full[name].shape
        assert 0.5 < np.median(row_norms[name] / full[name]) < 2, name


def test_sums_that_begin_with_a_large_bias_are_covered_too() -> None:
    sizes = {"lead": (2,), "H": 1, "K": 1, "T": 5, "S": 3, "D": 509, "E": 2, "dtype": "float64"}
    problem = Recipe(**sizes, seed=7, bias="-1e4 rows").problem()
    cheap, full = (tolerance(problem, "float64", row_norms=one)["o"] for one in (True, False))
    assert np.all(cheap >= full)
