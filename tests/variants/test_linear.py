"""Linear attention: loops, two forms, complex steps, and the functions of other systems."""

import math

import mpmath  # type: ignore[import-untyped]  # it has no annotations
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.testing.bounds.linear import linear_bounds
from npattn.testing.bounds.ulp import excess
from npattn.variants import linear
from npattn.variants.linear import FEATURE_MAPS, FeatureMap, chunked, recurrent
from tests.variants import linear_loops

B, H, K, T, D, E = 2, 6, 3, 7, 5, 2
FORMS = ({}, *({"form": "chunked"} | size for size in ({"chunk_size": 5}, {"chunk_size": 3}, {})))
NAMES = ("q", "k", "v", "log_decay", "beta", "initial_state", "initial_normaliser")


def softplus(x):
    return np.log(1 + np.exp(x))


def sample(seed, *, causal, normalise, decay=None, state=False, keys=T, feature_map="elu"):
    """Arrays and options of a problem; q, k, v are the first three."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape)

    arrays = {"q": normal(B, H, T, D), "k": normal(B, K, keys, D), "v": normal(B, K, keys, E)}
    shapes = {"head": (K, 1, 1), "key": (B, K, keys, 1), "feature": (K, keys, D)}
    if decay is not None:
        arrays["log_decay"] = -abs(normal(*shapes[decay]))
    if state:
        arrays["initial_state"] = normal(B, K, D, E)
        if normalise:
            arrays["initial_normaliser"] = abs(normal(B, K, D))
    return arrays, {"causal": causal, "normalise": normalise, "feature_map": feature_map}


def cotangents(fwd, seed=9):
    rng = np.random.default_rng(seed)
    results = (fwd.out, fwd.state, fwd.normaliser)
    return [None if x is None else rng.standard_normal(x.shape) for x in results]


@st.composite
def problems(draw):
    causal, normalise = draw(st.booleans()), draw(st.booleans())
    return sample(
        draw(st.integers(0, 999)),
        causal=causal,
        normalise=normalise,
        decay=draw(st.sampled_from([None, "head", "key", "feature"])) if causal else None,
        state=draw(st.booleans()),
        keys=T if causal else draw(st.sampled_from([T, 11, 1])),
        feature_map=draw(st.sampled_from([*FEATURE_MAPS, np.tanh, softplus])),
    )


def assert_within(bounds, results, times=1):
    """Check results against exact ones; `times` of the bound where both have rounded."""
    for name, (exact, allowed) in bounds.items():
        assert results[name].shape == exact.shape
        beyond = excess(results[name], exact) - times * allowed
        assert not (beyond > 0).any(), name


def results_of(fwd, grads):
    results = {"out": fwd.out, "state": fwd.state, "normaliser": fwd.normaliser}
    return results | {"d" + name: getattr(grads, name) for name in NAMES}


# --- forward ----------------------------------------------------------------------------------


@pytest.mark.thorough
@given(problem=problems())
def test_forward_is_that_of_plain_loops(problem):
    arrays, options = problem
    out, state, normaliser = linear_loops.forward(**arrays, **options)
    fwd = linear.forward(**arrays, **options)
    bounds = linear_bounds(fwd, np.float64)
    assert_within(bounds, {"out": out, "state": state, "normaliser": normaliser})


@pytest.mark.thorough
@given(problem=problems())
def test_forms_agree_forward_and_backward(problem):
    arrays, options = problem
    fwd = linear.forward(**arrays, **options)
    douts = cotangents(fwd)
    bounds = linear_bounds(fwd, np.float64, *douts)
    for form in FORMS[1:]:
        other = linear.forward(**arrays, **options, **form)
        assert_within(bounds, results_of(other, linear.backward(other, *douts)), times=2)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("decay", [None, "head", "key", "feature"])
def test_float32_stays_within_its_bound(form, normalise, decay):
    arrays, options = sample(3, causal=True, normalise=normalise, decay=decay, state=True)
    arrays = {n: x.astype(np.float32) for n, x in arrays.items()}
    exact = linear.forward(**arrays, **options)
    douts = [None if x is None else x.astype(np.float32) for x in cotangents(exact)]
    fwd = linear.forward(**arrays, **options, **form, dtype=np.float32)
    results = results_of(fwd, linear.backward(fwd, *douts))
    assert {x.dtype for x in results.values() if x is not None} == {np.dtype(np.float32)}
    wide = [None if x is None else x.astype(np.float64) for x in douts]
    assert_within(linear_bounds(exact, np.float32, *wide), results)


def test_a_state_carries_on():
    arrays, options = sample(1, causal=True, normalise=True, decay="feature")
    whole = linear.forward(**arrays, **options)
    state, outs = {}, []
    for part in (slice(0, 3), slice(3, 3), slice(3, T)):
        pieces = {n: x[..., part, :] for n, x in arrays.items()}
        fwd = linear.forward(**pieces, **options, **state)
        state = {"initial_state": fwd.state, "initial_normaliser": fwd.normaliser}
        outs.append(fwd.out)
    results = {"out": np.concatenate(outs, -2), "state": fwd.state, "normaliser": fwd.normaliser}
    assert_within(linear_bounds(whole, np.float64), results, times=2)


@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("reset", [-1e9, -1e15, -1e30, -np.inf])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_reset_forgets_what_came_before(form, reset, per_feature):
    """As at the border of two documents: from there on it is the sequence that begins there."""
    T, D, E, at = 7, 3, 2, 4
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((1, T, n)) for n in (D, D, E))
    g = -abs(rng.standard_normal((1, T, D if per_feature else 1)))
    g[0, at] = reset
    options = {"causal": True, "normalise": False}
    fwd = linear.forward(q, k, v, log_decay=g, **options, **form)
    later = [x[:, at:] for x in (q, k, v)]
    alone = linear.forward(*later, log_decay=g[:, at:], **options)
    np.testing.assert_allclose(fwd.out[:, at:], alone.out, rtol=1e-12)
    np.testing.assert_allclose(fwd.state, alone.state, rtol=1e-12)
    dout = rng.standard_normal(fwd.out.shape)
    dout[:, :at] = 0
    grads, own = linear.backward(fwd, dout), linear.backward(alone, dout[:, at:])
    for name in ("q", "k", "v", "log_decay"):
        whole, part = getattr(grads, name), getattr(own, name)
        np.testing.assert_allclose(whole[:, at:], part, rtol=1e-11, atol=1e-14)
        np.testing.assert_allclose(whole[:, :at], 0, atol=1e-14)  # what cancels in log_decay


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_query_whose_weights_add_up_to_0_gives_0(form):
    arrays, options = sample(4, causal=True, normalise=True, feature_map="relu")
    arrays["q"][0, 0, 2] = -1
    fwd = linear.forward(**arrays, **options, **form)
    assert not fwd.out[0, 0, 2].any()
    dout = np.zeros_like(fwd.out)
    dout[0, 0, 2] = 1
    grads = linear.backward(fwd, dout)
    assert not any(x.any() for x in (grads.q, grads.k, grads.v))


def test_relu_has_slope_0_at_0():
    x = np.array([-1.0, 0.0, 2.0])
    assert FEATURE_MAPS["relu"].pullback(x, np.ones(3)).tolist() == [0, 0, 1]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rank_2_is_one_head(form):
    arrays, options = sample(5, causal=True, normalise=True, decay="feature", state=True)
    arrays["log_decay"] = arrays["log_decay"][None]
    one = {n: x[0, :1] for n, x in arrays.items()}
    fwd = linear.forward(**one, **options, **form)
    flat = linear.forward(**{n: x[0] for n, x in one.items()}, **options, **form)
    assert flat.out.shape == (T, E)
    assert np.array_equal(flat.out, fwd.out[0])
    assert np.array_equal(flat.state, fwd.state[0])
    assert np.array_equal(flat.normaliser, fwd.normaliser[0])
    douts = cotangents(fwd)
    grads = linear.backward(fwd, *douts)
    flat_grads = linear.backward(flat, *(x[0] for x in douts))
    for name in arrays:
        assert np.array_equal(getattr(flat_grads, name), getattr(grads, name)[0])


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("empty", ["T", "H", "D", "E"])
def test_sizes_of_0(empty, causal, form):
    h, t, d, e = (0 if empty == n else m for n, m in (("H", 2), ("T", 3), ("D", 5), ("E", 7)))
    q, v = np.ones((h, t, d)), np.ones((h, t, e))
    fwd = linear.forward(q, q, v, causal=causal, **form)
    assert fwd.out.shape == (h, t, e)
    assert np.isfinite(fwd.out).all()
    assert fwd.state.shape == (h, d, e)
    grads = linear.backward(fwd, np.ones_like(fwd.out))
    assert (grads.q.shape, grads.k.shape, grads.v.shape) == (q.shape, q.shape, v.shape)


def test_no_keys_give_0_or_the_state():
    q = np.ones((1, 3, 2))
    none = np.ones((1, 0, 2))
    assert not linear.attention(q, none, none).any()
    state = np.arange(4.0).reshape(1, 2, 2)
    out = linear.attention(q, none, none, normalise=False, initial_state=state, scale=1.0)
    assert np.array_equal(out[0, 0], 2 * state[0].sum(0))  # φ(1) is 2


def test_arguments_are_not_written_to():
    arrays, options = sample(1, causal=True, normalise=True, decay="key", state=True)
    copies = {n: x.copy() for n, x in arrays.items()}
    for form in FORMS:
        fwd = linear.forward(**arrays, **options, **form)
        douts = cotangents(fwd)
        before = [x.copy() for x in douts]
        linear.backward(fwd, *douts)
        assert all(np.array_equal(x, y) for x, y in zip(douts, before, strict=True))
    assert all(np.array_equal(arrays[n], x) for n, x in copies.items())


# --- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("decay", [None, "head", "key", "feature", "all keys"])
def test_gradients_are_those_of_complex_steps(form, feature_map, normalise, decay):
    causal = decay != "all keys"
    arrays, options = sample(
        7, causal=causal, normalise=normalise, decay=decay if causal else None, state=True,
        keys=T if causal else 11, feature_map=feature_map,
    )  # fmt: skip
    fwd = linear.forward(**arrays, **options, **form)
    douts = cotangents(fwd)
    grads = linear.backward(fwd, *douts)
    bounds, rng, h = linear_bounds(fwd, np.float64, *douts), np.random.default_rng(3), 1e-30
    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        moved = linear.forward(**{**arrays, name: x + 1j * h * direction}, **options, **form)
        results = (moved.out, moved.state, moved.normaliser)
        pairs = [(d, y) for d, y in zip(douts, results, strict=True) if d is not None]
        slopes = [(d * y.imag).sum() / h for d, y in pairs]
        # The step passes the same sums, forward; a bound for the gradient is one for it too.
        allowed = 2 * (bounds["d" + name][1] * abs(direction)).sum()
        assert abs(sum(slopes) - (getattr(grads, name) * direction).sum()) <= allowed


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_a_callable_is_differentiated_as_a_named_map(form):
    arrays, options = sample(8, causal=True, normalise=True, feature_map="elu")
    named = linear.forward(**arrays, **options, **form)
    options["feature_map"] = lambda x: np.where(x.real > 0, x + 1, np.exp(x))
    fwd = linear.forward(**arrays, **options, **form)
    douts = cotangents(fwd)
    bounds = linear_bounds(named, np.float64, *douts)
    assert_within(bounds, results_of(fwd, linear.backward(fwd, *douts)), times=2)


def test_a_feature_map_of_its_own_has_its_own_pullback():
    arrays, options = sample(8, causal=True, normalise=False)
    own = FeatureMap(lambda x: x**2, lambda x, dy: 2 * x * dy)
    fwd = linear.forward(**arrays, **(options | {"feature_map": own}))
    same = linear.forward(**arrays, **(options | {"feature_map": lambda x: x * x}))
    douts = cotangents(fwd)
    bounds = linear_bounds(fwd, np.float64, *douts)
    assert_within(bounds, results_of(same, linear.backward(same, *douts)), times=2)


def test_leading_axes_broadcast_and_their_gradients_are_summed():
    arrays, options = sample(6, causal=True, normalise=True, decay="head", state=True)
    arrays["k"], arrays["v"] = arrays["k"][0], arrays["v"][:1]
    arrays["initial_normaliser"] = arrays["initial_normaliser"][0, 0]
    fwd = linear.forward(**arrays, **options)
    whole = {n: np.broadcast_to(arrays[n], (B, *arrays[n].shape[-3:])) for n in "kv"}
    whole["initial_normaliser"] = np.broadcast_to(arrays["initial_normaliser"], (B, K, D))
    whole["log_decay"] = np.broadcast_to(arrays["log_decay"], (B, K, T, D))
    full = linear.forward(**(arrays | whole), **options)
    assert np.array_equal(fwd.out, full.out)
    douts = cotangents(fwd)
    grads, full_grads = (linear.backward(x, *douts) for x in (fwd, full))
    bounds = linear_bounds(fwd, np.float64, *douts)
    for name in ("k", "v", "log_decay", "initial_normaliser"):
        got, parts = getattr(grads, name), getattr(full_grads, name)
        axes = tuple(i for i in range(parts.ndim) if i < parts.ndim - got.ndim)
        axes += tuple(i for i in range(-got.ndim, 0) if got.shape[i] != parts.shape[i])
        summed = parts.sum(axes, keepdims=True).reshape(got.shape)
        assert (abs(summed - got) <= 2 * bounds["d" + name][1]).all(), name


def test_a_missing_cotangent_is_0():
    arrays, options = sample(6, causal=True, normalise=True)
    fwd = linear.forward(**arrays, **options)
    zeros = linear.backward(fwd, np.zeros_like(fwd.out), np.ones_like(fwd.state))
    assert np.array_equal(zeros.k, linear.backward(fwd, None, np.ones_like(fwd.state)).k)
    assert not zeros.q.any()


# --- the delta rule ---------------------------------------------------------------------------


def delta_sample(seed, decay=None, state=False, feature_map="identity"):
    arrays, options = sample(
        seed, causal=True, normalise=False, decay=decay, state=state, feature_map=feature_map
    )
    arrays["k"] /= np.sqrt((arrays["k"] ** 2).sum(-1, keepdims=True))
    arrays["beta"] = np.random.default_rng(seed).uniform(0, 1, (K, T, 1))
    return arrays, options


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("feature_map", ["identity", "softmax"])
@pytest.mark.parametrize("decay", [None, "head", "key", "feature"])
def test_the_delta_rule_is_that_of_plain_loops(form, feature_map, decay):
    arrays, options = delta_sample(23, decay, state=True, feature_map=feature_map)
    out, state = linear_loops.delta_forward(**arrays, feature_map=feature_map)
    fwd = linear.forward(**arrays, **options, **form)
    assert_within(linear_bounds(fwd, np.float64), {"out": out, "state": state}, times=2)


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
@pytest.mark.parametrize("decay", [None, "head", "feature"])
def test_gradients_of_the_delta_rule_are_those_of_complex_steps(form, decay):
    arrays, options = delta_sample(29, decay, state=True, feature_map="softmax")
    fwd = linear.forward(**arrays, **options, **form)
    douts = cotangents(fwd)
    grads, bounds = linear.backward(fwd, *douts), linear_bounds(fwd, np.float64, *douts)
    for name, x in arrays.items():
        direction = np.random.default_rng(1).standard_normal(x.shape)
        moved = linear.forward(**{**arrays, name: x + 1e-30j * direction}, **options, **form)
        pairs = ((douts[0], moved.out), (douts[1], moved.state))
        slope = sum((d * y.imag).sum() for d, y in pairs) * 1e30
        allowed = 2 * (bounds["d" + name][1] * abs(direction)).sum()
        assert abs(slope - (getattr(grads, name) * direction).sum()) <= allowed, name


@pytest.mark.thorough
@pytest.mark.parametrize(("T", "length"), [(67, None), (5, 1e8)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_states_that_grow_by_many_powers_of_ten_keep_their_digits(form, T, length):
    """The keys of one state are 10¹⁷ times as large as others; row by row none of them is lost."""
    D, E = 61, 2
    rng = np.random.default_rng(T)
    q, k, v = (rng.standard_normal((T, n)) for n in (D, D, E))
    beta = rng.uniform(0, 1, (T, 1))
    if length is not None:
        k *= length / np.sqrt((k**2).sum(-1, keepdims=True))
    with mpmath.workdps(80):
        exact = [[float(x) for x in row] for row in exact_delta(q, k, v, beta)]
    out = linear.attention(
        q, k, v, beta=beta, scale=1.0, causal=True, normalise=False, feature_map="identity", **form
    )
    largest = abs(np.array(exact)).max(-1, keepdims=True)
    assert largest.max() > 1e17
    fwd = linear.forward(
        q, k, v, beta=beta, scale=1.0, causal=True, normalise=False, feature_map="identity"
    )
    allowed = linear_bounds(fwd, np.float64)["out"][1]
    assert (abs(out - exact) <= allowed).all()
    assert (allowed.min(-1) < 1e-2 * largest[:, 0]).all()  # it says something of every row


def exact_delta(q, k, v, beta):
    """Rows of the output in mpmath, key by key."""
    q, k, v, beta = (mpmath.matrix(x.tolist()) for x in (q, k, v, beta))
    state, rows = mpmath.zeros(k.cols, v.cols), []
    for t in range(k.rows):
        state += k[t, :].T * (beta[t] * (v[t, :] - k[t, :] * state))
        rows.append(list(q[t, :] * state))
    return rows


@pytest.mark.parametrize("decay", [None, "key", "feature"])
def test_onnx_delta_rule(decay):
    ops = pytest.importorskip("onnx.reference.ops.op_linear_attention")
    arrays, options = delta_sample(31, decay, state=True)
    arrays = narrow(arrays)
    if decay == "feature":
        arrays["log_decay"] = np.repeat(arrays["log_decay"][None], B, 0)
    got, present = ops.LinearAttention._run(
        None, *(rows(arrays[n]) for n in "qkv"), arrays["initial_state"],
        rows(arrays["log_decay"]) if decay else None, rows(np.repeat(arrays["beta"][None], B, 0)),
        q_num_heads=H, kv_num_heads=K, update_rule="gated_delta" if decay else "delta",
    )  # fmt: skip
    bounds = linear_bounds(linear.forward(**arrays, **options), np.float32)
    assert_within(bounds, {"out": got.reshape(B, T, H, E).swapaxes(1, 2), "state": present})


# --- mistakes ---------------------------------------------------------------------------------


def wrong_forward(mistake, x):
    """Features, a recurrence with a mistake, and no normalisation."""
    state, y = x.state, np.empty((*x.q.shape[:-1], x.v.shape[-1]))
    a = np.exp(x.g)
    for t in range(T):
        new = x.k[..., t, :, None] * x.v[..., t, None, :]
        decay = a[..., t, :, None]
        if mistake == "decay of the key before":
            decay = a[..., max(t - 1, 0), :, None]
        if mistake == "read before write":
            y[..., t, :] = x.q[..., t, :] @ (state * decay)
        state = (state + new) * decay if mistake == "decay after write" else state * decay + new
        if mistake != "read before write":
            y[..., t, :] = x.q[..., t, :] @ state
    return y, state


@pytest.mark.parametrize(
    "mistake", [None, "decay of the key before", "read before write", "decay after write"]
)
def test_mistakes_of_the_recurrence_are_beyond_the_bound(mistake):
    arrays, options = sample(3, causal=True, normalise=False, decay="feature", state=True)
    fwd = linear.forward(**arrays, **options)
    y, _ = wrong_forward(mistake, fwd.residuals[0])
    exact, allowed = linear_bounds(fwd, np.float32)["out"]
    ratio = (abs(y.reshape(exact.shape) - exact) / allowed).max()
    assert (ratio <= 1) == (mistake is None)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("no slope of the feature map", "dq"),
        ("no normaliser in the gradient", "dk"),
        ("decay not in the reverse", "dv"),
        ("reverse in the order of time", "dk"),
        ("last state gets nothing", "dv"),
        ("decay of the state after", "dlog_decay"),
    ],
)
def test_mistakes_of_gradients_are_beyond_the_bound(mistake, name):
    arrays, options = sample(3, causal=True, normalise=True, decay="feature", state=True)
    fwd = linear.forward(**arrays, **options)
    douts = cotangents(fwd)
    x, total = fwd.residuals
    shape = (B, K, H // K, T, E)
    dn = douts[0].reshape(shape) / total
    dd = -(dn * fwd.out.reshape(shape)).sum(-1, keepdims=True)
    if mistake == "no normaliser in the gradient":
        dd = 0 * dd
    dy, dS = np.concatenate([dn, dd], -1), np.concatenate([douts[1], douts[2][..., None]], -1)
    if mistake == "last state gets nothing":
        dS = 0 * dS
    if mistake == "decay not in the reverse":
        x = x._replace(g=0 * x.g)
    if mistake == "reverse in the order of time":
        x, dy = x._replace(k=x.k[..., ::-1, :], v=x.v[..., ::-1, :]), dy[..., ::-1, :]
    d = recurrent.backward(x, dy, dS)
    got = {"dv": d.v[..., :E], "dk": d.k, "dq": fwd.problem.scale * d.q.reshape(B, H, T, D)}
    got["dlog_decay"] = d.g.sum(0)
    if mistake == "decay of the state after":
        got["dlog_decay"] = np.roll(got["dlog_decay"], 1, -2)
    maps = FEATURE_MAPS["elu"]
    for which in ("q", "k"):
        if mistake != "no slope of the feature map":
            got["d" + which] = maps.pullback(arrays[which], got["d" + which])
    exact, allowed = linear_bounds(fwd, np.float32, *douts)[name]
    assert (abs(got[name] - exact) / allowed).max() > 10


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"causal": "top_left"}, OptionError, "causal is 'top_left', must be True or False"),
        ({"normalise": 1}, OptionError, "normalise is 1, must be True or False"),
        ({"feature_map": "silu"}, OptionError, "must be one of identity, elu, relu, softmax"),
        ({"feature_map": lambda x: x[..., 1:]}, OptionError, "feature_map returned shape"),
        ({"eps": -1.0}, OptionError, "eps is -1.0, must be a finite number ≥ 0"),
        ({"scale": math.nan}, OptionError, "scale is nan"),
        ({"form": "parallel"}, OptionError,
         'one of recurrent, chunked: all pairs at once are form="chunked" with chunk_size=7'),
        ({"chunk_size": 3}, OptionError, 'pass form="chunked"'),
        ({"chunk_size": 0, "form": "chunked"}, OptionError, "must be an integer ≥ 1"),
        ({"log_decay": np.zeros(K)}, ShapeError, "log_decay[:, None, None]"),
        ({"log_decay": np.zeros((K + 1, 1, 1))}, ShapeError, "broadcast against (..., K, S, D)"),
        ({"log_decay": np.zeros((3, B, K, T, D))}, ShapeError, "broadcast against"),
        ({"log_decay": np.zeros((T, 1)), "causal": False}, OptionError, "pass causal=True"),
        ({"beta": np.ones((T, 1))}, OptionError, "needs causal=True and normalise=False"),
        ({"beta": np.ones((T, D)), "normalise": False}, ShapeError,
         "broadcast against (..., K, S, 1)"),
        ({"log_decay": np.zeros((T, 1), int)}, DtypeError, "log_decay is int64"),
        ({"initial_state": np.zeros((B, K, D, E))}, OptionError, "must have both or neither"),
        ({"initial_normaliser": np.zeros(D), "normalise": False}, OptionError, "leave it out"),
        ({"initial_state": np.zeros(E), "initial_normaliser": np.zeros(D)}, ShapeError,
         "initial_state has shape (2,), must have rank 2"),
        ({"k": np.zeros((B, K, T + 1, D)), "v": np.zeros((B, K, T + 1, E))}, OptionError, "T = S"),
        ({"k": np.zeros((B, 4, T, D)), "v": np.zeros((B, 4, T, E))}, ShapeError, "does not divide"),
        ({"q": np.zeros((B, H, T, D), int)}, DtypeError, "q is int64"),
        ({"dtype": "bfloat16"}, DtypeError, "emulates no mixed precision"),
    ],
)  # fmt: skip
def test_errors_name_the_way_out(change, error, words):
    arrays, options = sample(1, causal=True, normalise=True)
    with pytest.raises(error) as caught:
        linear.attention(**(arrays | options | change))
    assert words in str(caught.value)


def test_errors_of_the_backward():
    arrays, options = sample(1, causal=True, normalise=False)
    fwd = linear.forward(**arrays, **options)
    with pytest.raises(OptionError, match="pass the result of npattn"):
        linear.backward(fwd.out, fwd.out)
    with pytest.raises(OptionError, match="got dnormaliser, but normalise is False"):
        linear.backward(fwd, fwd.out, dnormaliser=np.zeros((B, K, D)))
    with pytest.raises(ShapeError, match="dstate has shape"):
        linear.backward(fwd, fwd.out, np.zeros((B, K, D, E + 1)))
    with pytest.raises(DtypeError, match="dout is complex128, but all arrays are real"):
        linear.backward(fwd, fwd.out + 0j)
    for wrong in (lambda x: x.real**2, np.sum):
        cut = linear.forward(**arrays, **(options | {"feature_map": wrong}))
        with pytest.raises(OptionError, match=r"feature_map has a .*derivative that differs"):
            linear.backward(cut, cut.out)


def test_the_bound_covers_three_dtypes():
    arrays, options = sample(1, causal=True, normalise=False)
    fwd = linear.forward(**arrays, **options)
    with pytest.raises(DtypeError, match="must be float64, float32 or bfloat16"):
        linear_bounds(fwd, np.float16)
    assert not {"dq"} & linear_bounds(fwd, "bfloat16").keys()


# --- other systems ----------------------------------------------------------------------------


def narrow(arrays):
    return {n: x.astype(np.float32) for n, x in arrays.items()}


def rows(x):
    """(B, heads, T, D) → (B, T, heads · D)."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


@pytest.mark.parametrize("decay", [None, "key", "feature"])
@pytest.mark.parametrize("state", [True, False])
def test_onnx_reference(decay, state):
    ops = pytest.importorskip("onnx.reference.ops.op_linear_attention")
    arrays, options = sample(
        11, causal=True, normalise=False, decay=decay, state=state, feature_map="identity"
    )
    arrays = narrow(arrays)
    if decay == "feature":  # with a batch axis, as the operator has it
        arrays["log_decay"] = np.repeat(arrays["log_decay"][None], B, 0)
    past = arrays.get("initial_state")
    got, present = ops.LinearAttention._run(
        None, *(rows(arrays[n]) for n in "qkv"), past,
        rows(arrays["log_decay"]) if decay else None, q_num_heads=H, kv_num_heads=K,
        update_rule="gated" if decay else "linear",
    )  # fmt: skip
    bounds = linear_bounds(linear.forward(**arrays, **options), np.float32)
    out = got.reshape(B, T, H, E).swapaxes(1, 2)
    assert_within(bounds, {"out": out, "state": present})


def fla(name, module):
    torch = pytest.importorskip("torch")
    functions = pytest.importorskip(f"fla.ops.{module}.naive")

    def call(arrays, **options):
        tensors = {n: torch.tensor(x).swapaxes(1, 2) for n, x in arrays.items()}
        for tensor in tensors.values():
            tensor.requires_grad_()
        result = getattr(functions, name)(*tensors.values(), **options)
        result = result if isinstance(result, tuple) else (result, None)
        return tensors, *result

    return call


def fla_gradients(tensors, out, dout):
    out.backward(out.new_tensor(dout).swapaxes(1, 2))
    grads = {n: x.grad for n, x in tensors.items()}
    return {"d" + n: g.swapaxes(1, 2).numpy() for n, g in grads.items()}


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.filterwarnings("ignore")  # of packages that fla imports
def test_fla_recurrence(normalise):
    call = fla("naive_recurrent_linear_attn", "linear_attn")
    arrays, options = sample(13, causal=True, normalise=normalise, feature_map="identity")
    arrays = narrow(arrays)
    arrays["q"] = arrays["q"][:, :K]
    if normalise:  # sums of positive weights, as after a feature map
        arrays["q"], arrays["k"] = abs(arrays["q"]), abs(arrays["k"])
    exact = linear.forward(**arrays, **options, eps=1e-10 if normalise else 0.0)
    tensors, out, state = call(arrays, normalize=normalise, output_final_state=True)
    dout = np.random.default_rng(0).standard_normal(exact.out.shape).astype(np.float32)
    bounds = linear_bounds(exact, np.float32, dout.astype(np.float64))
    last = {"state": state[0] if normalise else state}
    if normalise:
        last["normaliser"] = state[1][:, 0]
    last = {n: x.detach().numpy() for n, x in last.items()}
    results = {"out": out.detach().numpy().swapaxes(1, 2)} | last
    assert_within(bounds, results | fla_gradients(tensors, out, dout))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "module", "decay"),
    [
        ("naive_recurrent_simple_gla", "simple_gla", "key"),
        ("naive_parallel_simple_gla", "simple_gla", "key"),
        ("naive_chunk_simple_gla", "simple_gla", "key"),
        ("naive_recurrent_gla", "gla", "feature"),
    ],
)
def test_fla_gates(name, module, decay):
    call = fla(name, module)
    arrays, options = sample(17, causal=True, normalise=False, decay=decay, feature_map="identity")
    arrays = narrow(arrays)
    arrays["q"] = arrays["q"][:, :K]
    if decay == "feature":
        arrays["v"] = np.repeat(arrays["v"], 3, -1)[..., :D]  # it reads E off D
        arrays["log_decay"] = np.repeat(arrays["log_decay"][None], B, 0)
    exact = linear.forward(**arrays, **options)
    theirs = arrays | ({"log_decay": arrays["log_decay"][..., 0]} if decay == "key" else {})
    options = {"chunk_size": 4} if "chunk" in name else {}
    tensors, out, _ = call(theirs, **options)
    dout = np.random.default_rng(0).standard_normal(exact.out.shape).astype(np.float32)
    bounds = linear_bounds(exact, np.float32, dout.astype(np.float64))
    results = {"out": out.detach().numpy().swapaxes(1, 2)} | fla_gradients(tensors, out, dout)
    results["dlog_decay"] = results["dlog_decay"].reshape(exact.problem.log_decay.shape)
    del bounds["state"]
    assert_within(bounds, results)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_fla_gated_delta_rule(form):
    name = f"naive_{form}_gated_delta_rule"
    call = fla(name, "gated_delta_rule")
    arrays, options = delta_sample(37, "key", state=True)
    arrays["beta"] = np.repeat(arrays["beta"][None], B, 0)
    arrays = narrow(arrays)
    arrays["q"] = arrays["q"][:, :K]
    exact = linear.forward(**arrays, **options)
    names = ("beta", "log_decay") if form == "recurrent" else ("log_decay", "beta")
    theirs = {n: arrays[n] for n in "qkv"} | {n: arrays[n][..., 0] for n in names}
    more = {"chunk_size": 4} if form == "chunk" else {}
    initial = pytest.importorskip("torch").tensor(arrays["initial_state"])
    tensors, out, state = call(theirs, initial_state=initial, output_final_state=True, **more)
    dout = np.random.default_rng(0).standard_normal(exact.out.shape).astype(np.float32)
    bounds = linear_bounds(exact, np.float32, dout.astype(np.float64))
    del bounds["dinitial_state"]
    results = {"out": out.detach().numpy().swapaxes(1, 2), "state": state.detach().numpy()}
    results |= fla_gradients(tensors, out, dout)
    results |= {"d" + n: results["d" + n][..., None] for n in names}
    assert_within(bounds, results)


@pytest.mark.filterwarnings("ignore")
def test_fla_retention():
    torch = pytest.importorskip("torch")
    functions = pytest.importorskip("fla.ops.retention.naive")
    arrays, options = sample(19, causal=True, normalise=False, feature_map="identity")
    arrays = narrow(arrays)
    arrays["q"] = arrays["q"][:, :K]
    decay = np.log(1 - 2.0 ** (-5 - np.arange(K)))[:, None, None]
    exact = linear.forward(**arrays, **options, log_decay=decay)
    out = functions.naive_retention(*(torch.tensor(arrays[n]) for n in "qkv"))
    bound = linear_bounds(exact, np.float32)["out"]
    # It computes log2(γ) in float32: off by less than the last bit of a number below 1.
    moved = linear.forward(**arrays, **options, log_decay=decay + 2.0**-23)
    slack = abs(moved.out - exact.out)
    assert_within({"out": (bound[0], bound[1] + slack)}, {"out": out.numpy()})


def test_chunks_end_before_their_decays_lose_digits():
    def lengths(g, size):
        one = np.ones_like(g)
        x = linear.forward(one, one, one, causal=True, log_decay=g).residuals[0]
        return [at.stop - at.start for at, _ in chunked._chunks(x, size)]

    none, strong = np.zeros((7, 2)), np.full((7, 2), -0.4 * chunked.LIMIT)
    assert [lengths(none, n) for n in (1, 3, 7, 8)] == [[1] * 7, [3, 3, 1], [7], [7]]
    assert lengths(strong, 7) == [3, 3, 1]
    reset = none.copy()
    reset[3, 1] = -np.inf
    assert lengths(reset, 7) == [3, 4]


def test_numbers_of_numpy_are_numbers():
    x = np.ones((1, 2, 3))
    one = linear.attention(x, x, x, eps=0.5)
    np.testing.assert_array_equal(linear.attention(x, x, x, eps=np.float32(0.5)), one)
