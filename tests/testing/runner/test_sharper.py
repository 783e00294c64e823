"""Power of the same problems under a declared rounding, where none is declared."""

from dataclasses import replace

import numpy as np
import pytest

import npattn
from npattn.conventions import Conventions
from npattn.testing import Implementation, Rounding, check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.power import Power
from npattn.testing.runner.sharper import find_powers
from npattn.testing.trial import Trial


def right(q, k, v):
    return npattn.attention(q, k, v).astype(q.dtype)


def backward(dout, q, k, v):
    grads = npattn.backward(npattn.forward(q, k, v), dout)
    return tuple(x.astype(q.dtype) for x in (grads.q, grads.k, grads.v))


def test_powers_of_another_model_are_those_of_its_tolerances():
    f = Implementation(right, framework="numpy")
    model = Rounding.undeclared("bfloat16")
    trial = Trial(f, Conventions(), model, Space(dtype="bfloat16"), frozenset({"dq"}))
    recipe = Recipe(lead=(2,), H=3, K=3, T=7, S=11, D=5, E=13, dtype="bfloat16")
    found = find_powers(trial, [recipe], Rounding.fused())
    own = replace(trial, rounding=Rounding.fused(), memo={})
    problem = own.problem(recipe)
    cotangents = own.cotangents(recipe, problem)
    exact = own.exact(problem, cotangents)
    allowed = own.tolerance(problem, cotangents, exact)
    assert found["dq"] == Power.of(exact["dq"], allowed["dq"], "bfloat16")
    assert found["dq"].factor < find_powers(trial, [recipe], model)["dq"].factor


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("bfloat16", None), ("bfloat16", "fused"), ("float32", None)]
)
def test_report_says_what_a_declared_rounding_would_see(dtype, rounding):
    f = Implementation(right, backward=backward, framework="numpy")
    options = {"dtypes": dtype, "rounding": rounding, "only": ["agreement"], "examples": 13}
    report = check(f, **options)
    assert report.passed, report
    lines = [line for line in str(report).splitlines() if "with --rounding fused: " in line]
    assert len(lines) == (dtype == "bfloat16" and rounding is None)
    for line in lines:
        assert line.startswith("bfloat16 with --rounding fused: o ")
        assert all(f"{name} " in line and " % instead of " in line for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"distribution": "flat"}, False),
        ({"scale": 0.0}, False),
        ({"scale": -0.25}, True),
        ({"scale": 0.75}, False),
    ],
)
def test_plain_scores_are_normal_and_not_steep(changes, plain):
    assert Recipe(D=11, **changes).has_plain_scores is plain


@pytest.mark.parametrize("features", [(), ("causal",), ("causal", "scale", "mask")])
def test_first_problem_has_plain_scores(features):
    pools = Pools(Space(features=frozenset(features)))
    for seed in (0, 5, 83):
        assert next(iter(pools.cases(seed, 20))).has_plain_scores


def test_result_that_a_rule_judges_is_shown_by_that_rule():
    report = check(right, framework="numpy", dtypes="bfloat16", only=["agreement-o"], examples=7)
    [one] = report.outcomes
    weak = Power.of(np.ones(5), np.full(5, 3.0))
    other = replace(one, rule="model-sizes", powers={"o": weak})
    both = replace(report, outcomes=(one, other))
    assert "twice the result" not in str(both)
    assert "o: twice the result" in str(replace(report, outcomes=(other,)))
