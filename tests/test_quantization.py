"""Formats of 8 bits and factors: rounding, dequantization and their gradients."""

from __future__ import annotations

import itertools
import math

import ml_dtypes  # noqa: F401  registers float8
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem.arrays import cast
from npattn.quantization import (
    FORMATS,
    Quantized,
    dequantize,
    dequantize_backward,
    largest,
    quantize,
    quantize_backward,
)

SHAPE = (2, 6, 7, 5)
CASES = {
    "tensor": ({}, ()),
    "head": ({"per": "head"}, (2, 6)),
    "group": ({"per": "head", "heads": 3}, (2, 3)),
    "block": ({"per": "block", "rows": 3}, (2, 6, 3)),
    "token": ({"per": "token"}, (2, 6, 7)),
}


def sample(seed=0, shape=SHAPE):
    return np.random.default_rng(seed).standard_normal(shape)


def numbers(dtype):
    """Return every number of a format that is used."""
    if dtype == "int8":
        return np.arange(-127.0, 128.0)
    bits = np.arange(256, dtype=np.uint8).view(dtype).astype(float)
    return np.unique(bits[np.isfinite(bits)])


def owner(case, index):
    """Return the place of the descale of an element."""
    b, h, t, _ = index
    owners = {"tensor": (), "head": (b, h), "group": (b, h // 2), "block": (b, h, t // 3)}
    return {**owners, "token": (b, h, t)}[case]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_values_are_the_nearest_numbers_and_descales_the_largest_by_the_largest(case, dtype):
    arguments, shape = CASES[case]
    x, legal = sample(), numbers(dtype)
    values, descale = quantize(x, dtype, **arguments)
    assert values.dtype == np.dtype(dtype)
    assert (descale.dtype, descale.shape) == (np.float32, shape)
    tops = np.zeros(shape)
    for index in np.ndindex(*SHAPE):
        own = owner(case, index)
        tops[own] = max(tops[own], abs(x[index]))
    assert np.array_equal(descale, (tops / legal[-1]).astype(np.float32))
    for index in np.ndindex(*SHAPE):
        exact = x[index] / float(descale[owner(case, index)])
        nearest = abs(legal - np.clip(exact, -legal[-1], legal[-1])).min()
        assert abs(float(values[index]) - np.clip(exact, -legal[-1], legal[-1])) == nearest


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_dequantize_is_the_product_of_each_element(case, dtype):
    arguments, _ = CASES[case]
    values, descale = quantize(sample(1), dtype, **arguments)
    found = dequantize(values, descale, rows=arguments.get("rows"))
    for index in np.ndindex(*SHAPE):
        assert found[index] == float(values[index]) * float(descale[owner(case, index)])


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_dequantize_are_the_sums_of_each_element(case):
    arguments, shape = CASES[case]
    values, descale = quantize(sample(2), "int8", **arguments)
    dx = sample(3)
    dvalues, ddescale = dequantize_backward(dx, values, descale, rows=arguments.get("rows"))
    sums = np.zeros(shape)
    for index in np.ndindex(*SHAPE):
        own = owner(case, index)
        assert dvalues[index] == dx[index] * float(descale[own])
        sums[own] += dx[index] * float(values[index])
    assert ddescale.shape == shape
    assert np.allclose(ddescale, sums, rtol=1e-13, atol=0)


def test_gradients_of_factors_of_no_rows_are_none():
    nothing = np.zeros((2, 0, 3))
    _, ddescale = dequantize_backward(nothing, nothing, np.ones((2, 0)))
    assert ddescale.shape == (2, 0)


def test_gradients_of_a_descale_that_broadcasts_over_samples():
    values, descale = sample(4), abs(sample(5, (1, 6))) + 0.5
    dx = sample(6)
    _, ddescale = dequantize_backward(dx, values, descale)
    assert np.allclose(ddescale, (dx * values).sum((0, 2, 3))[None], rtol=1e-13, atol=0)


@given(st.integers(0, 2**32), st.sampled_from(FORMATS), st.floats(1e-3, 1e3))
def test_what_is_quantized_once_stays_as_it_is(seed, dtype, size):
    x = size * sample(seed, (3, 4, 5))
    once = dequantize(*quantize(x, dtype, per="head"))
    assert np.array_equal(dequantize(*quantize(once, dtype, per="head")), once)


def test_the_oracle_of_a_quantized_kernel_has_the_gradients_of_its_factors():
    """By central differences: o is smooth in each factor."""
    q, k, v = (quantize(sample(seed), "float8_e4m3fn", per="head") for seed in range(3))
    dout = sample(9)

    def loss(descales):
        arrays = [dequantize(x.values, d) for x, d in zip((q, k, v), descales, strict=True)]
        return float((npattn.attention(*arrays, causal=True) * dout).sum())

    descales = [x.descale.astype(float) for x in (q, k, v)]
    arrays = [dequantize(x.values, d) for x, d in zip((q, k, v), descales, strict=True)]
    grads = npattn.backward(npattn.forward(*arrays, causal=True), dout)
    for n, (x, name) in enumerate(zip((q, k, v), "qkv", strict=True)):
        _, found = dequantize_backward(getattr(grads, name), x.values, descales[n])
        for own in itertools.product(range(2), (0, 5)):
            h = 1e-5 * descales[n][own]
            ends = []
            for sign in (1, -1):
                moved = [d.copy() for d in descales]
                moved[n][own] += sign * h
                ends.append(loss(moved))
            slope = (ends[0] - ends[1]) / (2 * h)
            assert math.isclose(slope, found[own], rel_tol=1e-6, abs_tol=1e-6 * abs(found).max())


def test_the_gradient_of_quantize_passes_where_nothing_is_saturated():
    x = np.array([[1.0, -3.0, 100.0, -127.0, 500.0]])
    dvalues = np.array([[2.0, 3.0, 5.0, 7.0, 11.0]])
    found = quantize_backward(dvalues, x, "int8", 0.5)
    assert found.tolist() == [[4.0, 6.0, 0.0, 0.0, 0.0]]
    assert quantize(x, "int8", descale=0.5).values.tolist() == [[2, -6, 127, -127, 127]]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(), (2, 6), (2, 3), (2, 6, 7)])
def test_a_scale_multiplies_and_a_descale_divides(shape, dtype):
    """cuDNN's scale_o, and the output_scale of vLLM: each element by the formula."""
    o, factor, legal = sample(7), abs(sample(8, shape)) + 0.25, numbers(dtype)
    top = legal[-1]
    size = 3 * top  # some are saturated
    results = {"scale": (size * o, "scale"), "descale": (size * o, "descale")}
    spread = {(): 0, (2, 6): 2, (2, 3): 2, (2, 6, 7): 1}[shape]
    whole = factor.repeat(2, -1) if shape == (2, 3) else factor
    whole = whole[(...,) + (None,) * spread]
    for name, (x, argument) in results.items():
        values, descale = quantize(x, dtype, **{argument: factor})
        exact = np.clip(x * whole if name == "scale" else x / whole, -top, top)
        gap = abs(legal[:, None] - exact.ravel()).min(0)
        assert np.array_equal(abs(values.astype(float) - exact).ravel(), gap)
        assert (abs(values.astype(float)) == top).any()
        assert np.array_equal(descale, 1 / factor if name == "scale" else factor)


@pytest.mark.parametrize("dtype", FORMATS)
def test_zeros_and_nothing_have_a_descale_of_1(dtype):
    for shape in ((3, 5), (0, 5), (2, 3, 0)):
        values, descale = quantize(np.zeros(shape), dtype)
        assert (values.shape, float(descale)) == (shape, 1.0)
        assert not values.astype(float).any()
    assert quantize(np.zeros((2, 0, 3)), dtype, per="block", rows=4).descale.shape == (2, 0)


def test_largest():
    assert [largest(dtype) for dtype in FORMATS] == [448.0, 57344.0, 127.0]


X = sample()
WRONG = (
    (lambda: quantize(X, "float16"), DtypeError, "dtype is float16, must be one of"),
    (lambda: quantize(X.astype(complex)), DtypeError, "x is complex128, must be real"),
    (lambda: quantize(X > 0), DtypeError, "x is bool"),
    (lambda: quantize(X[0, 0, 0]), ShapeError, r"x has shape \(5,\), must be"),
    (lambda: quantize(X, per="row"), OptionError, "per is 'row'"),
    (lambda: quantize(X, per="block"), OptionError, "rows is None, must be given"),
    (lambda: quantize(X, rows=2), OptionError, "rows is 2, must be left out"),
    (lambda: quantize(X, heads=2), OptionError, "heads is 2, must be left out"),
    (lambda: quantize(X, per="head", heads=4), ShapeError, "heads is 4, must divide"),
    (lambda: quantize(X[0, 0], per="head", heads=1), ShapeError, "heads is 1, must divide"),
    (lambda: quantize(X * np.nan), OptionError, "x has NaN or inf"),
    (lambda: quantize(X, per="head", descale=1.0), OptionError, "beside descale="),
    (lambda: quantize(X, scale=1.0, heads=2), OptionError, "beside descale= or scale="),
    (lambda: quantize(X, descale=1.0, scale=1.0), OptionError, "got descale beside scale"),
    (lambda: quantize(X, descale=0.0), OptionError, "descale must be finite numbers above 0"),
    (lambda: quantize(X, scale=0.0), OptionError, "scale must be finite numbers above 0"),
    (lambda: quantize(X, "uint8"), DtypeError, "dtype is uint8.*no zero points"),
    (lambda: dequantize(X.astype(np.uint8), 1.0), DtypeError, "uint8.*no zero points"),
    (lambda: dequantize(X, np.nan), OptionError, "finite numbers above 0"),
    (lambda: dequantize(X, np.ones((2, 4))), ShapeError, r"descale has shape \(2, 4\)"),
    (lambda: dequantize(X, np.ones(6)), ShapeError, r"descale has shape \(6,\)"),
    (lambda: dequantize(X, np.ones((2, 6, 4)), rows=3), ShapeError, r"\(2, 6, 4\)"),
    (lambda: dequantize_backward(X, X, np.ones((2, 6, 3))), OptionError, "with rows="),
    (lambda: dequantize(X, np.ones((2, 6, 3))), OptionError, "say how many with rows="),
    (lambda: dequantize(X, np.ones((2, 6)), rows=3), OptionError, "has no blocks"),
    (lambda: dequantize(X.astype(np.int32), 1.0), DtypeError, "values is int32"),
    (lambda: dequantize(X, 1), DtypeError, "descale is int64"),
    (lambda: dequantize_backward(X[0], X, 1.0), ShapeError, "dx has shape"),
    (lambda: quantize_backward(X[0], X, "int8", 1.0), ShapeError, "dvalues has shape"),
)


@pytest.mark.every
@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_result_is_a_pair():
    found = quantize(X)
    assert isinstance(found, Quantized)
    values, descale = found
    assert values is found.values
    assert descale is found.descale


# --- one rounding ---------------------------------------------------------------------------------


def neighbours(dtype):
    """Return all finite numbers of a dtype of 8 or 16 bits, in order."""
    bits = np.arange(2 ** (8 * np.dtype(dtype).itemsize), dtype=f"u{np.dtype(dtype).itemsize}")
    with np.errstate(invalid="ignore"):
        values = bits.view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


NARROW = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", NARROW)
def test_every_tie_and_what_is_beside_it_is_rounded_once(dtype):
    """A midpoint goes to the even neighbour, the next float64 on either side to the nearer one."""
    values = neighbours(dtype)
    low, high = values[:-1], values[1:]
    middle = low + (high - low) / 2
    below, above = np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)
    unsigned = f"u{np.dtype(dtype).itemsize}"
    is_even = low.astype(dtype).view(unsigned) % 2 == 0  # exact: these are numbers of the dtype
    is_even |= low == 0
    want = {"low": (below, low), "high": (above, high)}
    want["even"] = (middle, np.where(is_even, low, high))
    for name, (x, expected) in want.items():
        assert np.array_equal(cast(x, dtype).astype(np.float64), expected), name
    torch = pytest.importorskip("torch")
    from npattn.torch.tensors import cast as cast_tensor

    for name, (x, expected) in want.items():
        got = cast_tensor(torch.from_numpy(x), getattr(torch, dtype)).double().numpy()
        assert np.array_equal(got, expected), name


def test_quantize_takes_the_nearest_number():
    x = np.array([[432.0, np.nextafter(432.0, 0)]])
    assert quantize(x, descale=1.0).values.astype(float).tolist() == [[448.0, 416.0]]
    rng = np.random.default_rng(0)
    values = neighbours("float8_e4m3fn")
    x = rng.standard_normal((7, 127)).astype(np.float32)
    found = quantize(x)
    scaled = x.astype(float) / float(found.descale)
    off = abs(found.values.astype(float) - scaled)
    assert (off <= abs(scaled[..., None] - values).min(-1)).all()


@pytest.mark.parametrize("module", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_rounds_inputs_once(module, dtype):
    ulp = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    x, one = np.array([[1 + ulp / 2 + 2.0**-40]]), np.ones((1, 1))  # beyond a tie by little
    if module == "numpy":
        attend, convert = npattn, np.asarray
    else:
        torch = pytest.importorskip("torch")
        import npattn.torch as attend

        convert, dtype = torch.from_numpy, getattr(torch, dtype)
    fwd = attend.forward(convert(one), convert(one), convert(x), dtype=dtype)
    assert float(fwd.out.item()) == 1 + ulp
    grads = attend.backward(fwd, convert(x))
    assert float(grads.v.item()) == 1 + ulp
    gated = attend.forward(convert(one), convert(one), convert(one), gate=convert(x), dtype=dtype)
    assert float(gated.out.item()) == 1 + ulp
