"""The cheap form is a bound too, of the size of the full one, and is not asked where it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import npattn.testing.trial as trial_module
from npattn.mistakes import base, base_backward
from npattn.problem import Problem
from npattn.testing import check
from npattn.testing.bounds.allowed import bounds, tolerance
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.row_norms import RowNorms, covers
from npattn.testing.cases.recipe import Recipe
from npattn.zoo.mutants import MUTANTS

MODELS = (Rounding.upcast(), Rounding.fused(), Rounding.eager())
ODD = ({"softcap": 2.0}, {"score_mod": "distance"}, {"sinks": True}, {"dropout": 0.3})


def drawn(**words: Any) -> tuple[Problem, dict[str, Any]]:
    sizes = {"lead": (2,), "H": 6, "K": 3, "T": 17, "S": 65, "D": 31, "E": 13}
    recipe = Recipe(**(sizes | {"dtype": "float32"} | words))
    problem = recipe.problem()
    dout, dlse = recipe.cotangents(problem)
    assert dlse is not None
    return problem, {"dout": dout.astype(float), "dlse": dlse.astype(float)}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
@pytest.mark.parametrize(
    "option", [{}, {"causal": True}, {"mask": "padding"}, {"bias": "full"}, {"bias": "keys"}]
)
def test_it_is_of_the_size_of_the_full_form(
    dtype: str, model: Rounding, option: dict[str, Any]
) -> None:
    problem, cotangents = drawn(dtype=dtype, **option)
    full = bounds(problem, dtype, model, **cotangents)
    row_norms = tolerance(problem, dtype, model, row_norms=True, **cotangents)
    assert row_norms.keys() == full.keys()
    for name, t in full.items():
        ratio = row_norms[name][t > 0] / t[t > 0]
        # Neither is the other's limit: both take worst cases, of other things.
        assert ratio.min() > 0.5, name
        assert np.median(ratio) < 8, name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_right_is_within_it(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "CHEAP", 0)
    report = check(base, backward=base_backward, dtypes=(dtype,), only=["agreement"], examples=60)
    assert report.passed, str(report)


@pytest.mark.parametrize("name", ["scale-twice", "dq-unscaled", "dbias-zero"])
def test_what_is_wrong_is_beyond_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "CHEAP", 0)
    mutant = MUTANTS[name]
    report = check(mutant.forward, backward=mutant.backward, only=mutant.killed_by, examples=60)
    assert not report.passed


@pytest.mark.parametrize("option", ODD, ids=lambda w: next(iter(w)))
def test_options_that_it_does_not_know_go_to_the_full_form(option: dict[str, Any]) -> None:
    problem, cotangents = drawn(**option)
    assert not covers(problem)
    row_norms = tolerance(problem, "float32", row_norms=True, **cotangents)
    plain = tolerance(problem, "float32", **cotangents)
    assert all(np.array_equal(row_norms[name], t) for name, t in plain.items())


def test_errors_of_exp_that_are_too_large_for_it_go_to_the_full_form() -> None:
    problem, cotangents = drawn(dtype="bfloat16", distribution="one-hot")
    assert covers(problem)
    assert not RowNorms(problem, Rounding.eager(), "bfloat16").fits
    row_norms = tolerance(problem, "bfloat16", row_norms=True, **cotangents)
    plain = tolerance(problem, "bfloat16", **cotangents)
    assert all(np.array_equal(row_norms[name], t) for name, t in plain.items())


def test_a_row_that_sees_nothing_is_allowed_nothing() -> None:
    problem, cotangents = drawn()
    visible = np.ones((problem.T, problem.S), bool)
    visible[3] = False
    problem = problem.replace(mask=visible)
    row_norms = tolerance(problem, "float32", row_norms=True, **cotangents)
    for name in ("o", "lse", "dq"):
        assert (row_norms[name][:, :, 3] == 0).all() or name == "dq", name
        assert (row_norms[name][:, :, 3] <= 1e-30).all(), name


def test_a_rounding_on_the_way_costs_what_it_costs_in_full() -> None:
    problem, cotangents = drawn(dtype="bfloat16")
    model = replace(Rounding.fused(), gradient_roundings=3, shared="input", gradient_block=7)
    plain = tolerance(problem, "bfloat16", Rounding.fused(), row_norms=True, **cotangents)
    more = tolerance(problem, "bfloat16", model, row_norms=True, **cotangents)
    full = bounds(problem, "bfloat16", model, **cotangents)
    for name in ("dq", "dk", "dv"):
        assert (more[name] > plain[name]).all(), name
        assert np.median(more[name] / full[name]) < 2, name


def test_parts_of_what_is_broadcast_may_be_rounded_then_summed() -> None:
    model, sizes = Rounding.fused(), {"lead": (2, 3), "dtype": "bfloat16", "broadcast": True}
    problem, cotangents = drawn(**sizes)
    assert problem.k.shape[:-3] != (2, 3)
    row_norms = tolerance(problem, "bfloat16", model, row_norms=True, **cotangents)
    full = bounds(problem, "bfloat16", model, **cotangents)
    for name in ("dq", "dk", "dv"):
        assert row_norms[name].shape == full[name].shape
        assert 0.5 < np.median(row_norms[name] / full[name]) < 2, name
