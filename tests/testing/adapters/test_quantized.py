"""Functions of quantized inputs, judged: right ones pass, wrong factors are found and named."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn.errors import OptionError
from npattn.quantization import dequantize
from npattn.testing import Implementation, Recipe, check
from npattn.testing.adapters.base import NotAsked
from tests.testing import quantized_kernels as kernels

RULES = ("agreement-o", "model-sizes", "shared-heads")
MORE = (*RULES, "permute-", "padded-keys", "hidden-finite", "views", "one-key")
SMALL = {"T": (3, 5), "S": (5, 17), "D": (5, 7)}
EXPLAINED = {"only": RULES, "sizes": SMALL}  # causes of small problems take half the time
ROWS = {"q": 4, "k": 8}
BLOCKS = {f"{x}_factors": f"descale of blocks of {x}" for x in "qk"}


def fp8(kernel, **arguments):
    given = {"framework": "numpy", "quantized": "fp8", "dtypes": ("bfloat16",), "examples": 10}
    return check(kernel, **{**given, **arguments})


def in_blocks(kernel, **arguments):
    return Implementation(
        kernel, framework="numpy", quantized="int8", rows=ROWS, rename=BLOCKS, **arguments
    )


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("rounding", [None, "fp8"])
def test_a_right_kernel_passes_every_rule(rounding):
    report = fp8(kernels.Fp8(), rounding=rounding, require="all", examples=2)
    assert report.passed, str(report)
    ran = {o.rule for o in report.outcomes if o.status == "passed"}
    assert ran >= {"hidden-finite", "hidden-nan-kv", "saturated", "arrays-reused", "two-threads"}
    examples = {o.rule: o.examples for o in report.outcomes}
    assert examples["hidden-finite"] == 2  # garbage is quantized as well


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", kernels.WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_factor_is_found_and_named(wrong):
    report = fp8(wrong(), **EXPLAINED)
    assert not report.passed
    assert [cause.text for cause in report.causes] == [wrong.cause]


@pytest.mark.thorough
def test_weights_that_are_stored_lower_than_declared_are_found():
    class Lower(kernels.Fp8):
        weights = ml_dtypes.float8_e5m2

    asked = {"only": ["agreement-o"], "rounding": "fp8", "diagnosis": False}
    assert not fp8(Lower(), examples=20, **asked).passed


@pytest.mark.thorough
def test_a_wrong_factor_of_stored_weights_is_found():
    only = ["agreement-o"]
    report = fp8(kernels.WeightsStayLarge(), only=only, rounding="fp8", sizes=SMALL)
    assert [cause.text for cause in report.causes] == [
        "P is multiplied by 2⁸ before it is stored, and o is not divided by it"
    ]
    asked = {"only": only, "rounding": "fp8", "diagnosis": False}
    assert not fp8(kernels.WeightsOverflow(), **asked).passed


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_factors_of_whole_arrays_and_of_a_cache():
    assert fp8(kernels.int8_cache, quantized="int8", only=MORE, examples=5).passed
    report = fp8(kernels.one_factor, quantized="int8", **EXPLAINED)
    assert [cause.text for cause in report.causes] == [
        "v is multiplied by k_scale, must be by v_scale"
    ]


@pytest.mark.thorough
def test_factors_of_blocks_of_rows():
    asked = {"dtypes": ("float16",), "examples": 3}
    assert check(in_blocks(kernels.blocks), **asked, only=MORE).passed
    report = check(in_blocks(kernels.first_block), dtypes=("float16",), examples=10, **EXPLAINED)
    assert [c.text for c in report.causes] == ["k_factors of the first block is taken for all"]


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_packed_sequences_with_factors_of_their_own():
    right, wrong = kernels.packed, kernels.packed_first
    rules = (*RULES, "other-sequences", "unread-slots")
    assert fp8(right, only=rules).passed
    assert not fp8(wrong, only=rules, diagnosis=False).passed


@pytest.mark.thorough
def test_a_worker_is_asked_the_same():
    pytest.importorskip("cloudpickle")
    assert fp8(kernels.Fp8(), only=["agreement-o"], isolate=True, examples=5).passed
    report = fp8(kernels.IgnoresV(), only=["agreement-o"], isolate=True, sizes=SMALL)
    assert [cause.text for cause in report.causes] == [kernels.IgnoresV.cause]


def test_without_quantized_the_factors_keep_their_default():
    f = Implementation(kernels.int8_cache, framework="numpy")
    assert f.quantized is None
    assert any(line.startswith("k_scale: a factor of quantized inputs") for line in f.untested)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_a_script_quantizes_too():
    few = {"only": ["agreement-o"], "examples": 3, "diagnosis": False}
    report = fp8(kernels.IgnoresV(), **few)
    script = report.outcomes[0].script()
    assert "quantized='float8_e4m3fn'" in script
    assert "then quantized" in report.outcomes[0].recipe
    few["examples"] = 10
    blocks = check(in_blocks(kernels.first_block), dtypes=("float16",), **few)
    assert "rows={'q': 4, 'k': 8}" in blocks.outcomes[0].script()


# --- the split into numbers and factors ---


@pytest.mark.thorough
@given(
    st.sampled_from(["float8_e4m3fn", "float8_e5m2", "int8"]),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.sampled_from(["normal", "outliers", "value offset", "heavy tails", "large logits"]),
    st.integers(0, 2**31),
)
def test_a_problem_is_numbers_and_factors_exactly(dtype, tested, distribution, seed):
    f = Implementation(kernels.Fp8(), framework="numpy", quantized=dtype)
    recipe = Recipe(lead=(2,), H=6, K=3, T=5, S=7, D=11, E=13, dtype=tested, seed=seed,
                    distribution=distribution)  # fmt: skip
    problem = f.fit(recipe.problem())
    assert all(
        np.array_equal(getattr(f.fit(problem), x), getattr(problem, x)) for x in "qkv"
    )  # it is fitted already
    stored, factors = f.quantized.split(problem)
    for name, own in f.quantized.by_input(factors).items():
        values = f.quantized.narrow(name, getattr(stored, name))
        assert (values.dtype, own.shape) == (np.dtype(dtype), (2, 3))
        whole = dequantize(values, own)
        assert np.array_equal(whole, getattr(problem, name).astype(float))
    arrays = f.inputs(problem)
    assert arrays["k"].dtype == np.dtype(dtype)
    assert arrays["descale of heads of k"].shape == (2, 3)


def test_factors_of_tiny_numbers_are_ordinary_numbers():
    f = Implementation(kernels.Fp8(), framework="numpy", quantized="int8")
    recipe = Recipe(lead=(2,), H=6, K=3, T=5, S=7, D=11, E=13, dtype="bfloat16", seed=3)
    tiny = recipe.problem()
    tiny = f.fit(
        tiny.replace(**{x: (getattr(tiny, x) * 2.0**-110).astype("bfloat16") for x in "qkv"})
    )
    stored, factors = f.quantized.split(tiny)
    for name, own in f.quantized.by_input(factors).items():
        assert (own >= 2.0**-100).all()
        assert np.array_equal(
            dequantize(f.quantized.narrow(name, getattr(stored, name)), own),
            getattr(tiny, name).astype(float),
        )


def test_factors_differ_between_heads_samples_and_inputs():
    f = Implementation(kernels.Fp8(), framework="numpy", quantized="fp8")
    problem = f.fit(Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13, dtype="bfloat16").problem())
    found = [*f.quantized.by_input(f.quantized.split(problem)[1]).values()]
    assert len({float(x) for own in found for x in own.ravel()}) > 6


def test_numbers_that_no_factor_holds_are_not_asked():
    f = Implementation(kernels.Fp8(), framework="numpy", quantized="fp8")
    problem = Recipe(lead=(2,), dtype="bfloat16", D=11).problem()
    with pytest.raises(NotAsked, match="is no array of float8_e4m3fn and factors"):
        f.inputs(problem)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantized": "fp4"}, "quantized is 'fp4', must be fp8"),
        ({"quantized": "int8", "rows": {"k": 8}}, "rows of blocks are"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(OptionError, match=message):
        Implementation(kernels.Fp8(), framework="numpy", **arguments)


def test_a_function_without_factors_cannot_be_quantized():
    def plain(q, k, v, scale=None):
        return q

    with pytest.raises(OptionError, match="plain has no q_descale, k_descale"):
        Implementation(plain, framework="numpy", quantized="int8")
    with pytest.raises(OptionError, match=r"rows of blocks are \{\}, must be of q, k"):
        Implementation(kernels.blocks, framework="numpy", quantized="int8", rename=BLOCKS)


def test_it_has_no_gradients():
    f = Implementation(kernels.Fp8(), framework="numpy", quantized="fp8")
    assert not f.has_gradients


@pytest.mark.thorough
def test_slices_of_one_buffer_are_quantized_too():
    report = fp8(kernels.Fp8(), only=["packed-inputs"])  # which refuses other dtypes
    assert [o.status for o in report.outcomes] == ["passed"]
