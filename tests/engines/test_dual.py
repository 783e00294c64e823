"""Dual numbers: each function's slope, against the complex step and against differences."""

import numpy as np
import pytest

from npattn.engines import dual
from npattn.engines.dual import Dual, differentiate
from npattn.errors import OptionError

U = 2.0**-53
X = np.array([0.25, 0.5, 0.875])
OF_ONE = [f for f in dual.SLOPES if f is not np.arccosh]
OF_TWO = list(dual.PAIRS)


def step(function, x):
    """Derivative at real x by complex step."""
    return function(x + 1e-150j).imag / 1e-150


def bound(function, x):
    """16 roundings of the numbers that a slope is made of, which are all below 1 + f² + f'²."""
    return 16 * U * (1 + abs(function(x + 0j)) ** 2 + abs(step(function, x)) ** 2)


@pytest.mark.parametrize("function", OF_ONE, ids=lambda f: f.__name__)
def test_slope_of_one_variable_is_the_complex_step(function):
    rate = differentiate("f", function, X)
    assert (abs(rate - step(function, X)) <= bound(function, X)).all()


def test_slope_of_arccosh_is_the_complex_step_above_1():
    x = 1 + X
    rate = differentiate("f", np.arccosh, x)
    assert (abs(rate - step(np.arccosh, x)) <= 4 * bound(np.arccosh, x)).all()


CONSTANTS = np.array([3.0, -2.0, 0.5])
FORMULAS = {
    f"{f.__name__}, {side}": (f, side) for f in OF_TWO for side in ("left", "right", "both")
}


def formula(function, side):
    return {
        "left": lambda s: function(s, abs(CONSTANTS)),
        "right": lambda s: function(abs(CONSTANTS), s),
        "both": lambda s: function(s, s * s + 0.5),
    }[side]


@pytest.mark.parametrize("name", FORMULAS)
def test_slope_of_two_variables_is_the_complex_step(name):
    f = formula(*FORMULAS[name])
    assert (abs(differentiate("f", f, X) - step(f, X)) <= 4 * bound(f, X)).all()


def compound(s):
    return np.where(s.real > 0.4, s**2 / (1 + np.exp(-s)), CONSTANTS - 2 * s) + (s < 0.3) * s


def test_slope_at_complex_arguments_is_the_difference_along_either_axis():
    """In the plane, an analytic function has one slope; a difference errs by h² and by U / h."""
    x, h = X + 0.125j, U ** (1 / 3)
    rate = differentiate("f", compound, x)
    for d in (h, 1j * h):
        difference = (compound(x + d) - compound(x - d)) / (2 * d)
        assert (abs(rate - difference) <= 64 * h * h).all()


@pytest.mark.parametrize("function", [*dual.SLOPES, *OF_TWO], ids=lambda f: f.__name__)
def test_a_wrong_slope_is_seen(function, monkeypatch):
    f = function if function in dual.SLOPES else formula(function, "both")
    x = X if function is not np.arccosh else 1 + X
    table = dual.SLOPES if function in dual.SLOPES else dual.PAIRS
    right = table[function]
    if function in dual.SLOPES:
        wrong = lambda x, y: right(x, y) * (1 + 2.0**-20)  # noqa: E731
    else:
        wrong = tuple(lambda *xs, g=g: g(*xs) * (1 + 2.0**-20) for g in right)
    monkeypatch.setitem(table, function, wrong)
    assert (abs(differentiate("f", f, x) - step(f, x)) > 4 * bound(f, x)).any()


def test_a_constant_has_no_slope():
    assert not differentiate("f", lambda s: CONSTANTS, X).any()
    assert not differentiate("f", lambda s: s.real * 2.0, X).any()


def test_attributes_are_those_of_the_value():
    x = Dual(X, np.ones(3))
    assert (x.shape, x.ndim, x.dtype) == (X.shape, 1, X.dtype)
    assert np.isfinite(x).all()


@pytest.mark.parametrize(
    "function",
    [np.abs, np.sign, lambda s: s.imag, np.sum, lambda s: np.exp(s, where=s > 0),
     np.add.reduce, np.where, lambda s: np.concatenate([s, s])],
)  # fmt: skip
def test_other_functions_are_refused(function):
    with pytest.raises(OptionError, match="f has no derivative at complex scores, since it is no"):
        differentiate("f", function, X)
