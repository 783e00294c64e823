"""Kernels with o in 8 bits, or factors of tokens, judged: right ones pass, wrong are named."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn.errors import OptionError
from npattn.quantization import largest
from npattn.testing import Implementation, Recipe, Rounding, check
from npattn.testing.adapters.base import ResultError
from npattn.testing.bounds.delivery import delivery_error, half_gap
from tests.testing import output_kernels as kernels

FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8")
RULES = ("agreement-o", "model-sizes", "one-key")
MORE = (*RULES, "permute-", "padded-keys", "hidden-finite", "views", "saturated")
SMALL = {"T": (3, 5), "S": (5, 17), "D": (5, 7)}
EXPLAINED = {"only": RULES, "sizes": SMALL}  # causes of small problems take half the time
TOKENS = {f"{x}_scales": f"descale of tokens of {x}" for x in "kv"}
PAGED = {**TOKENS, "lengths": "lengths of keys", "block_tables": "page table"}


def judge(kernel, quantized=None, **arguments):
    quantized = quantized or np.dtype(kernel.dtype).name
    given = {"framework": "numpy", "dtypes": ("bfloat16",), "examples": 10}
    return check(kernel, quantized=quantized, **{**given, **arguments})


def named(report):
    return [cause.text for cause in report.causes]


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "kernel",
    [kernels.Output, kernels.OutputInInt8, kernels.OutputInE5M2, kernels.ByReciprocal],
    ids=lambda kernel: kernel.__name__,
)
def test_right_kernels_pass_every_rule(kernel):
    report = judge(kernel(), examples=2, require="all")
    assert report.passed, str(report)
    ran = {o.rule for o in report.outcomes if o.status == "passed"}
    assert ran >= {"agreement-o", "saturated", "rows-sum-to-one", "repeatable", "shape-dtype"}
    assert max(o.worst or 0 for o in report.outcomes if o.status == "passed") > 0.5
    reasons = {o.rule: o.status for o in report.outcomes}
    assert reasons["aggregate"] == "not applicable"
    assert (reasons["nan-query"] == "not applicable") == (kernel is kernels.OutputInInt8)


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", kernels.WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_output_is_found_and_named(wrong):
    report = judge(wrong(), **EXPLAINED)
    assert not report.passed
    assert named(report) == [wrong.cause]


@pytest.mark.thorough
def test_scale_o_multiplies():
    assert judge(kernels.cudnn, "fp8", rename={"attn_scale": "scale"}, only=MORE, examples=5).passed
    report = judge(kernels.cudnn_divides, "fp8", rename={"attn_scale": "scale"}, **EXPLAINED)
    assert named(report) == ["o is divided by scale_o, must be multiplied"]
    told = {"attn_scale": "scale", "scale_o": "descale of all of o"}
    assert judge(kernels.cudnn_divides, "fp8", rename=told, **EXPLAINED).passed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kernel", "quantized", "of", "rows"),
    [
        (kernels.of_heads, "fp8", "heads", None),
        (kernels.of_rows, "int8", "tokens", None),
        (kernels.of_blocks, "int8", "blocks", {"o": 4}),
    ],
)
def test_factors_of_parts_of_o(kernel, quantized, of, rows):
    meant = {"o_factors": f"descale of {of} of o"}
    f = Implementation(kernel, framework="numpy", quantized=quantized, rename=meant, rows=rows)
    assert check(f, dtypes=("float16",), only=MORE, examples=4).passed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kernel", "quantized", "of", "part"),
    [
        (kernels.of_first_head, "fp8", "heads", "head"),
        (kernels.of_first_row, "int8", "tokens", "token"),
    ],
)
def test_factor_of_another_part_of_o_is_named(kernel, quantized, of, part):
    meant = {"o_factors": f"descale of {of} of o"}
    report = judge(kernel, quantized, rename=meant, **EXPLAINED)
    assert named(report) == [f"o_factors of the first {part} is taken for all"]


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_factor_of_an_input_is_named_though_o_is_in_8_bits():
    """The factor of o stays that of the call, when a cause gives v another factor."""

    class KForV(kernels.Output):
        def __call__(
            self, q, k, v, scale=None, causal=False,
            q_scale=1.0, k_scale=1.0, v_scale=1.0, output_scale=1.0,
        ):  # fmt: skip
            own = q_scale, k_scale, k_scale, output_scale
            return super().__call__(q, k, v, scale, causal, *own)

    report = judge(KForV(), "fp8", only=RULES)
    assert named(report) == ["v is multiplied by k_scale, must be by v_scale"]


@pytest.mark.thorough
def test_factors_of_inputs_that_do_not_fit_o_are_no_cause():
    """Factors of tokens of k and v are (B, K, S): o cannot be divided by them."""

    def forgets(q, k, v, scale=None, causal=False, k_scales=None, v_scales=None, o_scale=1.0):
        o = kernels.Tokens()(q.astype(np.float32), k, v, scale, causal, k_scales, v_scales)
        return kernels.store(o, np.int8)

    report = judge(forgets, "int8", rename=TOKENS, only=["agreement-o"], sizes=SMALL)
    assert named(report) == ["o_scale is ignored: o is stored as it is computed"]


def test_factors_of_heads_leave_an_o_of_other_axes_to_shape_dtype():
    meant = {"o_factors": "descale of heads of o"}
    f = Implementation(kernels.of_heads, framework="numpy", quantized="fp8", rename=meant)
    problem = Recipe(lead=(2,), H=2, K=2, dtype="bfloat16").problem()
    flat = np.ones((2, 2, problem.T), kernels.E4M3)
    assert f.output.restore(flat, problem).shape == flat.shape


def test_o_of_another_dtype_is_an_error():
    def wide(q, k, v, scale=None, causal=False, o_scale=1.0):
        return kernels.attend(q, k, v, *np.ones((2, *q.shape[:2])), q.dtype, scale=scale, causal=0)

    report = judge(wide, "fp8", only=["agreement-o"])
    assert [o.status for o in report.outcomes] == ["error"]
    assert "o has dtype bfloat16, must be float8_e4m3fn" in report.outcomes[0].message


@pytest.mark.thorough
def test_o_of_another_shape_fails():
    def flat(q, k, v, scale=None, causal=False, o_scale=1.0):
        return np.zeros(q.shape[:-1], kernels.E4M3)

    report = judge(flat, "fp8", only=["shape-dtype"])
    assert "o has shape" in report.outcomes[0].message


@pytest.mark.thorough
def test_a_worker_and_a_script_return_8_bits_too():
    pytest.importorskip("cloudpickle")
    assert judge(kernels.Output(), only=["agreement-o"], isolate=True, examples=3).passed
    report = judge(kernels.Forgets(), only=["agreement-o"], examples=3, diagnosis=False)
    assert "quantized='float8_e4m3fn'" in report.outcomes[0].script()


# --- the factor, and the bound --------------------------------------------------------------------


@given(
    st.sampled_from(FORMATS),
    st.sampled_from(["all", "heads", "blocks", "tokens"]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_factors_of_o_hold_and_saturate_its_values(dtype, of, multiplies, seed):
    """Every second factor is too small for the largest value, the others are not."""

    def f(q, k, v, o_factors=None):
        return q

    meaning = f"{'scale' if multiplies else 'descale'} of {of} of o"
    made = Implementation(f, framework="numpy", quantized=dtype, rename={"o_factors": meaning},
                          rows={"o": 3} if of == "blocks" else None)  # fmt: skip
    recipe = Recipe(lead=(2,), H=6, K=3, T=5, S=7, D=11, E=13, dtype="float32", seed=seed)
    problem = recipe.problem()
    factors = made.output.factors(problem)
    shapes = {"all": (), "heads": (2, 6), "blocks": (2, 6, 2), "tokens": (2, 6, 5)}
    assert (factors.dtype, factors.shape) == (np.float32, shapes[of])
    descales = np.broadcast_to(made.output.descales(problem), (2, 6, 5, 13))
    plain = 1 / factors.astype(float) if multiplies else factors.astype(float)
    for b, h, t in itertools.product(range(2), range(6), range(5)):
        own = {"all": (), "heads": (b, h), "blocks": (b, h, t // 3), "tokens": (b, h, t)}[of]
        assert descales[b, h, t, 0] == plain[own]
    most = abs(problem.v).max() if of == "all" else abs(problem.v).max((-2, -1)).repeat(2, 1)
    reach = descales.max(-1) * largest(dtype) / (most if of == "all" else most[..., None])
    assert ((reach < 1) | (reach >= 2)).all()
    if of != "all":
        assert (reach < 1).any()
        assert (reach >= 2).any()


@given(st.sampled_from(FORMATS), st.floats(2.0**-20, 1e5), st.integers(-6, 6))
def test_nearest_rounding_stays_within_the_bound_and_reaches_it(dtype, size, power):
    """With no other error half a gap is allowed, and no more."""
    factor, exact = np.float64(1.25 * 2.0**power), np.array([size])
    error = delivery_error(
        exact, np.zeros(1), factor, dtype, Rounding.upcast(), np.float64
    )  # u = 2⁻⁵³
    values = _numbers(dtype)
    y = min(size / factor, values[-1])
    nearest = values[np.argmin(abs(values - y))]
    assert abs(nearest * factor - size) <= error[0] * (1 + 2.0**-40)
    place = np.searchsorted(values, y)
    around = values[max(place - 1, 0) : place + 1]
    gap = np.diff(around)[0] if len(around) == 2 and y != values[place] else None
    if gap is not None:
        exact_bound = factor * gap / 2
        assert error[0] <= exact_bound * (1 + 2.0**-40) + 16 * 2.0**-53 * size


def _numbers(dtype):
    """Return the numbers ≥ 0 of a format, in order."""
    if dtype == "int8":
        return np.arange(128.0)
    bits = np.arange(128, dtype=np.uint8).view(dtype).astype(float)
    return np.sort(bits[np.isfinite(bits)])


@pytest.mark.parametrize("dtype", FORMATS)
def test_half_gap_is_that_of_every_pair_of_neighbours(dtype):
    values = _numbers(dtype)
    for low, high in itertools.pairwise(values):
        for inside in (low, (low + high) / 2):
            assert Fraction(float(half_gap(np.float64(inside), dtype))) == Fraction(high - low) / 2


def test_int8_promises_nothing_where_o_is_no_number():
    o = np.array([[np.nan, 1.0]])
    own = (np.zeros((1, 2)), np.ones(()), "int8", Rounding.upcast(), "float32")
    assert np.isposinf(delivery_error(o, *own)).tolist() == [[True, False]]
    fp8 = (np.zeros((1, 2)), np.ones(()), "float8_e4m3fn", Rounding.upcast(), "float32")
    assert not np.isposinf(delivery_error(o, *fp8)).any()


def test_a_model_that_stores_arrays_stores_o_once_more():
    o, one = np.full((1, 1), 96.0), np.ones(())
    eager, upcast = (
        delivery_error(o, np.zeros((1, 1)), one, "int8", model, ml_dtypes.bfloat16)
        for model in (Rounding.eager(), Rounding.upcast())
    )
    assert eager - upcast == pytest.approx(96 * 2.0**-8, rel=1e-6)


# --- factors of tokens ----------------------------------------------------------------------------


def tokens(kernel, rename=TOKENS, **arguments):
    return Implementation(kernel, framework="numpy", quantized="int8", rename=rename, **arguments)


@pytest.mark.thorough
def test_factors_of_tokens():
    report = check(tokens(kernels.Tokens()), dtypes=("bfloat16",), examples=2, require="all")
    assert report.passed, str(report)
    assert "k in int8 with factors of tokens" in report.settings["reads"][0]


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("wrong", kernels.WRONG_TOKENS, ids=lambda wrong: wrong.__name__)
def test_wrong_factor_of_tokens_is_found_and_named(wrong):
    only = ("agreement-o", "model-sizes", "shared-heads")
    asked = {"dtypes": ("bfloat16",), "examples": 10, "only": only, "sizes": SMALL}
    report = check(tokens(wrong()), **asked)
    assert not report.passed
    assert named(report) == [wrong.cause]


@pytest.mark.thorough
def test_tokens_in_pages_have_their_factors_there():
    rules = ("agreement-o", "other-sequences", "unread-slots")
    asked = {"dtypes": ("float32",), "examples": 6, "only": rules, "sizes": {"T": (1,), "P": (4,)}}
    report = check(tokens(kernels.paged, PAGED), **asked)
    assert report.passed, str(report)
    assert {o.rule for o in report.outcomes if o.status == "passed"} >= {"other-sequences"}
    assert not check(tokens(kernels.paged_of_slot, PAGED), **asked, diagnosis=False).passed


# --- errors ---------------------------------------------------------------------------------------


def test_zero_points_are_refused_in_words():
    def asymmetric(q, k, v, q_scale=1.0, q_zp=3, k_zero_point=0):
        return q

    def needs_one(q, k, v, q_zp, q_scale=1.0):
        return q

    def symmetric(q, k, v, q_scale=1.0, q_zp=0):
        return q

    with pytest.raises(OptionError, match=r"asymmetric has q_zp, a zero point, and formats here"):
        Implementation(asymmetric, framework="numpy", quantized="int8")
    with pytest.raises(OptionError, match=r"needs_one needs q_zp"):
        Implementation(needs_one, framework="numpy", quantized="int8")
    with pytest.raises(OptionError, match=r"quantized is 'uint8'.*uint8 has a zero point"):
        Implementation(symmetric, framework="numpy", quantized="uint8")
    assert "q_zp" in Implementation(symmetric, framework="numpy", quantized="int8").untested


def test_blocks_are_not_known_in_pages():
    meant = {**PAGED, "k_scales": "descale of blocks of k"}
    with pytest.raises(OptionError, match="factors of blocks of rows, which are not known there"):
        tokens(kernels.paged, meant, rows={"k": 4})


def test_restore_asks_for_the_format():
    f = Implementation(kernels.Output(), framework="numpy", quantized="fp8")
    problem = Recipe(lead=(2,), dtype="bfloat16").problem()
    with pytest.raises(ResultError, match="must be float8_e4m3fn"):
        f.output.restore(np.zeros((2, 1, 1, 1), np.float32), problem)
