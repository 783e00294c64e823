"""Bounds where hidden keys stay in the softmax: numbers for any fill, and as sharp as elsewhere."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import npattn
from npattn.conventions import Conventions
from npattn.oracle.api import evaluate
from npattn.problem import Problem
from npattn.testing import compare
from npattn.testing.bounds.allowed import BoundTask, tolerance
from npattn.testing.bounds.rounding import Rounding

H, T, S, D, E = 2, 5, 7, 3, 11
NUMBERS = [*(float(np.finfo(f"f{n}").min) for n in (2, 4, 8)), -1e9, -1e4, 0.0, -1e30, "min"]
KINDS = [{name: x} for name in ("hidden_fill", "hidden_add") for x in NUMBERS]
PLAIN = {"softcap": None, "sinks": None, "drops": False, "bias": None}
OPTIONS = [
    PLAIN,
    PLAIN | {"sinks": np.array([-1.0, 2.0])},
    PLAIN | {"softcap": 1.5, "bias": -1e9},
    PLAIN | {"softcap": 1.5, "sinks": np.array([-1.0, 2.0]), "drops": True},
    PLAIN | {"drops": True, "bias": -1e9},
]


def make(dtype="float32", softcap=None, sinks=None, drops=False, bias=None, seed=0):
    """A problem with a row that sees nothing, and one that sees all, and a key of a huge bias."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    mask = rng.random((T, S)) < 0.6
    mask[0], mask[1] = False, True
    dense = None if bias is None else normal(H, T, S)
    if dense is not None:
        with np.errstate(over="ignore"):  # −inf in float16
            dense[:, :, 3] = dense[:, 2] = bias
    return Problem(
        normal(H, T, D), normal(H, S, D), normal(H, S, E), mask, bias=dense, softcap=softcap,
        sinks=None if sinks is None else sinks.astype(dtype),
        dropout_mask=rng.random((T, S)) < 0.5 if drops else None, dropout_rate=0.5 * drops,
    )  # fmt: skip


def cotangents(seed=1):
    rng = np.random.default_rng(seed)
    return {"dout": rng.standard_normal((H, T, E)), "dlse": rng.standard_normal((H, T))}


@pytest.mark.parametrize("meaning", KINDS, ids=str)
def test_no_bound_is_nan(meaning):
    every = itertools.product(
        ("float16", "bfloat16", "float32", "float64"),
        ("before_bias", "after_mask"),
        zip(OPTIONS, itertools.cycle(("after_scale", "before_scale"))),
    )
    for dtype, softcap, (options, bias) in every:
        conventions = Conventions(**meaning, softcap=softcap, bias=bias)
        given = cotangents()
        task = BoundTask(
            make(dtype, **options), dtype, None, given["dout"], given["dlse"], None, conventions
        )
        for bounds in (task.worst_case(), task.deviations()):
            assert not any(np.isnan(x).any() for x in bounds.values())


def narrow(problem, conventions):
    """Results of a correct implementation in float32."""
    fwd = evaluate(problem.replace(dtype=np.float32), conventions, engine="dense")
    grads = npattn.backward(fwd, *(x.astype("f4") for x in cotangents().values()))
    results = {"o": fwd.out, "lse": fwd.lse} | {f"d{n}": getattr(grads, n) for n in "qkv"}
    return {name: x.astype("f4") for name, x in results.items()}


def failures(got, problem, conventions):
    given = {name: x.astype("f4").astype(float) for name, x in cotangents().items()}
    lines = compare(got, problem, conventions=conventions, rounding="upcast", **given)
    return {line.name for line in lines if not line.passed}


@pytest.mark.parametrize("meaning", KINDS, ids=str)
def test_a_float32_implementation_is_within_the_tolerance(meaning):
    if meaning.get("hidden_fill", meaning.get("hidden_add")) == NUMBERS[2]:
        return  # float32 has no such number
    for options, seed in itertools.product(OPTIONS, range(3)):
        problem = make(seed=seed, **options)
        conventions = Conventions(**meaning)
        assert not failures(narrow(problem, conventions), problem, conventions)


@pytest.mark.parametrize("number", [-1e4, "min"])
def test_a_constant_in_place_of_a_sum_is_seen_in_dq(number):
    fill, added = Conventions(hidden_fill=number), Conventions(hidden_add=number)
    problem = make()
    assert "dq" in failures(narrow(problem, fill), problem, added)
    assert "dq" in failures(narrow(problem, added), problem, fill)


def test_another_number_is_seen_in_lse():
    problem = make()
    for name in ("hidden_fill", "hidden_add"):
        got = narrow(problem, Conventions(**{name: -1e4}))
        assert "lse" in failures(got, problem, Conventions(**{name: -1.001e4}))


@pytest.mark.parametrize("number", [-1e9, -1e30, "min"])
def test_a_fill_that_no_weight_survives_costs_no_tolerance(number):
    problem = make()
    rows = problem.mask.any(-1)
    plain = tolerance(problem, "float32", **cotangents())
    for name in ("hidden_fill", "hidden_add"):
        conventions = Conventions(**{name: number})
        wider = tolerance(problem, "float32", conventions=conventions, **cotangents())
        for result in ("o", "lse", "dq"):
            assert (wider[result][:, rows] <= 4 * plain[result][:, rows]).all()


def worst_case(problem, conventions=None, rounding=None):
    return BoundTask(problem, "float32", rounding, None, None, None, conventions).worst_case()


def test_scores_that_the_number_swallows_cost_no_tolerance():
    """A row that sees nothing is the mean of the values, whichever sums begin with the number."""
    added, filled = (
        worst_case(make(), Conventions(**{name: -1e30}))["o"][:, 0]
        for name in ("hidden_add", "hidden_fill")
    )
    assert np.all(added <= 1.01 * filled)


def test_sums_that_are_cut_off_move_by_a_unit_of_the_bias_for_each_product():
    problem, many = make(bias=-1e5), (1, 1, 31)
    problem = problem.replace(q=np.tile(problem.q / 1000, many), k=np.tile(problem.k, many))
    cut = worst_case(problem, rounding=replace(Rounding.upcast(), accumulator="truncated"))
    assert np.all(cut["lse"][:, 2] >= problem.D * 2.0**-23 * 1e5)


def test_a_bias_of_a_billion_at_some_keys_costs_no_tolerance():
    problem = make(bias=-1e9)
    problem = problem.replace(bias=np.where(np.arange(S) == 3, problem.bias, 0).astype("f4"))
    conventions = replace(Conventions(), empty_row="zero")
    allowed = tolerance(problem, "float32", conventions=conventions, **cotangents())
    plain = tolerance(problem.replace(bias=np.zeros((1, 1), "f4")), "float32", **cotangents())
    assert (allowed["o"] <= 4 * plain["o"]).all()


def test_what_a_row_of_nan_adds_to_others_is_judged():
    problem, conventions = make(), Conventions(empty_row="nan")
    got = narrow(problem, conventions)
    assert np.isnan(got["dq"][:, 0]).all()
    assert not failures(got, problem, conventions)
    for name in ("dk", "dv"):
        leaky = got | {name: np.full_like(got[name], np.nan)}
        assert failures(leaky, problem, conventions) == {name}
