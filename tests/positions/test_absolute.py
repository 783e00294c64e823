"""Positions that are added: sinusoidal, looked up; slopes of ALiBi."""

import math

import numpy as np
import pytest
from mpmath import mp

from npattn import biases
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.positions import alibi_slopes, look_up, look_up_backward, sinusoidal

T, D, N = 5, 7, 11
U = 2.0**-53


@pytest.mark.parametrize("size", [D, D + 1, 1, 0])
def test_sinusoidal_is_its_formula(size):
    got = sinusoidal(T, size, offset=3, base=100.0)
    assert got.shape == (T, size)
    with mp.workdps(50):
        for t in range(T):
            for i in range(size):
                angle = (t + 3) * mp.mpf(100) ** (-mp.mpf(i - i % 2) / size)
                want = mp.cos(angle) if i % 2 else mp.sin(angle)
                assert abs(got[t, i] - want) <= (8 + 4 * angle) * U


def test_sinusoidal_shifts_by_a_rotation():
    """Vectors at t and t + n have a product that depends on n alone."""
    x = sinusoidal(31, 16)
    products = x @ x.T
    for n in range(5):
        assert np.ptp(np.diagonal(products, n)) < 1e-13


def test_rows_that_are_looked_up_and_their_gradient():
    rng = np.random.default_rng(0)
    table, places = rng.standard_normal((N, D)), rng.integers(0, N, (3, T))
    assert np.array_equal(look_up(table, places), table[places])
    dout = rng.standard_normal((3, T, D))
    want = np.zeros((N, D))
    for index in np.ndindex(3, T):
        want[places[index]] += dout[index]
    got = look_up_backward(dout, places, N=N)
    assert np.allclose(got, want, rtol=0, atol=64 * U)
    assert np.all(got[np.setdiff1d(np.arange(N), places)] == 0)


def test_rows_that_are_looked_up_twice_are_summed():
    assert np.array_equal(
        look_up_backward(np.ones((3, 2)), [1, 1, 0], N=3), [[1, 1], [2, 2], [0, 0]]
    )


def test_complex_gradients_keep_their_imaginary_part():
    assert np.array_equal(look_up_backward(1j * np.ones((1, 2)), [1], N=2), [[0, 0], [1j, 1j]])


def test_no_position_has_no_row():
    assert look_up(np.ones((3, 2)), []).shape == (0, 2)


@pytest.mark.parametrize("H", [1, 2, 3, 8, 12, 17])
def test_slopes_are_those_of_the_bias(H):
    assert np.array_equal(biases.alibi(H).slopes, alibi_slopes(H))


def test_slopes_of_the_paper():
    assert np.array_equal(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    assert np.array_equal(alibi_slopes(3), [2.0**-4, 2.0**-8, 2.0**-2])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: sinusoidal(-1, 4), OptionError, "T is -1, must be an integer ≥ 0"),
        (lambda: sinusoidal(1, 4.5), OptionError, "D is 4.5, must be an integer ≥ 0"),
        (lambda: sinusoidal(1, 4, base=0), OptionError, "base is 0"),
        (lambda: sinusoidal(1, 4, offset=math.inf), OptionError, "offset is inf"),
        (lambda: look_up(np.ones(3), [0]), ShapeError, "must be (N, D)"),
        (lambda: look_up(np.ones((3, 2)), [0.0]), DtypeError, "must be integers"),
        (lambda: look_up(np.ones((3, 2)), [-1]), OptionError, "has -1 to -1, must be 0 to 2"),
        (lambda: look_up(np.ones((3, 2)), [0, 3]), OptionError, "has 0 to 3, must be 0 to 2"),
        (lambda: look_up_backward(np.ones((3, 2)), [0], N=3), ShapeError, "must be (1, 'D')"),
        (lambda: alibi_slopes(0), OptionError, "H is 0, must be an integer ≥ 1"),
    ],
)
def test_errors_name_the_way_out(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
