"""Visible keys of each mask, against its definition for one query and one key."""

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
from npattn.problem.arrays import MaskLike, Tile
from tests.make import Sizes, generators, inputs, sizes_of_a_problem

Array = np.ndarray[Any, Any]
Sees = Callable[[tuple[int, ...], int, int, int], bool]
ALIGNMENTS = ["bottom_right", "top_left"]


class Case(NamedTuple):
    """A mask, and whether the query t of head h in sample b (an index) sees key s."""

    mask: masks.Mask
    sees: Sees
    sizes: Sizes

    def definition(self) -> Array:
        """The definition, one pair at a time."""
        lead, *rest = self.sizes
        array = np.zeros((*lead, *rest), bool)
        for *b, h, t, s in np.ndindex(array.shape):
            array[(*b, h, t, s)] = self.sees(tuple(b), h, t, s)
        return array


# --- the definitions ------------------------------------------------------------------------------


def beside(t: int, sizes: Sizes, alignment: str | None) -> int:
    return t + sizes.S - sizes.T if alignment == "bottom_right" else t


def of_sample(b: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """The index into batch axes that broadcast."""
    return tuple(0 if n == 1 else i for i, n in zip(b[len(b) - len(batch) :], batch, strict=True))


def batch_of(rng: np.random.Generator, sizes: Sizes) -> tuple[int, ...]:
    """Batch axes that broadcast against those of the problem: fewer of them, some 1."""
    kept = sizes.lead[rng.integers(0, len(sizes.lead) + 1) :]
    return tuple(n if rng.random() < 0.7 else 1 for n in kept)


def causal(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    alignment = None if sizes.T == sizes.S and rng.random() < 0.5 else rng.choice(ALIGNMENTS)
    known = (sizes.T, sizes.S) if rng.random() < 0.5 else ()
    mask = masks.causal(*known, alignment=alignment)
    return mask, lambda b, h, t, s: s <= beside(t, sizes, alignment)


def window(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    left, right = (None if rng.random() < 0.3 else int(rng.integers(0, 5)) for _ in range(2))
    alignment = rng.choice(ALIGNMENTS)

    def sees(b: tuple[int, ...], h: int, t: int, s: int) -> bool:
        before = beside(t, sizes, alignment) - s
        return (left is None or before <= left) and (right is None or -before <= right)

    return masks.window(left, right, alignment=alignment), sees


def lengths(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    keys = rng.integers(0, sizes.S + 1, batch_of(rng, sizes))
    if rng.random() < 0.5:
        mask = masks.lengths(keys)
        return mask, lambda b, h, t, s: s < keys[of_sample(b, keys.shape)]
    queries = rng.integers(0, sizes.T + 1, batch_of(rng, sizes))
    return masks.lengths(keys, queries), lambda b, h, t, s: bool(
        s < keys[of_sample(b, keys.shape)] and t < queries[of_sample(b, queries.shape)]
    )


def documents(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    queries = rng.integers(-1, 3, (*batch_of(rng, sizes), sizes.T), np.int32)
    if sizes.T == sizes.S and rng.random() < 0.5:
        keys, mask = queries, masks.documents(queries)
    else:
        keys = rng.integers(-1, 3, (*batch_of(rng, sizes), sizes.S))
        mask = masks.documents(queries, keys)
    return mask, lambda b, h, t, s: bool(
        queries[(*of_sample(b, queries.shape[:-1]), t)] == keys[(*of_sample(b, keys.shape[:-1]), s)]
    )


def prefix(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    length, alignment = int(rng.integers(0, sizes.S + 1)), rng.choice(ALIGNMENTS)
    mask = masks.prefix(length, alignment=alignment)
    return mask, lambda b, h, t, s: s < length or s <= beside(t, sizes, alignment)


def blocks(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    m, n = (int(x) for x in rng.integers(1, 5, 2))
    n, size = (m, m) if rng.random() < 0.3 else (n, (m, n))
    axes = (*batch_of(rng, sizes), rng.choice([1, sizes.H])) if rng.random() < 0.7 else ()
    layout = rng.random((*axes, -(-sizes.T // m), -(-sizes.S // n))) < 0.5
    return masks.blocks(layout, size), lambda b, h, t, s: bool(
        layout[(*of_sample((*b, h), axes), t // m, s // n)]
    )


def custom(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    def sees(b: tuple[int, ...], h: int, t: int, s: int) -> bool:
        flat = int(np.ravel_multi_index(b, sizes.lead)) if b else 0
        return (2 * flat + h + t * s) % 3 == 0

    return masks.custom(every_third), sees


def every_third(b: Array, h: Array, t: Array, s: Array) -> Array:
    return (2 * b + h + t * s) % 3 == 0


def dense(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    axes = (*batch_of(rng, sizes), rng.choice([1, sizes.H])) if rng.random() < 0.7 else ()
    axes = (*axes, rng.choice([1, sizes.T]), rng.choice([1, sizes.S]))
    array = rng.random(axes) < rng.choice([0.1, 0.5, 0.9])
    return masks.of(array), lambda b, h, t, s: bool(array[of_sample((*b, h, t, s), axes)])


def sliding(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    (left, sinks), alignment = (int(n) for n in rng.integers(0, 4, 2)), rng.choice(ALIGNMENTS)

    def sees(b: tuple[int, ...], h: int, t: int, s: int) -> bool:
        before = beside(t, sizes, alignment) - s
        return before >= 0 and (before <= left or s < sinks)

    return masks.sliding(left, sinks, alignment=alignment), sees


def strided(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    step, alignment = int(rng.integers(1, 5)), rng.choice(ALIGNMENTS)
    mask = masks.strided(step, alignment=alignment)
    return mask, lambda b, h, t, s: abs(beside(t, sizes, alignment) - s) in range(0, 99, step)


def dilated(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    left, right = (None if rng.random() < 0.3 else int(rng.integers(0, 3)) for _ in range(2))
    step, alignment = int(rng.integers(1, 4)), rng.choice(ALIGNMENTS)

    def sees(b: tuple[int, ...], h: int, t: int, s: int) -> bool:
        before, rest = divmod(beside(t, sizes, alignment) - s, step)
        inside = (left is None or before <= left) and (right is None or -before <= right)
        return rest == 0 and inside

    return masks.dilated(left, right, step, alignment=alignment), sees


def chunked(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    size, alignment = int(rng.integers(1, 5)), rng.choice(ALIGNMENTS)

    def sees(b: tuple[int, ...], h: int, t: int, s: int) -> bool:
        first = beside(t, sizes, alignment) // size * size
        return first <= s < first + size

    return masks.chunked(size, alignment=alignment), sees


def global_tokens(rng: np.random.Generator, sizes: Sizes) -> tuple[masks.Mask, Sees]:
    count, alignment = int(rng.integers(0, 4)), rng.choice(ALIGNMENTS)
    mask = masks.global_tokens(count, alignment=alignment)
    return mask, lambda b, h, t, s: s < count or beside(t, sizes, alignment) in range(count)


PATTERNS = [sliding, strided, dilated, chunked, global_tokens]
KINDS = [causal, window, lengths, documents, prefix, blocks, custom, dense, *PATTERNS]


def make_case(kind: Any, rng: np.random.Generator, sizes: Sizes) -> Case:
    return Case(*kind(rng, sizes), sizes)


@st.composite
def compositions(draw: st.DrawFn) -> Case:
    sizes, rng = draw(sizes_of_a_problem), draw(generators)
    case = make_case(draw(st.sampled_from(KINDS)), rng, sizes)
    for how in draw(st.lists(st.sampled_from(["&", "|", "~", "array &", "| array"]), max_size=3)):
        other = make_case(dense if "array" in how else draw(st.sampled_from(KINDS)), rng, sizes)
        case = Case(*compose(how, case, other), sizes)
    return case


def compose(how: str, one: Case, other: Case) -> tuple[masks.Mask, Sees]:
    if how == "~":
        return ~one.mask, lambda *at: not one.sees(*at)
    if how == "&":
        return one.mask & other.mask, lambda *at: one.sees(*at) and other.sees(*at)
    if how == "|":
        return one.mask | other.mask, lambda *at: one.sees(*at) or other.sees(*at)
    array = np.asarray(other.mask)
    if how == "array &":
        return array & one.mask, lambda *at: one.sees(*at) and other.sees(*at)
    return one.mask | array, lambda *at: one.sees(*at) or other.sees(*at)


def rectangles(sizes: Sizes, rng: np.random.Generator) -> list[Tile]:
    """Every rectangle of one head, empty ones too."""
    if 0 in (*sizes.lead, sizes.H):
        return []
    plane = tuple(int(rng.integers(n)) for n in (*sizes.lead, sizes.H))
    rows, columns = (
        [(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in (sizes.T, sizes.S)
    )
    return [Tile(*sizes, plane, *t, *s) for t in rows for s in columns]


def whole(case: Case) -> Array:
    lead, H, T, S = case.sizes
    return case.mask.to_array(T, S, lead=lead, H=H)


# --- what they are --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=sizes_of_a_problem, rng=generators)
def test_the_array_of_a_mask_is_its_definition(kind, sizes, rng):
    case = make_case(kind, rng, sizes)
    array = whole(case)
    assert array.dtype == bool
    assert array.shape == case.mask.shape(*sizes)
    assert array.ndim >= 2
    np.testing.assert_array_equal(
        np.broadcast_to(array, (*sizes.lead, *sizes[1:])), case.definition()
    )


@given(compositions())
def test_the_array_of_a_composition_is_its_definition(case):
    array = whole(case)
    assert array.shape == case.mask.shape(*case.sizes)
    np.testing.assert_array_equal(
        np.broadcast_to(array, (*case.sizes.lead, *case.sizes[1:])), case.definition()
    )


@given(compositions())
def test_repr_of_a_mask_evaluates_back(case):
    copy = case._replace(mask=eval(repr(case.mask), {**globals()}))
    assert repr(copy.mask) == repr(case.mask)
    assert copy.mask.shape(*case.sizes) == case.mask.shape(*case.sizes)
    np.testing.assert_array_equal(whole(copy), whole(case))


@pytest.mark.parametrize(
    ("mask", "source"),
    [
        (masks.causal(), "masks.causal()"),
        (masks.causal(3), "masks.causal(3, 3)"),
        (masks.causal(S=5), "masks.causal(None, 5)"),
        (masks.causal(2, 3, alignment="top_left"), "masks.causal(2, 3, alignment='top_left')"),
        (masks.window(1), "masks.window(1, None, alignment='bottom_right')"),
        (masks.lengths(3), "masks.lengths(3)"),
        (masks.lengths([3], queries=[2]), "masks.lengths([3], queries=[2])"),
        (masks.documents([0, 1]), "masks.documents([0, 1])"),
        (masks.prefix(2), "(masks.causal() | masks.lengths(2))"),
        (masks.blocks([[True]], 2), "masks.blocks([[True]], (2, 2))"),
        (masks.custom(every_third), "masks.custom(every_third)"),
        (~masks.of([[True, False]]), "~masks.of([[True, False]])"),
        (masks.lengths(np.array([2], np.int32)), "masks.lengths(np.array([2], 'int32'))"),
        (masks.of(np.ones((40, 40), bool)), "masks.of(<bool array of shape (40, 40)>)"),
    ],
)
def test_repr_of_a_mask_names_public_functions(mask, source):
    assert repr(mask) == source


def holds(case: Case, tile: Tile, want: Array) -> None:
    """A tile of a mask is True, False or `want`."""
    got = case.mask.tile(tile)
    if want.all():
        assert got is True
    elif not want.any():
        assert got is False
    else:
        assert got.dtype == bool
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=sizes_of_a_problem, rng=generators)
@pytest.mark.broad
def test_tile_is_true_false_or_an_array(kind, sizes, rng):
    case = make_case(kind, rng, sizes)
    whole = case.definition()
    for tile in rectangles(sizes, rng):
        holds(case, tile, whole[tile.plane][tile.t0 : tile.t1, tile.s0 : tile.s1])


@pytest.mark.thorough
@given(case=compositions(), rng=generators)
def test_tile_of_a_composition(case, rng):
    whole = case.definition()
    for tile in rectangles(case.sizes, rng):
        holds(case, tile, whole[tile.plane][tile.t0 : tile.t1, tile.s0 : tile.s1])


@pytest.mark.thorough
@given(case=compositions(), rng=generators)
def test_nothing_is_visible_outside_the_hull(case, rng):
    whole = case.definition()
    for tile in rectangles(case.sizes, rng):
        lo, hi = case.mask.hull(tile)
        assert 0 <= lo <= hi <= case.sizes.S
        rows = whole[tile.plane][tile.t0 : tile.t1]
        assert not rows[:, :lo].any()
        assert not rows[:, hi:].any()


@pytest.mark.parametrize("kind", [causal, window, lengths, documents, prefix, dense])
@given(sizes=sizes_of_a_problem, rng=generators)
@pytest.mark.broad
def test_hull_of_rows_is_tight(kind, sizes, rng):
    case = make_case(kind, rng, sizes)
    whole = case.definition()
    for tile in rectangles(sizes, rng):
        seen = np.flatnonzero(whole[tile.plane][tile.t0 : tile.t1].any(0))
        lo, hi = case.mask.hull(tile)
        if tile.t0 < tile.t1:
            assert hi - lo == (seen[-1] + 1 - seen[0] if seen.size else 0)


@given(sizes=sizes_of_a_problem, rng=generators)
def test_hull_of_blocks_ends_at_a_block_or_S(sizes, rng):
    case = make_case(blocks, rng, sizes)
    whole, keys = case.definition(), case.mask.keys
    for tile in rectangles(sizes, rng):
        lo, hi = case.mask.hull(tile)
        assert lo % keys == 0
        assert hi % keys == 0 or hi == sizes.S
        if tile.t0 % case.mask.queries == 0 and tile.t1 % case.mask.queries == 0:
            seen = np.flatnonzero(whole[tile.plane][tile.t0 : tile.t1].any(0))
            assert lo == (seen[0] if seen.size else 0)
            assert hi == (seen[-1] + 1 if seen.size else 0)


def test_tile_has_indices_of_queries_and_keys():
    tile = Tile((2,), 3, 11, 13, (1, 2), 5, 7, 2, 5)
    assert tile.t.tolist() == [[5], [6]]
    assert tile.s.tolist() == [[2, 3, 4]]
    assert tile.t.dtype == tile.s.dtype == np.int64


def test_bands_and_lengths_answer_uniform_tiles_without_arrays():
    tile = Tile((), 1, 2**40, 2**40, (0,), 2**39, 2**40, 0, 2**38)  # no array is that large
    assert masks.causal().tile(tile) is True
    assert masks.window(2**37, 0).tile(tile) is False
    assert masks.lengths(2**38).tile(tile) is True
    assert (masks.causal() & ~masks.lengths(2**38)).tile(tile) is False
    assert masks.window(5, 0).hull(tile) == (2**39 - 5, 2**40)


def test_empty_mask_does_not_widen_a_union_hull():
    tile = Tile((), 1, 7, 7, (0,), 3, 5, 0, 7)
    assert (masks.lengths(0) | masks.window(1, 0)).hull(tile) == (2, 5)
    assert (masks.window(1, 0) | masks.lengths(0)).hull(tile) == (2, 5)
    assert (masks.lengths(0) | masks.lengths(0)).hull(tile) == (0, 0)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (masks.causal(5), (5, 5)),
        (masks.causal(2, 7, alignment="top_left"), (2, 7)),
        (masks.causal(1) & masks.window(0), (1, 1)),
        (masks.documents([0, 0, 1]), (3, 3)),
        (masks.documents(np.zeros((2, 3), int), np.zeros((2, 5), int)), (2, 1, 3, 5)),
        (masks.of(np.ones((2, 1, 1, 3), bool)), (2, 1, 1, 3)),
        (masks.lengths([1, 2, 3]) & masks.causal(5), (3, 1, 5, 5)),
        (~(masks.prefix(2) | np.ones((4, 4), bool)), (4, 4)),
        (masks.custom(lambda b, h, t, s: s > h) & masks.of(np.ones((3, 2, 5), bool)), (3, 2, 5)),
        (masks.blocks(np.ones((3, 2, 2), bool), 2) & masks.causal(3), (3, 3, 3)),
    ],
)
def test_a_mask_that_knows_its_sizes_is_an_array(mask, shape):
    array = np.asarray(mask)
    assert array.dtype == bool
    assert array.shape == shape
    np.testing.assert_array_equal(array, mask.to_array())
    np.testing.assert_array_equal(np.array(mask, dtype=float), array.astype(float))


def test_what_a_mask_knows_may_be_left_out():
    assert masks.lengths(np.array([[1, 2, 3]])).to_array(S=5).shape == (1, 3, 1, 1, 5)
    assert masks.lengths([1, 2], [3, 3]).to_array(T=3, S=5).shape == (2, 1, 3, 5)
    assert masks.lengths(2).to_array(S=5).shape == (1, 5)
    assert masks.blocks(np.ones((3, 2, 2), bool), 2).to_array(T=3, S=4).shape == (3, 3, 4)


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (masks.window(2), "T"),
        (masks.causal(), "T"),
        (masks.causal(S=5), "T"),
        (masks.lengths([2, 3]), "S"),
        (masks.lengths([2, 3], [1, 1]), "T"),
        (masks.lengths([2, 3]) | masks.window(1), "T"),
        (masks.blocks(np.ones((2, 2), bool), 3), "T"),
        (masks.custom(lambda b, h, t, s: s > t), "T"),
        (masks.window(2) & masks.of(np.ones((1, 5), bool)), "T"),
    ],
)
def test_unknown_size_is_required(mask, name):
    with pytest.raises(OptionError, match=rf"^this mask has no {name} of its own: .*to_array\(T="):
        np.asarray(mask)


@pytest.mark.parametrize("T", [-1, 2.0, True])
def test_a_size_is_an_integer(T):
    with pytest.raises(OptionError, match=r"T is .*, must be an integer ≥ 0"):
        masks.window(2).to_array(T, 5)


def test_a_square_causal_mask_needs_no_alignment():
    np.testing.assert_array_equal(np.asarray(masks.causal(5)), np.tri(5, dtype=bool))


# --- in a problem ---------------------------------------------------------------------------------


def same(one: Any, other: Any) -> None:
    """Two results, to the bit."""
    for name in ("out", "lse", "q", "k", "v", "bias", "sinks"):
        x, y = getattr(one, name, None), getattr(other, name, None)
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(x, y)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": "top_left"},
    {"window": (2, 1), "conventions": Conventions(mask_true="hide", causal="top_left")},
    {"conventions": Conventions(hidden_fill=-3.0)},
    {"softcap": 2.0, "conventions": Conventions(softcap="after_mask")},
    {"conventions": Conventions(empty_row="mean", mask_true="hide")},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize("options", OPTIONS)
@given(case=compositions(), rng=generators)
@pytest.mark.broad
def test_an_object_and_its_array_give_the_same_results(options, case, rng):
    q, k, v = inputs(case.sizes, rng)
    one = npattn.forward(q, k, v, case.mask, **options)
    other = npattn.forward(q, k, v, whole(case), **options)
    same(one, other)
    np.testing.assert_array_equal(one.weights, other.weights)
    do = rng.standard_normal(one.out.shape)
    same(npattn.backward(one, do), npattn.backward(other, do))


@pytest.mark.thorough
@given(case=compositions(), rng=generators)
@pytest.mark.unmeasured
def test_loops_takes_objects_too(case, rng):
    q, k, v = inputs(case.sizes, rng)
    one, other = (Problem(q, k, v, mask) for mask in (case.mask, whole(case)))
    for x, y in zip(loops.forward(one), loops.forward(other), strict=True):
        np.testing.assert_array_equal(x, y)
    do = rng.standard_normal((*q.shape[:-1], 2))
    same(loops.backward(one, do), loops.backward(other, do))


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(("T", "S"), [(5, 7), (7, 5), (3, 3), (0, 2), (2, 0)])
def test_a_causal_mask_is_what_causal_means(alignment, T, S):
    q, k, v = inputs(Sizes((), 2, T, S), np.random.default_rng(0))
    mask = masks.causal(T, S, alignment=alignment)
    np.testing.assert_array_equal(
        npattn.attention(q, k, v, mask), npattn.attention(q, k, v, causal=alignment)
    )


@pytest.mark.parametrize("sides", [(2, 0), (None, 1), (0, None), (2**70, 2**70)])
def test_a_window_is_what_window_means(sides):
    q, k, v = inputs(Sizes((), 2, 5, 7), np.random.default_rng(1))
    np.testing.assert_array_equal(
        npattn.attention(q, k, v, masks.window(*sides)), npattn.attention(q, k, v, window=sides)
    )


def test_one_head_without_batch_takes_a_mask():
    q, k, v = (np.random.default_rng(2).standard_normal((n, 3)) for n in (5, 7, 7))
    for mask in (masks.lengths(3), masks.window(1), masks.custom(lambda b, h, t, s: s != t)):
        np.testing.assert_array_equal(
            npattn.attention(q, k, v, mask), npattn.attention(q, k, v, mask.to_array(5, 7))
        )


def test_module_accepts_masks_with_or_without_extra_keys():
    x = np.random.default_rng(3).standard_normal((2, 5, 12))
    mask = masks.causal() & masks.lengths([3, 5])
    for own in (False, True):
        mha = MultiHeadAttention.init(12, 3, seed=0, add_bias_kv=own, add_zero_attn=own)
        array = mask.to_array(5, 5)
        one, other = mha.forward(x, mask=mask), mha.forward(x, mask=array)
        np.testing.assert_array_equal(one.out, other.out)
        do = np.ones_like(one.out)
        np.testing.assert_array_equal(mha.backward(one, do).query, mha.backward(other, do).query)


def test_the_judge_takes_masks():
    q, k, v = (x.astype(np.float32) for x in inputs(Sizes((2,), 3, 5, 7), np.random.default_rng(4)))
    for mask in (masks.window(2), masks.lengths([3, 7])):
        problem = Problem(q, k, v, mask)
        fwd = npattn.forward(q, k, v, mask)
        do = np.ones(fwd.out.shape, np.float32)
        grads = npattn.backward(fwd, do)
        got = {"o": fwd.out, "lse": fwd.lse, "dq": grads.q, "dk": grads.k, "dv": grads.v}
        got = {name: x.astype(np.float32) for name, x in got.items()}
        found = npattn.testing.compare(got, problem, dout=do)
        assert all(one.passed for one in found)
        got["o"] = got["o"] + np.float32(0.1)
        assert not npattn.testing.compare(got, problem, dout=do)[0].passed
        given = npattn.testing.Implementation(npattn.attention).inputs(problem)
        np.testing.assert_array_equal(given["mask"], problem.mask_array)


def test_a_problem_keeps_the_object_and_has_its_array():
    q, k, v = inputs(Sizes((2,), 3, 5, 7), np.random.default_rng(5))
    mask = masks.window(2, 1) & masks.lengths([3, 7])
    problem = Problem(q, k, v, mask, causal="bottom_right")
    assert problem.mask is mask
    assert isinstance(mask, MaskLike)
    np.testing.assert_array_equal(problem.mask_array, mask.to_array(5, 7))
    plain = problem.materialise()
    assert plain.mask is problem.mask_array
    assert plain.materialise() is plain
    np.testing.assert_array_equal(plain.visible, problem.visible)
    assert problem.replace(scale=2.0).mask is mask
    source = "(masks.window(2, 1, alignment='bottom_right') & masks.lengths([3, 7]))"
    assert repr(mask) == source
    assert f"mask={source}" in repr(problem)


def test_custom_mask_like_objects_are_accepted():
    class Even:
        def __invert__(self) -> Any:
            raise NotImplementedError

        def shape(self, lead, H, T, S):
            return T, S

        def hull(self, tile):
            return 0, tile.S

        def tile(self, tile):
            return (tile.t + tile.s) % 2 == 0

        def to_array(self, T=None, S=None, *, lead=(), H=1):
            return (np.arange(T)[:, None] + np.arange(S)) % 2 == 0

    q, k, v = inputs(Sizes((2,), 3, 5, 7), np.random.default_rng(6))
    want = npattn.attention(q, k, v, masks.custom(lambda b, h, t, s: (t + s) % 2 == 0))
    np.testing.assert_array_equal(npattn.attention(q, k, v, Even()), want)


# --- nothing of the caller's changes --------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_frozen(kind):
    mask, _ = kind(np.random.default_rng(0), Sizes((2,), 3, 5, 7))
    for field in dataclasses.fields(mask):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(mask, field.name, None)


def test_arrays_are_kept_and_not_written():
    array = np.ones((5, 7), bool)
    array.flags.writeable = False
    ids = np.zeros(7, int)
    mask, documents = masks.of(array), masks.documents(ids)
    assert mask.array is array
    assert documents.keys is ids
    mask.to_array()
    assert not mask.to_array().flags.writeable
    array.flags.writeable = True
    assert not mask.to_array().flags.writeable
    assert np.array(mask).flags.writeable
    assert masks.of(mask) is mask
    assert array.all()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.every
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.causal(3, 5), OptionError,
         "without alignment is ambiguous for T = 3 .* S = 5"),
        (lambda: masks.causal(3, alignment="left"), OptionError, "alignment is 'left', must be"),
        (lambda: masks.causal(-1), OptionError, "T is -1, must be an integer ≥ 0"),
        (lambda: masks.causal(3, 2.0), OptionError, "S is 2.0, must be an integer ≥ 0"),
        (lambda: masks.causal(True), OptionError, "T is True, must be an integer ≥ 0"),
        (lambda: masks.window(-1), OptionError, "left is -1, must be an integer ≥ 0"),
        (lambda: masks.window(1, 1.5), OptionError, "right is 1.5, must be an integer ≥ 0"),
        (lambda: masks.window(1, alignment=None), OptionError, "alignment is None, must be one"),
        (lambda: masks.lengths(2.0), DtypeError, "keys is float64, must be integers"),
        (lambda: masks.lengths([True]), DtypeError, "keys is bool, must be integers"),
        (lambda: masks.lengths([3, -2]), OptionError, "keys contains length -2, must be 0 or more"),
        (lambda: masks.lengths(2, [-1]), OptionError, "queries contains length -1, must be"),
        (lambda: masks.lengths([1, 2], [1, 2, 3]), ShapeError, r"lengths \(2,\) and \(3,\) do not"),
        (lambda: masks.documents(1), ShapeError, r"queries has shape \(\), must have rank 1"),
        (lambda: masks.documents([1.0]), DtypeError, "queries is float64, must be integers"),
        (lambda: masks.documents([1], [True]), DtypeError, "keys is bool, must be integers"),
        (lambda: masks.documents(np.zeros((2, 5), int), np.zeros((3, 5), int)), ShapeError,
         r"batch axes \(2,\) and \(3,\) do not broadcast"),
        (lambda: masks.prefix(-1), OptionError, "keys contains length -1, must be 0 or more"),
        (lambda: masks.blocks([[1]], 2), DtypeError, "layout is int64, must be bool"),
        (lambda: masks.blocks([True], 2), ShapeError, r"layout has shape \(1,\), must have rank"),
        (lambda: masks.blocks([[True]], 0), OptionError, "size is 0, must be an integer ≥ 1"),
        (lambda: masks.blocks([[True]], (1, 2, 3)), OptionError, r"size is \(1, 2, 3\), must be"),
        (lambda: masks.custom(3), OptionError, "function is 3, must be a callable"),
        (lambda: masks.of(np.ones((2, 2))), DtypeError, "mask is float64, must be bool: pass it"),
        (lambda: masks.causal() & None, DtypeError, "mask is object, must be bool"),
        (lambda: masks.causal() | np.ones((2, 2), int), DtypeError, "mask is int64, must be bool"),
        (lambda: masks.of(biases.alibi(2)), DtypeError, r"mask is the bias biases.alibi\(.*; pass"),
        (lambda: masks.causal(3) & masks.causal(5), ShapeError, "objects for T = 3 and T = 5"),
        (lambda: np.ones((2, 1, 3, 3), bool) | masks.documents(np.zeros((5, 3), int)), ShapeError,
         r"batch and head axes \(2, 1\) and \(5, 1\) do not broadcast"),
    ],
)  # fmt: skip
def test_what_no_mask_is_made_of_is_said(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.every
@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (masks.causal(), OptionError, "a causal mask without alignment is ambiguous for T = 5"),
        (masks.causal(5), ShapeError, r"mask is masks.*, which does not fit T = 5 .* S = 7"),
        (masks.causal(1, 7, alignment="top_left"), ShapeError,
         r"mask is masks.*, which does not fit T = 5"),
        (masks.documents(np.zeros(5, int)), ShapeError, r"documents\(.*\), which does not fit"),
        (masks.documents(np.zeros(5, int), [0]), ShapeError, "does not fit T = 5 .* S = 7"),
        (masks.lengths([7, 8]), ShapeError, "keys contains length 8, which exceeds S = 7"),
        (masks.lengths(7, 6), ShapeError, "queries contains length 6, which exceeds T = 5"),
        (masks.lengths([1, 2, 3]), ShapeError, r"mask has shape \(3, 1, 1, 7\), must have rank 2"),
        (masks.blocks(np.ones((3, 3), bool), 2), ShapeError, r"but T = 5 .* keys need \(3, 4\)"),
        (masks.of(np.ones((2, 7), bool)), ShapeError,
         r"for a \(B, S\) mask pass mask\[:, None, None, :\]"),
        (masks.of(np.ones(7, bool)), ShapeError, r"for one row of keys pass mask\[None, :\]"),
        (masks.of(np.ones(7, bool)) & masks.window(1), ShapeError, r"mask has shape \(7,\)"),
        (~masks.of(np.ones((3, 7), bool)), ShapeError, r"mask has shape \(3, 7\), must have"),
        (biases.alibi(3), DtypeError, r"mask is the bias biases.*; pass it as bias"),
    ],
)  # fmt: skip
def test_a_mask_for_other_sizes_is_an_error(mask, error, message):
    q, k, v = inputs(Sizes((2,), 3, 5, 7), np.random.default_rng(0))
    with pytest.raises(error, match=message) as found:
        Problem(q, k, v, mask)
    if error is ShapeError:
        assert str(found.value).endswith("[q (2, 3, 5, 3), k (2, 3, 7, 3), v (2, 3, 7, 2)]")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda b, h, t, s: t + s, DtypeError, "function returned int64, must return bool"),
        (
            lambda b, h, t, s: np.ones((2, 3, 4), bool),
            OptionError,
            r"function returned shape \(2, 3, 4\), which does not broadcast to \(5, 7\)",
        ),
    ],
)
def test_a_function_that_says_something_else_is_an_error(function, error, message):
    with pytest.raises(error, match=message):
        masks.custom(function).tile(Tile((), 1, 5, 7, (0,), 0, 5, 0, 7))


def test_equal_tiles_are_shared_and_read_only():
    mask = masks.causal()
    one, other = (mask.tile(Tile((), 1, 23, 23, (0,), t, t + 5, t, t + 5)) for t in (2, 11))
    assert one is other
    with pytest.raises(ValueError, match="read-only"):
        one[0] = False


# --- named patterns -------------------------------------------------------------------------------


def test_a_tree_is_itself_its_ancestors_and_the_past():
    rng = np.random.default_rng(0)
    parents = np.array([-1, *(int(rng.integers(-1, t)) for t in range(1, 11))])
    for past in (0, 3):
        got = np.asarray(masks.tree(parents, past))
        assert got.shape == (11, past + 11)
        for t in range(11):
            family, at = set(), t
            while at >= 0:
                family.add(at + past)
                at = int(parents[at])
            assert set(np.flatnonzero(got[t])) == family | set(range(past))


@pytest.mark.every
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: masks.sliding(-1, 2), OptionError, "left is -1"),
        (lambda: masks.sliding(1, 2.0), OptionError, "sinks is 2.0"),
        (lambda: masks.strided(0), OptionError, "step is 0"),
        (lambda: masks.dilated(1, -1, 2), OptionError, "right is -1"),
        (lambda: masks.dilated(1, 1, 0), OptionError, "step is 0"),
        (lambda: masks.chunked(0), OptionError, "size is 0"),
        (lambda: masks.chunked(4, alignment="left"), OptionError, "alignment"),
        (lambda: masks.global_tokens(True), OptionError, "count is True"),
        (lambda: masks.tree([0]), OptionError, r"parents\[0\] is 0, must be −1 or"),
        (lambda: masks.tree([-1, -2]), OptionError, r"parents\[1\] is -2"),
        (lambda: masks.tree([[-1]]), ShapeError, "parents has shape"),
        (lambda: masks.tree([-1.0]), DtypeError, "parents is float64"),
        (lambda: masks.tree([-1], -1), OptionError, "past is -1"),
    ],
)
def test_patterns_that_are_none_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
