"""Rotary positions, against complex numbers of 50 digits, loops and what attention sees."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp

import npattn
from npattn import positions
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.positions import Frequencies, plain, rope, rope_backward
from tests.make import normal

B, H, T, D = 2, 3, 5, 14
LAYOUTS = ("half", "interleaved")
U = 2.0**-53


def in_loops(x, places, values, layout, amplitude=1.0):
    """Turn one vector after the other as complex numbers of 50 digits."""
    out = x.copy()
    R = 2 * len(values)
    with mp.workdps(50):
        for index in np.ndindex(x.shape[:-1]):
            place = np.broadcast_to(places, (*x.shape[:-1], len(values)))[index]
            for i, f in enumerate(values):
                a, b = (i, i + R // 2) if layout == "half" else (2 * i, 2 * i + 1)
                z = mp.mpc(float(x[(*index, a)]), float(x[(*index, b)]))
                z *= mp.mpf(amplitude) * mp.expj(mp.mpf(float(place[i])) * mp.mpf(float(f)))
                out[(*index, a)], out[(*index, b)] = z.real, z.imag
    return out


def bound(x, angle):
    """Error of a turned feature: of the rounded angle, of cos, sin, two products and a sum."""
    return (abs(angle) * U + 8 * U) * np.abs(x).max() * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [None, 0, 2, 6])
def test_pairs_turn_as_complex_numbers(layout, size):
    x, R = normal(B, H, T, D), D if size is None else size
    values = np.array([10000.0 ** (-2 * i / max(R, 1)) for i in range(R // 2)])
    want = in_loops(x, np.arange(T)[:, None] + 7, values, layout)
    got = rope(x, layout=layout, size=size, offset=7)
    assert np.all(abs(got - want) <= bound(x, T + 7))
    assert np.array_equal(got[..., R:], x[..., R:])


def test_positions_of_each_sample_and_head():
    x, places = normal(B, H, T, D), np.random.default_rng(1).integers(-50, 1000, (B, 1, T))
    got = rope(x, positions=places)
    want = in_loops(x, places[..., None], plain(D).values, "half")
    assert np.all(abs(got - want) <= bound(x, 1000))


def test_sections_turn_pairs_by_their_own_coordinate():
    x, places = normal(B, H, T, D), np.random.default_rng(1).integers(0, 100, (3, B, 1, T))
    got = rope(x, positions=places, sections=(2, 4, 1))
    axes = (0, 0, 1, 1, 1, 1, 2)
    want = in_loops(x, np.stack([places[a] for a in axes], -1), plain(D).values, "half")
    assert np.all(abs(got - want) <= bound(x, 100))


def test_sections_with_equal_coordinates_are_one_position():
    x, places = normal(H, T, D), np.arange(T) + 3
    got = rope(x, positions=np.stack([places] * 2), sections=(3, 4))
    assert np.array_equal(got, rope(x, offset=3))


def test_amplitude_multiplies_the_turned_features():
    x, f = normal(T, D), Frequencies(np.array([0.5, 0.25]), 1.5)
    got = rope(x, frequencies=f)
    want = in_loops(x, np.arange(T)[:, None], f.values, "half", 1.5)
    assert np.all(abs(got - want) <= 2 * bound(x, T))
    assert np.array_equal(got[:, 4:], x[:, 4:])


@pytest.mark.unmeasured
@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    seed=st.integers(0, 1 << 16),
    shift=st.integers(-1000, 1000),
    size=st.sampled_from([None, 4, 14]),
    base=st.sampled_from([10.0, 10000.0, 1e6]),
)
def test_a_shift_of_all_positions_leaves_the_scores(layout, seed, shift, size, base):
    q, k = normal(2, 3, D, seed=seed), normal(2, 7, D, seed=seed + 1)
    options = {"layout": layout, "size": size, "base": base}
    scores = [
        rope(q, offset=n + 4, **options) @ rope(k, offset=n, **options).swapaxes(-1, -2)
        for n in (0, shift)
    ]
    reach = abs(q) @ abs(k).swapaxes(-1, -2)
    # Angles of up to `shift` are rounded, and each score sums D products.
    assert np.all(abs(scores[1] - scores[0]) <= (4 * (abs(shift) + 20) + 4 * D) * U * 4 * reach)


def test_attention_sees_relative_positions_alone():
    q, k, v = (normal(H, n, D, seed=n) for n in (T, T, T))
    here, there = (
        npattn.attention(rope(q, offset=n), rope(k, offset=n), v, causal=True) for n in (0, 64)
    )
    assert np.allclose(here, there, rtol=0, atol=1e4 * U)
    assert not np.allclose(here, npattn.attention(q, k, v, causal=True), atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_is_the_transpose(layout):
    """The map is linear: ⟨rope(x), dout⟩ = ⟨x, rope_backward(dout)⟩ for every x and dout."""
    options = {
        "layout": layout,
        "positions": np.random.default_rng(2).integers(0, 99, (2, H, T)),
        "sections": (2, 1),
        "frequencies": Frequencies(np.array([1.0, 0.3, 0.01]), 1.25),
    }
    for seed in range(7):
        x, dout = normal(H, T, D, seed=seed), normal(H, T, D, seed=seed + 99)
        turned, back = rope(x, **options) * dout, x * rope_backward(dout, **options)
        assert abs(turned.sum() - back.sum()) <= 32 * x.size * U * abs(turned).max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_is_the_jacobian_transposed(layout):
    options = {"layout": layout, "size": 6, "offset": 3}
    unit = np.eye(T * D).reshape(-1, T, D)
    jacobian, back = (f(unit, **options).reshape(T * D, T * D) for f in (rope, rope_backward))
    assert np.array_equal(jacobian.T, back)
    assert not np.array_equal(jacobian, back)  # turning the same way again is no gradient


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: rope(x, layout="interleaved"),  # the pairs of the other layout
        lambda x: rope(x, offset=1),  # counted from 1
        lambda x: rope(x, size=12),  # a pair left out
        lambda x: rope(x, base=10001.0),
        lambda x: rope(x, frequencies=Frequencies(-plain(D).values)),  # turned the other way
        lambda x: rope(x, frequencies=Frequencies(plain(D + 2).values[:-1])),  # of another R
        lambda x: np.concatenate([rope(x[..., :-1, :]), x[..., -1:, :]], -2),  # the last one
    ],
)
def test_mistakes_are_far_from_the_right_result(wrong):
    x = normal(H, T, D)
    want = in_loops(x, np.arange(T)[:, None], plain(D).values, "half")
    assert abs(wrong(x) - want).max() > 1e6 * bound(x, T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_narrow_inputs_are_computed_in_float64(dtype):
    x = normal(T, D).astype(dtype)
    got = rope(x)
    assert got.dtype == np.float64
    assert np.array_equal(got, rope(x.astype(np.float64)))


def test_the_dtype_of_the_result():
    x = normal(T, D)
    assert rope(x, dtype="float32").dtype == np.float32
    assert rope(x + 1j * x).dtype == np.complex128
    assert np.allclose(rope(x + 1j * x), rope(x) * (1 + 1j), rtol=0, atol=16 * U)


def test_the_input_is_left_alone():
    x = normal(T, D)
    before = x.copy()
    rope(x)
    rope_backward(x)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 2, 5, 4)])
def test_sizes_of_0(shape):
    assert rope(np.zeros(shape)).shape == shape


@pytest.mark.every
@pytest.mark.parametrize(
    ("shape", "options", "error", "words"),
    [
        ((4,), {}, ShapeError, "must be (..., T, D)"),
        ((5, 7), {}, OptionError, "size is 7, must be even and at most D, which is 7: pass size="),
        ((5, 4), {"size": 6}, OptionError, "size is 6, must be even and at most D"),
        ((5, 4), {"size": 1}, OptionError, "must be even"),
        ((5, 4), {"layout": "neox"}, OptionError, "must be one of half, interleaved"),
        ((5, 4), {"base": -1.0}, OptionError, "base is -1.0, must be a positive and finite"),
        ((5, 4), {"offset": math.nan}, OptionError, "offset is nan, must be a finite number"),
        ((5, 4), {"offset": np.array([1, 2])}, OptionError, "offset is array([1, 2]), must be"),
        ((5, 4), {"offset": 10**400}, OptionError, "must be a finite number"),
        ((5, 4), {"positions": np.zeros(5) * 1j}, DtypeError,
         "positions is complex128, must be real"),
        ((5, 4), {"frequencies": plain(4), "base": np.ones(2)}, OptionError, "base is array("),
        ((5, 4), {"frequencies": plain(4), "size": np.ones(2)}, OptionError, "size is array("),
        ((5, 4), {"positions": [0, 1]}, ShapeError, "positions has shape (2,), must be (5,)"),
        ((5, 4), {"positions": [True] * 5}, DtypeError, "must be real numbers"),
        ((5, 4), {"positions": [math.inf] * 5}, OptionError, "must be finite"),
        ((5, 4), {"positions": range(5), "offset": 1}, OptionError, "add it to them"),
        ((2, 3, 5, 4), {"positions": np.zeros((2, 5))}, ShapeError, "pass positions[:, None]"),
        ((5, 4), {"sections": (1, 1)}, OptionError, "must be given with sections"),
        ((5, 4), {"sections": (1, 2), "positions": np.zeros((2, 5))}, OptionError,
         "sum to R/2, which is 2"),
        ((5, 4), {"sections": (1, 1), "positions": np.zeros((3, 5))}, OptionError,
         "must be 3 numbers"),
        ((5, 4), {"sections": 2, "positions": np.zeros((2, 5))}, OptionError, "a sequence"),
        ((5, 4), {"frequencies": [1.0]}, OptionError, "must be Frequencies"),
        ((5, 4), {"frequencies": plain(4), "base": 5.0}, OptionError, "must not be given with"),
        ((5, 4), {"frequencies": plain(4), "size": 2}, OptionError, "size is 2, must be 4"),
        ((5, 4), {"frequencies": plain(6)}, OptionError, "turn 6 features, must be at most D"),
        ((5, 4), {"dtype": "bfloat16"}, DtypeError, "must be float32, float64"),
    ],
)  # fmt: skip
def test_errors_name_the_way_out(shape, options, error, words):
    for f in (rope, rope_backward):
        with pytest.raises(error) as caught:
            f(np.zeros(shape), **options)
        assert words in str(caught.value)


def test_the_error_of_backward_names_its_argument():
    with pytest.raises(ShapeError, match="dout has shape"):
        rope_backward(np.ones(3))


def test_positions_of_any_real_dtype():
    x, places = normal(T, D), np.array([3, 1, 4, 1, 5])
    for dtype in ("bfloat16", "float16", "uint8"):
        assert np.array_equal(rope(x, positions=places.astype(dtype)), rope(x, positions=places))


def test_integers_are_no_features():
    with pytest.raises(DtypeError, match="x is int64, must be floating"):
        rope(np.zeros((3, 4), int))


def test_the_names_of_the_module():
    assert npattn.positions is positions
    assert set(positions.__all__) >= {"rope", "rope_backward", "sinusoidal", "alibi_slopes"}
