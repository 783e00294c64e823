"""Mixed precision: what is rounded, how far the gradients are, and the scale of the loss."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from train import train
from train.model import loss_and_gradients, random_parameters
from train.precision import GROWTH, PRECISIONS, START, LossScale

from npattn.errors import OptionError
from tests.train.test_model import noisy_parameters

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff of what is stored."""
ROUNDINGS = 2 * (3 * 5 + 4)
"""Roundings from a token to a logit, and as many back: three of each of the five linear steps (two
operands and the result) before and after attention, whose q, k, weights and o are rounded."""


def gap(low, exact):
    """Distance of the gradients by the size of the exact ones, of all parameters together."""
    square = sum(((low[name] - exact[name]) ** 2).sum() for name in exact)
    return float(np.sqrt(square / sum((x**2).sum() for x in exact.values())))


@pytest.mark.parametrize("positions", ["learned", "relative"])
@pytest.mark.parametrize("dtype", UNIT)
def test_gradients_are_within_the_roundings(few, small, dtype, positions):
    settings = dataclasses.replace(small, dtype=dtype, positions=positions)
    p = noisy_parameters(settings)
    exact = loss_and_gradients(
        {name: x.astype(np.float64) for name, x in p.items()},
        dataclasses.replace(settings, dtype="float64"), few.x, few.y,
    )[1]  # fmt: skip
    for scale in (1.0, 2.0**12):
        low = loss_and_gradients(p, settings, few.x, few.y, loss_scale=scale)[1]
        assert {x.dtype for x in low.values()} == {np.dtype(np.float32)}
        assert 0 < gap(low, exact) < ROUNDINGS * UNIT[dtype]


def test_operands_and_results_of_products_are_rounded():
    for name, storage in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        precision = PRECISIONS[name]
        x, w, b = (np.full(n, 1 / 3, np.float32) for n in ((3, 5), (5, 7), (7,)))
        third = np.float32(storage(1 / 3))
        expected = np.float32(storage(5 * third * third + third))
        y = precision.linear(x, w, b)
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y, np.full((3, 7), expected))
        dx, dw, db = precision.linear_backward(y, x, w)
        for got, exact in (
            (dx, 7 * expected * third),
            (dw, 3 * expected * third),
            (db, 3 * expected),
        ):
            np.testing.assert_array_equal(got, np.full(got.shape, np.float32(storage(exact))))


def test_float64_is_not_rounded():
    precision, x = PRECISIONS["float64"], np.full((2, 2), 1 / 3)
    assert precision.round(x) is x
    assert precision.widen(x) is x
    assert precision.attention is None


# --- the scale of the loss ------------------------------------------------------------------------


def test_scale_keeps_small_gradients_in_float16(few, small):
    """Of a loss 2¹⁶ times as small, float16 loses most gradients: it ends at 6e-8."""
    settings = dataclasses.replace(small, dtype="float16")
    p = noisy_parameters(settings)
    exact = loss_and_gradients(
        {n: a.astype(np.float64) for n, a in p.items()},
        dataclasses.replace(settings, dtype="float64"), few.x, few.y,
    )[1]  # fmt: skip
    tiny, scaled = (
        loss_and_gradients(p, settings, few.x, few.y, loss_scale=factor)[1]
        for factor in (1 / START, 2.0**8)
    )
    assert gap(tiny, exact) > 0.1
    assert gap(scaled, exact) < ROUNDINGS * UNIT["float16"]
    assert (tiny["wq"] == 0).all()
    assert (scaled["wq"] != 0).all()


def test_scale_halves_on_overflow_and_grows_again():
    scale = LossScale.of(PRECISIONS["float16"])
    assert scale.scale == START
    fine, broken = np.ones(3), np.array([1.0, np.inf])
    assert not scale.accept(0.5, [fine, broken])
    assert scale.scale == START / 2
    assert not scale.accept(np.nan, [fine])
    assert scale.scale == START / 4
    for _ in range(GROWTH - 1):
        assert scale.accept(0.5, [fine])
    assert scale.scale == START / 4
    assert scale.accept(0.5, [fine])
    assert scale.scale == START / 2
    assert scale.steps == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_other_dtypes_have_no_scale(dtype):
    scale = LossScale.of(PRECISIONS[dtype])
    for _ in range(GROWTH + 1):
        assert scale.accept(0.5, [np.ones(3)])
    assert scale.scale == 1
    with pytest.raises(OptionError, match="the loss is nan and its gradient is not finite: pass"):
        scale.accept(np.nan, [np.ones(3)])
    with pytest.raises(OptionError, match="smaller lr, more warmup"):
        scale.accept(0.5, [np.array([np.nan])])


def test_steps_that_overflow_change_nothing(few, small):
    """The first scale is too large for batches of one; the steps that show it are left out."""
    settings = dataclasses.replace(small, dtype="float16", batch_size=1, epochs=1)
    start = random_parameters(settings, 5, 3, 4)
    run = train(settings, data=few, max_steps=1)
    assert run.adam.step == 0
    assert len(run.losses) == 1
    assert run.loss_scale.scale == START / 2
    for name, x in start.items():
        np.testing.assert_array_equal(run.parameters[name], x)
    whole = train(settings, data=few)
    assert 0 < whole.adam.step < len(whole.losses) == 31
    assert np.isfinite(whole.losses).all()


def test_loss_that_is_no_longer_finite_ends_training(few, small):
    broken = few._replace(x=np.where(few.x > 2, np.nan, few.x))
    with pytest.raises(OptionError, match="the loss is nan"):
        train(small, data=broken)


@pytest.mark.parametrize("dtype", UNIT)
def test_training_in_a_narrow_dtype_follows_float64(few, small, dtype):
    """Losses of the first steps agree; parameters stay in float32."""
    exact = train(small, data=few, max_steps=5)
    run = train(dataclasses.replace(small, dtype=dtype), data=few, max_steps=5)
    assert {x.dtype for x in run.parameters.values()} == {np.dtype(np.float32)}
    assert run.adam.step == 5
    differences = abs(np.array(run.losses) - exact.losses)
    assert 0 < differences.max() < ROUNDINGS * UNIT[dtype]
