"""Pairs of float64 against mpmath: each operation errs by no more than it says."""

from __future__ import annotations

import mpmath  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn.engines import double_double as dd
from npattn.engines.double_double import EXP, UNIT, Pair, as_pair

seeds = st.integers(0, 2**32)


@pytest.fixture(autouse=True)
def many_digits():
    with mpmath.workprec(500):
        yield


def sample(seed, low=-30, high=30, size=53):
    """Return pairs of all signs, with exponents in this range."""
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.uniform(1, 2, size) * rng.choice([-1, 1], size), rng.integers(low, high, size))
    rest = x * 2.0**-53 * rng.uniform(-1, 1, size)
    return Pair(x, rest).plus(0.0)


def exact(x):
    return [
        mpmath.mpf(h) + mpmath.mpf(low) for h, low in zip(*(y.tolist() for y in x), strict=True)
    ]


def error(got, want):
    """Return the largest relative error."""
    pairs = zip(exact(got), want, strict=True)
    return max(abs(g - w) / abs(w) if w else abs(g) for g, w in pairs)


@pytest.mark.thorough
@given(seeds, seeds)
def test_sums_products_and_quotients(one, other):
    x, y = sample(one), sample(other)
    a, b = exact(x), exact(y)
    assert error(x.times(y), [p * q for p, q in zip(a, b, strict=True)]) <= UNIT
    assert error(x.over(y), [p / q for p, q in zip(a, b, strict=True)]) <= UNIT
    assert error(x.plus(y), [p + q for p, q in zip(a, b, strict=True)]) <= UNIT
    assert error(x.minus(y), [p - q for p, q in zip(a, b, strict=True)]) <= UNIT


@given(seeds)
def test_results_are_the_nearest_float_and_what_is_left(seed):
    x = sample(seed).times(sample(seed + 1))
    assert np.array_equal(x.high, x.nearest)
    assert (abs(x.low) <= np.spacing(abs(x.high)) / 2).all()


@pytest.mark.thorough
@given(seeds, st.sampled_from([(-40, -3), (-6, 2), (1, 9)]))
def test_exp_and_expm1(seed, exponents):
    x = sample(seed, *exponents)
    x = dd.select(abs(x.high) < 700, x, 1.0)
    assert error(dd.exp(x), map(mpmath.exp, exact(x))) <= EXP
    assert error(dd.expm1(x), map(mpmath.expm1, exact(x))) <= EXP


@pytest.mark.thorough
@given(seeds)
def test_log(seed):
    x = sample(seed, -200, 200)
    x = dd.select(x.high > 0, x, -x)
    for got, own in zip(exact(dd.log(x)), exact(x), strict=True):
        want = mpmath.log(own)
        assert abs(got - want) <= EXP * max(1, abs(want))


@pytest.mark.thorough
@given(seeds, st.integers(0, 17))
def test_total_and_dot(seed, n):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, 3, n)), rng.standard_normal((2, n, 5))
    got = dd.dot(as_pair(a), as_pair(b))
    sums = dd.total(as_pair(a), -1)
    assert sums.high.shape == (2, 3, 1)
    for i, j, m in np.ndindex(2, 3, 5):
        terms = [mpmath.mpf(x) * mpmath.mpf(y) for x, y in zip(a[i, j], b[i, :, m], strict=True)]
        whole = mpmath.mpf(got.high[i, j, m]) + mpmath.mpf(got.low[i, j, m])
        assert abs(whole - mpmath.fsum(terms)) <= (n + 2) * UNIT * mpmath.fsum(map(abs, terms))
        row = mpmath.mpf(sums.high[i, j, 0]) + mpmath.mpf(sums.low[i, j, 0])
        assert abs(row - mpmath.fsum(a[i, j])) <= (n + 1) * UNIT * abs(a[i, j]).sum()


def test_dot_in_blocks_is_the_same(monkeypatch):
    rng = np.random.default_rng(0)
    a, b = as_pair(rng.standard_normal((2, 3, 23))), as_pair(rng.standard_normal((2, 23, 5)))
    whole = dd.dot(a, b)
    monkeypatch.setattr(dd, "BLOCK", 7)
    assert np.array_equal(dd.dot(a, b).high, whole.high)


def test_the_ends_of_exp():
    found = dd.exp(as_pair(np.array([-np.inf, -1e9, -800.0, 0.0, 709.0])))
    assert found.nearest.tolist()[:4] == [0.0, 0.0, 0.0, 1.0]
    assert found.nearest[4] == float(mpmath.exp(709))
