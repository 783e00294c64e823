"""Names of mistakes in a gradient."""

import numpy as np
import pytest

from npattn.testing.gradients.explain import explain_shape, explain_values, name_factor

WANT = np.random.default_rng(2).standard_normal((5, 5, 3))
ZERO = np.zeros_like(WANT)


@pytest.mark.parametrize(
    ("factor", "precision", "text"),
    [
        (2.0, 1e-12, "2 times"),
        (-1.0, 1e-12, "-1 times"),
        (1 / 3, 1e-12, "1/3 of"),
        (2 / 3, 1e-12, "2/3 of"),
        (3.00001 / 3, 1e-12, "1.00000333 times"),
        (10.0, 0.04, "about 10 times"),
        (10.0, 0.4, "about 10 times"),
        (5**0.5, 0.05, "about 2 times"),
        (7**0.5, 1e-12, "√7 times"),
        (1 / 420, 1e-12, "1/420 of"),
        (1.2345678912, 1e-12, "1.23456789 times"),
        (1.2345678912, 1e-4, "1.235 times"),
        (2**0.5, 0.01, "about 1.4 times"),  # or 7/5, or 10/7
    ],
)
def test_factor_is_named(factor, precision, text):
    """A name stands for one number alone, at the precision to which the factor is known."""
    assert name_factor(factor, precision, (3, 4, 5, 7)) == text


@pytest.mark.parametrize(
    ("got", "text"),
    [
        (ZERO, "dx is 0 everywhere"),
        (WANT.swapaxes(0, 1), "dx is transposed: axes 0 and 1 are swapped"),
        (WANT + 1.5, "dx is off by a term that is constant along axis -1"),
        (WANT - WANT.mean(1, keepdims=True), "has its mean over axis -2 subtracted"),
        (abs(WANT), "dx has the wrong sign at"),
        (
            np.where(np.arange(3) == 2, 2 * WANT, WANT),
            "25 of 75 elements, all at index 2 of axis 2 alone",
        ),
        (WANT**2, ""),
    ],
)
def test_values_are_explained(got, text):
    explanation = explain_values("dx", got, WANT, ZERO, {})
    assert text in explanation
    assert bool(explanation) is bool(text)


def test_a_difference_within_the_errors_has_no_place():
    assert explain_values("dx", WANT, WANT + 1e-3, ZERO + 1e-2, {}) == ""


def test_results_that_do_not_depend_on_an_argument():
    text = explain_values("dx", WANT, ZERO, ZERO + 1e-12, {})
    assert text == "dx is not 0, but the results do not depend on it"


def test_coarse_differences_explain_nothing():
    assert (
        explain_values("dx", WANT * 1.001, WANT, ZERO + 1, {}) != "dx is 1 times what it should be"
    )


@pytest.mark.parametrize(
    ("got", "want", "text"),
    [
        ((3, 5, 7), (7,), "it is not summed over axes 0, 1, along which f broadcasts"),
        ((3, 7), (1, 7), "it is not summed over axis 0, along which f broadcasts"),
        ((7, 5), (5, 7), "its axes are in another order"),
        ((2,), (3, 5), "dx has shape (2,), must be (3, 5)"),
    ],
)
def test_shapes_are_explained(got, want, text):
    assert explain_shape("dx", got, want).endswith(text)
