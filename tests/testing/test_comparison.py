"""Comparison of a result with the exact array: what counts as an error, what never passes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
from npattn.errors import InternalError, NpattnError, OptionError
from npattn.problem import Problem
from npattn.problem.arrays import finfo
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.ulp import excess
from npattn.testing.comparison import Comparison, compare, compare_arrays, exact

Array = np.ndarray[Any, Any]
BF16 = ml_dtypes.bfloat16
DTYPES: tuple[Any, ...] = (BF16, np.float16, np.float32, np.float64)
NARROW = DTYPES[:3]


def one(value: float, dtype: Any) -> Array:
    return np.array([value], np.float64).astype(dtype)


def gap(got: float, expected: float, dtype: Any) -> float:
    return float(excess(one(got, dtype), np.array([expected]))[0])


# --- excess ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
@given(expected=st.floats(-6e4, 6e4))
def test_rounded_exact_value_has_no_excess(dtype: Any, expected: float) -> None:
    exact = np.array([expected])
    assert excess(exact.astype(dtype), exact)[0] == 0


@pytest.mark.parametrize("dtype", NARROW)
@given(expected=st.floats(-1e3, 1e3), error=st.floats(-1, 1))
def test_excess_is_at_most_the_error_before_rounding(
    dtype: Any, expected: float, error: float
) -> None:
    computed = np.array([expected + error])
    t = abs(computed - expected)
    assert excess(computed.astype(dtype), np.array([expected]))[0] <= t * (1 + 2.0**-50)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("sign", [1, -1])
def test_excess_is_counted_from_the_midpoint(dtype: Any, sign: int) -> None:
    u = float(finfo(dtype).eps) / 2
    assert gap(sign, sign * (1 + u), dtype) == 0  # the midpoint itself rounds either way
    assert gap(sign, sign * (1 + 1.5 * u), dtype) == 0.5 * u
    assert gap(sign, sign * (1 - u / 2), dtype) == 0  # below a power of two the spacing halves
    assert gap(sign, sign * (1 - u), dtype) == u / 2
    assert gap(sign * 2, sign, dtype) == 1 - u


@pytest.mark.parametrize("dtype", NARROW)
def test_subnormals_and_zero_have_excess_like_others(dtype: Any) -> None:
    least = float(finfo(dtype).smallest_subnormal)
    assert gap(0, least / 2, dtype) == 0
    assert gap(0, -least / 2, dtype) == 0
    assert gap(-0.0, least / 4, dtype) == 0
    assert gap(0, least, dtype) == least / 2
    assert gap(3 * least, 4 * least, dtype) == least / 2
    assert gap(least, 0, dtype) == least / 2


def test_float64_excess_is_within_a_unit_of_the_distance() -> None:
    assert gap(1, 1, np.float64) == 0
    assert gap(1, 1 + 2.0**-52, np.float64) <= 2.0**-53
    assert gap(1, 1 + 2.0**-40, np.float64) == pytest.approx(2.0**-40, rel=2.0**-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("got", [np.nan, np.inf, -np.inf])
def test_non_finite_result_has_infinite_excess(dtype: Any, got: float) -> None:
    assert gap(got, 1, dtype) == np.inf
    assert gap(got, 0, dtype) == np.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expected", [np.nan, np.inf, -np.inf])
def test_non_finite_value_accepts_any_non_finite_result(dtype: Any, expected: float) -> None:
    assert gap(1, expected, dtype) == np.inf
    assert gap(0, expected, dtype) == np.inf
    assert [gap(got, expected, dtype) for got in (np.nan, np.inf, -np.inf)] == [0, 0, 0]


@pytest.mark.parametrize("dtype", NARROW)
def test_largest_number_has_excess_from_below(dtype: Any) -> None:
    top = float(finfo(dtype).max)
    assert gap(top, top, dtype) == 0
    assert gap(top, top / 2, dtype) > top / 4


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_number_has_excess_from_above(dtype: Any, sign: int) -> None:
    top = float(finfo(dtype).max)
    half = top * float(finfo(dtype).eps) / 2
    assert gap(sign * top, sign * (top + half / 4), dtype) == 0
    assert gap(sign * top, sign * 1.5 * top, dtype) > top / 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_excess_has_the_shape_of_its_arrays(dtype: Any) -> None:
    for shape in ((), (0,), (2, 0, 3), (2, 3)):
        comparison = excess(np.ones(shape, dtype), np.ones(shape))
        assert comparison.shape == shape
        assert comparison.dtype == np.float64


# --- compare_arrays -------------------------------------------------------------------------------


def arrays(got: Any, expected: Any, allowed: Any, dtype: Any = np.float32) -> Comparison:
    expected = np.asarray(expected, np.float64)
    allowed = np.broadcast_to(np.asarray(allowed, np.float64), expected.shape)
    return compare_arrays("o", np.asarray(got, np.float64).astype(dtype), expected, allowed)


def test_error_within_tolerance_passes_and_beyond_fails() -> None:
    assert arrays([1.0], [1.5], 0.51).passed
    comparison = arrays([1.0], [1.5], 0.25)
    assert not comparison.passed
    assert comparison.ratio == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("allowed", [0, 1, 1e300])
def test_nan_never_passes_for_a_number(dtype: Any, allowed: float) -> None:
    comparison = arrays([1.0, np.nan], [1.0, 1.0], allowed, dtype)
    assert not comparison.passed
    assert comparison.ratio == np.inf
    assert comparison.index == (1,)
    assert np.isnan(comparison.got)


def test_number_never_passes_for_nan() -> None:
    assert not arrays([0.0], [np.nan], 1.0).passed
    assert arrays([np.nan], [np.nan], 0.0).passed
    assert arrays([np.inf], [np.nan], 0.0).passed


def test_nan_tolerance_is_a_defect_of_npattn_and_no_verdict() -> None:
    for got in (1.0, 2.0):
        with pytest.raises(InternalError, match="the tolerance of o is NaN"):
            arrays([got], [2.0], np.nan)
    assert arrays([np.nan], [np.inf], np.nan).passed  # not read there


def test_zero_tolerance_passes_the_rounded_exact_value_alone() -> None:
    assert arrays([0.1], [0.1], 0).passed
    assert arrays([0.0], [0.0], 0).passed
    comparison = arrays([1e-30], [0.0], 0)
    assert not comparison.passed
    assert comparison.ratio == np.inf


@pytest.mark.parametrize("got", [0.0, 1e30, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("expected", [1.0, np.nan, np.inf])
def test_infinite_tolerance_passes_everything(got: float, expected: float) -> None:
    assert arrays([got], [expected], np.inf).passed


@pytest.mark.parametrize("sign", [1, -1])
def test_overflow_passes_beyond_the_range_of_the_dtype(sign: int) -> None:
    inf = sign * np.inf
    assert arrays([inf], [sign * 7e4], 1.0, np.float16).passed
    assert arrays([inf], [sign * 65000], 600.0, np.float16).passed  # or may be
    assert not arrays([inf], [sign * 6e4], 1.0, np.float16).passed
    assert not arrays([np.nan], [sign * 7e4], 1.0, np.float16).passed
    assert not arrays([sign], [sign * 7e4], 1.0, np.float16).passed
    assert arrays([inf], [sign * 1e39], 1e30, BF16).passed
    assert not arrays([inf], [sign * 7e4], 1.0, BF16).passed


def test_overflow_of_the_wrong_sign_fails() -> None:
    assert not arrays([-np.inf], [7e4], 1.0, np.float16).passed


def test_overflow_of_either_sign_passes_where_both_are_within_the_tolerance() -> None:
    assert arrays([np.inf], [-184.0], 2.2e6, np.float16).passed
    assert not arrays([np.inf], [-184.0], 65600.0, np.float16).passed
    assert arrays([-np.inf], [-184.0], 65600.0, np.float16).passed


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3, 0)])
def test_empty_array_passes(shape: tuple[int, ...]) -> None:
    comparison = arrays(np.zeros(shape), np.zeros(shape), 0)
    assert comparison.passed
    assert comparison.ratio == 0
    assert (comparison.wrong, comparison.size) == (0, 0)
    assert str(comparison) == "o is empty"


def test_worst_element_has_the_largest_ratio() -> None:
    expected = np.zeros((2, 3, 5))
    got, allowed = expected.copy(), expected + 1
    got[0, 1, 2], allowed[0, 1, 2] = 100, 1000  # the largest error, but allowed
    got[1, 2, 3], allowed[1, 2, 3] = 1, 0.25
    got[1, 0, 0] = 2
    comparison = arrays(got, expected, allowed)
    assert comparison.index == (1, 2, 3)
    assert comparison.ratio == pytest.approx(4, rel=1e-6)
    assert (comparison.got, comparison.want, comparison.allowed) == (1, 0, 0.25)
    assert (comparison.wrong, comparison.size) == (2, 30)


def test_scalar_has_an_empty_index() -> None:
    comparison = arrays(1.0, 3.0, 1.0)
    assert comparison.index == ()
    assert not comparison.passed
    assert "got 1" in str(comparison)


def test_str_has_index_values_and_ratio() -> None:
    comparison = compare_arrays(
        "dq", np.float32([[1, 2]]), np.array([[1.0, 3]]), np.full((1, 2), 0.5)
    )
    assert str(comparison) == (
        "dq[0, 1]: got 2, want 3, allowed ±0.5 (2 × tolerance; 1 of 2 elements out of tolerance)"
    )
    assert "out of tolerance" not in str(arrays([1.0], [1.0], 1.0))


# --- compare --------------------------------------------------------------------------------------


def make_problem(dtype: Any = np.float32, **options: Any) -> tuple[Problem, Array, Array]:
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(s).astype(dtype) for s in ((2, 6, 5, 3), (2, 3, 7, 3), (2, 3, 7, 11))
    )
    dout = rng.standard_normal((2, 6, 5, 11)).astype(dtype)
    dlse = rng.standard_normal((2, 6, 5))
    return Problem(q, k, v, **options), dout, dlse


def results(problem: Problem, dout: Array, dlse: Array | None) -> dict[str, Array]:
    """Return the results of a correct implementation, in the dtype of q."""
    low = problem.q.dtype
    exact = npattn.forward(problem.q, problem.k, problem.v, bias=problem.bias, sinks=problem.sinks)
    grads = npattn.backward(exact, dout, dlse)
    comparison = {"o": exact.out, "lse": exact.lse, "weights": exact.weights}
    comparison |= {f"d{n}": getattr(grads, n) for n in ("q", "k", "v", "bias", "sinks")}
    return {n: x.astype(low) for n, x in comparison.items() if x is not None}


@pytest.mark.parametrize("dtype", DTYPES)
def test_array_is_o(dtype: Any) -> None:
    problem, dout, dlse = make_problem(dtype)
    o = results(problem, dout, dlse)["o"]
    (comparison,) = compare(o, problem)
    assert comparison.name == "o"
    assert comparison.passed
    (wrong,) = compare(-o, problem)
    assert not wrong.passed


def test_pair_is_o_and_lse() -> None:
    problem, dout, dlse = make_problem()
    got = results(problem, dout, dlse)
    o, lse = compare((got["o"], got["lse"]), problem)
    assert (o.name, lse.name) == ("o", "lse")
    assert o.passed
    assert lse.passed
    _, base2 = compare((got["o"], got["lse"] / np.float32(np.log(2))), problem)
    assert not base2.passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_mapping_keeps_its_order(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    bias, sinks = rng.standard_normal((5, 7)).astype(dtype), rng.standard_normal(6).astype(dtype)
    problem, dout, dlse = make_problem(dtype, bias=bias, sinks=sinks)
    got = dict(reversed(results(problem, dout, dlse).items()))
    comparison = compare(got, problem, dout=dout, dlse=dlse)
    assert [c.name for c in comparison] == list(got)
    assert set(got) == {"o", "lse", "weights", "dq", "dk", "dv", "dbias", "dsinks"}
    assert all(c.passed for c in comparison), [str(c) for c in comparison]
    for name in got:
        broken = got | {name: (1.25 * got[name].astype(float)).astype(dtype)}
        failed = [c.name for c in compare(broken, problem, dout=dout, dlse=dlse) if not c.passed]
        assert failed == [name]


def test_gradients_depend_on_dlse() -> None:
    problem, dout, dlse = make_problem()
    got = {"dq": results(problem, dout, dlse)["dq"]}
    assert compare(got, problem, dout=dout, dlse=dlse)[0].passed
    assert not compare(got, problem, dout=dout)[0].passed


def test_tolerance_is_that_of_the_declared_rounding() -> None:
    problem, dout, _ = make_problem(BF16)
    got = {"o": results(problem, dout, None)["o"]}
    for rounding in (None, Rounding.upcast(), Rounding.fused()):
        (comparison,) = compare(got, problem, rounding=rounding)
        limit = tolerance(problem, BF16, rounding)["o"]
        assert comparison.allowed == limit[comparison.index]


def test_exact_value_follows_the_conventions() -> None:
    mask = np.zeros((1, 7), bool)
    problem, _, _ = make_problem(mask=mask)
    mean = np.repeat(problem.v.astype(float).mean(-2, keepdims=True), 2, axis=-3)
    got = np.broadcast_to(mean, (2, 6, 5, 11)).astype(np.float32)
    assert compare(got, problem, conventions=npattn.Conventions(empty_row="mean"))[0].passed
    assert not compare(got, problem)[0].passed


def test_list_is_an_array() -> None:
    problem, _, _ = make_problem(np.float64)
    assert compare(npattn.attention(problem.q, problem.k, problem.v).tolist(), problem)[0].passed


def test_tuple_of_three_is_an_error() -> None:
    problem, dout, dlse = make_problem()
    o = results(problem, dout, dlse)["o"]
    with pytest.raises(OptionError, match=r"a tuple of 3: pass \(o, lse\), or a mapping"):
        compare((o, o, o), problem)


@pytest.mark.parametrize("name", ["upcast", "fused", "eager"])
def test_rounding_may_be_a_name(name: str) -> None:
    problem, dout, _ = make_problem(BF16)
    got = {"o": results(problem, dout, None)["o"]}
    (comparison,) = compare(got, problem, rounding=name)
    assert comparison == compare(got, problem, rounding=Rounding.from_name(name))[0]


def test_unknown_result_lists_known_ones() -> None:
    problem, dout, _ = make_problem()
    with pytest.raises(
        OptionError, match="out is not a result of this problem: pass one of o, lse; gradients"
    ):
        compare({"out": np.zeros((2, 6, 5, 11))}, problem)
    with pytest.raises(OptionError, match="dbias is not a result") as caught:
        compare({"dbias": np.zeros((5, 7))}, problem, dout=dout)
    assert "dq, dk, dv" in str(caught.value)
    assert "dout=" not in str(caught.value)


def test_gradients_without_dout_are_an_error() -> None:
    problem, _, _ = make_problem()
    with pytest.raises(OptionError, match=r"gradients need dout="):
        compare({"dq": np.zeros((2, 6, 5, 3))}, problem)


@pytest.mark.parametrize("shape", [(2, 6, 5, 10), (6, 5, 11), (), (2, 6, 11, 5), (1, 6, 5, 11)])
def test_wrong_shape_is_never_broadcast(shape: tuple[int, ...]) -> None:
    problem, _, _ = make_problem()
    with pytest.raises(NpattnError, match=r"o has shape .*, must have \(2, 6, 5, 11\)"):
        compare(np.zeros(shape, np.float32), problem)


def test_what_is_no_problem_is_an_error_that_says_how_to_make_one() -> None:
    problem, dout, dlse = make_problem()
    o = results(problem, dout, dlse)["o"]
    fwd = npattn.forward(problem.q, problem.k, problem.v)
    others = [None, np, (problem.q, problem.k, problem.v), problem.q, {"q": problem.q}, 3, "q"]
    for other in (*others, fwd, npattn.attention, npattn.MultiHeadAttention.init(6, 2, seed=0)):
        for got in (o, (o, o, o), other):
            with pytest.raises(OptionError, match=r"^problem is .* must be npattn\.Problem\(q"):
                compare(got, other)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"of type Forward, .*: pass its \.problem$"):
        compare(o, fwd)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="to judge a function or a module, pass it to npattn"):
        compare(o, npattn.attention)  # type: ignore[arg-type]


def test_tensors_are_compared_in_their_dtype() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "bfloat16"):
        problem, dout, dlse = make_problem(dtype)
        o = results(problem, dout, dlse)["o"]
        tensor = torch.tensor(o.astype("f4"), requires_grad=True).to(getattr(torch, dtype))
        assert str(compare(tensor, problem)) == str(compare(o, problem))
    tensors = (torch.tensor(x.astype("f4")) for x in (problem.q, problem.k, problem.v))
    with pytest.raises(OptionError, match=r"a Problem of tensors, .*, with NumPy arrays$"):
        compare(o, npattn.torch.Problem(*tensors))


# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", [None, "upcast"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_difference_is_within_the_tolerance_of_exact(dtype: Any, rounding: Any) -> None:
    """Of what is computed at the edge of the bound, and then rounded to the dtype."""
    problem, dout, dlse = make_problem(dtype)
    found = exact(problem, dout=dout, dlse=dlse, rounding=rounding)
    assert list(found) == ["o", "lse", "dq", "dk", "dv"]
    model = None if rounding is None else Rounding.from_name(rounding)
    bound = tolerance(problem, problem.q.dtype, model, dout=dout, dlse=dlse)
    limits = finfo(dtype)
    for name, (value, allowed) in found.items():
        size = (abs(value) + bound[name]) * (1 + float(limits.eps))  # it may be rounded up
        last = float(limits.eps) / 2 * size
        more = (allowed - bound[name]) * (1 - 2.0**-40)
        assert (more <= last + float(limits.smallest_subnormal)).all()
        for sign in (1, -1):
            got = (value + sign * bound[name]).astype(dtype)
            assert compare({name: got}, problem, dout=dout, dlse=dlse, rounding=rounding)[0].passed
            assert (abs(got.astype(float) - value) <= allowed).all()


def test_exact_has_gradients_with_dout_only_and_takes_conventions() -> None:
    problem, _, _ = make_problem()
    assert list(exact(problem)) == ["o", "lse"]
    empty = npattn.Problem(*np.ones((3, 2, 2), "f4"), np.zeros((2, 2), bool))
    assert (exact(empty)["o"].value == 0).all()
    nan = exact(empty, conventions=npattn.Conventions(empty_row="nan"))
    assert np.isnan(nan["o"].value).all()
    with pytest.raises(OptionError, match="problem is None, must be npattn"):
        exact(None)  # type: ignore[arg-type]


def test_exact_lets_overflow_be() -> None:
    top = float(np.finfo(np.float16).max)
    problem = npattn.Problem(*np.full((3, 2, 2), top, "f2"), scale=0.0)
    value, allowed = exact(problem)["o"]
    assert (value == top).all()
    assert np.isposinf(allowed).all()


def test_arrays_of_two_shapes_are_never_compared() -> None:
    """One that broadcasts is as wrong as any other."""
    with pytest.raises(InternalError, match=r"dk \(2, 3\) is compared with \(1, 3\)"):
        compare_arrays("dk", np.zeros((2, 3), np.float32), np.zeros((1, 3)), np.ones((1, 3)))
