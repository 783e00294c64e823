"""Gathered attention against dense attention with the mask of its lists, and entry by entry."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
from npattn import biases, masks
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.testing.bounds.allowed import bounds
from npattn.testing.comparison import compare_arrays
from npattn.variants import gathered
from npattn.variants.gathered import OPTIONS, drop_repeats, index_mask, top_k
from tests.variants import formulas
from tests.variants.running_error import Bounded, assert_within

B, H, K, T, S, D, E, M = 2, 6, 3, 5, 11, 7, 13, 4
LISTS = {
    "of all heads": (T,),
    "of one axis": (1, T),
    "of each head": (H, T),
    "of each sample": (B, 1, T),
    "of each head and sample": (B, H, T),
}


def sample(seed=0, lead=(B,), of_keys=(B,)):
    normal = np.random.default_rng(seed).standard_normal
    return normal((*lead, H, T, D)), normal((*of_keys, K, S, D)), normal((*of_keys, K, S, E))


def draw_lists(shape, n=M, seed=1, keys=S, unused=0.3):
    """Lists without repeats in random order, with unused entries anywhere."""
    rng = np.random.default_rng(seed)
    lists = np.argsort(rng.random((*shape, keys)), -1)[..., :n]
    return np.where(rng.random(lists.shape) < unused, -1, lists)


def formula(q, k, v, listed, do=None, dlse=None, scale=None, **options):
    """The formula of attention in which every query sees a key, with its bounds."""
    G = q.shape[-3] // k.shape[-3]
    keys, values = (Bounded(np.repeat(x, G, -3)) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    exact = formulas.softmax_attention(
        Bounded(q), keys, values, listed, scale, do=do, dlse=dlse, **options
    )
    for name, x in (("k", k), ("v", v)):
        if name in exact:
            dx = exact[name]
            split = (*dx.x.shape[:-3], x.shape[-3], G, *dx.x.shape[-2:])
            shared = Bounded(dx.x.reshape(split), dx.e.reshape(split)).sum(-3)
            exact[name] = shared.sum_to(x.shape)
    if "q" in exact:
        exact["q"] = exact["q"].sum_to(q.shape)
    return exact


def cotangents(fwd, seed=9):
    normal = np.random.default_rng(seed).standard_normal
    return normal(fwd.out.shape), normal(fwd.lse.shape)


def with_a_key_each(lists):
    """Lists in which every query has a key: the formula divides by their sum."""
    lists = lists.copy()
    lists[..., 0] = np.where((lists < 0).all(-1), 0, lists[..., 0])
    return lists


@pytest.mark.parametrize("case", LISTS)
def test_is_attention_with_the_mask_of_the_lists(case):
    q, k, v = sample()
    lists = with_a_key_each(draw_lists(LISTS[case]))
    fwd = gathered.forward(q, k, v, lists)
    do, dlse = cotangents(fwd)
    grads = gathered.backward(fwd, do, dlse)
    exact = formula(q, k, v, index_mask(lists, S), do, dlse)
    assert_within("out", fwd.out, exact["out"])
    assert_within("lse", fwd.lse, exact["lse"])
    for name in "qkv":
        assert_within(f"d{name}", getattr(grads, name), exact[name])
    assert np.array_equal(gathered.attention(q, k, v, lists), fwd.out)
    of_entries = np.where(lists < 0, 0, np.broadcast_to(lists, fwd.weights.shape))
    weights = np.take_along_axis(exact["weights"].x, of_entries, -1) * (lists >= 0)
    allowed = np.take_along_axis(exact["weights"].e, of_entries, -1)
    assert (abs(fwd.weights - weights) <= 2.0**-52 * allowed).all()


@pytest.mark.parametrize("case", LISTS)
def test_options_hide_keys_of_the_lists_and_gradients_reach_every_input(case):
    """Rows that see nothing included."""
    q, k, v = sample(2)
    rng = np.random.default_rng(3)
    lists = draw_lists(LISTS[case], n=6)
    bias, sinks = rng.standard_normal((H, T, S)), rng.standard_normal(H)
    options = {
        "mask": rng.random((T, S)) < 0.7, "causal": "bottom_right", "window": (6, None),
        "bias": bias, "scale": 0.4, "softcap": 3.0, "sinks": sinks,
        "dropout_mask": rng.random((B, 1, T, S)) < 0.8, "dropout_rate": 0.25,
    }  # fmt: skip
    fwd = gathered.forward(q, k, v, lists, **options)
    mask = options.pop("mask") & index_mask(lists, S)
    want = npattn.forward(q, k, v, mask, **options)
    assert_both_are_near(fwd, want)


def assert_both_are_near(fwd, want):
    """Compare with dense, within the bound that the judge derives for float64."""
    do, dlse = cotangents(want)
    grads, wants = gathered.backward(fwd, do, dlse), npattn.backward(want, do, dlse)
    allowed = bounds(want.problem.materialise(), np.float64, dout=do, dlse=dlse)
    pairs = {"o": (fwd.out, want.out), "lse": (fwd.lse, want.lse)}
    pairs |= {f"d{n}": (getattr(grads, n), getattr(wants, n)) for n in ("q", "k", "v", "sinks")}
    given = want.problem.bias
    pairs["dbias"] = grads.bias, wants.bias
    if isinstance(given, biases.Bias):
        allowed["dbias"] = abs(given.gradient(allowed["dbias"]))
    for name, (got, exact) in pairs.items():
        if exact is None:
            assert got is None
            continue
        line = compare_arrays(name, got, exact, allowed[name])
        assert line.passed, str(line)


@given(st.tuples(*[st.integers(1, 4)] * 5), st.integers(0, 6), st.integers(0, 99), st.booleans())
def test_lists_of_any_length_in_any_order(sizes, n, seed, of_heads):
    h, t, s, d, e = sizes
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((h, m, x)) for m, x in ((t, d), (s, d), (s, e)))
    lists = draw_lists((h, t) if of_heads else (t,), n, seed, s)
    fwd = gathered.forward(q, k, v, lists)
    lists = np.broadcast_to(lists, (h, t, lists.shape[-1]))
    out, lse = formulas.gathered_in_loops(q, k, v, lists, 1 / math.sqrt(d))
    allowed = bounds(npattn.Problem(q, k, v, index_mask(lists, s)), np.float64)
    for name, got, exact in (("o", fwd.out, out.real), ("lse", fwd.lse, lse.real)):
        line = compare_arrays(name, got, exact, 2 * allowed[name])  # the loops round as well
        assert line.passed, str(line)


def test_gradients_are_the_complex_steps_of_the_loops():
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((4, 3, 2)), rng.standard_normal((2, 5, 2)), rng.random((2, 5, 3))
    lists = np.array([[3, -1, 0], [4, 2, 3], [-1, 1, 0]])
    fwd = gathered.forward(q, k, v, lists, scale=0.7)
    do, dlse = cotangents(fwd)
    grads = gathered.backward(fwd, do, dlse)
    exact = formula(q, k, v, index_mask(lists, 5), do, dlse, scale=0.7)
    whole, step = np.broadcast_to(lists, (4, 3, 3)), 1e-200
    for i, name in enumerate("qkv"):
        for at in np.ndindex((q, k, v)[i].shape):
            moved = [x.astype(complex) for x in (q, k, v)]
            moved[i][at] += 1j * step
            out, lse = formulas.gathered_in_loops(*moved, whole, 0.7)
            slope = ((do * out).sum() + (dlse * lse).sum()).imag / step
            assert abs(slope - getattr(grads, name)[at]) <= 2.0**-52 * exact[name].e[at]


def test_keys_in_no_list_are_never_read_and_get_no_gradient():
    q, k, v = sample(7)
    lists = draw_lists((T,), keys=S - 2)  # never the last two
    before = gathered.forward(q, k, v, lists)
    do, dlse = cotangents(before)
    grads = gathered.backward(before, do, dlse)
    k[..., -2:, :], v[..., -2:, :] = np.nan, np.inf
    after = gathered.forward(q, k, v, lists)
    assert np.array_equal(after.out, before.out)
    again = gathered.backward(after, do, dlse)
    assert np.array_equal(again.q, grads.q)
    for name in "kv":
        assert np.array_equal(getattr(again, name), getattr(grads, name))
        assert not getattr(again, name)[..., -2:, :].any()


def test_weights_have_a_gradient():
    q, k, v = sample(8)
    lists = with_a_key_each(draw_lists((H, T)))
    fwd = gathered.forward(q, k, v, lists)
    dweights = np.random.default_rng(10).standard_normal(fwd.weights.shape)
    grads = gathered.backward(fwd, np.zeros_like(fwd.out), None, dweights)
    along, step = np.random.default_rng(11).standard_normal(k.shape), 1e-200
    end = gathered.forward(q, k + 1j * step * along, v, lists)
    slope = (dweights * end.weights).sum().imag / step
    terms = grads.k * along
    assert abs(slope - terms.sum()) <= (terms.size + 4 * (D + M)) * 2.0**-53 * abs(terms).sum()


def test_one_head_without_an_axis():
    q, k, v = (x[0, 0] for x in sample(9))
    lists = draw_lists((T,))
    fwd = gathered.forward(q, k, v, lists)
    assert (fwd.out.shape, fwd.lse.shape, fwd.weights.shape) == ((T, E), (T,), (T, M))
    do, dlse = cotangents(fwd)
    grads = gathered.backward(fwd, do, dlse, np.ones((T, M)))
    whole = gathered.forward(q[None], k[None], v[None], lists)
    wants = gathered.backward(whole, do[None], dlse[None], np.ones((1, T, M)))
    assert np.array_equal(fwd.out, whole.out[0])
    for name in "qkv":
        assert np.array_equal(getattr(grads, name), getattr(wants, name)[0])


def test_objects_are_masks_and_biases_too():
    q, k, v = sample(10)
    lists = draw_lists((B, 1, T), n=6)
    mask, bias = masks.causal(alignment="top_left"), biases.alibi(H)
    fwd = gathered.forward(q, k, v, lists, mask=mask, bias=bias)
    listed = index_mask(lists, S) & mask.to_array(T=T, S=S)
    want = npattn.forward(q, k, v, listed, bias=bias)
    assert_both_are_near(fwd, want)


@pytest.mark.parametrize("letter", ["H", "T", "S", "D", "E", "n"])
def test_every_size_may_be_0(letter):
    sizes = {"H": 4, "T": T, "S": S, "D": D, "E": E, "n": M} | {letter: 0}
    h, t, s, d, e, n = sizes.values()
    kv = min(h, 2)
    q, k, v = np.ones((B, h, t, d)), np.ones((B, kv, s, d)), np.ones((B, kv, s, e))
    lists = np.full((t, n), -1) if letter == "S" else draw_lists((t,), n)
    fwd = gathered.forward(q, k, v, lists)
    assert (fwd.out.shape, fwd.weights.shape) == ((B, h, t, e), (B, h, t, n))
    grads = gathered.backward(fwd, np.ones_like(fwd.out))
    assert [x.shape for x in (grads.q, grads.k, grads.v)] == [q.shape, k.shape, v.shape]
    if letter in "Sn":
        assert not fwd.out.any()
        assert np.isneginf(fwd.lse).all()


WRONG = {
    "floating": (np.zeros((T, M)), DtypeError, "indices is float64, must be integers"),
    "rank 1": (np.zeros(M, int), ShapeError, "indices has shape"),
    "queries": (np.zeros((T + 1, 1), int), ShapeError, "must be \\(..., H, T, n\\)"),
    "heads": (np.zeros((K, T, 1), int), ShapeError, "indices has shape"),
    "no heads": (np.zeros((B, T, 1), int), ShapeError, "pass indices\\[:, None\\]"),
    "beyond": (np.full((T, 1), S), OptionError, "indices contains 11, must be a key, 0 to 10"),
    "−2": (np.full((T, 1), -2), OptionError, "indices contains -2"),
    "twice": (
        np.array([[0, 1, 2]] * (T - 1) + [[1, -1, 1]]),
        OptionError,
        "key 1 twice in list \\(4,\\), .*drop_repeats",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists_are_errors(case):
    lists, error, match = WRONG[case]
    with pytest.raises(error, match=match):
        gathered.forward(*sample(), lists)


def test_wrong_options_are_errors():
    lists = draw_lists((T,))
    assert "score_mod" not in OPTIONS
    for name in ("score_mod", "conventions"):
        with pytest.raises(OptionError, match=f"gathered.attention has no option {name}"):
            gathered.forward(*sample(), lists, **{name: None})
    with pytest.raises(DtypeError, match="float16, must be"):
        gathered.forward(*sample(), lists, dtype="float16")
    fwd = gathered.forward(*sample(), lists)
    with pytest.raises(ShapeError, match="dweights has shape"):
        gathered.backward(fwd, fwd.out, None, np.zeros((B, H, T, S)))


def test_repeats_count_once_or_by_their_bias():
    """Both ways out of the error, against the lists with repeats in loops."""
    q, k, v = (x[0] for x in sample(12))
    lists = np.array(
        [[3, 1, 3, -1, 3], [0, 0, 2, -1, -1], [4, -1, 5, 6, 7], *[[0, 1, 2, 3, 4]] * 2]
    )
    once = drop_repeats(lists)
    assert once[0].tolist() == [3, 1, -1, -1, -1]
    counts = np.zeros((T, S))
    np.add.at(counts, (np.arange(T)[:, None], np.where(lists < 0, 0, lists)), lists >= 0)
    whole = np.broadcast_to(lists, (H, *lists.shape))
    twice = formulas.gathered_in_loops(q, k, v, whole, 1 / math.sqrt(D))[0]
    bias = np.log(np.maximum(counts, 1))
    got = gathered.attention(q, k, v, once, bias=bias)
    exact = formula(q, k, v, index_mask(once, S), bias=Bounded(bias, 2 * abs(bias)))
    assert abs(got - twice).max() <= 2 * 2.0**-52 * exact["out"].e.max()
    listed = np.broadcast_to(index_mask(lists, S), (T, S))
    assert np.array_equal(index_mask(once, S), listed)


# --- selection ------------------------------------------------------------------------------------


def choose(row, n, visible):
    """The n largest by hand: largest first, of equal ones the lower key."""
    order = sorted((s for s in range(len(row)) if visible[s] and row[s] > -np.inf),
                   key=lambda s: (-row[s], s))  # fmt: skip
    return (order + [-1] * n)[:n]


@given(st.integers(0, 8), st.integers(0, 99), st.booleans())
def test_top_k_takes_the_largest_and_of_ties_the_lowest(n, seed, masked):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-2, 3, (2, 3, 6)).astype(float)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    mask = rng.random((3, 6)) < 0.6 if masked else None
    got = top_k(scores, n, mask)
    assert got.shape == (2, 3, n)
    for b, t in np.ndindex(2, 3):
        visible = np.ones(6, bool) if mask is None else mask[t]
        assert got[b, t].tolist() == choose(scores[b, t], n, visible)


def test_a_choice_is_constant_so_gradients_are_those_of_fixed_lists():
    """By complex step, which the choice follows by its real part, and by a difference."""
    q, k, v = (x[:, :K] for x in sample(14))
    do = np.random.default_rng(15).standard_normal((B, K, T, E))

    def loss(q):
        lists = top_k((q @ k.swapaxes(-1, -2)).real, M)
        return (do * gathered.attention(q, k, v, lists)).sum()

    scores = np.sort(q @ k.swapaxes(-1, -2))
    gap = np.diff(scores)[..., S - M - 1].min()  # between the last chosen key and the next
    fwd = gathered.forward(q, k, v, top_k(q @ k.swapaxes(-1, -2), M))
    dq = gathered.backward(fwd, do).q
    along = np.random.default_rng(16).standard_normal(q.shape)
    slope = loss(q + 1e-200j * along).imag / 1e-200
    terms = dq * along
    allowed = (terms.size + 4 * (D + M + E)) * 2.0**-53 * abs(terms).sum()
    assert abs(slope - terms.sum()) <= allowed
    h = 2.0**-18
    assert 2 * h * abs(along @ k.swapaxes(-1, -2)).max() < gap  # no choice changes over the step
    quotient = (loss(q + h * along) - loss(q - h * along)) / (2 * h)
    second = abs(loss(q + h * along) - 2 * loss(q) + loss(q - h * along)) / h**2
    # Truncation is h² / 6 times the third derivative, here below h times the second and first.
    assert abs(quotient - slope) <= h * (second + abs(slope) + abs(terms).sum())


def test_wrong_rankings_are_errors():
    scores = np.zeros((T, S))
    for error, match, args in (
        (OptionError, "n is -1, must be an integer", (scores, -1)),
        (OptionError, "scores has NaN", (scores * np.nan, 2)),
        (DtypeError, "scores is complex128", (scores + 0j, 2)),
        (DtypeError, "mask is int64", (scores, 2, np.ones((T, S), int))),
        (ShapeError, "scores has shape", (scores[0], 2)),
        (ShapeError, "mask has shape", (scores, 2, np.ones((S, T), bool))),
    ):
        with pytest.raises(error, match=match):
            top_k(*args)
    assert top_k(scores * np.nan, 2, np.zeros((T, S), bool)).tolist() == [[-1, -1]] * T


# --- mistakes -------------------------------------------------------------------------------------


def wrong_forward(q, k, v, lists, mistake):
    """Gathered attention with a mistake in it, by rows that NumPy's indexing reads."""
    if mistake == "off by one":
        return gathered.attention(q, k, v, np.where(lists < 0, -1, (lists + 1) % S))
    used = np.ones_like(lists, bool)  # −1 is the last key, in Python
    read = lists
    if mistake == "unused entries take weight":
        k, v = (np.concatenate([x, np.zeros_like(x[..., :1, :])], -2) for x in (k, v))
    elif mistake is None:
        used = lists >= 0
    G = H // K
    s = np.einsum("bhtd,bhtnd->bhtn", q, np.repeat(k, G, 1)[:, :, read]) / math.sqrt(D)
    p = np.where(used, np.exp(s), 0)
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bhtn,bhtne->bhte", p, np.repeat(v, G, 1)[:, :, read])


@pytest.mark.parametrize(
    "mistake", ["−1 wraps to the last key", "off by one", "unused entries take weight"]
)
def test_every_mistake_is_found(mistake):
    q, k, v = sample(17)
    lists = with_a_key_each(draw_lists((T,)))
    exact = formula(q, k, v, index_mask(lists, S))["out"]
    assert_within("out", wrong_forward(q, k, v, lists, None), exact)
    with pytest.raises(AssertionError, match="out is off by"):
        assert_within("out", wrong_forward(q, k, v, lists, mistake), exact)


@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_that_are_assigned_are_found(monkeypatch, accumulate):
    """Fancy assignment keeps the last of the rows that name one key."""

    def assign(total, at, rows):
        if accumulate:
            np.add.at(total, at, rows)
        else:
            total[at] = rows

    class Changed:
        class add:
            at = staticmethod(assign)

        def __getattr__(self, name):
            return getattr(np, name)

    q, k, v = sample(18)
    lists = with_a_key_each(draw_lists((T,)))
    fwd = gathered.forward(q, k, v, lists)
    do, dlse = cotangents(fwd)
    exact = formula(q, k, v, index_mask(lists, S), do, dlse)
    monkeypatch.setattr(gathered, "np", Changed())
    grads = gathered.backward(fwd, do, dlse)
    if accumulate:
        assert_within("dk", grads.k, exact["k"])
    else:
        with pytest.raises(AssertionError, match="dk is off by"):
            assert_within("dk", grads.k, exact["k"])


def test_backward_takes_its_own_forward_alone():
    with pytest.raises(OptionError, match=r"fwd is of type NoneType; pass the result of"):
        gathered.backward(None, np.ones(1))
