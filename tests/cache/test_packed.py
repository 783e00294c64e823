"""Packed sequences, against one padded problem with a mask, and in loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
from npattn import biases, masks
from npattn.cache import varlen, varlen_backward, varlen_forward
from npattn.engines import loops
from npattn.errors import DtypeError, OptionError, ShapeError
from tests.make import normal

H, K, D, E = 4, 2, 3, 5
U = 2.0**-53
LENGTHS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 11)), min_size=1, max_size=5)


def pack(lengths, seed=0):
    of_q, of_k = (np.cumsum([0, *n]) for n in zip(*lengths, strict=True))
    arrays = (normal(of_q[-1], H, D, seed=seed), normal(of_k[-1], K, D, seed=seed + 1))
    return (*arrays, normal(of_k[-1], K, E, seed=seed + 2), of_q, of_k)


def as_one_problem(q, k, v, of_q, of_k, causal):
    """All tokens in one problem, whose mask is made of each sequence by its formula."""
    mask = np.zeros((len(q), len(k)), bool)
    for a, b, c, d in zip(of_q, of_q[1:], of_k, of_k[1:], strict=False):
        for t in range(b - a):
            for s in range(d - c):
                beside = t + (d - c) - (b - a) if causal == "bottom_right" else t
                mask[a + t, c + s] = not causal or s <= beside
    return npattn.forward(*(x.swapaxes(0, 1) for x in (q, k, v)), mask)


@pytest.mark.unmeasured
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_sequences_are_one_problem_with_a_mask(causal, lengths, seed):
    q, k, v, of_q, of_k = pack(lengths, seed)
    got = varlen_forward(q, k, v, of_q, of_k, causal=causal)
    want = as_one_problem(q, k, v, of_q, of_k, causal)
    assert got.out.shape == (len(q), H, E)
    assert np.allclose(got.out.swapaxes(0, 1), want.out, rtol=0, atol=256 * U)
    assert np.allclose(got.lse, want.lse, rtol=0, atol=64 * U)
    dout, dlse = normal(len(q), H, E, seed=7), normal(H, len(q), seed=8)
    dlse[np.isneginf(got.lse)] = 0
    grads = varlen_backward(got, dout, dlse)
    wants = npattn.backward(want, dout.swapaxes(0, 1), dlse)
    for name in "qkv":
        ours = getattr(grads, name).swapaxes(0, 1)
        assert np.allclose(ours, getattr(wants, name), rtol=0, atol=1e4 * U)


def test_a_sequence_is_what_the_loops_say():
    q, k, v, of_q, of_k = pack([(3, 5), (0, 2), (2, 0), (4, 7)])
    options = {"causal": "bottom_right", "window": (2, 0), "softcap": 2.0}
    got = varlen_forward(q, k, v, of_q, of_k, sinks=np.array([0.5, -1, 2, 0]), **options)
    for i, (a, b, c, d) in enumerate(zip(of_q, of_q[1:], of_k, of_k[1:], strict=False)):
        own = (x.swapaxes(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        problem = npattn.Problem(*own, sinks=np.array([0.5, -1, 2, 0]), **options)
        o, lse = loops.forward(problem)[:2]
        assert np.allclose(got.out[a:b].swapaxes(0, 1), o, rtol=0, atol=64 * U)
        assert np.allclose(got.lse[:, a:b], lse, rtol=0, atol=64 * U)
        assert got.parts[i].weights.shape == (H, b - a, d - c)


def test_self_attention_needs_one_set_of_bounds():
    q, k, v = normal(7, H, D), normal(7, K, D, seed=1), normal(7, K, E, seed=2)
    bounds = [0, 3, 7]
    assert np.array_equal(varlen(q, k, v, bounds), varlen(q, k, v, bounds, bounds))


def test_no_sequence_sees_another():
    q, k, v, of_q, of_k = pack([(3, 5), (4, 7)])
    before = varlen(q, k, v, of_q, of_k)
    k[of_k[1] :], v[of_k[1] :] = np.nan, np.inf
    after = varlen(q, k, v, of_q, of_k)
    assert np.array_equal(after[: of_q[1]], before[: of_q[1]])
    assert np.isnan(after[of_q[1] :]).all()


def test_objects_and_lists_of_arrays():
    lengths = [(3, 5), (4, 7)]
    q, k, v, of_q, of_k = pack(lengths)
    slopes = biases.alibi(H)
    dense = [slopes.to_array(H=H, T=t, S=s) for t, s in lengths]
    visible = [masks.causal(alignment="top_left").to_array(T=t, S=s) for t, s in lengths]
    by_object = varlen_forward(
        q, k, v, of_q, of_k, bias=slopes, mask=masks.causal(alignment="top_left")
    )
    by_list = varlen_forward(q, k, v, of_q, of_k, bias=dense, mask=visible)
    assert np.allclose(by_object.out, by_list.out, rtol=0, atol=16 * U)
    dout = normal(len(q), H, E, seed=7)
    dslopes, dbias = (varlen_backward(fwd, dout).bias for fwd in (by_object, by_list))
    assert dslopes.shape == (H,)
    assert [x.shape for x in dbias] == [(H, t, s) for t, s in lengths]
    want = sum(slopes.gradient(x) for x in dbias)
    assert np.allclose(dslopes, want, rtol=0, atol=256 * U)


def test_gradients_of_what_sequences_share_are_sums():
    q, k, v, of_q, of_k = pack([(3, 5), (4, 7)])
    table = normal(8, H, seed=3)
    bias = biases.alibi(H) + biases.relative(table)
    fwd = varlen_forward(q, k, v, of_q, of_k, bias=bias, sinks=normal(H, seed=4))
    dout = normal(len(q), H, E, seed=7)
    grads = varlen_backward(fwd, dout)
    apart = [
        npattn.backward(part, dout[a:b].swapaxes(0, 1))
        for part, a, b in zip(fwd.parts, of_q, of_q[1:], strict=False)
    ]
    assert np.array_equal(grads.sinks, apart[0].sinks + apart[1].sinks)
    for got, one, other in zip(grads.bias, apart[0].bias, apart[1].bias, strict=True):
        assert np.array_equal(got, one + other)


@pytest.mark.parametrize("bounds", [[0], [0, 0]])
def test_no_tokens(bounds):
    q, k, v = (np.zeros((0, n, m)) for n, m in ((H, D), (K, D), (K, E)))
    fwd = varlen_forward(q, k, v, bounds, sinks=np.zeros(H))
    assert fwd.out.shape == (0, H, E)
    assert fwd.lse.shape == (H, 0)
    grads = varlen_backward(fwd, fwd.out)
    assert (grads.q.shape, grads.v.shape, grads.sinks.shape) == (q.shape, v.shape, (H,))


def test_conventions_hold_within_each_sequence():
    q, k, v, of_q, of_k = pack([(3, 0), (5, 4)])
    meaning = npattn.Conventions(empty_row="mean", causal="bottom_right", lse_base="2")
    fwd = varlen_forward(q, k, v, of_q, of_k, conventions=meaning, causal=True)
    own = [x.swapaxes(0, 1) for x in (q[3:], k, v)]
    want = npattn.forward(*own, conventions=meaning, causal=True)
    assert np.array_equal(fwd.out[3:].swapaxes(0, 1), want.out)
    assert np.array_equal(fwd.lse[:, 3:], want.lse)
    mean_of_values = np.repeat(v.mean(0), H // K, axis=0)
    assert np.allclose(fwd.out[3], mean_of_values)  # its first query sees nothing
    dout = normal(*fwd.out.shape, seed=7)
    grads = varlen_backward(fwd, dout)
    assert np.array_equal(grads.v.swapaxes(0, 1), npattn.backward(want, dout[3:].swapaxes(0, 1)).v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_have_the_dtype_that_was_asked_for(dtype):
    q, k, v, of_q, of_k = pack([(3, 5), (4, 7)])
    fwd = varlen_forward(q, k, v, of_q, of_k, dtype=dtype)
    grads = varlen_backward(fwd, normal(*fwd.out.shape, seed=7).astype(fwd.out.dtype))
    assert {x.dtype for x in (fwd.out, grads.q, grads.k, grads.v)} == {np.dtype(dtype)}


def test_complex_gradients_keep_their_imaginary_part():
    q, k, v, of_q, of_k = pack([(3, 5), (4, 7)])
    fwd = varlen_forward(q, k, v, of_q, of_k)
    dout = normal(*fwd.out.shape, seed=7)
    grads, real = varlen_backward(fwd, 1j * dout), varlen_backward(fwd, dout)
    for name in "qkv":
        assert np.allclose(getattr(grads, name), 1j * getattr(real, name), rtol=0, atol=1e-13)


def test_no_sequence_needs_no_mask():
    arrays = (np.zeros((0, n, m)) for n, m in ((H, D), (K, D), (K, E)))
    assert varlen(*arrays, [0], mask=[], bias=[]).shape == (0, H, E)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v, a, b: varlen(q, k, v, a, b, causal="top_left"),
        lambda q, k, v, a, b: varlen(q, k, v, a, b),
        lambda q, k, v, a, b: varlen(q, k, v, a, [0, 6, 12], causal="bottom_right"),  # shifted
        lambda q, k, v, a, b: varlen(q, k, v, [0, 7], [0, 12], causal="bottom_right"),  # as one
    ],
)
def test_mistakes_are_seen(wrong):
    q, k, v, of_q, of_k = pack([(3, 5), (4, 7)])
    right = as_one_problem(q, k, v, of_q, of_k, "bottom_right").out.swapaxes(0, 1)
    assert abs(wrong(q, k, v, of_q, of_k) - right).max() > 1e-3


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": np.ones((1, 7, H, D))}, ShapeError, "q has shape (1, 7, 4, 3), must be (total"),
        ({"v": np.ones((11, K, E))}, ShapeError, "k has 12 keys and v 11"),
        ({"cu_seqlens_q": [0, 3]}, OptionError, "end at the number of tokens, 7: cut off those"),
        ({"cu_seqlens_q": [1, 3, 7]}, OptionError, "must begin at 0"),
        ({"cu_seqlens_k": [0, 13, 12]}, OptionError, "never fall"),
        ({"cu_seqlens_k": [0, 5, 7, 12]}, ShapeError, "has 3 sequences, must have 2"),
        ({"cu_seqlens_q": [0.0, 7.0]}, DtypeError, "must be integers"),
        ({"cu_seqlens_q": 7}, ShapeError, "must be (N + 1,)"),
        ({"causal": True}, OptionError, "(sequence 0)"),
        ({"bias": [None, np.ones((4, 7))]}, OptionError, "bias has None for sequence 0"),
        ({"bias": [biases.alibi(H)] * 2}, OptionError, "must have an array for each"),
        ({"bias": masks.causal()}, OptionError, "must be an object of npattn.biases"),
        ({"bias": [np.ones((3, 5)), np.ones((4, 8))]}, ShapeError, "(sequence 1)"),
        ({"mask": np.ones((7, 12), bool)}, OptionError, "or a list of 2 arrays (H, T, S)"),
        ({"bias": [np.ones((3, 5))]}, OptionError, "bias is list, must be"),
        ({"dropout_rate": 0.5}, OptionError, "varlen has no option dropout_rate"),
    ],
)
def test_errors_name_the_way_out(change, error, words):
    q, k, v, of_q, of_k = pack([(3, 5), (4, 7)])
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": of_q, "cu_seqlens_k": of_k} | change
    with pytest.raises(error) as caught:
        varlen(**given)
    assert words in str(caught.value)


def test_backward_takes_the_result_of_its_own_forward():
    x = np.ones((2, 3, 5))
    message = "fwd is of type Forward; pass the result of npattn.cache.varlen_forward"
    with pytest.raises(OptionError, match=message):
        varlen_backward(npattn.forward(x, x, x), x)
