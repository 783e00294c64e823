"""Differential attention: loops, complex steps, DiffLlama, and mistakes."""

import math

import numpy as np
import pytest

import npattn
from npattn import masks
from npattn.engines import loops
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem import Problem
from npattn.testing.bounds.differential import differential_bounds
from npattn.testing.bounds.ulp import excess
from npattn.variants import differential
from npattn.variants.differential import initial_lambda, reparametrise, reparametrise_backward

B, H, K, T, S, D, E = 2, 6, 3, 5, 7, 2, 11
U = 2.0**-53
NAMES = ("q1", "k1", "q2", "k2", "v")
INPUTS = ("bias", "sinks", "norm_weight")


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def sample(seed=0):
    shapes = {"q1": (H, T, D), "k1": (K, S, D), "q2": (H, T, D), "k2": (K, S, D), "v": (K, S, E)}
    arrays = {n: normal(B, *shape, seed=seed + i) for i, (n, shape) in enumerate(shapes.items())}
    return arrays | {"lam": normal(H, seed=seed)}


OPTIONS = {
    "none": {},
    "mask": {"mask": np.random.default_rng(5).random((B, 1, T, S)) < 0.6},
    "causal": {"causal": "bottom_right"},
    "empty rows": {
        "causal": "bottom_right",
        "window": (1, 0),
        "mask": np.arange(S) < 3 * np.ones((T, 1)),
    },
    "softcap": {"softcap": 1.5, "scale": 2.0},
    "bias": {"bias": normal(H, T, S)},
    "sinks": {"sinks": normal(H)},
    "score_mod": {"score_mod": lambda s, b, h, t, j: np.tanh(s) * (1 + h)},
    "dropout": {"dropout_mask": normal(B, H, T, S) < 1, "dropout_rate": 0.25},
}
NORMS = {
    "plain": {},
    "norm": {"norm": True, "out_scale": 0.4},
    "weight": {"norm": True, "norm_weight": normal(E, seed=4), "norm_eps": 0.01},
}


def loops_forward(arrays, lam, options, norm=False, norm_weight=None, norm_eps=1e-5, out_scale=1.0):
    """Weights first: their difference times the values, and the norm, in plain Python."""
    q1, k1, q2, k2, v = (arrays[n] for n in NAMES)
    keep = options.get("dropout_mask", np.ones((B, H, T, S))) / (1 - options.get("dropout_rate", 0))
    plain = {n: x for n, x in options.items() if not n.startswith("dropout")}
    one, two = (loops.forward(Problem(q, k, v, **plain))[2] for q, k in ((q1, k1), (q2, k2)))
    out = np.zeros((B, H, T, E))
    for b, h, t in np.ndindex(B, H, T):
        weights = [float(one[b, h, t, s] - lam[h] * two[b, h, t, s]) for s in range(S)]
        row = [
            math.fsum(weights[s] * keep[b, h, t, s] * v[b, h // (H // K), s, e] for s in range(S))
            for e in range(E)
        ]
        if norm:
            size = math.sqrt(math.fsum(x * x for x in row) / E + norm_eps)
            row = [x / size for x in row]
            weight = [1.0] * E if norm_weight is None else norm_weight
            row = [x * w for x, w in zip(row, weight, strict=True)]
        out[b, h, t] = [out_scale * x for x in row]
    return out


def assert_within(bounds, results, times=1):
    for name, (exact, allowed) in bounds.items():
        assert results[name].shape == exact.shape
        assert not (excess(results[name], exact) > times * allowed).any(), name


def results_of(fwd, grads):
    named = {"d" + n: x for n, x in vars(grads).items() if x is not None}
    return {"out": fwd.out} | named


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("option", OPTIONS)
def test_forward_is_that_of_plain_loops(option, norm):
    arrays, options, norms = sample(), OPTIONS[option], NORMS[norm]
    fwd = differential.forward(**arrays, **options, **norms)
    bounds = differential_bounds(fwd, np.float64)
    assert_within(bounds, {"out": loops_forward(arrays, arrays["lam"], options, **norms)})
    assert np.array_equal(differential.attention(**arrays, **options, **norms), fwd.out)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("option", OPTIONS)
def test_float32_stays_within_its_bound(option, norm):
    arrays = {n: x.astype(np.float32) for n, x in sample(3).items()}
    options = OPTIONS[option] | NORMS[norm]
    arrays |= {n: options.pop(n).astype(np.float32) for n in INPUTS if n in options}
    exact = differential.forward(**arrays, **options)
    dout = normal(B, H, T, E, seed=8).astype(np.float32)
    fwd = differential.forward(**arrays, **options, dtype=np.float32)
    results = results_of(fwd, differential.backward(fwd, dout))
    assert {x.dtype for x in results.values()} == {np.dtype(np.float32)}
    assert_within(differential_bounds(exact, np.float32, dout.astype(np.float64)), results)


def test_weights_are_the_difference():
    arrays = sample()
    fwd = differential.forward(**arrays, causal="bottom_right")
    weighted = fwd.weights @ np.repeat(arrays["v"], H // K, 1)
    assert_within(differential_bounds(fwd, np.float64), {"out": weighted})
    want = fwd.first.weights - arrays["lam"][:, None, None] * fwd.second.weights
    assert np.array_equal(fwd.weights, want)


def test_a_number_is_a_number_for_every_head():
    arrays = sample()
    one = differential.forward(**(arrays | {"lam": 0.3}))
    each = differential.forward(**(arrays | {"lam": np.full(H, 0.3)}))
    assert np.array_equal(one.out, each.out)
    dout = normal(B, H, T, E, seed=8)
    dlam = differential.backward(one, dout).lam
    bound = differential_bounds(one, np.float64, dout)["dlam"][1]
    assert dlam.shape == ()
    assert abs(dlam - differential.backward(each, dout).lam.sum()) <= 2 * bound


def test_rank_2_is_one_head():
    """Within rounding: products of matrices and of stacks of them may be added in other orders."""
    arrays = sample()
    flat = {n: x[0, 0] for n, x in arrays.items() if n != "lam"}
    one = {n: x[None] for n, x in flat.items()}
    dout, dweights = normal(T, E), normal(T, S)
    for lam in (0.4, np.array([0.4])):
        fwd = differential.forward(**flat, lam=lam, norm=True)
        want = differential.forward(**one, lam=lam, norm=True)
        grads = differential.backward(fwd, dout)
        assert grads.lam.shape == np.shape(lam)
        results = results_of(fwd, grads)
        bounds = differential_bounds(want, np.float64, dout[None])
        results = {n: results[n].reshape(exact.shape) for n, (exact, _) in bounds.items()}
        assert_within(bounds, results, times=2)
        assert fwd.weights.shape == (T, S)
        assert differential.backward(fwd, dout, dweights).q1.shape == (T, D)


def test_masks_and_biases_of_npattn():
    arrays = sample()
    alibi = npattn.biases.alibi(H) + npattn.biases.dense(normal(H, T, S))
    fwd = differential.forward(**arrays, mask=masks.window(2, 1), bias=alibi)
    plain = differential.forward(
        **arrays, mask=fwd.first.problem.mask_array, bias=fwd.first.problem.bias_array
    )
    assert np.array_equal(fwd.out, plain.out)
    dout = normal(B, H, T, E)
    slopes, dense = differential.backward(fwd, dout).bias
    want = differential.backward(plain, dout).bias
    assert slopes is None or slopes.shape == (H,)
    bound = differential_bounds(plain, np.float64, dout)["dbias"][1]
    assert (abs(dense - want) <= 2 * bound).all()


def test_arguments_are_not_written_to():
    arrays = sample()
    copies = {n: x.copy() for n, x in arrays.items()}
    fwd = differential.forward(**arrays, norm=True, norm_weight=np.ones(E))
    dout = np.ones_like(fwd.out)
    differential.backward(fwd, dout)
    assert all(np.array_equal(arrays[n], x) for n, x in copies.items())
    assert (dout == 1).all()


# --- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("option", [n for n in OPTIONS if n != "score_mod"])
def test_gradients_are_those_of_complex_steps(option, norm):
    inputs, options = sample(1), OPTIONS[option] | NORMS[norm]
    inputs |= {n: options[n] for n in INPUTS if n in options}
    rest = {n: x for n, x in options.items() if n not in inputs}
    fwd = differential.forward(**inputs, **rest)
    dout, h = normal(*fwd.out.shape, seed=9), 1e-30
    dweights = normal(*fwd.weights.shape, seed=10) if norm == "plain" else None
    grads = differential.backward(fwd, dout, dweights)
    bounds = differential_bounds(fwd, np.float64, dout)
    for name, x in inputs.items():
        direction = normal(*x.shape, seed=11)
        moved = differential.forward(**{**inputs, name: x + 1j * h * direction}, **rest)
        slope = (dout * moved.out.imag).sum() / h
        allowed = 2 * (bounds["d" + name][1] * abs(direction)).sum()
        if dweights is not None:
            slope += (dweights * moved.weights.imag).sum() / h
            # The weights are outputs like any other, for values of the identity.
            allowed *= 1 + abs(dweights).sum() / abs(dout).sum() * S
        assert abs(slope - (getattr(grads, name) * direction).sum()) <= allowed, name


def test_score_mod_passes_gradients():
    arrays, option = sample(1), OPTIONS["score_mod"]
    fwd = differential.forward(**arrays, **option)
    dout = normal(*fwd.out.shape, seed=9)
    grads = differential.backward(fwd, dout)
    one = npattn.backward(fwd.first, dout)
    two = npattn.backward(fwd.second, -arrays["lam"][:, None, None] * dout)
    for got, want in ((grads.q1, one.q), (grads.k2, two.k), (grads.v, one.v + two.v)):
        assert np.array_equal(got, want)
    assert grads.bias is None
    assert grads.sinks is None


@pytest.mark.parametrize("shape", [(D,), (H, D)])
def test_lambda_and_its_gradients(shape):
    vectors = [normal(*shape, seed=i) for i in range(4)]
    lam = reparametrise(*vectors, 0.2)
    rows = [x.reshape(-1, D) for x in vectors]
    for head, got in enumerate(lam.reshape(-1)):
        a, b, c, d = (x[head] for x in rows)
        first, second = math.exp(math.fsum(a * b)), math.exp(math.fsum(c * d))
        # The error of a dot product, D roundings of its size, is a relative one of its exp.
        allowed = sum(e * (4 + D * abs(x * y).sum()) for e, x, y in ((first, a, b), (second, c, d)))
        assert abs(got - (first - second + 0.2)) <= 2 * U * (allowed + abs(got) + 1)
    dlam = normal(*shape[:-1], seed=7)
    grads = reparametrise_backward(dlam, *vectors)
    for i in range(4):
        direction = normal(*shape, seed=8)
        moved = [y + 1e-30j * direction if j == i else y for j, y in enumerate(vectors)]
        slope = (dlam * reparametrise(*moved, 0.2).imag).sum() * 1e30
        got = (grads[i] * direction).sum()
        assert abs(slope - got) <= 64 * D * U * (abs(grads[i] * direction)).sum()


def test_initial_lambda_is_that_of_the_paper():
    assert initial_lambda(0) == 0.8 - 0.6
    assert abs(initial_lambda(11) - (0.8 - 0.6 * math.exp(-3.3))) <= 4 * U
    with pytest.raises(OptionError, match="layer is -1"):
        initial_lambda(-1)


# --- mistakes ---------------------------------------------------------------------------------


def wrong(mistake, arrays, lam, dout):
    """Out and gradients of code with a mistake, with RMS norm and a factor of 0.4."""
    q1, k1, q2, k2, v = (arrays[n] for n in NAMES)
    scale = 1.0 if mistake == "second softmax without scale" else None
    first, second = npattn.forward(q1, k1, v), npattn.forward(q2, k2, v, scale=scale)
    sign = -1 if mistake == "sign of λ" else 1
    beside = sign * (lam[::-1] if mistake == "λ of another head" else lam)[:, None, None]
    y = first.out - beside * second.out
    axes = (-2, -1) if mistake == "norm over queries too" else -1
    s = np.sqrt((y * y).mean(axes, keepdims=True) + 1e-5)
    factor = 0.2 if mistake == "factor of λ_init" else 0.4
    u, du = y / s, factor * dout
    mean = 0 if mistake == "norm without its mean" else (du * u).mean(-1, keepdims=True)
    dy = (du - u * mean) / s
    one = npattn.backward(first, dy)
    two = npattn.backward(second, (1 if mistake == "no λ in the gradient" else -beside) * dy)
    dv = one.v if mistake == "values of the first alone" else one.v + two.v
    dlam = -(dy * second.out).sum((0, 2, 3))
    dlam = -dlam if mistake == "sign of dλ" else dlam
    grads = {"dq1": one.q, "dk1": one.k, "dq2": two.q, "dk2": two.k, "dv": dv, "dlam": dlam}
    return {"out": factor * u} | grads


@pytest.mark.parametrize(
    ("mistake", "names"),
    [
        (None, ""),
        ("second softmax without scale", "out dq2 dk2 dlam"),
        ("sign of λ", "out dq1 dq2 dlam"),
        ("λ of another head", "out dq1 dlam"),
        ("norm over queries too", "out dq1 dlam"),
        ("factor of λ_init", "out dq1 dv"),
        ("norm without its mean", "dq1 dv dlam"),
        ("no λ in the gradient", "dq2 dk2 dv"),
        ("values of the first alone", "dv"),
        ("sign of dλ", "dlam"),
    ],
)
def test_mistakes_are_beyond_the_bound(mistake, names):
    arrays = sample(2)
    lam = arrays["lam"]
    exact = differential.forward(**arrays, norm=True, out_scale=0.4)
    dout = normal(B, H, T, E, seed=3)
    bounds = differential_bounds(exact, np.float32, dout)
    results = wrong(mistake, arrays, lam, dout)
    beyond = {n for n, (x, e) in bounds.items() if (abs(results[n] - x) > e).any()}
    assert beyond >= set(names.split())
    assert bool(beyond) == (mistake is not None)


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q2": normal(B, H, T + 1, D)}, ShapeError, "q2 has shape (2, 6, 6, 2), must have"),
        ({"k2": normal(B, 1, S, D)}, ShapeError, "k2 has shape"),
        ({"lam": normal(K)}, ShapeError, "must be one number, or have (H,) = (6,)"),
        ({"lam": np.ones(H, int)}, DtypeError, "lam is int64"),
        ({"lam": True}, DtypeError, "lam is bool"),
        ({"norm": 1}, OptionError, "norm is 1, must be True or False"),
        ({"norm_weight": np.ones(E)}, OptionError, "pass norm=True"),
        ({"norm_weight": np.ones(D), "norm": True}, ShapeError, "must have shape (E,) = (11,)"),
        ({"norm_eps": -1}, OptionError, "norm_eps is -1, must be a finite number ≥ 0"),
        ({"out_scale": math.inf}, OptionError, "out_scale is inf, must be a finite number"),
        ({"dtype": "float16"}, DtypeError, "emulates no mixed precision"),
        ({"causal": True}, OptionError, "causal=True is ambiguous"),
        ({"scaling": 1.0}, OptionError, "scaling"),
        ({"q1": np.ones((B, H, T, D), int)}, DtypeError, "q1 is int64"),
    ],
)
def test_errors_name_the_way_out(change, error, words):
    with pytest.raises(error) as caught:
        differential.attention(**(sample() | change))
    assert words in str(caught.value)


def test_errors_of_gradients():
    fwd = differential.forward(**sample())
    with pytest.raises(OptionError, match="pass the result of npattn"):
        differential.backward(fwd.first, fwd.out)
    with pytest.raises(ShapeError, match="dout has shape"):
        differential.backward(fwd, fwd.out[0])
    with pytest.raises(ShapeError, match="dweights has shape"):
        differential.backward(fwd, fwd.out, fwd.out)
    with pytest.raises(ShapeError, match="lambda_k2 has shape"):
        reparametrise(*[np.ones(D)] * 3, np.ones(D + 1), 0.1)
    with pytest.raises(ShapeError, match=r"lambda_q1 has shape \(\)"):
        reparametrise(*[np.ones(())] * 4, 0.1)
    with pytest.raises(ShapeError, match="dlam has shape"):
        reparametrise_backward(np.ones(H), *[np.ones(D)] * 4)


# --- other systems ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of packages that transformers imports
def test_diffllama():
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")
    torch.manual_seed(0)
    config = llama.DiffLlamaConfig(
        hidden_size=24, num_attention_heads=8, num_key_value_heads=4, head_dim=6,
        intermediate_size=8, num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    module = llama.DiffLlamaAttention(config, layer_idx=3)
    x = torch.randn(2, 5, 24)
    positions = (torch.ones(2, 5, 6), torch.zeros(2, 5, 6))  # angles of 0: q and k stay
    kept = {}

    def keep(name):
        def hook(_, __, out):
            out.retain_grad()
            kept[name] = out

        return hook

    for name in "qkv":
        getattr(module, f"{name}_proj").register_forward_hook(keep(name))
    module.o_proj = torch.nn.Identity()
    hidden = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    out, _ = module(x, positions, hidden)
    dout = torch.randn(out.shape)
    (out * dout).sum().backward()

    def heads(y, n):
        return y.detach().numpy().reshape(2, 5, n, 6).swapaxes(1, 2)

    q, k, v = heads(kept["q"], 8), heads(kept["k"], 4), heads(kept["v"], 4)
    vectors = [getattr(module, f"lambda_{n}") for n in ("q1", "k1", "q2", "k2")]
    numbers = [y.detach().numpy() for y in vectors]
    lam = reparametrise(*numbers, initial_lambda(3))
    fwd = differential.forward(
        q[:, :4], k[:, :2], q[:, 4:], k[:, 2:], np.concatenate([v[:, :2], v[:, 2:]], -1),
        causal=True, lam=lam, norm=True, norm_eps=config.rms_norm_eps,
        out_scale=1 - initial_lambda(3),
    )  # fmt: skip

    def pairs(y):
        return y.detach().numpy().reshape(2, 5, 4, 12).swapaxes(1, 2)

    d = pairs(dout).astype(np.float64)
    bounds = differential_bounds(fwd, np.float32, d)
    dq, dk, dv = (heads(kept[n].grad, m) for n, m in (("q", 8), ("k", 4), ("v", 4)))
    results = {"out": pairs(out), "dq1": dq[:, :4], "dq2": dq[:, 4:], "dk1": dk[:, :2]}
    results |= {"dk2": dk[:, 2:], "dv": np.concatenate([dv[:, :2], dv[:, 2:]], -1)}
    # λ is a sum of exponentials in float32: its error moves the results as a change of λ does.
    u = 2.0**-24
    sizes = [(np.exp(a @ b), abs(a * b).sum()) for a, b in (numbers[:2], numbers[2:])]
    e_lam = 2 * u * (abs(lam) + 1 + sum(e * (4 + 6 * size) for e, size in sizes))
    high, low = (
        differential.forward(
            fwd.first.problem.q, fwd.first.problem.k, fwd.second.problem.q, fwd.second.problem.k,
            fwd.first.problem.v, causal=True, lam=lam + e, norm=True,
            norm_eps=config.rms_norm_eps, out_scale=1 - initial_lambda(3),
        )
        for e in (e_lam, -e_lam)
    )  # fmt: skip
    moved = {"out": np.maximum(abs(high.out - fwd.out), abs(low.out - fwd.out))}
    grads = [differential.backward(y, d) for y in (fwd, high, low)]
    for n in NAMES:
        at, above, below = (getattr(g, n) for g in grads)
        moved["d" + n] = np.maximum(abs(above - at), abs(below - at))
    exact_dlam, allowed_dlam = bounds.pop("dlam")
    assert_within({n: (y, e + 2 * moved[n]) for n, (y, e) in bounds.items()}, results)
    change = max(abs(g.lam - exact_dlam) for g in grads[1:])
    wants = reparametrise_backward(exact_dlam, *numbers)
    for vector, want, a in zip(vectors, wants, [0, 0, 2, 2], strict=True):
        x, y = numbers[a], numbers[a + 1]
        size = np.exp(x.astype(float) @ y) * np.maximum(abs(x), abs(y))
        allowed = (allowed_dlam + 2 * change) * size + 16 * u * abs(want)
        assert (abs(vector.grad.numpy() - want) <= allowed).all()


def test_numbers_of_numpy_are_numbers():
    arrays = np.ones((4, 1, 2, 3))
    options = {"lam": 0.5, "norm": True}
    one = differential.attention(*arrays, arrays[0], norm_eps=0.5, out_scale=2.0, **options)
    own = {"norm_eps": np.float32(0.5), "out_scale": np.float32(2)}
    np.testing.assert_array_equal(differential.attention(*arrays, arrays[0], **own, **options), one)
