"""Values of each bias and the gradient of its parameter, against definitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
from npattn import Conventions, MultiHeadAttention, Problem, biases, masks
from npattn.engines import loops
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem.arrays import BiasLike, Tile, sum_to
from tests.make import Sizes, generators, inputs, sizes_of_a_problem

Array = np.ndarray[Any, Any]
ALIGNMENTS = ["bottom_right", "top_left"]
U = 2.0**-53
STEP = 1e-200  # its square is 0 beside any float, so that the imaginary part is the derivative


class Case(NamedTuple):
    """A bias, its parameter, and what it adds at an index (..., h, t, s): factor · parameter[at].

    Each score takes one number of the parameter, times a number that does not depend on it.
    """

    bias: biases.Bias
    parameter: Array
    takes: Callable[[tuple[int, ...]], tuple[tuple[int, ...], float]]
    sizes: Sizes

    def definition(self) -> Array:
        array = np.zeros((*self.sizes.lead, *self.sizes[1:]))
        for index in np.ndindex(array.shape):
            at, factor = self.takes(index)
            array[index] = factor * float(self.parameter[at])
        return array

    def gradient(self, ds: Array) -> Array:
        """The sum of factor · ds over the scores that take a number."""
        sums = np.zeros(self.parameter.shape)
        for index in np.ndindex(ds.shape):
            at, factor = self.takes(index)
            sums[at] += factor * float(ds[index])
        return sums


# --- the definitions ------------------------------------------------------------------------------


def after(t: int, s: int, sizes: Sizes, alignment: str) -> int:
    """Return the number of keys by which s lies after the one beside t."""
    return s - (t + sizes.S - sizes.T if alignment == "bottom_right" else t)


def dense(rng: np.random.Generator, sizes: Sizes, dtype: Any = np.float64) -> Case:
    tail = [n if rng.random() < 0.7 else 1 for n in (*sizes.lead, *sizes[1:])]
    array = rng.integers(-4, 5, tail[rng.integers(0, len(tail) - 1) :]).astype(dtype)

    def takes(index: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        last = index[len(index) - array.ndim :]
        return tuple(0 if n == 1 else i for i, n in zip(last, array.shape, strict=True)), 1.0

    return Case(biases.dense(array), array, takes, sizes)


def alibi(rng: np.random.Generator, sizes: Sizes) -> Case:
    alignment, slopes = rng.choice(ALIGNMENTS), rng.integers(-4, 5, sizes.H) / 8

    def takes(index: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        *_, h, t, s = index
        return (h,), -float(abs(after(t, s, sizes, alignment)))

    return Case(biases.alibi(slopes, alignment=alignment), slopes, takes, sizes)


def relative(rng: np.random.Generator, sizes: Sizes) -> Case:
    alignment, both = rng.choice(ALIGNMENTS), bool(rng.random() < 0.5)
    count, far = int(rng.integers(4, 10)), int(rng.integers(5, 9))
    table = rng.integers(-4, 5, (count, sizes.H)).astype(np.float32)

    def takes(index: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        *_, h, t, s = index
        return (bucket(after(t, s, sizes, alignment), count, far, both), h), 1.0

    options = {"max_distance": far, "bidirectional": both, "alignment": alignment}
    return Case(biases.relative(table, **options), table, takes, sizes)


def bucket(after: int, count: int, far: int, bidirectional: bool) -> int:
    """The row of a table of `count`, one comparison of integers at a time."""
    if bidirectional:
        count //= 2
        first, distance = (count if after > 0 else 0), abs(after)
    else:
        first, distance = 0, max(-after, 0)
    single = count // 2
    if distance < single:
        return first + distance
    grown = count - single
    # The largest k < grown with distance ≥ single · (far / single)^(k / grown).
    k = max(k for k in range(grown) if distance**grown * single**k >= far**k * single**grown)
    return first + single + k


KINDS = [dense, alibi, relative]


@pytest.mark.parametrize(
    ("bias", "T", "S"),
    [
        (biases.alibi(3, alignment="top_left"), 2, 3),
        (biases.alibi(np.array([0.1, 0.7], np.float32)), 2, 3),
        (biases.alibi(np.array([0.1], "bfloat16")), 2, 3),
        (biases.alibi(np.array([0.5, 0.25]) + 1j), 2, 3),
        (biases.relative(np.ones((4, 2)) / 3, max_distance=9, bidirectional=False), 2, 3),
        (biases.dense([[-np.inf, 0.0], [np.nan, np.inf]]), 2, 2),
        (biases.dense(np.zeros((0, 1))), 0, 1),
        (biases.dense(np.array([[1]], np.longdouble) / 3), 1, 1),
        (biases.alibi(2) + np.array([[0.1], [1e-9]]) + biases.relative(np.ones((4, 2))), 2, 3),
    ],
)
def test_repr_of_a_bias_evaluates_back(bias, T, S):
    copy = eval(repr(bias))
    assert repr(copy) == repr(bias)
    assert copy.dtype == bias.dtype
    np.testing.assert_array_equal(copy.to_array(T, S), bias.to_array(T, S))


def whole(case: Case) -> Array:
    lead, H, T, S = case.sizes
    return case.bias.to_array(T, S, lead=lead, H=H)


def a_tile(draw: Any, sizes: Sizes) -> Tile | None:
    """A rectangle, perhaps an empty one; None where there is no head."""
    if 0 in (*sizes.lead, sizes.H):
        return None
    plane = tuple(draw(st.integers(0, n - 1)) for n in (*sizes.lead, sizes.H))
    t = sorted(draw(st.integers(0, sizes.T)) for _ in range(2))
    s = sorted(draw(st.integers(0, sizes.S)) for _ in range(2))
    return Tile(*sizes, plane, *t, *s)


def tiles(sizes: Sizes, m: int, n: int) -> list[Tile]:
    """All of the scores, in rectangles of at most m queries and n keys."""
    return [
        Tile(*sizes, plane, t, min(t + m, sizes.T), s, min(s + n, sizes.S))
        for plane in np.ndindex(*sizes.lead, sizes.H)
        for t in range(0, sizes.T, m)
        for s in range(0, sizes.S, n)
    ]


# --- what they are --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=sizes_of_a_problem, rng=generators)
def test_the_array_of_a_bias_is_its_definition(kind, sizes, rng):
    case = kind(rng, sizes)
    array = whole(case)
    assert array.dtype == case.bias.dtype == np.float64
    assert array.shape == case.bias.shape(*sizes)
    assert array.ndim >= 2
    np.testing.assert_array_equal(
        np.broadcast_to(array, (*sizes.lead, *sizes[1:])), case.definition()
    )


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=sizes_of_a_problem, rng=generators, data=st.data())
def test_a_tile_is_that_part_of_the_array(kind, sizes, rng, data):
    case, tile = kind(rng, sizes), a_tile(data.draw, sizes)
    if tile is None:
        assert case.definition().size == 0
        return
    want = case.definition()[tile.plane][tile.t0 : tile.t1, tile.s0 : tile.s1]
    got = case.bias.tile(tile)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=sizes_of_a_problem, rng=generators)
def test_gradient_sums_over_scores_by_parameter(kind, sizes, rng):
    case = kind(rng, sizes)
    ds = rng.integers(-9, 10, (*sizes.lead, *sizes[1:])).astype(float)  # so that sums are exact
    got = case.bias.gradient(ds)
    assert got.shape == case.parameter.shape
    np.testing.assert_array_equal(got, case.gradient(ds))


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=sizes_of_a_problem, rng=generators, m=st.integers(1, 4), n=st.integers(1, 4))
def test_the_gradient_is_that_of_its_tiles(kind, sizes, rng, m, n):
    case = kind(rng, sizes)
    ds = rng.integers(-9, 10, (*sizes.lead, *sizes[1:])).astype(float)
    total = case.bias.zeros(*sizes)
    for tile in tiles(sizes, m, n):
        case.bias.add(total, tile, ds[tile.plane][tile.t0 : tile.t1, tile.s0 : tile.s1])
    np.testing.assert_array_equal(total, case.bias.gradient(ds))


@pytest.mark.thorough
@given(sizes=sizes_of_a_problem, rng=generators, data=st.data())
def test_sum_adds_terms_and_splits_gradients(sizes, rng, data):
    cases = [kind(rng, sizes) for kind in data.draw(st.lists(st.sampled_from(KINDS), min_size=2))]
    bias = sum((case.bias for case in cases[1:]), start=cases[0].bias)
    lead, H, T, S = sizes
    want = sum(case.definition() for case in cases)
    array = bias.to_array(T, S, lead=lead, H=H)
    assert array.shape == bias.shape(*sizes)
    np.testing.assert_array_equal(np.broadcast_to(array, want.shape), want)
    if tile := a_tile(data.draw, sizes):
        part = want[tile.plane][tile.t0 : tile.t1, tile.s0 : tile.s1]
        np.testing.assert_array_equal(np.broadcast_to(bias.tile(tile), part.shape), part)
    ds = rng.integers(-9, 10, want.shape).astype(float)
    got = bias.gradient(ds)
    assert isinstance(got, tuple)
    for one, case in zip(got, cases, strict=True):
        np.testing.assert_array_equal(one, case.gradient(ds))


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=sizes_of_a_problem, rng=generators)
def test_the_gradient_of_the_array_is_enough(kind, sizes, rng):
    case = kind(rng, sizes)
    ds = rng.integers(-9, 10, (*sizes.lead, *sizes[1:])).astype(float)
    summed = sum_to(ds, case.bias.shape(*sizes))
    np.testing.assert_array_equal(case.bias.gradient(summed), case.bias.gradient(ds))


def test_array_on_either_side_of_plus():
    array = np.arange(15.0).reshape(3, 5)
    bias = biases.alibi(2)
    for one in (array + bias, bias + array, biases.of(array) + bias):
        np.testing.assert_array_equal(one.to_array(3, 5), array + bias.to_array(3, 5))
        assert {x.shape for x in one.gradient(np.ones((2, 3, 5)))} == {(3, 5), (2,)}


@pytest.mark.parametrize("dtype", [np.float32, "bfloat16", np.complex128])
def test_dense_bias_keeps_the_array_and_widens_tiles(dtype):
    array = np.arange(15).reshape(3, 5).astype(dtype)
    bias = biases.dense(array)
    assert bias.dtype == np.asarray(bias).dtype == array.dtype
    wide = np.complex128 if array.dtype.kind == "c" else np.float64
    tile = Tile((), 2, 3, 5, (1,), 1, 3, 2, 5)
    assert bias.tile(tile).dtype == (bias + bias).dtype == (bias + bias).to_array().dtype == wide
    np.testing.assert_array_equal(bias.tile(tile), array[1:3, 2:5].astype(wide))


def test_the_published_slopes():
    eight = biases.alibi(8).slopes
    np.testing.assert_array_equal(eight, [2.0**-n for n in range(1, 9)])
    # 12 heads: those of 8, then every second one of 16's.
    np.testing.assert_array_equal(
        biases.alibi(12).slopes, [*eight, 2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    )
    np.testing.assert_array_equal(biases.alibi(1).slopes, [2.0**-8])


def test_one_slope_holds_for_all_heads():
    bias = biases.alibi(np.array([0.5]))
    q = np.zeros((2, 3, 5, 1))
    fwd = npattn.forward(q, q, q, bias=bias)
    assert npattn.backward(fwd, np.ones_like(q), np.ones(fwd.lse.shape)).bias.shape == (1,)
    tile = Tile((2,), 3, 5, 5, (1, 2), 1, 4, 0, 5)
    np.testing.assert_array_equal(bias.tile(tile), bias.to_array(5, 5)[0, 1:4])


def test_the_buckets_of_t5():
    # As published, 32 to both sides: 8 distances on their own, then up to 16, 23, 32, 46, 64, 91.
    table = np.arange(32.0)[:, None]
    row = biases.relative(table).to_array(T=400, S=400)[0, 200]
    starts = [int(np.flatnonzero(row == n)[0]) - 200 for n in range(17, 32)]
    assert starts == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    np.testing.assert_array_equal(row[1:201][::-1], row[200:] % 16)


def test_no_rounding_moves_a_distance_to_another_bucket():
    # Buckets of exactly one octave each: a logarithm that is rounded down would begin one late.
    far = 2**50
    bias = biases.relative(np.arange(100.0)[:, None], max_distance=far, bidirectional=False)
    for n in range(6, 50):
        t = 2**n
        tile = Tile((), 1, t + 1, t + 1, (0,), t, t + 1, 0, 2)
        got = bias.tile(tile)[0]
        assert got.tolist() == [bucket(-t, 100, far, False), bucket(1 - t, 100, far, False)]


# --- in a problem ---------------------------------------------------------------------------------


def all_kinds(rng: np.random.Generator, sizes: Sizes) -> Case:
    return KINDS[int(rng.integers(3))](rng, sizes)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": "bottom_right", "softcap": 2.0},
    {"window": (2, 1), "conventions": Conventions(causal="top_left", mask_true="hide")},
    {"window": (2, 1), "conventions": Conventions(hidden_fill=-3.0, bias="before_scale")},
    {"window": (1, 0), "softcap": 2.0, "conventions": Conventions(softcap="after_mask")},
    {"softcap": 2.0, "conventions": Conventions(softcap="after_bias")},
    {"window": (0, 1), "conventions": Conventions(empty_row="mean", bias="before_scale")},
    {"dtype": "float32"},
]


@pytest.mark.parametrize("options", OPTIONS)
@given(sizes=sizes_of_a_problem, rng=generators)
@pytest.mark.broad
def test_an_object_and_its_array_give_the_same_results(options, sizes, rng):
    case = all_kinds(rng, sizes)
    q, k, v = inputs(sizes, rng)
    one = npattn.forward(q, k, v, bias=case.bias, **options)
    other = npattn.forward(q, k, v, bias=whole(case), **options)
    np.testing.assert_array_equal(one.out, other.out)
    np.testing.assert_array_equal(one.lse, other.lse)
    do, dl = rng.standard_normal(one.out.shape), rng.standard_normal(one.lse.shape)
    got, want = npattn.backward(one, do, dl), npattn.backward(other, do, dl)
    for name in "qkv":
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert got.bias.shape == case.parameter.shape
    assert got.bias.dtype == want.bias.dtype
    np.testing.assert_array_equal(got.bias, case.bias.gradient(want.bias))


@pytest.mark.parametrize("kind", [alibi, relative])
@pytest.mark.parametrize("meaning", [None, Conventions(bias="before_scale", hidden_fill=-1.0)])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_the_gradient_of_a_parameter_is_its_complex_step(kind, meaning, lead):
    rng, sizes = np.random.default_rng(7), Sizes(lead, 3, 5, 7)
    case = kind(rng, sizes)
    q, k, v = inputs(sizes, rng)
    field = "slopes" if kind is alibi else "table"

    def loss(parameter: Array) -> Any:
        bias = dataclasses.replace(case.bias, **{field: parameter})
        fwd = npattn.forward(q, k, v, bias=bias, window=(3, 1), conventions=meaning)
        return (do * fwd.out).sum() + (dl * fwd.lse).sum(), fwd

    do, dl = rng.standard_normal((*q.shape[:-1], 2)), rng.standard_normal(q.shape[:-1])
    got = npattn.backward(loss(case.parameter.astype(float))[1], do, dl).bias
    # A score moves the row's out by at most 2 max |v|, its lse by at most 1, and a parameter moves
    # all scores by at most S each; of that, each way to it rounds as many times as it has sums.
    size = (2 * abs(v).max() * abs(do).sum() + abs(dl).sum()) * sizes.S
    room = (sizes.S + sizes.T + 40) * U * size
    for at in np.ndindex(got.shape):
        step = case.parameter.astype(complex)
        step[at] += 1j * STEP
        slope = loss(step)[0].imag / STEP
        assert abs(got[at] - slope) <= room
    assert abs(got).max() > 1e6 * room  # or nothing was held against anything


def test_gradient_of_a_sum_has_every_term_s():
    rng, sizes = np.random.default_rng(8), Sizes((2,), 3, 5, 7)
    cases = [kind(rng, sizes) for kind in KINDS]
    q, k, v = inputs(sizes, rng)
    bias = cases[0].bias + cases[1].bias + cases[2].bias
    for options in ({}, {"window": (1, 0), "conventions": Conventions(empty_row="nan")}):
        fwd = npattn.forward(q, k, v, bias=bias, **options)
        grads = npattn.backward(fwd, np.ones_like(fwd.out)).bias
        assert [g.shape for g in grads] == [case.parameter.shape for case in cases]
        array = npattn.forward(q, k, v, bias=bias.to_array(5, 7, lead=(2,), H=3), **options)
        want = bias.gradient(npattn.backward(array, np.ones_like(fwd.out)).bias)
        for one, other in zip(grads, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_rows_of_nan_add_nothing_to_a_parameter_of_all_rows():
    q, k, v = inputs(Sizes((), 2, 3, 3), np.random.default_rng(9))
    mask = np.tri(3, k=-1, dtype=bool) | np.array([[[False]], [[True]]])  # the first row of head 0
    bias = biases.alibi(2) + biases.dense(np.zeros((2, 1, 1)))
    undefined, zero = (
        npattn.forward(q, k, v, mask, bias=bias, conventions=Conventions(empty_row=result))
        for result in ("nan", "zero")
    )
    do = np.ones_like(zero.out)
    pairs = zip(npattn.backward(undefined, do).bias, npattn.backward(zero, do).bias, strict=True)
    assert np.isnan(undefined.out).any()
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


@pytest.mark.thorough
@given(sizes=sizes_of_a_problem, rng=generators)
def test_loops_gradient_of_an_object_is_its_array_s(sizes, rng):
    case = all_kinds(rng, sizes)
    q, k, v = inputs(sizes, rng)
    one, other = (Problem(q, k, v, bias=bias) for bias in (case.bias, whole(case)))
    for x, y in zip(loops.forward(one), loops.forward(other), strict=True):
        np.testing.assert_array_equal(x, y)
    do = rng.standard_normal((*q.shape[:-1], 2))
    got, want = loops.backward(one, do), loops.backward(other, do)
    for name in ("q", "k", "v", "bias"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_one_head_without_batch_takes_a_bias():
    q, k, v = (np.random.default_rng(2).standard_normal((n, 3)) for n in (5, 7, 7))
    bias = biases.alibi(1) + np.ones((1, 7))
    fwd = npattn.forward(q, k, v, bias=bias)
    np.testing.assert_array_equal(fwd.out, npattn.attention(q, k, v, bias=bias.to_array(5, 7)))
    assert [g.shape for g in npattn.backward(fwd, fwd.out).bias] == [(1,), (1, 7)]


@pytest.mark.parametrize("own", [False, True])
def test_module_accepts_biases_with_or_without_extra_keys(own):
    x = np.random.default_rng(3).standard_normal((2, 5, 12))
    mha = MultiHeadAttention.init(12, 3, seed=0, add_bias_kv=own, add_zero_attn=own)
    bias = biases.alibi(3) + biases.dense(np.ones((5, 1)))
    one, other = (mha.forward(x, bias=b) for b in (bias, bias.to_array(5, 5)))
    np.testing.assert_array_equal(one.out, other.out)
    got, want = (mha.backward(fwd, np.ones_like(one.out)) for fwd in (one, other))
    np.testing.assert_array_equal(got.query, want.query)
    for gradient, of_array in zip(got.bias, bias.gradient(want.bias), strict=True):
        np.testing.assert_array_equal(gradient, of_array)


def test_mixed_precision_module_rounds_gradients_of_all_terms():
    x = np.random.default_rng(3).standard_normal((2, 5, 12))
    mha = MultiHeadAttention.init(12, 3, seed=0)
    fwd = mha.forward(x, bias=biases.alibi(3) + np.ones((5, 1)), dtype="bfloat16")
    dtypes = [g.dtype.name for g in mha.backward(fwd, np.ones((2, 5, 12))).bias]
    assert dtypes == ["bfloat16", "bfloat16"]


def test_the_judge_takes_biases_as_their_arrays():
    q, k, v = (x.astype(np.float32) for x in inputs(Sizes((2,), 2, 5, 7), np.random.default_rng(4)))
    bias = biases.alibi(2)
    problem, array = Problem(q, k, v, bias=bias), bias.to_array(5, 7)
    fwd = npattn.forward(q, k, v, bias=array)
    do = np.ones(fwd.out.shape, np.float32)
    got = {"o": fwd.out, "dbias": npattn.backward(fwd, do).bias}
    got = {name: x.astype(np.float32) for name, x in got.items()}
    assert all(one.passed for one in npattn.testing.compare(got, problem, dout=do))
    got["dbias"] = got["dbias"] + np.float32(0.1)
    assert [one.passed for one in npattn.testing.compare(got, problem, dout=do)] == [True, False]
    given = npattn.testing.Implementation(npattn.attention).inputs(problem)
    np.testing.assert_array_equal(given["bias"], array)


def test_a_problem_keeps_the_object_and_has_its_array():
    q, k, v = inputs(Sizes((2,), 2, 5, 7), np.random.default_rng(5))
    bias = biases.alibi(2)
    problem = Problem(q, k, v, masks.window(1), bias=bias)
    assert problem.bias is bias
    assert isinstance(bias, BiasLike)
    np.testing.assert_array_equal(problem.bias_array, bias.to_array(5, 7))
    plain = problem.materialise()
    assert plain.bias is problem.bias_array
    assert plain.mask is problem.mask_array
    assert problem.replace(scale=2.0).bias is bias
    source = "biases.alibi([0.0625, 0.00390625], alignment='bottom_right')"
    assert f"bias={source}" in repr(problem)
    assert repr(bias + bias) == f"({source} + {source})"


def test_a_complex_parameter_makes_a_complex_problem():
    q, k, v = inputs(Sizes((), 2, 3, 3), np.random.default_rng(6))
    for bias in (biases.alibi(np.ones(2) + 0j), biases.relative(np.ones((4, 2)) + 0j)):
        assert bias.dtype == np.complex128
        assert Problem(q, k, v, bias=bias + np.ones((3, 3))).dtype == np.complex128


def objects(rng, sizes):
    """A bias of each kind for these sizes, and a direction of its parameter."""
    each = [
        biases.dense(rng.standard_normal((sizes.T, sizes.S))),
        biases.alibi(rng.standard_normal(sizes.H)),
        biases.relative(rng.standard_normal((8, sizes.H)), max_distance=9),
    ]
    each.append(each[0] + each[1] + each[2])
    directions = [rng.standard_normal(bias.parameter.shape) for bias in each[:3]]
    return zip(each, [*directions, tuple(directions)], strict=True)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_jvp_of_an_object_is_that_of_its_array_and_the_adjoint_of_its_gradient(engine):
    rng = np.random.default_rng(8)
    sizes = Sizes((2,), 3, 5, 7)
    q, k, v = inputs(sizes, rng)
    for bias, along in objects(rng, sizes):
        fwd = npattn.forward(q, k, v, bias=bias, engine=engine)
        do, dlse = npattn.jvp(fwd, dbias=along)
        tangent = bias.with_parameter(along).to_array(5, 7, lead=(2,), H=3)
        plain = npattn.forward(q, k, v, bias=bias.to_array(5, 7, lead=(2,), H=3), engine=engine)
        for got, want in zip((do, dlse), npattn.jvp(plain, dbias=tangent), strict=True):
            # The values of a sum are added in another order, and the same numbers follow.
            np.testing.assert_allclose(got, want, rtol=0, atol=32 * U * abs(tangent).max())
        dout, dl = rng.standard_normal(do.shape), rng.standard_normal(dlse.shape)
        grads = npattn.backward(fwd, dout, dl).bias
        pairs = zip(grads, along, strict=True) if isinstance(along, tuple) else [(grads, along)]
        products = [(g * d).ravel() for g, d in pairs]
        forward_mode = [(dout * do).ravel(), (dl * dlse).ravel()]
        # Rounding of a term is relative to it, and of sums over D, E, S, T, H and B.
        size = sum(abs(x).sum() for x in (*products, *forward_mode))
        size += (abs(dout).sum() * abs(v).max() + abs(dl).sum()) * abs(tangent).max()
        count = 2 * (q.shape[-1] + v.shape[-1] + 7) + dout.size + 40
        gap = sum(x.sum() for x in forward_mode) - sum(x.sum() for x in products)
        assert abs(gap) <= count * U * size


def test_a_direction_of_a_sum_may_leave_terms_out():
    rng = np.random.default_rng(9)
    q, k, v = inputs(Sizes((), 2, 3, 3), rng)
    slopes, d = rng.standard_normal(2), rng.standard_normal(2)
    fwd = npattn.forward(q, k, v, bias=biases.alibi(slopes) + np.zeros((3, 3)))
    alone = npattn.jvp(npattn.forward(q, k, v, bias=biases.alibi(slopes)), dbias=d)
    for got, want in zip(npattn.jvp(fwd, dbias=(d, None)), alone, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_wrong_direction_of_an_object_is_named():
    q, k, v = inputs(Sizes((), 2, 3, 3), np.random.default_rng(6))
    bias = biases.alibi(2)
    fwd = npattn.forward(q, k, v, bias=bias)
    with pytest.raises(ShapeError, match=r"dbias has shape \(2, 3, 3\), but the parameter has"):
        npattn.jvp(fwd, dbias=np.ones((2, 3, 3)))
    with pytest.raises(DtypeError, match="dbias is int64, must be floating"):
        npattn.jvp(fwd, dbias=np.ones(2, int))
    fwd = npattn.forward(q, k, v, bias=bias + bias)
    for wrong in (np.ones(2), (np.ones(2),)):
        with pytest.raises(ShapeError, match=r"dbias is .*, must be a tuple of 2 arrays or None"):
            npattn.jvp(fwd, dbias=wrong)


def test_a_direction_of_an_object_of_somebody_else_is_refused():
    class Other:
        dtype = np.dtype(float)

        def __init__(self, bias):
            self.bias = bias

        def __getattr__(self, name):
            return getattr(self.bias, name)

    q, k, v = inputs(Sizes((), 2, 3, 3), np.random.default_rng(6))
    fwd = npattn.forward(q, k, v, bias=Other(biases.alibi(2)), engine="dense")
    with pytest.raises(OptionError, match=r"not of npattn\.biases: call forward with bias=bias\."):
        npattn.jvp(fwd, dbias=np.ones(2))
    assert npattn.jvp(fwd, dq=np.ones_like(q))[0].shape == fwd.out.shape


# --- nothing of the caller's changes --------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bias_is_frozen_and_keeps_its_parameter(kind):
    case = kind(np.random.default_rng(0), Sizes((2,), 3, 5, 7))
    before = case.parameter.copy()
    case.parameter.flags.writeable = False
    assert any(x is case.parameter for x in vars(case.bias).values())
    for field in dataclasses.fields(case.bias):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(case.bias, field.name, None)
    case.bias.gradient(whole(case))
    np.testing.assert_array_equal(case.parameter, before)


def test_array_of_a_dense_bias_is_read_only():
    array = np.ones((3, 5))
    bias = biases.dense(array)
    assert np.shares_memory(bias.to_array(), array)
    assert not bias.to_array().flags.writeable
    assert not bias.tile(Tile((), 1, 3, 5, (0,), 0, 3, 0, 5)).flags.writeable
    assert not np.shares_memory(bias.zeros((), 1, 3, 5), array)
    assert biases.of(bias) is bias


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.every
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: biases.alibi(0), OptionError, "slopes is 0, must be an integer ≥ 1"),
        (lambda: biases.alibi(True), OptionError, "slopes is True, must be an integer ≥ 1"),
        (lambda: biases.alibi([1, 2]), DtypeError, "slopes is int64, must be floating"),
        (lambda: biases.alibi(np.ones((2, 1))), ShapeError, r"slopes has shape \(2, 1\), must be"),
        (lambda: biases.alibi(2, alignment=None), OptionError, "alignment is None, must be one"),
        (lambda: biases.relative(np.ones(8)), ShapeError, r"table has shape \(8,\), must be \(num"),
        (lambda: biases.relative(np.ones((3, 2))), ShapeError, "table has 3 buckets, must have 4"),
        (lambda: biases.relative(np.ones((1, 2)), bidirectional=False), ShapeError,
         "table has 1 buckets, must have 2"),
        (lambda: biases.relative(np.ones((8, 2), int)), DtypeError, "table is int64, must be"),
        (lambda: biases.relative(np.ones((8, 2)), max_distance=2), OptionError,
         "max_distance is 2, must be an integer ≥ 3"),
        (lambda: biases.relative(np.ones((8, 2)), bidirectional=1), OptionError,
         "bidirectional is 1, must be True or False"),
        (lambda: biases.relative(np.ones((8, 2)), alignment="left"), OptionError,
         "alignment is 'left', must be one of"),
        (lambda: biases.dense(np.ones((2, 2), int)), DtypeError, "bias is int64, must be floating"),
        (lambda: biases.dense(np.ones((2, 2), bool)), DtypeError, "bias is bool, must be floating"),
        (lambda: biases.dense(biases.alibi(2)), DtypeError, "array is biases.*, must be a float"),
        (lambda: biases.of(masks.window(1)), DtypeError,
         "bias is the mask masks.*; pass it as mask"),
        (lambda: biases.alibi(2) + None, DtypeError, "bias is object, must be floating"),
        (lambda: biases.alibi(2) + biases.alibi(3), ShapeError,
         r"batch and head axes \(2,\) and \(3,\) do not broadcast"),
        (lambda: np.ones((3, 5)) + biases.dense(np.ones((3, 7))), ShapeError,
         "cannot compose objects for S = 5 and S = 7"),
        (lambda: np.asarray(biases.alibi(2)), OptionError, "this bias has no T of its own: biases"),
        (lambda: biases.alibi(2).gradient(np.ones((3, 5, 7))), ShapeError, "bias has shape"),
        (lambda: biases.alibi(2).gradient(np.ones((2, 5, 7), int)), DtypeError, "ds is int64"),
    ],
)  # fmt: skip
def test_what_no_bias_is_made_of_is_said(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (biases.alibi(2), ShapeError, r"bias has shape \(2, 5, 7\), must have rank 2 or more"),
        (biases.relative(np.ones((4, 5))), ShapeError, r"bias has shape \(5, 5, 7\), must have"),
        (biases.dense(np.ones((2, 7))), ShapeError, r"for a \(B, S\) bias pass bias\[:, None"),
        (biases.dense(np.ones(7)) + biases.alibi(3), ShapeError, r"bias has shape \(7,\)"),
        (masks.window(2), DtypeError, r"bias is the mask masks.*; pass it as mask"),
    ],
)
def test_a_bias_for_other_sizes_is_an_error(bias, error, message):
    q, k, v = inputs(Sizes((2,), 3, 5, 7), np.random.default_rng(0))
    with pytest.raises(error, match=message) as found:
        Problem(q, k, v, bias=bias)
    if error is ShapeError:
        assert str(found.value).endswith("[q (2, 3, 5, 3), k (2, 3, 7, 3), v (2, 3, 7, 2)]")
