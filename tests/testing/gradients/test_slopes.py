"""Slopes and their errors; differences that persist."""

import numpy as np
import pytest

from npattn.testing.gradients.slopes import FIRST, STEPS, Line, norm, persists, remainder_order

FUNCTIONS = [
    (np.sin, np.cos),
    (np.exp, np.exp),
    (np.tanh, lambda x: 1 / np.cosh(x) ** 2),
    (lambda x: np.sin(50 * x), lambda x: 50 * np.cos(50 * x)),
    (lambda x: 1e8 + np.sin(x), np.cos),
    (lambda x: np.sqrt(x**2 + 1e-6), lambda x: x / np.sqrt(x**2 + 1e-6)),
    (lambda x: 1e-200 * x**3, lambda x: 3e-200 * x**2),
    (lambda x: np.sin(x.astype(np.float32)).astype(float), np.cos),
]


def line(f, x, u=None, eps=2.0**-52, size=0.0):
    x = np.atleast_1d(x)
    u = np.ones_like(x) if u is None else u
    w, value = np.eye(len(x)), f(x)
    return Line(lambda y: (f(y), eps), x, u, value, w, eps, size + np.zeros(len(x)))


@pytest.mark.parametrize(("f", "rate"), FUNCTIONS)
def test_errors_are_within_their_estimates(f, rate):
    """At every step, for 400 arguments, but for those where truncation has not begun to fall."""
    x = np.random.default_rng(1).standard_normal(400)
    exact = rate(x)
    own = line(f, x, size=abs(exact))
    for i in range(own.count):
        own.slope(i)
    gaps = [abs(own.slope(i).value - exact) for i in range(own.count)]
    ratios = [gap / own.error(i, own.count - 1) for i, gap in enumerate(gaps)]
    small = np.array(ratios)[STEPS[: own.count] < 2.0**-7]
    assert len(small) >= 3
    assert small.max() <= 1
    assert small.max() > 1e-3  # and the estimates are no wild ones


def test_estimate_without_noise_would_be_exceeded():
    x = np.random.default_rng(1).standard_normal(400)
    own = line(np.sin, x)
    gaps = [abs(own.slope(i).value - np.cos(x)) - own.slope(i).truncation for i in range(10, 16)]
    assert np.max(gaps) > 0


@pytest.mark.thorough
def test_noise_of_values_is_measured():
    """An estimate from one step is exceeded at 8 of 10000 steps, from all smaller ones at 0.7."""
    rng, exceeded, steps = np.random.default_rng(3), [], range(3, len(STEPS))
    for noise in (1e-14, 1e-10, 1e-4):
        x = rng.standard_normal(3001)
        own = line(lambda y: np.sin(y) + noise * rng.standard_normal(len(y)), x)  # noqa: B023
        gaps = [abs(own.slope(i).value - np.cos(x)) for i in range(len(STEPS))]
        exceeded += [gaps[i] > own.error(i, len(STEPS) - 1) for i in steps]
    assert 0 < np.mean(exceeded) < 3e-4


def test_precision_of_an_argument_is_found():
    assert line(np.sin, np.array([0.3, 0.7])).response.max() < 1e-15
    single = line(lambda x: np.sin(x.astype(np.float32)).astype(float), np.array([0.3, 0.7]))
    assert 2.0**-26 < single.response.max() < 2.0**-20
    assert single.count < line(np.sin, np.array([0.3])).count
    assert line(lambda x: 0 * x, np.array([0.3])).response.max() < 1e-15


@pytest.mark.parametrize(
    ("size", "error", "expected"),
    [
        ([0, 0, 0], [1, 1, 1], False),
        ([1, 1, 1], [0.1, 0.1, 0.1], True),
        ([1, 1, 0], [0.1, 0.1, 0.1], False),  # a smaller step denies it
        ([1, 1, 0], [0.1, 0.1, 0.9], True),  # a smaller step is blind
        ([1, 0, 1], [0.1, 2, 0.1], False),  # no two neighbours
        ([1, 1, 1], [np.inf, 0.1, 0.1], True),
        ([np.inf, np.inf, 0], [0.1, 0.1, 0.1], False),
    ],
)
def test_difference_persists(size, error, expected):
    columns = (np.array(a, float)[:, None] for a in (size, error))
    assert persists(*columns).tolist() == [expected]


def test_remainder_of_right_and_wrong_gradients():
    slope = line(np.exp, np.array([0.3, 0.3])).slope(FIRST)
    orders = remainder_order(slope, np.exp(0.3) * np.array([1, 1.1]))
    assert orders == pytest.approx([3, 1], abs=0.05)


def test_one_sided_slopes_at_a_kink():
    slope = line(np.abs, np.array([0.0, 1.0])).slope(FIRST)
    assert slope.left == pytest.approx([-1, 1])
    assert slope.right == pytest.approx([1, 1])
    assert slope.side_error[1] < 1e-12


def test_nodes_outside_of_the_domain_tell_nothing():
    own = line(lambda x: np.log(np.maximum(x, 0)), np.array([1.0, 1e-3]), u=np.array([1.0, 1.0]))
    with np.errstate(divide="ignore"):
        slope = own.slope(FIRST - 1)
    assert np.isfinite(slope.truncation).tolist() == [True, False]
    raising = Line(lambda y: None, np.ones(1), np.ones(1), np.ones(1), np.eye(1), 1e-16, np.ones(1))
    assert np.isinf(raising.slope(FIRST).truncation)


def test_norm_does_not_underflow():
    assert norm(np.array([[3e-200, 4e-200], [0, 0]])) == pytest.approx([5e-200, 0])
