"""Declared roundings, and the units that they come to."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.testing.bounds import allowed as allowed_module
from npattn.testing.bounds.rounding import Rounding, StorageCost, Units, unit_roundoff
from npattn.testing.cases.recipe import Recipe

STORED = ("scores", "weights", "dweights", "dscores")


def low_storages(rounding: Rounding) -> set[str]:
    return {name for name in STORED if getattr(rounding, name) == "input"}


def test_upcast_stores_nothing_low() -> None:
    rounding = Rounding.upcast()
    assert low_storages(rounding) == set()
    assert rounding.gradient_roundings == 1
    assert rounding.gradient_block is None


def test_fused_stores_product_inputs_low_and_delta_from_out() -> None:
    rounding = Rounding.fused()
    assert low_storages(rounding) == {"weights", "dscores"}
    assert rounding.delta_from == "out"
    assert rounding.gradient_roundings == 1


def test_fused_model_halves_the_roundings_of_storage() -> None:
    recipe = Recipe(H=2, K=2, T=17, S=67, D=11, E=13, dtype="bfloat16", seed=3, dropout=0.3)
    problem = recipe.problem()
    dout = recipe.cotangents(problem).dout.astype(float)
    once = allowed_module.bounds(problem, "bfloat16", Rounding.fused(), dout=dout)
    apart = dataclasses.replace(Rounding.fused(), fuses=False)
    twice = allowed_module.bounds(problem, "bfloat16", apart, dout=dout)
    for name in ("o", "dq", "dk", "dv"):
        assert 1.2 < np.median(twice[name] / once[name]) < 4, name  # of P and of dS


def test_eager_stores_everything_low_and_rounds_gradients_twice() -> None:
    rounding = Rounding.eager()
    assert low_storages(rounding) == set(STORED)
    assert rounding.delta_from == "either"
    assert rounding.gradient_roundings == 2


def test_undeclared_is_eager_in_float64() -> None:
    assert Rounding.undeclared(np.float64) == Rounding.eager()


@pytest.mark.parametrize("dtype", [np.float32, "float32"])
def test_undeclared_float32_allows_least_accurate_known_exp(dtype: Any) -> None:
    eager = dataclasses.replace(Rounding.eager(), exp_error=2.0**-20)
    assert Rounding.undeclared(dtype) == eager


@pytest.mark.parametrize("dtype", ["bfloat16", np.float16, ml_dtypes.float8_e4m3fn])
def test_undeclared_narrow_dtypes_allow_fast_exp_and_low_sums(dtype: Any) -> None:
    rounding = Rounding.undeclared(dtype)
    assert rounding.exp_error == 2.0**-11
    assert rounding.gradient_block == 32
    changed = dataclasses.replace(rounding, exp_error=None, gradient_block=None)
    assert changed == Rounding.eager()


@pytest.mark.parametrize("name", ["upcast", "fused", "eager", "fp8", "int8"])
def test_from_name_returns_the_preset(name: str) -> None:
    rounding = Rounding.from_name(name)
    assert rounding == getattr(Rounding, name)()
    assert rounding.name == name


def test_a_declared_model_is_chosen_before_that_of_the_dtype() -> None:
    own = Rounding(name="own", scores="input")
    assert Rounding.choose(own, "float32") is own
    assert Rounding.choose("int8", "float32") == Rounding.int8()
    assert Rounding.choose(None, "float16") == Rounding.undeclared("float16")


@pytest.mark.parametrize("name", ["", "Fused", "flash", "undeclared"])
def test_unknown_preset_lists_known_ones(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        Rounding.from_name(name)
    assert (
        str(caught.value) == f"rounding is {name!r}, must be one of upcast, fused, eager, fp8, int8"
    )


def test_rounding_is_frozen_hashable_and_keyword_only() -> None:
    rounding = Rounding(name="mine", weights="input")
    with pytest.raises(dataclasses.FrozenInstanceError):
        rounding.weights = "accumulator"  # type: ignore[misc]  # that is the point
    assert hash(rounding) == hash(Rounding(name="mine", weights="input"))
    with pytest.raises(TypeError, match="positional"):
        Rounding("mine")  # type: ignore[misc]  # that is the point


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [
        ("bfloat16", -8),
        (np.float16, -11),
        (np.float32, -24),
        (np.float64, -53),
        (ml_dtypes.float8_e4m3fn, -4),
        (ml_dtypes.float8_e5m2, -3),
    ],
)
def test_unit_roundoff_is_half_of_eps(dtype: Any, exponent: int) -> None:
    u = unit_roundoff(dtype)
    assert u == 2.0**exponent
    one = np.ones((), dtype)
    assert np.asarray(1 + u).astype(dtype) == one  # a tie, to even
    assert np.asarray(1 + 1.5 * u).astype(dtype) > one


def test_allowed_exports_the_same_names() -> None:
    assert allowed_module.Rounding is Rounding
    assert allowed_module.unit_roundoff is unit_roundoff


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_of_narrow_inputs_are_float32(dtype: str) -> None:
    unit = Units.of(Rounding.fused(), dtype)
    assert unit.u == 2.0**-24
    assert unit.tiny == 2.0**-126
    assert unit.low.u == unit_roundoff(dtype)
    assert unit.exp == 2.0**-22


def test_sums_of_float64_inputs_are_float64() -> None:
    unit = Units.of(Rounding.fused(), np.float64)
    assert unit.u == unit.low.u == 2.0**-53
    assert unit.exp == 2.0**-51


@pytest.mark.parametrize(
    ("accumulator", "dtype", "u"),
    [
        ("float64", "bfloat16", 2.0**-53),
        ("float32", "float64", 2.0**-24),
        ("truncated", "float16", 2.0**-23),
    ],
)
def test_accumulator_can_be_declared(accumulator: Any, dtype: str, u: float) -> None:
    assert Units.of(Rounding(name="own", accumulator=accumulator), dtype).u == u


def test_unstored_intermediates_cost_nothing() -> None:
    low, exact = StorageCost(2.0**-8, 2.0**-134), StorageCost(0.0, 0.0)
    fused = Units.of(Rounding.fused(), "bfloat16")
    assert (fused.q, fused.s, fused.p, fused.dp, fused.ds) == (exact, exact, low, exact, low)
    loose = Units.of(Rounding.undeclared("bfloat16"), "bfloat16")
    stored = (loose.q, loose.s, loose.p, loose.dp, loose.ds, loose.shared)
    assert stored == (low,) * len(stored)
    assert (loose.operands, loose.row_sum, loose.lse) == (exact,) * 3
    assert loose.exp == 2.0**-11


@pytest.mark.parametrize(
    ("dtype", "least"), [("float16", 2.0**-24), ("bfloat16", 2.0**-133), ("float32", 2.0**-149)]
)
def test_eta_is_half_the_least_subnormal(dtype: str, least: float) -> None:
    assert Units.of(Rounding.eager(), dtype).low.eta == least / 2


def test_storage_may_be_another_format_than_the_input() -> None:
    unit = Units.of(Rounding(name="own", operands="tf32", weights="float8_e4m3fn"), "float32")
    assert unit.operands.u == 2.0**-11
    assert unit.p.u == 2.0**-4


def test_n_storages_cost_n_roundings_to_all_orders() -> None:
    once = StorageCost(2.0**-8, 0.0)
    assert once.times(0) == 0
    assert once.times(1) == 2.0**-8
    assert once.times(2) == 2 * 2.0**-8 + 2.0**-16


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weights": "float12"}, "weights is 'float12'"),
        ({"accumulator": "bfloat16"}, "accumulator is 'bfloat16'"),
        ({"delta_from": "dout"}, "delta_from is 'dout'"),
        ({"sum_block": 0}, "sum_block is 0"),
        ({"gradient_block": True}, "gradient_block is True"),
        ({"exp_error": 1.5}, "exp_error is 1.5"),
        ({"exp_error": -0.1}, "exp_error is -0.1"),
    ],
)
def test_illegal_declaration_is_an_error(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Rounding(name="own", **kwargs)


def test_repr_evaluates_back() -> None:
    own = Rounding(name="own", weights="input", exp_error=2.0**-20)
    assert repr(own) == "Rounding(name='own', weights='input', exp_error=9.5367431640625e-07)"
    assert eval(repr(own)) == own  # that is the claim


def test_a_factor_of_the_weights_keeps_more_of_them():
    plain = Units.of(Rounding(name="own", weights="float8_e4m3fn"), "bfloat16").p
    scaled = Units.of(Rounding(name="own", weights="float8_e4m3fn", weights_factor=256), "bfloat16")
    assert scaled.p == (plain.u, plain.eta / 256)
    assert Units.of(Rounding.fp8(), "bfloat16").p == scaled.p
    with pytest.raises(OptionError, match=r"weights_factor is 0.5, must be finite and ≥ 1"):
        Rounding(name="own", weights_factor=0.5)


def test_an_undeclared_model_of_quantized_inputs_stores_the_weights_as_they_are():
    model = Rounding.choose(None, "bfloat16", "float8_e5m2")
    assert model.weights == "float8_e5m2"
    assert dataclasses.replace(model, weights="input") == Rounding.undeclared("bfloat16")
