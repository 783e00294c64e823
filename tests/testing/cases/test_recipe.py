"""Recipes: lines of text that evaluate back and make the same problem everywhere."""

from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import npattn
from npattn import Problem
from npattn.testing import Recipe
from npattn.testing.cases.options import SCORE_MODS
from npattn.testing.cases.recipe import (
    BIASES,
    DISTRIBUTIONS,
    MASKS,
    UNUSUAL,
    VIEWS,
    describe_changed,
)
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import recipes

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 11, 13
SIZES = {"lead": (B,), "H": H, "K": K, "T": T, "S": S, "D": D, "E": E}
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ARRAYS = ("q", "k", "v", "mask", "bias", "sinks", "dropout_mask")
LEADS = (None, (), (2,), (2, 3), (0,))


def recipe(**kwargs):
    return Recipe(**(SIZES | kwargs))


def with_lead(lead, **kwargs):
    sizes = {"H": 1, "K": 1} if lead is None else {}
    return recipe(lead=lead, **sizes, **kwargs)


def same(a, b):
    arrays = [(getattr(a, n), getattr(b, n)) for n in ARRAYS]
    return repr(a) == repr(b) and all(
        (x is None) == (y is None) and (x is None or x.tobytes() == y.tobytes()) for x, y in arrays
    )


# --- repr -----------------------------------------------------------------------------------------


@pytest.mark.thorough
@settings(max_examples=100, database=None, deadline=None)
@given(recipes(Space()))
def test_repr_evaluates_to_same_problem(drawn):
    again = eval(repr(drawn), {"Recipe": Recipe})
    assert again == drawn
    assert hash(again) == hash(drawn)
    assert same(again.problem(), drawn.problem())


def test_repr_has_sizes_and_non_default_options():
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
        dropout=0.0, gate="full", view="reversed",
    )  # fmt: skip
    assert all(getattr(other, f.name) != f.default for f in fields(Recipe) if f.name != "lead")
    assert eval(repr(other), {"Recipe": Recipe}) == other


# --- the problem ----------------------------------------------------------------------------------


def test_seed_determines_problem():
    kwargs = {"mask": "full", "bias": "full", "sinks": True, "dropout": 0.5}
    first, again = recipe(**kwargs).problem(), recipe(**kwargs).problem()
    assert same(first, again)
    other = recipe(seed=1, **kwargs).problem()
    for name in ARRAYS:
        assert (getattr(first, name) != getattr(other, name)).any(), name


def test_option_changes_no_other_array():
    plain = recipe().problem()
    full = recipe(mask="full", bias="full", sinks=True, dropout=0.5, softcap=2.0).problem()
    for name in "qkv":
        np.testing.assert_array_equal(getattr(plain, name), getattr(full, name))
    assert same(replace(recipe(mask="full"), causal=True).problem().replace(causal=False),
                recipe(mask="full").problem())  # fmt: skip


def test_problem_has_sizes_and_options_of_recipe():
    problem = recipe(causal=True, window=(2, None), scale=0.5, softcap=2.0, dropout=0.25).problem()
    assert {n: getattr(problem, n) for n in SIZES} == SIZES
    assert problem.causal == "bottom_right"
    assert (problem.window, problem.scale, problem.softcap) == ((2, None), 0.5, 2.0)
    assert problem.dropout_rate == 0.25
    assert problem.dropout_mask.shape == (B, H, T, S)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recipes_have_dtype_of_space(dtype):
    problem = recipe(dtype=dtype, bias="full", sinks=True).problem()
    for name in ("q", "k", "v", "bias", "sinks"):
        assert getattr(problem, name).dtype == np.dtype(dtype), name


def test_alignment_and_mask_true_follow_arguments():
    case = recipe(mask="full", causal=True)
    assert case.problem("top_left").causal == "top_left"
    plain, hiding = case.problem(), case.problem(mask_true="hide")
    np.testing.assert_array_equal(plain.mask, ~hiding.mask)


def test_zero_rate_drops_without_rescaling():
    assert recipe().problem().dropout_mask is None
    problem = recipe(dropout=0.0).problem()
    assert problem.dropout_rate == 0
    assert 0 < problem.dropout_mask.mean() < 1


def test_broadcast_k_and_v_have_leading_size_1():
    problem = recipe(lead=(2, 3), broadcast=True).problem()
    assert problem.q.shape == (2, 3, H, T, D)
    assert problem.k.shape == (1, 1, K, S, D)
    assert problem.v.shape == (1, 1, K, S, E)


# --- cotangents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", LEADS)
def test_cotangents_have_shapes_and_dtypes_of_results(lead, dtype):
    case = with_lead(lead, dtype=dtype)
    problem = case.problem()
    fwd = npattn.forward(problem.q, problem.k, problem.v)
    dout, dlse = case.cotangents(problem)
    assert dout.shape == fwd.out.shape
    assert dlse.shape == fwd.lse.shape
    assert dout.dtype == np.dtype(dtype)
    assert dlse.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_no_cotangent_of_lse_without_lse():
    case = recipe()
    dout, dlse = case.cotangents(case.problem(), lse=False)
    assert dlse is None
    np.testing.assert_array_equal(dout, case.cotangents(case.problem()).dout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", LEADS)
def test_cotangent_of_weights_is_made_on_request(lead, dtype):
    case = with_lead(lead, dtype=dtype)
    problem = case.problem()
    assert case.cotangents(problem).dweights is None
    case = case.cotangents(problem, weights=True)
    assert case.dweights.shape == npattn.forward(problem.q, problem.k, problem.v).weights.shape
    assert case.dweights.dtype == case.dlse.dtype


def test_cotangents_are_random_and_reproducible():
    case = recipe()
    one, all_three = (case.cotangents(case.problem()), case.cotangents(case.problem(), True, True))
    np.testing.assert_array_equal(one.dout, all_three.dout)
    np.testing.assert_array_equal(one.dlse, all_three.dlse)
    for array in (all_three.dout, all_three.dlse, all_three.dweights):
        assert len(np.unique(array)) == array.size
    dout, dlse = all_three
    assert dout is all_three.dout
    assert dlse is all_three.dlse


# --- distributions --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, *UNUSUAL])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_distribution_is_finite_in_every_dtype(name, dtype):
    problem = recipe(distribution=name, dtype=dtype).problem()
    for array in (problem.q, problem.k, problem.v):
        assert np.isfinite(array.astype(float)).all()


@pytest.mark.parametrize("name", [*DISTRIBUTIONS, *UNUSUAL])
def test_every_distribution_gives_sizes_of_zero(name):
    for sizes in ({"S": 0}, {"T": 0}, {"D": 0}, {"E": 0}, {"H": 0, "K": 0}, {"lead": (0,)}):
        problem = recipe(distribution=name, **sizes).problem()
        assert problem.q.size == 0 or problem.v.size == 0


def raw(case):
    """Return q·k, unscaled."""
    problem = case.problem()
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
    case = recipe(distribution=name, dtype="float64", T=64, S=64)
    assert least < abs(raw(case) / D**0.5).max() < most


def is_split_in_size(x):
    """Return whether some rows of x are a hundred times as large as others."""
    sizes = abs(x).max(-1)
    return sizes.max() > 100 * sizes.min()


SHAPED = [
    ("flat", {}, lambda p, w: (w == 1 / S).all()),
    ("one-hot", {"T": 64, "S": 65}, lambda p, w: np.median(w.max(-1)) > 1 - 1e-6),
    ("nearly one-hot", {"T": 65, "S": 65}, lambda p, w: 1e-8 < np.median(1 - w.max(-1)) < 1e-4),
    ("near-uniform", {"S": 257}, lambda p, w: 0 < abs(w * 257 - 1).max() < 0.1),
    ("saturated", {"S": 1}, lambda p, w: (w == 1).all()),
    ("duplicate keys", {"S": 9}, lambda p, w: (p.k[..., 0:8:2, :] == p.k[..., 1:8:2, :]).all()
     and np.allclose(w[..., 0], w[..., 1], 1e-7, 0)),
    ("value offset", {}, lambda p, w: abs(p.v - 100).max() < 6),
    ("tiny values", {}, lambda p, w: 0 < abs(p.v).max() < 2.0**-7),
    ("integers", {}, lambda p, w: all((x == np.round(x)).all() for x in (p.q, p.k, p.v))),
    ("outliers", {"S": 200}, lambda p, w: p.k[..., 0].std() > 4 * p.k[..., 1:].std()
     and p.v[..., -1].std() > 32 * p.v[..., :-1].std()),
    ("heavy tails", {"T": 257, "S": 257},
     lambda p, w: all(abs(x).max() > 20 * np.median(abs(x)) for x in (p.q, p.k, p.v))),
    ("mixed scales", {"T": 65, "S": 65}, lambda p, w: all(map(is_split_in_size, (p.q, p.v)))),
]  # fmt: skip
"""Distributions, sizes, and what holds of a problem and its weights."""


@pytest.mark.parametrize(("name", "sizes", "holds"), SHAPED, ids=[name for name, *_ in SHAPED])
def test_a_distribution_is_as_its_name_says(name, sizes, holds):
    problem = recipe(distribution=name, **sizes).problem()
    assert holds(problem, npattn.forward(problem.q, problem.k, problem.v).weights)


@pytest.mark.parametrize("scale", [None, 1.7, -0.75])
def test_low_has_all_scores_far_below_zero(scale):
    case = recipe(distribution="low", scale=scale, dtype="float64")
    final = raw(case) * case.problem().scale
    assert final.max() < -20


STEEP = ("one-hot", "huge logits", "low", "heavy tails", "mixed scales", "key offset", "saturated")


@pytest.mark.parametrize("name", STEEP)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_unscaled_scores_stay_within_dtype(name, dtype):
    for seed in range(5):
        case = recipe(distribution=name, dtype=dtype, seed=seed, D=64)
        assert abs(raw(case)).max() <= float(ml_dtypes.finfo(dtype).max)


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_keys_or_values_are_subnormal(dtype):
    least, seen = float(ml_dtypes.finfo(dtype).tiny), set()
    for seed in range(12):
        problem = recipe(distribution="subnormal", dtype=dtype, seed=seed).problem()
        low = [abs(x.astype(float)).max() < least for x in (problem.k, problem.v)]
        assert abs(problem.q.astype(float)).max() > least
        seen.add(tuple(map(bool, low)))
    assert seen == {(True, True), (True, False), (False, True)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_key_offset_is_common_and_keeps_keys_distinct(dtype):
    problem = recipe(distribution="key offset", dtype=dtype, S=257).problem()
    keys = problem.k.astype(float)
    assert keys.mean() > 0.9 * min(1e3, 1 / 8 / float(ml_dtypes.finfo(dtype).eps))
    assert 0.8 < keys.std() < 1.2


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_near_ties_differ_by_a_few_ulp(dtype):
    keys = recipe(distribution="near ties", dtype=dtype, S=33).problem().k.astype(float)
    apart = abs(keys / keys[..., :1, :] - 1)
    assert 0 < apart.max() <= 5 * float(ml_dtypes.finfo(dtype).eps)


@pytest.mark.parametrize("scale", [None, 1.7, -0.75])
def test_saturated_rows_have_one_extreme_key(scale):
    case = recipe(distribution="saturated", scale=scale, dtype="float64", T=33, S=65)
    final = np.sort(raw(case) * case.problem().scale, axis=-1)
    above, below = final[..., -1] - final[..., -2], final[..., 1] - final[..., 0]
    assert above.min() > 9e3
    assert below.min() > 9e3


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
def test_masks_and_biases_exist_for_sizes_0_and_1(name, sizes):
    kwargs = {"mask": name} if name in MASKS and name not in BIASES else {"bias": name}
    problem = recipe(**kwargs, **sizes).problem()
    assert problem.bias is not None or problem.mask is not None


def sample_mask(name, **kwargs):
    return np.broadcast_to(
        recipe(mask=name, **kwargs).problem().mask, (B, H, T, kwargs.get("S", S))
    )


def test_padding_hides_last_keys_and_left_padding_first():
    shapes = [recipe(mask=n).problem().mask.shape for n in ("padding", "left padding")]
    assert shapes == [(B, 1, 1, S)] * 2
    for seed in range(5):
        tail, front = (sample_mask(n, seed=seed) for n in ("padding", "left padding"))
        assert (np.diff(tail.astype(int), axis=-1) <= 0).all()
        assert (np.diff(front.astype(int), axis=-1) >= 0).all()
        assert tail.any(-1).all()
        assert front.any(-1).all()


def test_empty_rows_and_empty_head_are_fully_masked():
    for seed in range(5):
        assert (~sample_mask("empty rows", seed=seed).any(-1)).any()
        assert not sample_mask("empty head", seed=seed)[0, 0].any()


def test_first_tile_hides_first_half_of_keys():
    mask = sample_mask("first tile", S=9)
    assert not mask[..., :4].any()
    assert mask[..., 4:].any()


def test_prefix_is_visible_to_all_and_rest_is_causal():
    for seed in range(5):
        mask = sample_mask("prefix", seed=seed)
        causal = np.tri(T, S, S - T, dtype=bool)
        prefix = (mask & ~causal).any(-2) | mask[..., 0, :]
        np.testing.assert_array_equal(mask, causal | prefix[..., None, :])
        assert mask.any(-1).all()


@pytest.mark.parametrize("sizes", [{}, {"T": 7, "S": 5}, {"T": 9, "S": 9}])
def test_documents_are_blocks_with_equal_visibility(sizes):
    T, S = sizes.get("T", 5), sizes.get("S", 7)
    seen = set()
    for seed in range(5):
        mask = recipe(mask="documents", seed=seed, **sizes).problem().mask
        assert mask.shape == (B, 1, T, S)
        together = mask.astype(int) @ mask.swapaxes(-1, -2) > 0
        same = (mask[..., :, None, :] == mask[..., None, :, :]).all(-1)
        assert (same | ~together).all()
        rows = min(T, S)  # the last rows stand at a key, which is in their own document
        assert mask[..., -rows:, -rows:].diagonal(0, -2, -1).all()
        seen |= set(mask.mean((-1, -2)).ravel())
    assert max(seen) > min(seen)


def test_a_checkerboard_alternates():
    mask = sample_mask("checkerboard")
    assert (mask[..., 1:] != mask[..., :-1]).all()
    assert (mask[..., 1:, :] != mask[..., :-1, :]).all()


def test_single_key_is_visible_to_each_query():
    mask = sample_mask("single key")
    np.testing.assert_array_equal(mask.sum(-1), 1)
    assert len(np.unique(mask.argmax(-1))) > 1


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("keys of samples", (B, 1, 1, S)),
        ("one a head", (H, 1, 1)),
        ("one number", (1, 1)),
        ("relative", (H, T, S)),
        ("-1e4 padding", (B, 1, 1, S)),
        ("least padding", (B, 1, 1, S)),
        ("-1e4 rows", (B, H, T, S)),
        ("-1e9 rows", (B, H, T, S)),
        ("least rows", (B, H, T, S)),
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


def test_alibi_falls_from_zero_on_diagonal():
    bias = recipe(bias="alibi", T=4, S=6, H=2, K=2).problem().bias
    np.testing.assert_array_equal(bias[0, [0, 1, 2, 3], [2, 3, 4, 5]], 0)
    assert bias[0, 3, 0] == 5 * bias[0, 3, 4] < 0


def test_additive_padding_is_infinite_or_large():
    assert set(np.unique(recipe(bias="-inf padding", lead=(9,)).problem().bias)) == {-np.inf, 0}
    for dtype in DTYPES:
        bias = recipe(bias="large negative padding", lead=(9,), dtype=dtype).problem().bias
        least = bias.astype(float).min()
        assert -1e9 * 1.01 <= least < -10
        assert np.isfinite(least)


def test_relative_bias_depends_on_head_and_bucketed_distance():
    bias = recipe(bias="relative", T=65, S=65).problem().bias
    np.testing.assert_array_equal(bias[:, 1:, 1:], bias[:, :-1, :-1])
    assert len(np.unique(bias[0])) == 7 + 6  # 0; 1, 2-3, ..., 32-63, and 64, to either side
    assert (bias[0] != bias[1]).any()


@pytest.mark.parametrize(
    ("kind", "offset"), [("-1e4", -1e4), ("-1e9", -1e9), ("least", -np.inf)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rows_are_offset_as_a_whole(kind, offset, dtype):
    bias = recipe(bias=f"{kind} rows", dtype=dtype, T=33).problem().bias.astype(float)
    half = float(ml_dtypes.finfo(dtype).min) / 2
    low = bias.min(-1) < max(offset, half) / 2
    assert 0.2 < low.mean() < 0.8
    assert (bias[low].max(-1) < max(offset, half) / 2).all()
    assert (bias[~low].min(-1) > -10).all()
    assert bias.min() >= half - 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_padding_leaves_room_for_scores_and_base_2(dtype):
    bias = recipe(bias="least padding", lead=(9,), dtype=dtype).problem().bias
    least = float(ml_dtypes.finfo(dtype).min)
    assert set(np.unique(bias.astype(float))) == {least / 2, 0}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods_are_analytic_and_elementwise(name):
    problem = recipe(score_mod=name).problem()
    fwd = npattn.forward(problem.q, problem.k, problem.v, score_mod=problem.score_mod)
    plain = npattn.forward(problem.q, problem.k, problem.v)
    assert abs(fwd.weights - plain.weights).max() > 1e-3
    assert np.isfinite(npattn.backward(fwd, np.ones_like(fwd.out)).q).all()


def test_the_first_view_is_the_plain_one():
    assert VIEWS[0] == Recipe().view == "contiguous"


def test_a_changed_problem_is_described_by_its_sizes_and_options():
    recipe = Recipe(lead=(2,), H=3, K=1, T=5, S=7, D=11, E=13, seed=17, bias="keys", softcap=2.0)
    problem = recipe.problem()
    assert describe_changed(recipe, problem) == recipe
    longer = {x: np.repeat(getattr(problem, x), 2, -2) for x in "kv"}
    mask = np.arange(14)[None] < 7
    changed = problem.replace(**longer, mask=mask, bias=None, window=(3, None), softcap=None)
    wanted = replace(recipe, S=14, mask="matrix", bias=None, window=(3, None), softcap=None)
    assert describe_changed(recipe, changed) == wanted
    bare = replace(recipe, bias=None)
    assert describe_changed(bare, problem).bias == "full"
    infinite = np.where(np.arange(7)[None] < 3, 0, -np.inf).astype("float32")
    hiding = problem.replace(bias=infinite)
    assert describe_changed(bare, hiding).bias == "-inf padding"
    flat = Problem(problem.q[0, 0], problem.k[0, 0], problem.v[0, 0], sinks=np.zeros(1, "float32"))
    plain = replace(recipe, lead=None, H=1, bias=None, softcap=None)
    assert describe_changed(recipe, flat) == replace(plain, sinks=True)
