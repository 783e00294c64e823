"""loops pinned down by cases that are small enough to work out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import npattn
from npattn import Problem
from npattn.engines import loops
from npattn.errors import OptionError

Array = np.ndarray[Any, Any]

# Every number here is of order 1 and comes out of fewer than 40 operations.
ROUNDING = 40 * 2.0**-53


def near(x: Any) -> Any:
    return pytest.approx(x, rel=ROUNDING, abs=ROUNDING, nan_ok=True)


def column(*numbers: float) -> Array:
    return np.array(numbers)[:, None]


def blank(T: int, S: int, **options: Any) -> Problem:
    """One head whose scores are all 0, with v = I: the weights are what is seen, evenly."""
    return Problem(np.zeros((T, 1)), np.zeros((S, 1)), np.eye(S), **options)


def visible_keys(problem: Problem, conventions: npattn.Conventions | None = None) -> list[str]:
    """A line for each query, with the keys that have weight."""
    weights = loops.forward(problem, conventions)[2]
    for row in weights:
        assert row[row > 0] == near(1 / max((row > 0).sum(), 1))
    return ["".join(str(s) for s in np.flatnonzero(row)) for row in weights]


# --- forward --------------------------------------------------------------------------------------


def test_results_of_one_query_and_two_keys() -> None:
    q, k = np.array([[2.0, 1.0]]), np.array([[0.5, 1.0], [-1.0, 0.25]])
    v = np.array([[1.0, 10.0, 0.0], [3.0, 20.0, -1.0]])
    a, b = 2 / math.sqrt(2), -1.75 / math.sqrt(2)  # q·k / √D
    total = math.exp(a) + math.exp(b)
    p = math.exp(a) / total
    out, lse, weights = loops.forward(Problem(q, k, v))
    assert lse == near([math.log(total)])
    assert weights == near(np.array([[p, 1 - p]]))
    assert out == near(np.array([[p + 3 * (1 - p), 10 * p + 20 * (1 - p), -(1 - p)]]))


def test_scores_are_scaled_then_capped_then_modified_then_biased() -> None:
    q, k, v = np.full((1, 1), 3.0), np.full((1, 1), 2.0), np.ones((1, 1))
    _, lse, _ = loops.forward(
        Problem(
            q,
            k,
            v,
            scale=-0.5,
            softcap=2.0,
            score_mod=lambda s, b, h, t, i: s * s + s,
            bias=np.array([[0.7]]),
        )
    )
    capped = 2 * math.tanh(-3 / 2)
    assert lse == near([capped**2 + capped + 0.7])  # the lse of one key is its score


def test_a_row_of_large_scores_does_not_overflow() -> None:
    _, lse, weights = loops.forward(Problem(column(1.0), column(1e4, -1e4, 1e4), np.ones((3, 1))))
    assert lse.tolist() == [1e4 + math.log(2)]
    assert weights.tolist() == [[0.5, 0.0, 0.5]]


def test_sums_are_exact_before_they_are_rounded() -> None:
    q, k = np.ones((1, 3)), np.array([[1e16, 1.0, -1e16]])
    assert loops.forward(Problem(q, k, np.ones((1, 1)), scale=1.0))[1].tolist() == [1.0]


@pytest.mark.parametrize(
    ("T", "S", "options", "want"),
    [
        (3, 5, {"causal": "bottom_right"}, ["012", "0123", "01234"]),
        (3, 5, {"causal": "top_left"}, ["0", "01", "012"]),
        (5, 3, {"causal": "bottom_right"}, ["", "", "0", "01", "012"]),
        (5, 3, {"causal": "top_left"}, ["0", "01", "012", "012", "012"]),
        (2, 2, {"causal": True}, ["0", "01"]),
        (3, 5, {"window": (1, 0)}, ["12", "23", "34"]),
        (3, 5, {"window": (None, 1)}, ["0123", "01234", "01234"]),
        (3, 5, {"window": (0, None), "alignment": "top_left"}, ["01234", "1234", "234"]),
        (3, 5, {"window": (1, 2), "alignment": "top_left"}, ["012", "0123", "1234"]),
        (3, 5, {"window": (1, 2), "causal": "top_left"}, ["0", "01", "12"]),
        (5, 3, {"window": (0, 0)}, ["", "", "0", "1", "2"]),
        (5, 3, {"window": (0, 1)}, ["", "0", "01", "12", "2"]),
        (2, 3, {"mask": np.array([[True, False, True]])}, ["02", "02"]),
        (2, 3, {"mask": np.array([[False], [True]])}, ["", "012"]),
        (2, 3, {"mask": np.array([[True, False, True]]), "causal": "bottom_right"}, ["0", "02"]),
        (1, 3, {"bias": np.array([[0.0, -np.inf, 0.0]])}, ["02"]),
    ],
)
def test_visible_is_the_intersection_of_mask_causal_window(
    T: int, S: int, options: dict[str, Any], want: list[str]
) -> None:
    assert visible_keys(blank(T, S, **options)) == want


def test_visibility_is_not_taken_from_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: Problem) -> None:
        raise AssertionError("loops asked Problem what is visible")

    problem = blank(3, 5, causal="top_left", window=(1, 0), mask=np.ones((3, 5), bool))
    monkeypatch.setattr(Problem, "visible", property(fail))
    loops.backward(problem, np.ones((3, 5)))
    assert visible_keys(problem) == ["0", "01", "12"]


def test_score_mod_receives_all_indices() -> None:
    q, k, v = np.zeros((2, 3, 2, 5, 1)), np.zeros((2, 3, 2, 1, 1)), np.zeros((2, 3, 2, 1, 1))
    _, lse, _ = loops.forward(
        Problem(q, k, v, score_mod=lambda s, b, h, t, i: s + 1000 * b + 100 * h + 10 * t + i)
    )
    for (i, j, h, t), number in np.ndenumerate(lse):
        assert number == 1000 * (3 * i + j) + 100 * h + 10 * t


def test_query_head_uses_the_head_of_its_group() -> None:
    v = np.array([1.0, 2.0]).reshape(2, 1, 1)
    out, _, _ = loops.forward(Problem(np.zeros((6, 1, 1)), np.zeros((2, 1, 1)), v))
    assert out[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_leading_axes_broadcast() -> None:
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 1, 1, 3, 2)), rng.standard_normal((3, 1, 5, 2))
    v = rng.standard_normal((1, 5, 7))
    out, lse, weights = loops.forward(Problem(q, k, v))
    assert (out.shape, lse.shape) == ((2, 3, 1, 3, 7), (2, 3, 1, 3))
    for i in range(2):
        for j in range(3):
            each = loops.forward(Problem(q[i, 0], k[j], v))
            for whole, one in zip((out, lse, weights), each, strict=True):
                assert (whole[i, j] == one).all()


def test_a_sink_takes_weight_and_gives_no_value() -> None:
    total = math.exp(0.5) + math.exp(-1) + math.exp(2)
    out, lse, weights = loops.forward(
        Problem(column(1.0)[None], column(0.5, -1)[None], np.ones((1, 2, 1)), sinks=np.array([2.0]))
    )
    assert lse == near(np.array([[math.log(total)]]))
    assert weights == near(np.array([[[math.exp(0.5) / total, math.exp(-1) / total]]]))
    assert out == near(np.array([[[(math.exp(0.5) + math.exp(-1)) / total]]]))


def test_dropout_changes_out_and_neither_weights_nor_lse() -> None:
    keep = np.array([[True, False, True], [False, False, False]])
    out, lse, weights = loops.forward(blank(2, 3, dropout_mask=keep, dropout_rate=0.25))
    assert out == near(np.array([[4 / 9, 0, 4 / 9], [0, 0, 0]]))
    assert weights == near(1 / 3)
    assert lse == near(math.log(3))
    out, _, _ = loops.forward(blank(2, 3, dropout_mask=keep))
    assert out == near(np.array([[1 / 3, 0, 1 / 3], [0, 0, 0]]))


def test_fully_masked_row_is_zero_with_lse_minus_infinity() -> None:
    out, lse, weights = loops.forward(blank(3, 2, causal="bottom_right"))
    assert (lse[0], out[0].tolist(), weights[0].tolist()) == (-math.inf, [0, 0], [0, 0])


def test_sink_only_row_has_the_lse_of_the_sink() -> None:
    out, lse, _ = loops.forward(blank(3, 2, causal="bottom_right", sinks=np.array([0.3])))
    assert (lse[0], out[0].tolist()) == (0.3, [0, 0])


@pytest.mark.parametrize("shape", [(0, 1, 3, 5, 2, 7), (2, 0, 3, 5, 2, 7), (2, 1, 0, 5, 2, 7)])
def test_without_queries_there_is_nothing(shape: tuple[int, ...]) -> None:
    B, H, T, S, D, E = shape
    problem = Problem(np.ones((B, H, T, D)), np.ones((B, H, S, D)), np.ones((B, H, S, E)))
    out, lse, weights = loops.forward(problem)
    assert (out.shape, lse.shape, weights.shape) == ((B, H, T, E), (B, H, T), (B, H, T, S))
    grads = loops.backward(problem, out)
    assert (grads.k == np.zeros((B, H, S, D))).all()


def test_sizes_of_zero() -> None:
    out, lse, _ = loops.forward(Problem(np.ones((3, 2)), np.ones((0, 2)), np.ones((0, 5))))
    assert (out == np.zeros((3, 5))).all()
    assert (lse == -np.inf).all()
    bias = np.array([[0.5, -1.0]])
    _, lse, _ = loops.forward(Problem(np.ones((1, 0)), np.ones((2, 0)), np.ones((2, 0)), bias=bias))
    assert lse == near([math.log(math.exp(0.5) + math.exp(-1))])


# --- what is not finite ---------------------------------------------------------------------------


def test_a_nan_behind_a_mask_matters_to_nobody() -> None:
    q, k, v = column(1.0, 1.0), column(0.0, np.nan), column(2.0, np.nan)
    problem = Problem(q, k, v, np.array([[True, False]]))
    assert loops.forward(problem)[0].tolist() == [[2], [2]]
    grads = loops.backward(problem, np.ones((2, 1)))
    assert (grads.q.tolist(), grads.v.tolist()) == ([[0], [0]], [[2], [0]])


def test_nan_in_a_visible_value_fills_its_column() -> None:
    v = np.array([[1.0, np.nan, 1.0], [1.0, 1.0, np.inf]])
    out, _, _ = loops.forward(Problem(column(1.0), column(0.0, -1e9), v))  # with no weight even
    assert np.isnan(out).tolist() == [[False, True, True]]


def test_nan_query_reaches_visible_keys_only() -> None:
    problem = Problem(column(np.nan, 1.0), column(1.0, 1.0), column(1.0, 1.0), causal=True)
    out, lse, weights = loops.forward(problem)
    assert np.isnan(out).tolist() == [[True], [False]]
    assert np.isnan(lse).tolist() == [True, False]
    assert np.isnan(weights).tolist() == [[True, False], [False, False]]
    grads = loops.backward(problem, np.ones((2, 1)))
    for gradient in (grads.q, grads.k, grads.v):
        assert np.isnan(gradient).tolist() == [[True], [False]]


def test_score_of_minus_infinity_leaves_the_softmax() -> None:
    q, k = column(1.0), column(1.0, -np.inf)
    problem = Problem(q, k, column(2.0, 3.0))
    assert loops.forward(problem)[0].tolist() == [[2]]
    assert loops.backward(problem, np.ones((1, 1))).v.tolist() == [[1], [0]]
    huge = Problem(np.full((1, 2), 1e200), np.array([[1e200, -1e200], [1e200, 1e200]]), np.eye(2))
    assert not np.isfinite(loops.forward(huge)[0]).all()


# --- backward -------------------------------------------------------------------------------------


def two_keys(**options: Any) -> tuple[Problem, float]:
    """q = 1, k = (0.5, −1), v = (2, 5), and the first weight: the logistic of the difference."""
    problem = Problem(column(1.0), column(0.5, -1.0), column(2.0, 5.0), **options)
    return problem, 1 / (1 + math.exp(-1.5))


def test_the_gradient_of_out_is_that_of_a_logistic() -> None:
    problem, p = two_keys(bias=np.zeros((1, 2)))
    grads = loops.backward(problem, np.array([[3.0]]))
    ds = 3 * p * (1 - p) * (2 - 5)
    assert grads.bias == near(np.array([[ds, -ds]]))
    assert grads.q == near(np.array([[ds * 1.5]]))
    assert grads.k == near(column(ds, -ds))
    assert grads.v == near(column(3 * p, 3 * (1 - p)))
    assert grads.sinks is None


def test_the_gradient_of_lse_is_the_weights() -> None:
    problem, p = two_keys(scale=-2.0)
    p = 1 / (1 + math.exp(3))  # scale turns the difference of 1.5 into −3
    grads = loops.backward(problem, np.zeros((1, 1)), np.array([0.7]))
    assert grads.q == near(np.array([[0.7 * -2 * (0.5 * p - (1 - p))]]))
    assert grads.k == near(0.7 * -2 * column(p, 1 - p))
    assert (grads.v == 0).all()


def test_the_gradient_of_the_weights_passes_by_dropout() -> None:
    keep = np.array([[False, False]])
    problem, p = two_keys(dropout_mask=keep, dropout_rate=0.5)
    grads = loops.backward(problem, np.ones((1, 1)), None, np.array([[1.0, 0.0]]))
    assert grads.q == near(np.array([[p * (1 - p) * 1.5]]))
    assert (grads.v == 0).all()


def test_the_gradient_of_out_goes_through_what_dropout_keeps() -> None:
    problem, p = two_keys(dropout_mask=np.array([[True, False]]), dropout_rate=0.5)
    grads = loops.backward(problem, np.ones((1, 1)))
    assert grads.q == near(np.array([[1.5 * p * (1 - p) * 2 * 2]]))  # o = 2 p · 2
    assert grads.v == near(column(2 * p, 0))


def test_the_gradients_of_softcap_and_score_mod_chain() -> None:
    def score(x: float) -> float:
        return (3 * math.tanh(x / 3)) ** 2

    problem = Problem(
        column(1.0), column(2.0), np.ones((1, 1)), softcap=3.0, score_mod=lambda s, *_: s * s
    )
    slope = 2 * 3 * math.tanh(2 / 3) / math.cosh(2 / 3) ** 2
    assert loops.forward(problem)[1] == near([score(2.0)])
    assert loops.backward(problem, np.zeros((1, 1)), np.ones(1)).k == near(column(slope))


def test_the_slope_of_a_saturated_softcap_keeps_its_digits() -> None:
    problem = Problem(column(1.0), column(20.0), np.ones((1, 1)), softcap=1.0)
    slope = 4 * math.exp(-40) / (1 + math.exp(-40)) ** 2  # 1 − tanh(20)² is 0 in float64
    got = loops.backward(problem, np.zeros((1, 1)), np.ones(1)).q / 20
    assert got[0, 0] == pytest.approx(slope, rel=ROUNDING, abs=0)


def test_the_gradient_of_a_sink_is_its_weight() -> None:
    q, k, v = np.zeros((2, 1, 1, 1)), np.zeros((2, 1, 1, 1)), np.full((2, 1, 1, 1), 5.0)
    problem = Problem(q, k, v, sinks=np.zeros(1))  # the key and the sink have half each
    grads = loops.backward(problem, np.ones_like(q), np.full((2, 1, 1), 0.3))
    assert grads.sinks == near([2 * (-5 * 0.25 + 0.3 * 0.5)])


def test_sink_only_row_passes_dlse_to_the_sink() -> None:
    options: dict[str, Any] = {"mask": np.zeros((1, 1), bool), "bias": np.ones((2, 3))}
    grads = loops.backward(blank(2, 3, **options), np.ones((2, 3)), np.ones(2), np.ones((2, 3)))
    for name in ("q", "k", "v", "bias"):
        assert not getattr(grads, name).any(), name
    problem = blank(2, 3, **options, sinks=np.array([1.5]))
    assert loops.backward(problem, np.ones((2, 3)), np.array([0.2, 0.3])).sinks == near([0.5])


def test_gradients_are_summed_over_what_was_shared_and_broadcast() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(s) for s in ((2, 1, 6, 3, 5), (7, 2, 2, 5), (2, 2, 11)))
    bias, do = rng.standard_normal((6, 1, 2)), rng.standard_normal((2, 7, 6, 3, 11))
    grads = loops.backward(Problem(q, k, v, bias=bias), do)
    want = {"q": np.zeros_like(q), "k": np.zeros_like(k), "v": np.zeros_like(v)}
    want["bias"] = np.zeros_like(bias)
    for i, j, h in np.ndindex(2, 7, 6):
        one = loops.backward(
            Problem(q[i, 0, h], k[j, h // 3], v[h // 3], bias=np.repeat(bias[h], 3, 0)), do[i, j, h]
        )
        want["q"][i, 0, h] += one.q
        want["k"][j, h // 3] += one.k
        want["v"][h // 3] += one.v
        assert one.bias is not None
        want["bias"][h] += one.bias.sum(0)
    for name, gradient in want.items():
        assert getattr(grads, name).shape == gradient.shape
        assert getattr(grads, name) == pytest.approx(gradient, abs=2 * 7 * 3 * 10 * ROUNDING)


def test_complex_arrays_are_refused() -> None:
    problem, _ = two_keys()
    with pytest.raises(OptionError, match="q is complex128, must be real"):
        loops.forward(Problem(problem.q + 0j, problem.k, problem.v))
    with pytest.raises(OptionError, match="dout is complex128"):
        loops.backward(problem, np.ones((1, 1), complex))


# --- conventions ----------------------------------------------------------------------------------

TWO_OF_THREE = np.array([[True, True, False], [False, False, False]])


def test_mask_true_hide_turns_the_mask_around() -> None:
    hide = npattn.Conventions(mask_true="hide")
    assert visible_keys(blank(2, 3, mask=TWO_OF_THREE), hide) == ["2", "012"]


def test_inclusive_window_counts_the_query_in_left_only() -> None:
    inclusive = npattn.Conventions(window="inclusive")
    assert visible_keys(blank(3, 5, window=(2, 1)), inclusive) == ["123", "234", "34"]
    assert visible_keys(blank(3, 5, window=(1, 0)), inclusive) == ["2", "3", "4"]
    assert visible_keys(blank(3, 5, window=(None, 0)), inclusive) == ["012", "0123", "01234"]


def test_hidden_fill_replaces_scores_and_stops_gradients() -> None:
    fill = npattn.Conventions(hidden_fill=-0.5)
    q, k, v = column(1.0), column(2.0, 7.0), column(3.0, 4.0)
    problem = Problem(q, k, v, np.array([[True, False]]), bias=np.array([[0.1, 9.0]]), softcap=1e9)
    p = 1 / (1 + math.exp(-0.5 - 2.1))
    out, _, weights = loops.forward(problem, fill)
    assert weights == near(np.array([[p, 1 - p]]))
    assert out == near(np.array([[3 * p + 4 * (1 - p)]]))
    grads = loops.backward(problem, np.ones((1, 1)), conventions=fill)
    ds = p * (1 - p) * (3 - 4)
    assert grads.v == near(column(p, 1 - p))
    assert grads.bias == near(np.array([[ds, 0]]))
    assert grads.k == near(column(ds, 0))
    assert grads.q == near(np.array([[2 * ds]]))


def test_hidden_fill_overrides_empty_row() -> None:
    both = npattn.Conventions(hidden_fill=-1e9, empty_row="nan", lse_empty=0.0)
    out, lse, _ = loops.forward(blank(2, 3, mask=TWO_OF_THREE), both)
    assert out == near(np.array([[0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]))
    assert lse[1] == -1e9 + math.log(3)


def test_empty_row_mean_passes_gradients_to_values_only() -> None:
    mean = npattn.Conventions(empty_row="mean", lse_empty=0.0)
    keep = np.zeros((1, 1), bool)  # dropout does not touch it
    problem = blank(2, 3, mask=TWO_OF_THREE, dropout_mask=keep, dropout_rate=0.5)
    out, lse, _ = loops.forward(problem, mean)
    assert out[1] == near([1 / 3] * 3)
    assert lse[1] == 0
    grads = loops.backward(problem, np.ones((2, 3)), np.array([0.0, 5.0]), conventions=mean)
    assert grads.v == near(1 / 3)
    assert not grads.q.any()
    nothing = Problem(np.ones((1, 2)), np.ones((0, 2)), np.ones((0, 5)))
    assert (loops.forward(nothing, mean)[0] == 0).all()


def test_empty_row_nan_has_undefined_gradients_of_its_own() -> None:
    undefined = npattn.Conventions(empty_row="nan")
    problem = blank(2, 3, mask=TWO_OF_THREE, bias=np.zeros((2, 3)))
    out, lse, weights = loops.forward(problem, undefined)
    assert np.isnan(out).tolist() == np.isnan(weights).tolist() == [[False] * 3, [True] * 3]
    assert lse[1] == -math.inf
    grads = loops.backward(problem, np.ones((2, 3)), conventions=undefined)
    assert np.isnan(grads.q).tolist() == [[False], [True]]
    assert np.isfinite(grads.k).all()
    assert grads.v[:2] == near(0.5)
    assert not grads.v[2].any()
    assert grads.bias is not None
    assert np.isnan(grads.bias).tolist() == [[False] * 3, [True] * 3]


def test_after_bias_caps_the_sum_and_both_gradients() -> None:
    late = npattn.Conventions(softcap="after_bias")
    problem = Problem(column(1.0), column(2.0, 7.0), column(3.0, 4.0),
                      bias=np.array([[0.5, -np.inf]]), softcap=3.0,
                      score_mod=lambda s, *_: s * s)  # fmt: skip
    y = (2.0**2 + 0.5) / 3
    p = 1 / (1 + math.exp(-3 - 3 * math.tanh(y)))  # −inf comes back as −3
    out, _, weights = loops.forward(problem, late)
    assert weights == near(np.array([[p, 1 - p]]))
    assert out == near(np.array([[3 * p + 4 * (1 - p)]]))
    grads = loops.backward(problem, np.ones((1, 1)), conventions=late)
    ds = p * (1 - p) * (3 - 4) / math.cosh(y) ** 2
    assert grads.bias == near(np.array([[ds, 0]]))
    assert grads.k == near(column(ds * 2 * 2, 0))
    assert grads.q == near(np.array([[ds * 2 * 2 * 2]]))


@pytest.mark.parametrize(("fill", "score"), [(None, -3.0), (-5.0, 3 * math.tanh(-5 / 3))])
def test_after_mask_caps_hidden_scores_without_gradient(fill: float | None, score: float) -> None:
    late = npattn.Conventions(softcap="after_mask", hidden_fill=fill)
    mask = np.array([[True, False]])
    problem = Problem(column(1.0), column(2.0, 7.0), column(3.0, 4.0), mask, softcap=3.0)
    p = 1 / (1 + math.exp(score - 3 * math.tanh(2 / 3)))
    assert loops.forward(problem, late)[2] == near(np.array([[p, 1 - p]]))
    grads = loops.backward(problem, np.ones((1, 1)), conventions=late)
    assert grads.v == near(column(p, 1 - p))
    assert grads.k == near(column(-p * (1 - p) / math.cosh(2 / 3) ** 2, 0))


def test_after_mask_needs_a_cap_to_matter() -> None:
    late = npattn.Conventions(softcap="after_mask", empty_row="nan", lse_empty=0.0)
    nothing = np.zeros((1, 1), bool)
    capped = blank(2, 3, mask=nothing, softcap=2.0)
    assert visible_keys(capped, late) == ["012", "012"]
    assert loops.forward(capped, late)[1] == near(-2 + math.log(3))
    assert np.isnan(loops.forward(blank(2, 3, mask=nothing), late)[0]).all()
    assert loops.forward(blank(2, 0, mask=nothing, softcap=2.0), late)[1].tolist() == [0, 0]


def test_bias_before_scale_and_its_gradient_are_scaled() -> None:
    inside = npattn.Conventions(bias="before_scale")
    problem, _ = two_keys(bias=np.array([[2.0, 3.0]]), scale=-0.5)
    p = 1 / (1 + math.exp(-0.5 * (-1 + 3) + 0.5 * (0.5 + 2)))
    assert loops.forward(problem, inside)[2] == near(np.array([[p, 1 - p]]))
    grads = loops.backward(problem, np.ones((1, 1)), conventions=inside)
    dbias = -0.5 * p * (1 - p) * (2 - 5)
    assert grads.bias == near(np.array([[dbias, -dbias]]))


@pytest.mark.parametrize(
    ("softcap", "score"),
    [("before_bias", 2 * math.tanh(0.75 / 2) + 0.5), ("after_bias", 2 * math.tanh(1.25 / 2))],
)
def test_a_bias_before_scale_is_added_where_softcap_says(softcap: Any, score: float) -> None:
    words = npattn.Conventions(bias="before_scale", softcap=softcap)
    problem = Problem(
        column(1.0), column(3.0), column(1.0), bias=np.array([[2.0]]), scale=0.25, softcap=2.0
    )
    assert loops.forward(problem, words)[1] == near([score])


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_minus_infinity_times_nonpositive_scale_is_nan(scale: float) -> None:
    inside = npattn.Conventions(bias="before_scale")
    problem = blank(1, 3, bias=np.array([[0.0, -np.inf, 0.0]]), scale=scale)
    assert np.isnan(loops.forward(problem, inside)[0]).all()
    assert loops.forward(problem)[2] == near(np.array([[0.5, 0, 0.5]]))


def test_tiled_query_head_uses_the_remainder() -> None:
    tile = npattn.Conventions(kv_head="tile")
    v = np.array([1.0, 2.0]).reshape(2, 1, 1)
    problem = Problem(np.zeros((6, 1, 1)), np.zeros((2, 1, 1)), v)
    assert loops.forward(problem, tile)[0][:, 0, 0].tolist() == [1, 2, 1, 2, 1, 2]
    grads = loops.backward(problem, 2.0 ** np.arange(6)[:, None, None], conventions=tile)
    assert grads.v[:, 0, 0].tolist() == [1 + 4 + 16, 2 + 8 + 32]


def test_weights_after_dropout_and_their_gradient() -> None:
    after = npattn.Conventions(weights="after_dropout")
    problem, p = two_keys(dropout_mask=np.array([[True, False]]), dropout_rate=0.75)
    assert loops.forward(problem, after)[2] == near(np.array([[4 * p, 0]]))
    dweights = np.array([[1.0, 7.0]])
    grads = loops.backward(problem, np.zeros((1, 1)), None, dweights, conventions=after)
    assert grads.q == near(np.array([[4 * p * (1 - p) * 1.5]]))


def test_lse_base_2_divides_lse_and_gradient() -> None:
    binary = npattn.Conventions(lse_base="2")
    assert loops.forward(blank(1, 4), binary)[1] == near([2.0])
    problem, p = two_keys()
    grads = loops.backward(problem, np.zeros((1, 1)), np.ones(1), conventions=binary)
    assert grads.k == near(column(p, 1 - p) / math.log(2))


@pytest.mark.parametrize("lse_empty", [-math.inf, math.inf, 0.0, math.nan])
def test_lse_empty_is_the_same_in_any_base(lse_empty: float) -> None:
    words = npattn.Conventions(lse_empty=lse_empty, lse_base="2")
    _, lse, _ = loops.forward(blank(2, 3, mask=TWO_OF_THREE), words)
    assert lse == near([1.0, lse_empty])
