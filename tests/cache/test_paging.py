"""Keys in pages, against the same keys in a row; and a cache that grows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
from npattn import biases, positions
from npattn.cache import append, append_backward, paged, paged_backward, paged_forward, varlen
from npattn.errors import DtypeError, OptionError, ShapeError
from tests.make import normal

B, T, H, K, D, E = 3, 2, 4, 2, 6, 5
U = 2.0**-53
POISON = np.nan


def make(lengths, P, seed=0, spare=3):
    """Pages in any order, holes between them, and poison wherever nobody may read."""
    rng = np.random.default_rng(seed)
    needed = [-(-n // P) for n in lengths]
    count = sum(needed) + spare
    order = rng.permutation(count)
    M = max(needed, default=0) + 1
    table = np.full((len(lengths), M), -7)
    k, v = np.full((count, P, K, D), POISON), np.full((count, P, K, E), POISON)
    rows, used = [], 0
    for b, n in enumerate(lengths):
        own = (normal(n, K, D, seed=seed + b), normal(n, K, E, seed=seed + 50 + b))
        rows.append(own)
        table[b, : needed[b]] = order[used : used + needed[b]]
        used += needed[b]
        for s in range(n):
            k[table[b, s // P], s % P], v[table[b, s // P], s % P] = own[0][s], own[1][s]
    return k, v, table, rows


@pytest.mark.unmeasured
@pytest.mark.parametrize("causal", [False, "bottom_right"])
@given(
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=4),
    P=st.sampled_from([1, 2, 5, 16, 256]),
    seed=st.integers(0, 99),
)
def test_pages_are_keys_in_a_row(causal, lengths, P, seed):
    k, v, table, rows = make(lengths, P, seed)
    q = normal(len(lengths), T, H, D, seed=seed + 9)
    fwd = paged_forward(q, k, v, table, lengths, causal=causal)
    dout, dlse = normal(*fwd.out.shape, seed=7), normal(*fwd.lse.shape, seed=8)
    dlse[np.isneginf(fwd.lse)] = 0
    grads = paged_backward(fwd, dout, dlse)
    read = np.zeros(k.shape[:2], bool)
    for b, (own_k, own_v) in enumerate(rows):
        want = npattn.forward(*(x.swapaxes(0, 1) for x in (q[b], own_k, own_v)), causal=causal)
        assert np.array_equal(fwd.out[b].swapaxes(0, 1), want.out)
        assert np.array_equal(fwd.lse[b], want.lse)
        wanted = npattn.backward(want, dout[b].swapaxes(0, 1), dlse[b])
        assert np.array_equal(grads.q[b].swapaxes(0, 1), wanted.q)
        for s in range(lengths[b]):
            place = table[b, s // P], s % P
            read[place] = True
            assert np.array_equal(grads.k[place], wanted.k[:, s])
            assert np.array_equal(grads.v[place], wanted.v[:, s])
    assert not grads.k[~read].any()
    assert not grads.v[~read].any()


def test_pages_that_samples_share_have_the_sum_of_their_gradients():
    k, v, _, _ = make([8], 4, spare=0)
    table, lengths = np.array([[0, 1], [0, 1]]), [8, 6]
    k, v = np.nan_to_num(k, nan=1.0), np.nan_to_num(v, nan=1.0)
    q = normal(2, T, H, D)
    fwd = paged_forward(q, k, v, table, lengths)
    dout = normal(*fwd.out.shape, seed=7)
    both = paged_backward(fwd, dout)
    alone = [
        paged_backward(
            paged_forward(q[b : b + 1], k, v, table[b : b + 1], lengths[b : b + 1]), dout[b : b + 1]
        )
        for b in range(2)
    ]
    assert np.array_equal(both.k, alone[0].k + alone[1].k)
    assert np.array_equal(both.v, alone[0].v + alone[1].v)


def test_a_chunked_prefill_is_the_whole_one():
    """Chunks of the queries, each behind the keys so far, as varlen and as pages."""
    n, P = 13, 4
    q, k, v = normal(n, H, D), normal(n, K, D, seed=1), normal(n, K, E, seed=2)
    whole = varlen(q, k, v, [0, n], causal="bottom_right")
    caches = np.full((1, 16, K, D), POISON), np.full((1, 16, K, E), POISON)
    k_cache, v_cache, length = *caches, np.array([0])
    table = np.array([[2, 0, 3, 1]])
    k_pages, v_pages = (x.reshape(4, P, *x.shape[2:]) for x in caches)
    chunks = []
    for a, b in ((0, 5), (5, 6), (6, 13)):
        new = k[None, a:b], v[None, a:b]
        k_pages, v_pages, _ = append(k_pages, v_pages, *new, length, block_table=table)
        k_cache, v_cache, length = append(k_cache, v_cache, *new, length)
        chunks.append(paged(q[None, a:b], k_pages, v_pages, table, length, causal="bottom_right"))
        here = varlen(q[a:b], k[:b], v[:b], [0, b - a], [0, b], causal="bottom_right")
        assert np.array_equal(chunks[-1][0], here)
    assert np.allclose(np.concatenate(chunks, 1)[0], whole, rtol=0, atol=64 * U)
    assert np.array_equal(k_cache[0, :n], k)
    assert np.isnan(k_cache[0, n:]).all()


def test_objects_and_sinks_are_shared():
    lengths, P = [7, 3, 5], 4
    k, v, table, _ = make(lengths, P)
    q = normal(B, T, H, D)
    fwd = paged_forward(q, k, v, table, lengths, bias=biases.alibi(H), sinks=normal(H, seed=3))
    grads = paged_backward(fwd, normal(*fwd.out.shape, seed=7))
    assert grads.bias.shape == grads.sinks.shape == (H,)
    assert np.isfinite(grads.bias).all()


def test_appended_keys_lie_behind_those_of_their_sample():
    k_cache, v_cache = normal(B, 7, K, D), normal(B, 7, K, E, seed=1)
    k, v, seqlens = normal(B, T, K, D, seed=2), normal(B, T, K, E, seed=3), np.array([0, 5, 2])
    before = k_cache.copy(), v_cache.copy()
    got_k, got_v, longer = append(k_cache, v_cache, k, v, seqlens)
    assert np.array_equal(longer, seqlens + T)
    for old, new, got in ((before[0], k, got_k), (before[1], v, got_v)):
        want = old.copy()
        for b, n in enumerate(seqlens):
            want[b, n : n + T] = new[b]
        assert np.array_equal(got, want)
    assert np.array_equal(k_cache, before[0])  # the arrays given are left alone
    assert np.array_equal(v_cache, before[1])


def test_appended_keys_turn_by_their_position():
    cache, seqlens = np.zeros((B, 9, K, D)), np.array([0, 5, 2])
    k = normal(B, T, K, D)
    options = {"layout": "interleaved", "size": 4}
    got, values, _ = append(cache, cache, k, k, seqlens, rotary=options)
    for b, n in enumerate(seqlens):
        want = positions.rope(k[b].swapaxes(0, 1), offset=int(n), **options).swapaxes(0, 1)
        assert np.array_equal(got[b, n : n + T], want)
        assert np.array_equal(values[b, n : n + T], k[b])


PLACES = {"cache": ((B, 9), None), "pages": ((2 * B, 5), np.array([[4, 0], [1, 5], [3, 2]]))}
ROTARY = {"none": None, "interleaved": {"layout": "interleaved", "size": 4}}


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("place", PLACES)
def test_append_backward_is_its_transpose(place, rotary):
    """append is linear, so ⟨dout, append(x)⟩ = ⟨append_backward(dout), x⟩."""
    (N, P), table = PLACES[place]
    options = {"block_table": table, "rotary": ROTARY[rotary]}
    inputs = [
        normal(N, P, K, D), normal(N, P, K, E, seed=1),
        normal(B, T, K, D, seed=2), normal(B, T, K, E, seed=3),
    ]  # fmt: skip
    seqlens = [0, 5, 2]
    out = append(*inputs, seqlens, **options)[:2]
    dout = [normal(*x.shape, seed=4 + i) for i, x in enumerate(out)]
    kept = [x.copy() for x in dout]
    grads = append_backward(*dout, *inputs[2:], seqlens, **options)
    assert [x.shape for x in grads] == [x.shape for x in inputs]
    terms = [(a * b).ravel() for a, b in zip([*dout, *grads], [*out, *inputs], strict=True)]
    total = sum(x.sum() for x in terms[:2]) - sum(x.sum() for x in terms[2:])
    # Each product is rounded once, each sum as often as it has terms, and a turned number thrice.
    count = sum(x.size for x in terms) + 4
    assert abs(total) <= count * U * sum(abs(x).sum() for x in terms)
    for before, x in zip(kept, dout, strict=True):
        assert np.array_equal(before, x)


def test_slots_that_are_written_over_get_no_gradient():
    grads = append_backward(
        np.ones((2, 7, K, D)), np.ones((2, 7, K, E)),
        np.zeros((2, T, K, D)), np.zeros((2, T, K, E)), [1, 3],
    )  # fmt: skip
    for x in (grads.k_cache, grads.v_cache):
        assert x[:, :, 0, 0].tolist() == [
            [float(not n <= s < n + T) for s in range(7)] for n in (1, 3)
        ]


def test_append_backward_names_the_gradients_that_do_not_fit():
    new = np.zeros((2, 1, K, D)), np.zeros((2, 1, K, E))
    with pytest.raises(ShapeError, match="dk_cache and dv_cache have shapes"):
        append_backward(np.ones((2, 7, K, D)), np.ones((2, 6, K, E)), *new, [1, 3])


def test_new_keys_are_rounded_to_the_dtype_of_the_cache():
    cache = np.zeros((1, 4, K, D), np.float16)
    k = normal(1, 1, K, D)
    got, _, _ = append(cache, cache, k, k, [1])
    assert got.dtype == np.float16
    assert np.array_equal(got[0, 1], k[0, 0].astype(np.float16))


def test_a_page_that_one_sample_reads_twice_has_the_sum():
    k, v, q = normal(2, 4, K, D), normal(2, 4, K, E, seed=1), normal(1, T, H, D, seed=2)
    fwd = paged_forward(q, k, v, [[1, 1]], [8])
    dout = normal(*fwd.out.shape, seed=7)
    grads = paged_backward(fwd, dout)
    apart = paged_forward(q, np.concatenate([k, k]), np.concatenate([v, v]), [[1, 3]], [8])
    wants = paged_backward(apart, dout)
    assert np.allclose(grads.k[1], wants.k[1] + wants.k[3], rtol=0, atol=64 * U)
    assert np.allclose(grads.v[1], wants.v[1] + wants.v[3], rtol=0, atol=64 * U)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_have_the_dtype_that_was_asked_for(dtype):
    k, v, q = normal(2, 4, K, D), normal(2, 4, K, E, seed=1), normal(2, T, H, D, seed=2)
    fwd = paged_forward(q, k, v, [[1], [1]], [3, 4], dtype=dtype)
    grads = paged_backward(fwd, normal(*fwd.out.shape, seed=7).astype(fwd.out.dtype))
    assert {x.dtype for x in (fwd.out, grads.q, grads.k, grads.v)} == {np.dtype(dtype)}


def test_complex_gradients_keep_their_imaginary_part():
    k, v, q = normal(2, 4, K, D), normal(2, 4, K, E, seed=1), normal(2, T, H, D, seed=2)
    fwd = paged_forward(q, k, v, [[1], [0]], [3, 4])
    dout = normal(*fwd.out.shape, seed=7)
    grads, real = paged_backward(fwd, 1j * dout), paged_backward(fwd, dout)
    for name in "qkv":
        assert np.allclose(getattr(grads, name), 1j * getattr(real, name), rtol=0, atol=1e-13)


def test_a_new_key_never_lies_on_another():
    """The other is of another sample, or of its own where a page is twice in a table."""
    cache, new = np.zeros((2, 2, K, D)), np.ones((1, 1, K, D))
    with pytest.raises(OptionError, match="where another key lies"):
        append(cache, cache, new, new, [2], block_table=[[0, 0]])
    cache, new = np.zeros((3, 2, K, D)), np.ones((2, 1, K, D))
    shared, _, _ = append(cache, cache, new, new, [2, 2], block_table=[[0, 1], [0, 2]])
    assert shared[1:, 0].all()  # behind a page that both read
    assert not shared[0].any()


@pytest.mark.parametrize("sizes", [(K, 0, E), (K, D, 0), (0, D, E)])
def test_append_of_sizes_of_0(sizes):
    heads, d, e = sizes
    caches = np.zeros((2, 4, heads, d)), np.zeros((2, 4, heads, e))
    new = np.ones((2, 1, heads, d)), np.ones((2, 1, heads, e))
    got = append(*caches, *new, [0, 3])
    assert got[0].shape == caches[0].shape
    assert got[1].sum() == 2 * heads * e


def test_pages_without_slots():
    pages = np.zeros((3, 0, K, D)), np.zeros((3, 0, K, E))
    for samples in (0, 2):
        table, lengths = np.zeros((samples, 2), int), np.zeros(samples, int)
        out = paged(np.zeros((samples, T, H, D)), *pages, table, lengths)
        assert out.shape == (samples, T, H, E)
        assert not out.any()


def test_no_sample_and_no_token():
    k, v, _, _ = make([3], 4)
    fwd = paged_forward(np.zeros((0, T, H, D)), k, v, np.zeros((0, 2), int), np.zeros(0, int))
    assert (fwd.out.shape, fwd.lse.shape) == ((0, T, H, E), (0, H, T))
    assert paged_backward(fwd, fwd.out).k.shape == k.shape
    none = np.zeros((0, 1, K, D)), np.zeros((0, 1, K, E))
    assert append(k, v, *none, np.zeros(0, int), block_table=np.zeros((0, 2), int))[2].shape == (0,)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, t, n: paged(q, k, v, t, n, causal="top_left"),
        lambda q, k, v, t, n: paged(q, k, v, t[:, ::-1], n, causal="bottom_right"),
        lambda q, k, v, t, n: paged(q, k, v, t, [5, 8], causal="bottom_right"),  # without the new
        lambda q, k, v, t, n: paged(q, k, v, t[::-1], n, causal="bottom_right"),  # of the other
    ],
)
def test_mistakes_are_seen(wrong):
    k, v, n = normal(4, 4, K, D), normal(4, 4, K, E, seed=1), [7, 8]
    q, table = normal(2, T, H, D, seed=2), np.array([[0, 2], [3, 1]])
    right = paged(q, k, v, table, n, causal="bottom_right")
    assert abs(wrong(q, k, v, table, n) - right).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": np.ones((T, H, D))}, ShapeError, "q has shape (2, 4, 6), must be (B, T, H, D)"),
        ({"v_pages": np.ones((4, 5, K, E))}, ShapeError, "must be (N, P, K, D) and (N, P, K, E)"),
        ({"seqlens": [3]}, ShapeError, "seqlens has shape (1,), must be (2,)"),
        ({"seqlens": [3.0, 4.0]}, DtypeError, "seqlens is float64, must be integers"),
        ({"seqlens": [9, 1]}, OptionError, "has 9 keys for sample 0, must be 0 to 8"),
        ({"seqlens": [1, -1]}, OptionError, "has -1 keys for sample 1"),
        ({"block_table": [0, 1]}, ShapeError, "must be (2, M)"),
        ({"block_table": [[0, 4], [1, 2]]}, OptionError, "has page 4 for keys of sample 0"),
        ({"block_table": [[0, 1], [-1, 2]]}, OptionError, "has page -1 for keys of sample 1"),
        ({"causal": True}, OptionError, "bottom_right"),
        ({"mask": np.ones((2, 1, 2, 7), bool)}, OptionError, "a list of 2 arrays"),
    ],
)
def test_errors_name_the_way_out(change, error, words):
    given = {
        "q": normal(2, T, H, D), "k_pages": np.ones((4, 4, K, D)), "v_pages": np.ones((4, 4, K, E)),
        "block_table": [[0, 2], [3, 1]], "seqlens": [7, 6],
    } | change  # fmt: skip
    with pytest.raises(error) as caught:
        paged(**given)
    assert words in str(caught.value)


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"k": np.ones((2, 1, K, D + 1))}, ShapeError, "k has shape"),
        ({"v": np.ones((2, 2, K, E))}, ShapeError, "v has shape"),
        ({"seqlens": [3, 4]}, OptionError, "seqlens is [3, 4], must be 0 to 3: there is room"),
        ({"seqlens": [-1, 0]}, OptionError, "seqlens is [-1, 0], must be 0 to 3"),
        ({"k": np.ones((2, 1, K, D)) * 1j}, DtypeError, "k is complex128, must be real"),
        ({"rotary": {"positions": [3]}}, OptionError, "positions are those behind seqlens"),
        ({"rotary": True}, OptionError, "must be a mapping"),
        ({"seqlens": [0]}, ShapeError, "must be (2,)"),
        (
            {"k_cache": np.ones((3, 4, K, D)), "v_cache": np.ones((3, 4, K, E))},
            ShapeError,
            "must have 2",
        ),
        ({"block_table": [[0], [0]]}, OptionError, "where another key lies"),
        ({"block_table": [[0], [0]], "seqlens": [1, 3]}, OptionError, "copy the page"),
    ],
)
def test_errors_of_append_name_the_way_out(change, error, words):
    given = {
        "k_cache": np.ones((2, 4, K, D)), "v_cache": np.ones((2, 4, K, E)),
        "k": np.ones((2, 1, K, D)), "v": np.ones((2, 1, K, E)), "seqlens": [0, 0],
    } | change  # fmt: skip
    with pytest.raises(error) as caught:
        append(**given)
    assert words in str(caught.value)


def test_backward_takes_the_result_of_its_own_forward():
    x = np.ones((2, 3, 5))
    message = "fwd is of type Forward; pass the result of npattn.cache.paged_forward"
    with pytest.raises(OptionError, match=message):
        paged_backward(npattn.forward(x, x, x), x)
