"""Ways of a cache: quarter turns, new keys, left padding, rows, and packed masks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn import positions
from npattn.cache import append
from npattn.positions import Frequencies
from npattn.problem import Problem
from npattn.testing.adapters.arrangement import turn
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.sequences import Draw, arrange, draw_turns
from npattn.testing.adapters.storage import MISREADINGS, Storage

B, H, K, T, S, D, E = 3, 10, 5, 7, 11, 13, 17
GROWS = frozenset(
    {
        *("lengths of keys", "page table", "new keys", "new values", "cosines", "sines"),
        *("adjacent pairs", "left padding", "rows of the cache"),
    }
)
STORAGE = Storage("batch", "pages", GROWS, either=True, page_size=3)
MASKED = Storage(
    "packed", "packed", frozenset({"offsets of queries", "offsets of keys", "packed mask"})
)


def sample(**options):
    rng = np.random.default_rng(19)
    shapes = (B, H, T, D), (B, K, S, D), (B, K, S, E)
    return Problem(*map(rng.standard_normal, shapes), **options)


# --- quarter turns --------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(2, 13), st.booleans(), st.integers(0, 2**16))
def test_quarter_turns_are_products_of_the_tables(length, size, adjacent, seed):
    rng = np.random.default_rng(seed)
    turns = draw_turns(rng, size, length)[:length]
    x = rng.standard_normal((length, 2, size))
    cos, sin = np.array([1, 0, -1, 0])[turns][:, None], np.array([0, 1, 0, -1])[turns][:, None]
    half = turns.shape[1]
    pairs = np.s_[0 : 2 * half : 2], np.s_[1 : 2 * half : 2]
    a, b = pairs if adjacent else (np.s_[:half], np.s_[half : 2 * half])
    want = x.copy()
    want[..., a] = x[..., a] * cos - x[..., b] * sin
    want[..., b] = x[..., a] * sin + x[..., b] * cos
    np.testing.assert_array_equal(turn(x, turns, adjacent), want)
    np.testing.assert_array_equal(turn(turn(x, turns, adjacent), -turns, adjacent), x)


@pytest.mark.parametrize(("adjacent", "layout"), [(True, "interleaved"), (False, "half")])
def test_quarter_turns_are_those_of_rope(adjacent, layout):
    x, at = np.random.default_rng(23).standard_normal((T, H, 6)), np.arange(5, 5 + T)
    numbers = np.array([1, 2, 3])
    frequencies = Frequencies(numbers * np.pi / 2, 1.0)
    want = positions.rope(x.swapaxes(0, 1), layout=layout, offset=5, frequencies=frequencies)
    # cos and sin of the angle are off by its rounding, at most 3 · 11 · π/2 · u.
    atol = 4 * 3 * 11 * np.pi / 2 * 2.0**-53 * abs(x).max()
    got = turn(x, at[:, None] * numbers, adjacent).swapaxes(0, 1)
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def test_as_many_features_turn_as_kernels_take():
    rng = np.random.default_rng(29)
    assert {draw_turns(rng, 37, 5).shape[1] for _ in range(19)} == {8, 16}
    assert draw_turns(rng, 13, 5).shape[1] == 6


# --- new keys -------------------------------------------------------------------------------------


def ways(problem, storage=STORAGE, seeds=31):
    return [arrange(replace(storage, seed=seed, least=0), problem) for seed in range(seeds)]


def attended(places, arrays, x, n):
    """The keys or values of sequence n in a cache, as an implementation finds them."""
    length = arrays["lengths of keys"][n] + places.new
    s = np.arange(arrays.get("left padding", [0] * (n + 1))[n], length)
    if places.keys == "pages":
        return x[arrays["page table"][n, s // x.shape[1]], s % x.shape[1]]
    return x[arrays.get("rows of the cache", np.arange(n + 1))[n], s]


@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_a_written_cache_has_the_keys_of_each_sample(causal):
    problem, seen = sample(causal=causal), set()
    for places in ways(problem):
        arrays, way = places.arrays(problem), places
        written = places.arrays_after(problem) or {name: arrays[name] for name in "kv"}
        for n, sequence in enumerate(places.sequences):
            if sequence.sample is None:
                continue
            for name in "kv":
                own = getattr(problem, name)[sequence.sample].swapaxes(0, 1)
                np.testing.assert_array_equal(attended(places, arrays, written[name], n), own)
        new = arrays["new keys"].shape[1] if "new keys" in arrays else 0
        assert new == way.new
        assert ("cosines" in arrays) == ("adjacent pairs" in places.numbers())
        seen.add((way.keys, new > 0, "cosines" in arrays))
        seen |= {name for name in ("left padding", "rows of the cache") if name in arrays}
    assert {("pages", True, True), ("cache", True, True), ("cache", False, False)} <= seen
    assert {"left padding", "rows of the cache"} <= seen


def test_what_is_written_is_what_append_writes():
    problem = sample()
    places = next(x for x in ways(problem) if x.new and x.keys == "pages")
    if places.turns is not None:
        places = replace(places, turns=None)
    arrays, written = places.arrays(problem), places.arrays_after(problem)
    grown = append(
        *(arrays["k"], arrays["v"], arrays["new keys"], arrays["new values"]),
        arrays["lengths of keys"],
        block_table=arrays["page table"],
    )
    for got, name in zip(grown, "kv", strict=False):
        np.testing.assert_array_equal(got, written[name])
        assert (arrays[name] != written[name]).any()


@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_queries_and_new_keys_turn_to_those_of_the_problem(causal):
    problem, found = sample(causal=causal), 0
    for places in ways(problem):
        arrays, numbers = places.arrays(problem), places.numbers()
        if "cosines" not in arrays:
            own = [one.sample for one in places.sequences].index(0)
            np.testing.assert_array_equal(arrays["q"][own], problem.q[0].swapaxes(0, 1))
            continue
        found += 1
        angles = arrays["cosines"] + 1j * arrays["sines"]
        for n, sequence in enumerate(places.sequences):
            if sequence.sample is None:
                continue
            begin, half = arrays["lengths of keys"][n], angles.shape[1]
            own = {
                "q": (arrays["q"][n], begin + np.arange(T) * bool(causal)),
                "k": (arrays["new keys"][n], begin + np.arange(places.new)),
            }
            for name, (x, at) in own.items():
                a, b = (
                    np.s_[0 : 2 * half : 2] if numbers["adjacent pairs"] else np.s_[:half],
                    np.s_[1 : 2 * half : 2]
                    if numbers["adjacent pairs"]
                    else np.s_[half : 2 * half],
                )
                turned, z = x.copy(), (x[..., a] + 1j * x[..., b]) * angles[at][:, None]
                turned[..., a], turned[..., b] = z.real, z.imag
                want = getattr(problem, name)[sequence.sample].swapaxes(0, 1)
                np.testing.assert_array_equal(turned, want[len(want) - len(x) :])
    assert found > 3


def test_contents_change_no_way():
    problem = sample()
    other = problem.replace(q=-problem.q, k=problem.k + 1)
    for one, two in zip(ways(problem), ways(other), strict=True):
        assert {n: x.shape for n, x in one.arrays(problem).items()} == {
            n: x.shape for n, x in two.arrays(other).items()
        }


def test_what_would_not_be_exact_is_not_turned():
    for change in ({"q": np.full((B, H, T, D), np.inf)}, {"window": (S, 3)}):
        problem = sample().replace(**change)
        assert all(x.turns is None for x in ways(problem))
    assert any(x.turns is not None for x in ways(sample(window=(2, 3))))
    required = replace(STORAGE, required=frozenset({"cosines"}))
    with pytest.raises(ImplementationError, match="quarter turns would not leave exact"):
        arrange(required, sample().replace(q=np.full((B, H, T, D), np.inf)))


def test_there_is_a_new_key_for_each_query():
    assert {x.new for x in ways(sample())} == {0, T}
    several = replace(STORAGE, several=True)
    assert {x.new for x in ways(sample(), several)} > {0, T}
    required = replace(STORAGE, required=frozenset({"new keys"}))
    assert {x.new for x in ways(sample(), required)} == {T}


@pytest.mark.parametrize("mask_true", ["attend", "hide"])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_new_keys_that_must_be_passed_are_visible(mask_true, causal):
    required = replace(STORAGE, required=frozenset({"new keys"}))
    shown = (np.arange(S) < np.array([[4], [0], [9]]))[:, None, None]
    mask = ~shown if mask_true == "hide" else shown
    problem = sample(mask=mask, causal=causal)
    if not causal:
        with pytest.raises(ImplementationError, match="sequences with fewer keys than new ones"):
            arrange(required, problem, mask_true)
    fit = required.fit(problem, mask_true)
    assert arrange(required, fit, mask_true).new == T
    seen = ~fit.mask if mask_true == "hide" else fit.mask
    assert seen.sum(-1).ravel().tolist() == [T, T, 9]
    assert required.fit(fit, mask_true) is fit
    assert not arrange(STORAGE, sample(mask=np.zeros((B, 1, 1, S), bool))).new


def test_what_is_left_out_is_not_passed():
    for name in ("new keys", "cosines", "left padding", "rows of the cache"):
        without = replace(STORAGE, without=frozenset({name}))
        assert all(name not in x.arrays(sample()) for x in ways(sample(), without))


@pytest.mark.parametrize(
    "misread", [name for name in MISREADINGS if name not in ("columns", "order")]
)
def test_a_misreading_changes_what_is_turned_back(misread):
    problem = sample(causal="bottom_right")
    pairs = zip(ways(problem), ways(problem, replace(STORAGE, misread=misread)), strict=True)
    changed = [
        not np.array_equal(one.arrays(problem)[name], other.arrays(problem)[name])
        for one, other in pairs
        for name in ("q", "new keys")
        if one.turns is not None
    ]
    assert any(changed)


# --- packed masks, and masks beside causal --------------------------------------------------------


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@pytest.mark.parametrize("shape", [(T, S), (B, 1, T, S), (1, S)])
def test_a_packed_mask_has_the_matrix_of_each_sample(shape, causal):
    mask = np.random.default_rng(31).random(shape) < 0.5
    problem = sample(mask=mask, causal=causal)
    places = arrange(MASKED, problem)
    packed, begin = places.arrays(problem)["packed mask"], 0
    want = np.broadcast_to(problem.visible, (B, H, T, S))
    for one in places.sequences:
        matrix = packed[begin : begin + one.T * one.S].reshape(one.T, one.S)
        begin += one.T * one.S
        if one.sample is not None:
            np.testing.assert_array_equal(matrix, want[one.sample, 0])
    assert begin == len(packed)


def test_other_masks_are_renewed_alone():
    problem = sample(mask=np.ones((T, S), bool))
    plain, renewed = (
        arrange(replace(MASKED, renewed=x), problem).arrays(problem) for x in ("", "masks")
    )
    assert [n for n in plain if not np.array_equal(plain[n], renewed[n])] == ["packed mask"]


def test_masks_of_heads_have_no_packed_one():
    with pytest.raises(ImplementationError, match="a mask of each head"):
        arrange(MASKED, sample(mask=np.ones((H, T, S), bool)))


def test_a_packed_mask_that_must_be_passed_shows_all():
    required = replace(MASKED, required=frozenset({"packed mask"}))
    places = arrange(required, sample())
    assert all(x.all() for x, one in zip(places.masks, places.sequences, strict=True) if one.sample)


@pytest.mark.parametrize("mask_true", ["attend", "hide"])
@pytest.mark.parametrize("options", [{"causal": "bottom_right"}, {"causal": "top_left"}])
def test_hidden_keys_move_where_causal_does_not_count_them(options, mask_true):
    lengths = np.array([4, 0, 11])
    shown = (np.arange(S) * 3 % S < lengths[:, None])[:, None, None]
    given = ~shown if mask_true == "hide" else shown
    problem = STORAGE.fit(sample(mask=given, **options), mask_true)
    moved = ~problem.mask if mask_true == "hide" else problem.mask
    assert moved.sum(-1).ravel().tolist() == lengths.tolist()
    seen = problem.visible if mask_true == "attend" else problem.replace(mask=moved).visible
    for b, n in enumerate(lengths):  # each sample alone, of its own length
        own = moved[b, 0, 0]
        alone = Problem(problem.q[b], problem.k[b][:, own], problem.v[b][:, own], **options)
        got = np.broadcast_to(seen, (B, H, T, S))[b][..., own]
        np.testing.assert_array_equal(got, np.broadcast_to(alone.visible, (H, T, n)))
    assert STORAGE.fit(problem, mask_true) is problem


def test_a_choice_is_that_of_its_shape():
    draws = [Draw.of(sample(), replace(STORAGE, seed=n)).wants("cosines", 0.5) for n in range(31)]
    assert set(draws) == {False, True}
