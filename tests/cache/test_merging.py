"""Parts of the keys, merged: against attention over all of them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
from npattn.cache import merge, merge_backward
from npattn.errors import DtypeError, OptionError, ShapeError
from tests.make import normal

H, T, S, D, E = 2, 5, 13, 3, 7
U = 2.0**-53


def problem(seed=0):
    q, k, v = (
        normal(H, T, D, seed=seed),
        normal(H, S, D, seed=seed + 1),
        normal(H, S, E, seed=seed + 2),
    )
    mask = np.random.default_rng(seed + 3).random((H, T, S)) < 0.6
    mask[0, 0] = False  # a row that sees nothing, in any part
    mask[1, 1, 4:] = False  # and one that sees the first part alone
    return q, k, v, mask


def in_parts(q, k, v, mask, cuts, base="e"):
    parts = []
    for a, b in zip((0, *cuts), (*cuts, S), strict=True):
        fwd = npattn.forward(q, k[:, a:b], v[:, a:b], mask[..., a:b])
        parts.append(fwd)
    unit = math.log(2) if base == "2" else 1
    return parts, [fwd.out for fwd in parts], [fwd.lse / unit for fwd in parts]


@pytest.mark.unmeasured
@pytest.mark.parametrize("base", ["e", "2"])
@given(seed=st.integers(0, 999), cuts=st.lists(st.integers(0, S), max_size=5).map(sorted))
def test_parts_of_the_keys_are_all_of_them(base, seed, cuts):
    q, k, v, mask = problem(seed)
    whole = npattn.forward(q, k, v, mask)
    _, outs, lses = in_parts(q, k, v, mask, cuts, base)
    o, lse = merge(outs, lses, base=base)
    unit = math.log(2) if base == "2" else 1
    assert np.allclose(o, whole.out, rtol=0, atol=256 * U * abs(v).max())
    assert np.allclose(lse * unit, whole.lse, rtol=64 * U, atol=64 * U)


@pytest.mark.parametrize("base", ["e", "2"])
def test_gradients_through_the_merge_are_those_of_all_keys(base):
    q, k, v, mask = problem()
    cuts, unit = (0, 4, 4, 9), math.log(2) if base == "2" else 1
    whole, (parts, outs, lses) = npattn.forward(q, k, v, mask), in_parts(q, k, v, mask, cuts, base)
    dout, dlse = normal(H, T, E, seed=8), normal(H, T, seed=9)
    dlse[0, 0] = 0  # the row that sees nothing
    want = npattn.backward(whole, dout, dlse)
    douts, dlses = merge_backward(outs, lses, dout, dlse * unit, base=base)
    grads = [
        npattn.backward(part, do, dl / unit)
        for part, do, dl in zip(parts, douts, dlses, strict=True)
    ]
    assert np.allclose(sum(one.q for one in grads), want.q, rtol=0, atol=1e3 * U)
    for name in "kv":
        got = np.concatenate([getattr(one, name) for one in grads], axis=1)
        assert np.allclose(got, getattr(want, name), rtol=0, atol=1e3 * U)


def test_parts_without_a_visible_key_are_left_out_whatever_they_hold():
    o, lse = np.full((2, 3), 1.5), np.array([0.5, 0.25])
    bad = np.full((2, 3), math.nan)
    got, total = merge([bad, o], [np.full(2, -np.inf), lse])
    assert np.array_equal(got, o)
    assert np.allclose(total, lse, rtol=4 * U)
    douts, dlses = merge_backward([bad, o], [np.full(2, -np.inf), lse], np.ones((2, 3)), np.ones(2))
    assert not douts[0].any()
    assert not dlses[0].any()
    assert np.array_equal(douts[1], np.ones((2, 3)))
    assert np.array_equal(dlses[1], np.ones(2))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_left_out_warns_of_nothing(bad):
    parts = [np.full((2, 3), bad), np.ones((2, 3))], [np.full(2, -np.inf), np.zeros(2)]
    assert np.array_equal(merge(*parts)[0], np.ones((2, 3)))
    douts, _ = merge_backward(*parts, np.ones((2, 3)))
    assert not douts[0].any()


def test_parts_that_are_all_empty_are_an_empty_row():
    empty = [np.ones((2, 3))] * 2, [np.full(2, -np.inf)] * 2
    o, lse = merge(*empty)
    assert not o.any()
    assert np.isneginf(lse).all()
    douts, dlses = merge_backward(*empty, np.ones((2, 3)), np.ones(2))
    assert not any(x.any() for x in (*douts, *dlses))


def test_a_nan_part_is_not_hidden():
    o, lse = merge([np.ones((1, 2))] * 2, [np.zeros(1), np.array([math.nan])])
    assert np.isnan(lse).all()
    assert np.isnan(o).all()


def test_large_lse_do_not_overflow():
    o, lse = merge([np.array([[1.0]]), np.array([[3.0]])], [np.array([1e4]), np.array([1e4])])
    assert np.allclose(o, 2)
    assert np.allclose(lse, 1e4 + math.log(2))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda outs, lses: (sum(outs) / len(outs), lses[0]),  # the mean of the parts
        lambda outs, lses: merge(outs[:1], lses[:1]),  # the first part alone
        lambda outs, lses: merge(outs, lses, base="2"),  # of natural logarithms
        lambda outs, lses: merge(outs, [np.exp(x) for x in lses]),  # the sums for their logarithms
    ],
)
def test_mistakes_are_seen(wrong):
    q, k, v, mask = problem()
    mask[:] = True
    _, outs, lses = in_parts(q, k, v, mask, (4,))
    want = npattn.attention(q, k, v)
    assert abs(merge(outs, lses)[0] - want).max() < 1e-14
    assert abs(wrong(outs, lses)[0] - want).max() > 1e-3


@pytest.mark.parametrize(
    ("outs", "lses", "options", "error", "words"),
    [
        ([], [], {}, ShapeError, "outs has 0 parts"),
        ([np.ones((2, 3))], [], {}, ShapeError, "outs has 1 parts and lses 0"),
        ([np.ones((2, 3))], [np.ones(3)], {}, ShapeError, "must be (..., E) and (...)"),
        ([np.ones((2, 3)), np.ones((2, 4))], [np.ones(2)] * 2, {}, ShapeError, "all alike"),
        ([np.ones((2, 3), int)], [np.ones(2)], {}, DtypeError, "outs is int64"),
        ([np.ones((2, 3)) * 1j], [np.ones(2)], {}, DtypeError, "outs is complex128, must be real"),
        ([np.ones((2, 3))], [np.ones(2) * 1j], {}, DtypeError, "lses is complex128, must be real"),
        (
            [np.ones((2, 3))],
            [np.ones(2)],
            {"base": 2},
            OptionError,
            "base is 2, must be one of e, 2",
        ),
        ([np.ones((2, 3))], [np.full(2, np.inf)], {}, OptionError, "pass np.where(np.isposinf"),
    ],
)
def test_errors_name_the_way_out(outs, lses, options, error, words):
    for call in (
        lambda: merge(outs, lses, **options),
        lambda: merge_backward(outs, lses, np.ones((2, 3)), **options),
    ):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)


def test_gradients_have_the_shapes_of_their_results():
    with pytest.raises(ShapeError, match="dout has shape"):
        merge_backward([np.ones((2, 3))], [np.ones(2)], np.ones((3, 2)))
