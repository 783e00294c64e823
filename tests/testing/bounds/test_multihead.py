"""Bounds of multi-head attention hold for torch, see mistakes, and follow errors of inputs."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

import npattn.problem.arrays
from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.testing.bounds.multihead import multihead_tolerance

B, T, S, IN, OUT, D, E = 2, 5, 7, 11, 13, 3, 17
GRADIENTS = ("query", "key", "value", "wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo")
INVARIANT = ("bk", "bv", "bo")
"""Gradients that are 0, or sums of cotangents, whatever the scale."""


def module(H, K, dtype, **options):
    mha = npattn.MultiHeadAttention.init(
        IN, H, num_kv_heads=K, head_size=D, value_size=E, out_size=OUT, seed=3, **options
    )
    rng = np.random.default_rng(4)
    biases = {n: rng.standard_normal(getattr(mha, n).shape) for n in ("bq", "bk", "bv", "bo")}
    arrays = {**mha.parameters, **biases}
    return npattn.MultiHeadAttention(
        **{n: x.astype(dtype) for n, x in arrays.items()}, num_heads=H, num_kv_heads=K
    )


def in_torch(mha, arrays, dout, dweights, visible, fill, scale=1.0):
    """Attention with separate operations, in the dtype of its weights, and its gradients."""
    leaves = {n: torch.tensor(x).requires_grad_() for n, x in arrays.items()}
    leaves |= {n: torch.tensor(x).requires_grad_() for n, x in mha.parameters.items()}
    p = leaves
    q, k, v = (p[x] @ p["w" + x[0]] + p["b" + x[0]] for x in ("query", "key", "value"))
    H, K = mha.num_heads, mha.num_kv_heads
    pairs = ((q, H), (k, K), (v, K))
    q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in pairs)
    k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
    s = (q @ k.mT * (scale / D**0.5)).masked_fill(~torch.tensor(visible), fill)
    weights = s.softmax(-1)
    out = (weights @ v).transpose(1, 2).flatten(2) @ p["wo"] + p["bo"]
    loss = (out * torch.tensor(dout)).sum() + (weights * torch.tensor(dweights)).sum()
    grads = torch.autograd.grad(loss, [leaves[n] for n in GRADIENTS])
    results = {"out": out, "weights": weights, **dict(zip(GRADIENTS, grads, strict=True))}
    return {n: x.detach().double().numpy() for n, x in results.items()}


def problem(H, K, dtype, seed=0, size=1.0):
    rng, mha = np.random.default_rng(seed), module(H, K, dtype)
    lengths = {"query": T, "key": S, "value": S}
    arrays = {n: (size * rng.standard_normal((B, x, IN))).astype(dtype) for n, x in lengths.items()}
    dout = rng.standard_normal((B, T, OUT)).astype(dtype)
    dweights = rng.standard_normal((B, H, T, S)).astype(dtype)
    visible = rng.random((B, 1, T, S)) < 0.7
    visible[..., 0] = True
    return mha, arrays, dout, dweights, visible


def exact(mha, arrays, dout, dweights, visible, conventions=None):
    fwd = mha.forward(**arrays, mask=visible, conventions=conventions)
    grads = mha.backward(fwd, dout.astype(float), None, dweights.astype(float))
    want = {"out": fwd.out, "weights": fwd.weights}
    return fwd, want | {n: getattr(grads, n) for n in GRADIENTS}


def ratios(got, want, allowed):
    with np.errstate(divide="ignore", invalid="ignore"):
        return {n: np.nanmax(abs(got[n] - want[n]) / allowed[n]) for n in got}


@pytest.mark.parametrize(("H", "K"), [(3, 3), (6, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [0.25, 1.0, 8.0])
def test_errors_of_torch_are_within_the_bound(H, K, dtype, size):
    worst = {}
    for seed in range(5):
        mha, arrays, dout, dweights, visible = problem(H, K, dtype, seed, size)
        fwd, want = exact(mha, arrays, dout, dweights, visible)
        got = in_torch(mha, arrays, dout, dweights, visible, -torch.inf)
        allowed = multihead_tolerance(
            fwd, dtype, dout=dout.astype(float), dweights=dweights.astype(float)
        )
        assert allowed.keys() == want.keys()
        assert all(allowed[n].shape == want[n].shape for n in want)
        for name, ratio in ratios(got, want, allowed).items():
            worst[name] = max(worst.get(name, 0), ratio)
    assert max(worst.values()) <= 1, worst
    assert min(worst.values()) > 1e-5, worst  # no bound is vacuous


@pytest.mark.parametrize("name", ["out", "weights", *GRADIENTS])
def test_a_scale_that_is_off_by_a_hundredth_is_beyond_the_bound(name):
    mha, arrays, dout, dweights, visible = problem(3, 3, "float32")
    fwd, want = exact(mha, arrays, dout, dweights, visible)
    got = in_torch(mha, arrays, dout, dweights, visible, -torch.inf, scale=1.01)
    allowed = multihead_tolerance(
        fwd, "float32", dout=dout.astype(float), dweights=dweights.astype(float)
    )
    if name in INVARIANT:
        assert ratios(got, want, allowed)[name] <= 1
    else:
        assert ratios(got, want, allowed)[name] > 1


def test_rows_that_see_nothing_are_filled():
    mha, arrays, dout, dweights, visible = problem(3, 3, "float32")
    visible[0, 0, 1] = False
    fills = Conventions(hidden_fill=-1e9)
    fwd, want = exact(mha, arrays, dout, dweights, visible, fills)
    got = in_torch(mha, arrays, dout, dweights, visible, -1e9)
    allowed = multihead_tolerance(
        fwd, "float32", dout=dout.astype(float), dweights=dweights.astype(float)
    )
    assert max(ratios(got, want, allowed).values()) <= 1
    # Such a row keeps 2 % of its o, docs/tolerance.md §11.
    assert allowed["out"].max() < 0.05 * abs(want["out"]).max()


@pytest.mark.parametrize(("H", "K"), [(3, 3), (6, 2)])
def test_errors_of_inputs_are_carried_to_every_result(H, K):
    """In float64 nothing else moves the results: a bound of the first order and beyond."""
    mha, arrays, dout, dweights, visible = problem(H, K, "float64")
    fwd, want = exact(mha, arrays, dout, dweights, visible)
    rng, worst = np.random.default_rng(5), {}
    errors = {n: 1e-4 * abs(rng.standard_normal(x.shape)) for n, x in arrays.items()}
    allowed = multihead_tolerance(fwd, "float64", dout=dout, dweights=dweights, errors=errors)
    for _ in range(30):
        signs = {n: np.sign(rng.standard_normal(x.shape)) for n, x in arrays.items()}
        moved = {n: x + signs[n] * errors[n] for n, x in arrays.items()}
        _, got = exact(mha, moved, dout, dweights, visible)
        for name, ratio in ratios(got, want, allowed).items():
            worst[name] = max(worst.get(name, 0), ratio)
    assert max(worst.values()) <= 1, worst
    assert min(x for n, x in worst.items() if n not in INVARIANT) > 1e-3, worst


def test_key_and_value_that_are_the_query_add_their_bounds():
    mha, arrays, dout, *_ = problem(3, 3, "float32")
    fwd = mha.forward(arrays["query"])
    allowed = multihead_tolerance(fwd, "float32", dout=dout.astype(float))
    assert "key" not in allowed
    assert allowed["query"].shape == arrays["query"].shape


def test_appended_keys_are_exact_and_have_gradients():
    mha = npattn.MultiHeadAttention.init(IN, 3, head_size=D, add_bias_kv=True, seed=1)
    x = np.random.default_rng(0).standard_normal((B, T, IN)).astype("float32")
    fwd = mha.forward(x)
    allowed = multihead_tolerance(fwd, "float32", dout=np.ones(fwd.out.shape))
    assert allowed["weights"].shape == (B, 3, T, T + 1)
    assert allowed["bias_k"].shape == (3 * D,)
    assert 0 < allowed["bias_v"].max() < 1e-3


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_mixed_precision_is_within_a_wider_bound(name):
    mha, arrays, _, _, visible = problem(3, 3, "float32")
    low = getattr(torch, name)
    p = {n: torch.tensor(x) for n, x in {**arrays, **mha.parameters}.items()}
    with torch.autocast("cpu", low):
        q, k, v = (functional.linear(p[x], p["w" + x[0]].mT, p["b" + x[0]])
                   .unflatten(-1, (3, -1)).transpose(1, 2) for x in arrays)  # fmt: skip
        s = (q @ k.mT / D**0.5).masked_fill(~torch.tensor(visible), -torch.inf)
        o = (s.softmax(-1) @ v).transpose(1, 2).flatten(2)
        out = functional.linear(o, p["wo"].mT, p["bo"])
    fwd = mha.forward(**arrays, mask=visible)
    dtype = npattn.problem.arrays.to_numpy(out).dtype
    allowed = multihead_tolerance(fwd, dtype, mixed=True)["out"]
    ratio = (abs(out.double().numpy() - fwd.out) / allowed).max()
    assert 1e-3 < ratio <= 1
    assert (allowed > multihead_tolerance(fwd, dtype)["out"]).all()


def test_scores_that_move_by_more_than_all_leave_the_range_of_the_values():
    mha, arrays, _, _, visible = problem(3, 3, "float32", size=3e4)
    fwd = mha.forward(**arrays, mask=visible)
    allowed = multihead_tolerance(fwd, "float16")
    assert np.isfinite(allowed["out"]).all()
    assert (allowed["weights"] >= 1).any()


def test_gates_have_no_bound_yet():
    mha = npattn.MultiHeadAttention.init(IN, 3, head_size=D, seed=1)
    gated = dataclasses.replace(mha, wg=np.ones(mha.wq.shape))
    with pytest.raises(OptionError, match="a gate"):
        multihead_tolerance(gated.forward(np.ones((T, IN))), "float32")


@pytest.mark.parametrize("kind", [None, "rms", "layer", "l2", "rms_projection"])
def test_norms_and_turns_that_round_keep_within_the_bound(kind):
    """A module of float16 numbers that rounds after each step, as `dtype=` emulates it."""
    rng = np.random.default_rng(5)
    size = 8 * (3 if kind == "rms_projection" else 1)
    x, dout = rng.standard_normal((2, 2, 9, 24)).astype(np.float16)
    w = [(rng.standard_normal((24, 24)) / 4).astype(np.float16) for _ in range(4)]
    norms = {n: rng.standard_normal(size).astype(np.float16) for n in ("norm_q", "norm_k")}
    norms = {"qk_norm": kind, **norms} if kind else {}
    mha = npattn.MultiHeadAttention(*w, num_heads=3, **norms)
    exact, rounded = (mha.forward(x, rope=npattn.positions.Rotary(), dtype=d)
                      for d in (None, "float16"))  # fmt: skip
    allowed = multihead_tolerance(exact, "float16", dout=dout.astype(float))
    want, got = mha.backward(exact, dout), mha.backward(rounded, dout)
    for name, bound in allowed.items():
        pair = [x if name in ("out", "weights") else g for x, g in ((exact, want), (rounded, got))]
        one, other = (np.asarray(getattr(x, name), float) for x in pair)
        assert (abs(one - other) <= bound).all(), name
        assert name != "out" or np.median(bound) < abs(one).max()


WIDE = 211


def project_in_order(x, w, b, order):
    """x w + b in float32, its products added one by one."""
    y = np.zeros((*x.shape[:-1], w.shape[1]), np.float32)
    for i in order:
        y = y + x[..., i, None] * w[i]
    return y + b


@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_a_wide_product_has_a_sharp_bound_that_any_order_of_its_sum_keeps(order):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((1, 3, WIDE)).astype(np.float32)
    mha = npattn.MultiHeadAttention.init(
        WIDE, 1, head_size=2, value_size=5, out_size=WIDE, seed=3, dtype=np.float32
    )
    mha = dataclasses.replace(mha, wo=None, bo=None)
    fwd = mha.forward(x, np.repeat(x[:, :1], 2, 1))  # of equal keys: out is the value
    allowed = multihead_tolerance(fwd, np.float32)["out"]
    orders = {"forwards": np.arange(WIDE), "backwards": np.arange(WIDE)[::-1]}
    given = orders.get(order, rng.permutation(WIDE))
    b = np.zeros(5, np.float32) if mha.bv is None else mha.bv
    out = project_in_order(x[:, :1], mha.wv, b, given)
    assert (abs(out - fwd.out) <= allowed).all()
    assert (abs(out * (1 + 1e-4) - fwd.out) > allowed).mean() >= 0.8
    worst = 2.0**-24 * WIDE * (abs(x[:, :1]) @ abs(mha.wv))
    assert (allowed < worst / 5).all()


def test_equal_products_have_the_worst_case():
    """Their partial sums round to one side: nothing is as good as random."""
    ones = np.ones((1, 2, WIDE), np.float32)
    mha = npattn.MultiHeadAttention.init(WIDE, 1, head_size=2, value_size=5, out_size=WIDE,
                                         seed=3, dtype=np.float32)  # fmt: skip
    mha = dataclasses.replace(mha, wo=None, bo=None, bv=None, wv=np.full_like(mha.wv, 0.1))
    fwd = mha.forward(ones)
    allowed = multihead_tolerance(fwd, np.float32)["out"]
    assert (allowed > 2.0**-24 * WIDE * (abs(ones) @ abs(mha.wv))).all()
    out = project_in_order(ones, mha.wv, np.float32(0), range(WIDE))
    assert (abs(out - fwd.out) <= allowed).all()
