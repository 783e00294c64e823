"""Distances of two results, in units of the tolerance and in ulps."""

import ml_dtypes
import numpy as np
import pytest

from npattn.testing.difference.measure import Judged, bits_differ, ratios, ulps

EPS = float(np.finfo(np.float32).eps)


def judged(x, tolerance, dtype=np.float32, exact=None):
    x = np.array(x, float)
    exact = x if exact is None else np.array(exact, float)
    return Judged(x.astype(dtype), exact, np.full(x.shape, tolerance))


def test_ratio_leaves_out_the_rounding_of_results():
    a, b = judged([1.0, 1.0, 1.0], 4 * EPS), judged([1.0, 1 + EPS, 1 + 9 * EPS], 4 * EPS)
    assert ratios(a, b).tolist() == [0, 0, 2]


def test_ratio_takes_the_larger_tolerance():
    a, b = judged([1.0], 0.0), judged([1.5], 0.5)
    assert ratios(a, b) == pytest.approx(1, rel=1e-6)


def test_ratio_of_what_is_no_number():
    a = judged([np.nan, np.nan, 3e38, 1.0, 2.0], 1e38, exact=[0, 0, 3e38, 0, 0])
    b = judged([np.nan, 1.0, np.inf, np.inf, 3.0], 1e38, exact=[0, 0, 3e38, 0, 0])
    b = b._replace(tolerance=np.array([1e38, 1e38, 1e38, 1e38, np.inf]))
    assert ratios(a, b).tolist() == [0, np.inf, 0, np.inf, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_ulps_of_neighbours(dtype):
    one = np.array([[1.0, 0.5]], dtype)
    up = np.nextafter(one, np.array(2, dtype)).astype(dtype)
    assert ulps("o", one, up, one.astype(float)).tolist() == [[1, 0.5]]
    assert ulps("lse", one, up, one.astype(float)).tolist() == [[1, 0.5]]
    assert ulps("o", one, one, one.astype(float)).tolist() == [[0, 0]]


def test_ulps_of_two_dtypes_are_those_of_the_wider_spaced():
    wide, narrow = np.array([[1.25]]), np.array([[1.0]], np.float16)
    assert ulps("o", wide, narrow, wide) == 0.25 / float(np.finfo(np.float16).eps)


def test_ulps_of_zeros_and_infinities():
    zero, small = np.zeros((1, 2), np.float32), np.array([[0, 2.0**-126]], np.float32)
    assert ulps("dq", zero, small, zero.astype(float)).tolist() == [[0, 2.0**23]]
    assert ulps("dq", zero, np.full((1, 2), np.inf, np.float32), zero.astype(float)).tolist() == [
        [np.inf, np.inf]
    ]
    assert ulps("o", zero[:, :0], zero[:, :0], zero[:, :0].astype(float)).size == 0


def test_bits():
    a = np.array([0.0, np.nan, 1.0], np.float32)
    b = np.array([-0.0, -np.nan, 1.0], np.float32)
    assert bits_differ(a, b).tolist() == [True, False, False]
    assert bits_differ(a, a.astype(float)).all()
