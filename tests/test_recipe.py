"""A recipe is a line of text: it evaluates back, and makes the same problem wherever it is."""

from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import npattn
from npattn.testing import Recipe
from npattn.testing.recipe import BIASES, DISTRIBUTIONS, MASKS, SCORE_MODS, VIEWS
from npattn.testing.strategies import Space, recipes

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 11, 13
SIZES = {"lead": (B,), "H": H, "K": K, "T": T, "S": S, "D": D, "E": E}
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ARRAYS = ("q", "k", "v", "mask", "bias", "sinks", "dropout_mask")
LEADS = (None, (), (2,), (2, 3), (0,))


def recipe(**words):
    return Recipe(**(SIZES | words))


def with_lead(lead, **words):
    sizes = {"H": 1, "K": 1} if lead is None else {}
    return recipe(lead=lead, **sizes, **words)


def same(a, b):
    arrays = [(getattr(a, n), getattr(b, n)) for n in ARRAYS]
    return repr(a) == repr(b) and all(
        (x is None) == (y is None) and (x is None or x.tobytes() == y.tobytes()) for x, y in arrays
    )


# --- the line -------------------------------------------------------------------------------------


@settings(max_examples=100, database=None, deadline=None)
@given(recipes(Space()))
def test_the_line_evaluates_back_and_makes_the_same_problem(drawn):
    again = eval(repr(drawn), {"Recipe": Recipe})
    assert again == drawn
    assert hash(again) == hash(drawn)
    assert same(again.problem(), drawn.problem())


def test_the_line_names_sizes_always_and_options_where_they_are_not_the_default():
    assert repr(Recipe()) == (
        "Recipe(lead=(2,), H=1, K=1, T=2, S=3, D=5, E=7, dtype='float32', seed=0)"
    )
    options = {"mask": "full", "causal": True, "window": (1, None), "view": "stepped"}
    assert repr(Recipe(**options)).endswith(
        "seed=0, mask='full', causal=True, window=(1, None), view='stepped')"
    )


def test_every_field_is_kept_by_the_line():
    other = recipe(
        dtype="bfloat16", seed=9, distribution="flat", broadcast=True, mask="matrix", causal=True,
        window=(1, 2), bias="keys", scale=-0.75, softcap=2.0, score_mod="squash", sinks=True,
        dropout=0.0, view="reversed",
    )  # fmt: skip
    assert all(getattr(other, f.name) != f.default for f in fields(Recipe) if f.name != "lead")
    assert eval(repr(other), {"Recipe": Recipe}) == other


# --- the problem ----------------------------------------------------------------------------------


def test_one_seed_makes_one_problem_and_another_makes_another():
    words = {"mask": "full", "bias": "full", "sinks": True, "dropout": 0.5}
    first, again = recipe(**words).problem(), recipe(**words).problem()
    assert same(first, again)
    other = recipe(seed=1, **words).problem()
    for name in ARRAYS:
        assert (getattr(first, name) != getattr(other, name)).any(), name


def test_an_option_changes_no_array_but_its_own():
    plain = recipe().problem()
    full = recipe(mask="full", bias="full", sinks=True, dropout=0.5, softcap=2.0).problem()
    for name in "qkv":
        np.testing.assert_array_equal(getattr(plain, name), getattr(full, name))
    assert same(replace(recipe(mask="full"), causal=True).problem().replace(causal=False),
                recipe(mask="full").problem())  # fmt: skip


def test_the_problem_has_the_sizes_and_options_of_the_recipe():
    problem = recipe(causal=True, window=(2, None), scale=0.5, softcap=2.0, dropout=0.25).problem()
    assert {n: getattr(problem, n) for n in SIZES} == SIZES
    assert problem.causal == "bottom_right"
    assert (problem.window, problem.scale, problem.softcap) == ((2, None), 0.5, 2.0)
    assert problem.dropout_rate == 0.25
    assert problem.dropout_mask.shape == (B, H, T, S)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_drawn_is_drawn_in_the_dtype(dtype):
    problem = recipe(dtype=dtype, bias="full", sinks=True).problem()
    for name in ("q", "k", "v", "bias", "sinks"):
        assert getattr(problem, name).dtype == np.dtype(dtype), name


def test_alignment_and_the_meaning_of_true_are_those_of_conventions():
    asked = recipe(mask="full", causal=True)
    assert asked.problem("top_left").causal == "top_left"
    plain, hiding = asked.problem(), asked.problem(mask_true="hide")
    np.testing.assert_array_equal(plain.mask, ~hiding.mask)


def test_a_rate_of_zero_drops_without_rescaling_and_none_does_not_drop():
    assert recipe().problem().dropout_mask is None
    problem = recipe(dropout=0.0).problem()
    assert problem.dropout_rate == 0
    assert 0 < problem.dropout_mask.mean() < 1


def test_broadcast_gives_k_and_v_leading_axes_of_size_1():
    problem = recipe(lead=(2, 3), broadcast=True).problem()
    assert problem.q.shape == (2, 3, H, T, D)
    assert problem.k.shape == (1, 1, K, S, D)
    assert problem.v.shape == (1, 1, K, S, E)


# --- cotangents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", LEADS)
def test_cotangents_have_the_shapes_and_dtypes_of_what_they_belong_to(lead, dtype):
    asked = with_lead(lead, dtype=dtype)
    problem = asked.problem()
    fwd = npattn.forward(problem.q, problem.k, problem.v)
    dout, dlse = asked.cotangents(problem)
    assert dout.shape == fwd.out.shape
    assert dlse.shape == fwd.lse.shape
    assert dout.dtype == np.dtype(dtype)
    assert dlse.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_without_an_lse_there_is_no_cotangent_of_it():
    asked = recipe()
    dout, dlse = asked.cotangents(asked.problem(), lse=False)
    assert dlse is None
    np.testing.assert_array_equal(dout, asked.cotangents(asked.problem()).dout)


# --- distributions --------------------------------------------------------------------------------


def scores(asked):
    problem = asked.problem()
    return npattn.forward(problem.q, problem.k, problem.v).weights, problem


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_distribution_is_finite_in_every_dtype(name, dtype):
    problem = recipe(distribution=name, dtype=dtype).problem()
    for array in (problem.q, problem.k, problem.v):
        assert np.isfinite(array.astype(float)).all()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_distribution_gives_sizes_of_zero(name):
    for sizes in ({"S": 0}, {"T": 0}, {"D": 0}, {"E": 0}, {"H": 0, "K": 0}, {"lead": (0,)}):
        problem = recipe(distribution=name, **sizes).problem()
        assert problem.q.size == 0 or problem.v.size == 0


def raw(asked):
    """q·k before it is scaled."""
    problem = asked.problem()
    k = np.repeat(problem.k, problem.H // problem.K, axis=-3)
    return problem.q.astype(float) @ k.astype(float).swapaxes(-1, -2)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("normal", 1, 10),
        ("large logits", 20, 150),
        ("one-hot", 300, 2e3),
        ("huge logits", 1e4, 1e5),
    ],
)
def test_a_steep_distribution_has_logits_of_its_size(name, least, most):
    asked = recipe(distribution=name, dtype="float64", T=64, S=64)
    assert least < abs(raw(asked) / D**0.5).max() < most


def test_one_hot_puts_nearly_all_weight_on_one_key():
    weights, _ = scores(recipe(distribution="one-hot", T=64, S=65))
    assert np.median(weights.max(-1)) > 1 - 1e-6


@pytest.mark.parametrize("scale", [None, 1.7, -0.75])
def test_low_has_all_scores_far_below_zero(scale):
    asked = recipe(distribution="low", scale=scale, dtype="float64")
    final = raw(asked) * asked.problem().scale
    assert final.max() < -20


@pytest.mark.parametrize("name", ["one-hot", "huge logits", "low"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_scores_stay_within_the_dtype_before_they_are_scaled(name, dtype):
    for seed in range(5):
        asked = recipe(distribution=name, dtype=dtype, seed=seed, D=64)
        assert abs(raw(asked)).max() <= float(ml_dtypes.finfo(dtype).max)


def test_flat_gives_every_key_the_same_weight():
    weights, _ = scores(recipe(distribution="flat"))
    np.testing.assert_array_equal(weights, np.full_like(weights, 1 / S))


def test_value_offset_has_values_about_100():
    _, problem = scores(recipe(distribution="value offset"))
    assert abs(problem.v - 100).max() < 6


def test_integers_are_whole_numbers():
    _, problem = scores(recipe(distribution="integers"))
    for array in (problem.q, problem.k, problem.v):
        np.testing.assert_array_equal(array, np.round(array))


def test_outliers_are_in_one_column_of_k_and_v():
    _, problem = scores(recipe(distribution="outliers", S=200))
    assert problem.k[..., 0].std() > 4 * problem.k[..., 1:].std()
    assert problem.v[..., -1].std() > 32 * problem.v[..., :-1].std()


def test_duplicate_keys_come_in_pairs_and_take_the_same_weight():
    weights, problem = scores(recipe(distribution="duplicate keys", S=9))
    np.testing.assert_array_equal(problem.k[..., 0:8:2, :], problem.k[..., 1:8:2, :])
    np.testing.assert_allclose(weights[..., 0], weights[..., 1])


def test_tiny_values_are_tiny():
    _, problem = scores(recipe(distribution="tiny values"))
    assert 0 < abs(problem.v).max() < 2.0**-7


# --- masks, biases, score_mods, views -------------------------------------------------------------


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_broadcasts_whatever_the_rank(name, lead):
    problem = with_lead(lead, mask=name).problem()
    assert problem.mask.dtype == bool
    whole = npattn.forward(problem.q, problem.k, problem.v, problem.mask).weights.shape
    assert np.broadcast_shapes(problem.mask.shape, whole) == whole


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("name", BIASES)
def test_every_bias_broadcasts_whatever_the_rank(name, lead):
    problem = with_lead(lead, bias=name).problem()
    whole = npattn.forward(problem.q, problem.k, problem.v).weights.shape
    assert np.broadcast_shapes(problem.bias.shape, whole) == whole


@pytest.mark.parametrize("sizes", [{"S": 0}, {"T": 0}, {"H": 0, "K": 0}, {"S": 1}, {"T": 1}])
@pytest.mark.parametrize("name", [*MASKS, *BIASES])
def test_masks_and_biases_are_made_for_sizes_of_0_and_1(name, sizes):
    words = {"mask": name} if name in MASKS and name not in BIASES else {"bias": name}
    problem = recipe(**words, **sizes).problem()
    assert problem.bias is not None or problem.mask is not None


def masked(name, **words):
    return np.broadcast_to(recipe(mask=name, **words).problem().mask, (B, H, T, words.get("S", S)))


def test_padding_hides_a_tail_of_the_keys_and_left_padding_a_head():
    shapes = [recipe(mask=n).problem().mask.shape for n in ("padding", "left padding")]
    assert shapes == [(B, 1, 1, S)] * 2
    for seed in range(5):
        tail, front = (masked(n, seed=seed) for n in ("padding", "left padding"))
        assert (np.diff(tail.astype(int), axis=-1) <= 0).all()
        assert (np.diff(front.astype(int), axis=-1) >= 0).all()
        assert tail.any(-1).all()
        assert front.any(-1).all()


def test_empty_rows_and_empty_head_have_queries_that_see_nothing():
    for seed in range(5):
        assert (~masked("empty rows", seed=seed).any(-1)).any()
        assert not masked("empty head", seed=seed)[0, 0].any()


def test_first_tile_hides_the_first_half_of_the_keys_from_all():
    mask = masked("first tile", S=9)
    assert not mask[..., :4].any()
    assert mask[..., 4:].any()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("matrix", (T, S)),
        ("heads", (H, T, S)),
        ("full", (B, H, T, S)),
        ("keys", (B, H, 1, S)),
        ("one for all heads", (B, 1, T, S)),
        ("one for all samples", (1, H, T, S)),
        ("one a row", (B, H, T, 1)),
        ("alibi", (H, T, S)),
        ("-inf padding", (B, 1, 1, S)),
        ("large negative padding", (B, 1, 1, S)),
    ],
)
def test_a_bias_has_the_shape_of_its_name(name, shape):
    assert recipe(bias=name).problem().bias.shape == shape


def test_alibi_is_zero_on_the_diagonal_and_falls_beside_it():
    bias = recipe(bias="alibi", T=4, S=6, H=2, K=2).problem().bias
    np.testing.assert_array_equal(bias[0, [0, 1, 2, 3], [2, 3, 4, 5]], 0)
    assert bias[0, 3, 0] == 5 * bias[0, 3, 4] < 0


def test_additive_padding_is_minus_infinity_or_a_large_number_within_the_dtype():
    assert set(np.unique(recipe(bias="-inf padding", lead=(9,)).problem().bias)) == {-np.inf, 0}
    for dtype in DTYPES:
        bias = recipe(bias="large negative padding", lead=(9,), dtype=dtype).problem().bias
        least = bias.astype(float).min()
        assert -1e9 * 1.01 <= least < -10
        assert np.isfinite(least)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods_are_analytic_and_elementwise(name):
    problem = recipe(score_mod=name).problem()
    fwd = npattn.forward(problem.q, problem.k, problem.v, score_mod=problem.score_mod)
    plain = npattn.forward(problem.q, problem.k, problem.v)
    assert abs(fwd.weights - plain.weights).max() > 1e-3
    assert np.isfinite(npattn.backward(fwd, np.ones_like(fwd.out)).q).all()


def test_the_first_view_is_the_plain_one():
    assert VIEWS[0] == Recipe().view == "contiguous"
