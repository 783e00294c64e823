"""The bound of second derivatives: float32 stays within it, and it is not idle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn.oracle.api
from npattn.testing.bounds import second_order
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.second_order import second_order_bounds
from tests.oracle.test_second_order import COTANGENTS, INPUTS, make

NAMES = ("scale", "softcap", "bias", "sinks", "mask", "causal", "window", "dropout")
MODEL = Rounding.choose(None, "float32", "accumulator")


def errors(options, size, seed, factor=1.0):
    """Errors of the page in float32, and the bounds; q is `factor` times as large."""
    case = make(options, size, seed, dtype=np.float32)
    problem = case.problem.replace(q=(factor * case.problem.q).astype(np.float32))
    dout, dlse = (case.cotangents[n].astype(np.float32) for n in COTANGENTS[:2])
    along = {n: x.astype(np.float32) for n, x in case.directions.items()}

    def compute(dtype):
        fwd = npattn.oracle.api.evaluate(problem.replace(dtype=dtype), engine="dense")
        return npattn.double_backward(fwd, dout, dlse, **{f"dd{n}": x for n, x in along.items()})

    exact, rounded = compute(np.float64), compute(np.float32)
    head = (None,) if problem.headless else (...,)
    do, dl = (x.astype(float)[head] for x in (dout, dlse))
    wide = {n: None if n not in along else along[n].astype(float) for n in INPUTS}
    wide |= {n: wide[n][head] for n in "qkv"}
    allowed = second_order_bounds(problem, np.float32, MODEL, do, dl, wide)
    allowed["dout"] = allowed.pop("o")[0 if problem.headless else ...]
    return {n: (abs(getattr(rounded, n) - getattr(exact, n)), b) for n, b in allowed.items()}


@given(
    st.sets(st.sampled_from(NAMES)),
    st.sampled_from(["tiny", "primes", "headless"]),
    st.integers(0, 99),
    st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_float32_stays_within_the_bound(options, size, seed, factor):
    for name, (error, bound) in errors(sorted(options), size, seed, factor).items():
        assert (error <= bound).all(), name


def test_the_errors_of_scores_are_needed(monkeypatch):
    """Without them, large scores exceed it."""

    def roundings_alone(self):
        return 4 * self.u

    right = errors(("bias",), "primes", 3, 100.0).values()
    assert all((error <= bound).all() for error, bound in right)
    monkeypatch.setattr(second_order._Sizes, "_growth", roundings_alone)
    wrong = errors(("bias",), "primes", 3, 100.0).values()
    assert any((error > bound).any() for error, bound in wrong)


def test_rows_without_a_digit_left_are_free():
    """Scores of 1e8 have an error of 10 in float32."""
    case = make((), "tiny")
    problem = case.problem.replace(q=1e9 * case.problem.q)
    along = dict.fromkeys(INPUTS) | case.directions
    do = case.cotangents["dout"]
    allowed = second_order_bounds(problem, np.float32, MODEL, do, None, along)
    assert not np.isfinite(allowed["q"]).any() or allowed["q"].max() > 1e9


@pytest.mark.parametrize("left_out", ["q", "k", "v"])
def test_a_direction_may_be_left_out(left_out):
    case = make(("mask",), "tiny")
    along = dict.fromkeys(INPUTS) | case.directions
    do, dl = case.cotangents["dout"], case.cotangents["dlse"]
    whole = second_order_bounds(case.problem, np.float32, MODEL, do, dl, along)
    part = second_order_bounds(case.problem, np.float32, MODEL, do, dl, along | {left_out: None})
    assert all((part[n] <= whole[n]).all() for n in part)
    assert any((part[n] < whole[n]).any() for n in part)
