"""Targets in NumPy: `naive` breaks the usual two rules; test_rules.py holds `flash` to all."""

import inspect

import numpy as np

from npattn.testing.targets.numpy import flash, flash_backward, naive


def test_the_parameters_name_the_features():
    features = {*inspect.signature(flash).parameters} - {"return_lse"}
    needs = {"dout", "out", "lse", "dlse"}
    assert {*inspect.signature(flash_backward).parameters} - needs == features


def test_naive_gives_nan_in_fully_masked_row():
    x = np.ones((1, 3, 4))
    assert np.isnan(naive(x, x, x, np.zeros((3, 3), bool))).all()


def test_naive_divides_by_zero_at_size_zero():
    q, v = np.ones((1, 3, 0)), np.ones((1, 3, 4))
    assert np.isnan(naive(q, q, v)).all()
    assert (flash(q, q, v) == 1).all()


def test_naive_lets_nan_leak_from_behind_the_mask():
    q, v = np.ones((1, 2, 4)), np.ones((1, 2, 4))
    v[0, 1] = np.nan
    mask = np.array([[True, False]])
    assert np.isnan(naive(q, q, v, mask)).all()
    assert not np.isnan(flash(q, q, v, mask)).any()
