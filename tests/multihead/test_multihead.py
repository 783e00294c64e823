"""Every published variant against a torch module that is written out here, in float64."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
import npattn.weights
from npattn import Conventions, MultiHeadAttention, masks
from npattn.errors import DtypeError, NpattnError, OptionError, ShapeError
from npattn.multihead import projections
from npattn.positions import Rotary
from npattn.problem import Problem
from npattn.testing.bounds.allowed import bounds
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.comparison import compare, compare_arrays

PRIMES = (2, 3, 5, 7, 11, 13)
CONFIGURATIONS = 50


# --- the variants, each beside its torch code -----------------------------------------------------


@dataclass
class Case:
    """A module, its inputs, and a torch function of tensors that returns (out, weights)."""

    mha: MultiHeadAttention
    inputs: dict[str, Any]
    torch: Any
    options: dict[str, Any] = field(default_factory=dict)


def sizes(rng, *names):
    """Different primes."""
    return dict(zip(names, rng.permutation(PRIMES).tolist(), strict=False))


def normal(rng, *shape):
    return rng.standard_normal(shape)


def annotated(rng):
    """Separate projections with biases; hidden scores become −1e9; weights are dropped."""
    n = sizes(rng, "B", "H", "T", "S", "D")
    width = n["H"] * n["D"]
    mha = MultiHeadAttention.init(width, n["H"], seed=int(rng.integers(99)))
    mha = mha.replace(**{b: normal(rng, width) for b in ("bq", "bk", "bv", "bo")})
    mask = rng.random((n["B"], 1, n["T"], n["S"])) < 0.6
    mask[0, :, 0] = False  # a fully masked row
    keep = rng.random((n["B"], n["H"], n["T"], n["S"])) < 0.7
    inputs = {
        "query": normal(rng, n["B"], n["T"], width),
        "key": normal(rng, n["B"], n["S"], width),
    }
    inputs["value"] = normal(rng, n["B"], n["S"], width)

    def forward(torch, p, query, key, value):
        def heads(x, w, b):
            return (x @ w + b).reshape(*x.shape[:-1], n["H"], -1).transpose(1, 2)

        q, k, v = (
            heads(x, p["w" + c], p["b" + c]) for x, c in ((query, "q"), (key, "k"), (value, "v"))
        )
        scores = q @ k.transpose(-2, -1) / n["D"] ** 0.5
        scores = scores.masked_fill(torch.tensor(mask) == 0, -1e9)
        weights = scores.softmax(-1) * torch.tensor(keep) / (1 - 0.3)
        o = (weights @ v).transpose(1, 2).reshape(n["B"], n["T"], -1)
        return o @ p["wo"] + p["bo"], weights

    conventions = Conventions(hidden_fill=-1e9, weights="after_dropout")
    options = {"mask": mask, "dropout_mask": keep, "dropout_rate": 0.3, "conventions": conventions}
    return Case(mha, inputs, forward, options)


def without_biases(rng):
    """Self-attention without any bias, as small as two numbers in two heads."""
    n = sizes(rng, "B", "T", "D")
    D = int(rng.choice([1, n["D"]]))
    mha = MultiHeadAttention.init(2 * D, 2, seed=int(rng.integers(99)), bias=False)

    def forward(torch, p, query):
        q, k, v = ((query @ p[w]).unflatten(-1, (2, D)).movedim(-2, -3) for w in ("wq", "wk", "wv"))
        weights = torch.einsum("bhtd,bhsd->bhts", q, k).div(D**0.5).softmax(-1)
        o = torch.einsum("bhts,bhsd->bthd", weights, v)
        return o.flatten(-2) @ p["wo"], weights

    return Case(mha, {"query": normal(rng, n["B"], n["T"], 2 * D)}, forward)


def packed_in_chunks(rng):
    """[Q | K | V] of one projection, scores divided by the root of the whole width."""
    n = sizes(rng, "B", "T", "H", "D")
    width = n["H"] * n["D"]
    w, b = normal(rng, width, 3 * width), normal(rng, 3 * width)
    wo, bo = normal(rng, width, width), normal(rng, width)
    mha = MultiHeadAttention.from_packed(w, b, wo, bo, num_heads=n["H"], order="qkv")

    def forward(torch, p, query):
        packed = torch.cat([p["wq"], p["wk"], p["wv"]], 1), torch.cat([p["bq"], p["bk"], p["bv"]])
        parts = (query @ packed[0] + packed[1]).chunk(3, -1)
        q, k, v = (x.view(*x.shape[:2], n["H"], n["D"]).transpose(1, 2) for x in parts)
        weights = (q @ k.mT * width**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ p["wo"] + p["bo"], weights

    inputs = {"query": normal(rng, n["B"], n["T"], width)}
    return Case(mha, inputs, forward, {"scale": width**-0.5})


def packed_by_head(rng, merge):
    """[q | k | v] head by head from another input width, an additive causal mask of −inf."""
    n = sizes(rng, "B", "T", "H", "D", "in")
    width = n["H"] * n["D"]
    w, b = normal(rng, n["in"], 3 * width), normal(rng, 3 * width)
    wo, bo = normal(rng, width, width), normal(rng, width)
    mha = MultiHeadAttention.from_packed(
        w, b, wo, bo, num_heads=n["H"], order="per_head", merge=merge
    )
    causal = np.where(masks.causal(n["T"]), 0, -np.inf)

    def forward(torch, p, query):
        def by_head(q, k, v):
            return torch.stack([x.unflatten(-1, (n["H"], n["D"])) for x in (q, k, v)], -2).flatten(
                -3
            )

        packed = by_head(p["wq"], p["wk"], p["wv"]), by_head(p["bq"], p["bk"], p["bv"])
        np.testing.assert_array_equal(packed[0].detach().numpy(), w)
        qkv = query @ packed[0] + packed[1]
        qkv = qkv.reshape(n["B"], n["T"], n["H"], 3 * n["D"]).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / n["D"] ** 0.5 + p["bias"]).softmax(-1)
        o = weights @ v
        o = o.permute(0, 2, 1, 3) if merge == "concat" else o
        return o.reshape(n["B"], n["T"], width) @ p["wo"] + p["bo"], weights

    inputs = {"query": normal(rng, n["B"], n["T"], n["in"])}
    return Case(mha, inputs, forward, {"bias": causal})


def any_head_size(rng):
    """H·D is not the input width; queries and keys have different lengths."""
    n = sizes(rng, "B", "T", "S", "H", "D", "in")
    E = int(rng.choice(PRIMES))
    mha = MultiHeadAttention.init(
        n["in"], n["H"], seed=int(rng.integers(99)), head_size=n["D"], value_size=E
    )

    def forward(torch, p, query, key):
        def heads(x, c):
            return (x @ p["w" + c] + p["b" + c]).unflatten(-1, (n["H"], -1)).transpose(1, 2)

        q, k, v = heads(query, "q"), heads(key, "k"), heads(key, "v")
        weights = (q @ k.mT / n["D"] ** 0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ p["wo"] + p["bo"], weights

    inputs = {"query": normal(rng, n["B"], n["T"], n["in"])}
    inputs["key"] = normal(rng, n["B"], n["S"], n["in"])
    return Case(mha, inputs, forward)


def torch_module(rng):
    """torch.nn.MultiheadAttention itself, with random options."""
    n = sizes(rng, "B", "T", "S", "H", "in_k", "in_v")
    width = n["H"] * int(rng.choice(PRIMES))
    batched, bias, extra, zero, own = (bool(rng.integers(2)) for _ in range(5))
    in_k, in_v = (n["in_k"], n["in_v"]) if own else (width, width)
    mha = MultiHeadAttention.init(
        width, n["H"], seed=int(rng.integers(99)), key_size=in_k, value_in=in_v, bias=bias,
        add_bias_kv=extra, add_zero_attn=zero,
    )  # fmt: skip
    lead = (n["B"],) if batched else ()
    inputs = {"query": normal(rng, *lead, n["T"], width), "key": normal(rng, *lead, n["S"], in_k)}
    inputs["value"] = normal(rng, *lead, n["S"], in_v)
    hidden = rng.random((n["T"], n["S"])) < 0.3
    padding = rng.random((*lead, n["S"])) < 0.3
    hidden[:, 0] = padding[..., 0] = False  # torch gives NaN in fully masked rows
    visible = ~(hidden | padding[..., None, :])
    visible = visible[:, None] if batched else visible

    def forward(torch, p, query, key, value):
        names = ("wq", "wk", "wv")
        whole = torch.cat([p[w].T for w in names]) if not own else None
        biases = torch.cat([p["b" + c] for c in "qkv"]) if bias else None
        rows = [x[:, None] if not batched else x.transpose(0, 1) for x in (query, key, value)]
        out, weights = torch.nn.functional.multi_head_attention_forward(
            *rows, width, n["H"], whole, biases,
            p["bias_k"][None, None] if extra else None, p["bias_v"][None, None] if extra else None,
            zero, 0.0, p["wo"].T, p.get("bo"), training=False,
            key_padding_mask=torch.tensor(padding if batched else padding[None]),
            attn_mask=torch.tensor(hidden), use_separate_proj_weight=own,
            q_proj_weight=p["wq"].T, k_proj_weight=p["wk"].T, v_proj_weight=p["wv"].T,
            average_attn_weights=False,
        )  # fmt: skip
        return (out.transpose(0, 1), weights) if batched else (out[:, 0], weights[0])

    return Case(mha, inputs, forward, {"mask": visible})


def grouped_with_norm(rng):
    """Shared key/value heads, and a norm of every head of q and k, as recent decoders have."""
    n = sizes(rng, "B", "T", "K", "D", "in")
    group, kind = int(rng.choice([1, 2, 3])), str(rng.choice(["rms", "layer"]))
    H = n["K"] * group
    mha = MultiHeadAttention.init(
        n["in"], H, seed=int(rng.integers(99)), num_kv_heads=n["K"], head_size=n["D"],
        qk_norm=kind, norm_q=normal(rng, n["D"]), norm_k=normal(rng, n["D"]),
        norm_k_bias=normal(rng, n["D"]) if kind == "layer" else None,
    )  # fmt: skip

    def forward(torch, p, query):
        def heads(c, count):
            return (query @ p["w" + c] + p["b" + c]).unflatten(-1, (count, n["D"])).transpose(1, 2)

        def norm(x, c):
            if kind == "rms":
                return torch.nn.functional.rms_norm(x, (n["D"],), p["norm_" + c], 1e-6)
            b = p.get(f"norm_{c}_bias")
            return torch.nn.functional.layer_norm(x, (n["D"],), p["norm_" + c], b, 1e-6)

        q, k = norm(heads("q", H), "q"), norm(heads("k", n["K"]), "k")
        k, v = (x.repeat_interleave(group, 1) for x in (k, heads("v", n["K"])))
        scores = (q @ k.mT / n["D"] ** 0.5).masked_fill(
            ~torch.ones(q.shape[-2], k.shape[-2]).tril().bool(), -torch.inf
        )
        weights = scores.softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ p["wo"] + p["bo"], weights

    return Case(mha, {"query": normal(rng, n["B"], n["T"], n["in"])}, forward, {"causal": True})


def rotary(rng):
    """Queries and keys that turn after a norm, as complex numbers; fewer queries than keys."""
    n = sizes(rng, "B", "T", "K", "D", "in")
    layout, R = str(rng.choice(["half", "interleaved"])), 2 * n["D"]
    S, H, D = n["T"] + int(rng.integers(3)), 2 * n["K"], R + int(rng.integers(3))
    mha = MultiHeadAttention.init(
        n["in"], H, seed=int(rng.integers(99)), num_kv_heads=n["K"], head_size=D,
        qk_norm="rms", norm_q=normal(rng, D), norm_k=normal(rng, D),
    )  # fmt: skip
    inputs = {"query": normal(rng, n["B"], n["T"], n["in"]), "key": normal(rng, n["B"], S, n["in"])}

    def forward(torch, p, query, key):
        def heads(x, c, count):
            return (x @ p["w" + c] + p["b" + c]).unflatten(-1, (count, D)).transpose(1, 2)

        def turned(x, c, places):
            x = torch.nn.functional.rms_norm(x, (D,), p["norm_" + c], 1e-6)
            angles = places[:, None] * 50.0 ** (-torch.arange(0, R, 2).double() / R)
            still, x = x[..., R:], x[..., :R]
            pairs = x.unflatten(-1, (2, -1)).mT if layout == "half" else x.unflatten(-1, (-1, 2))
            z = torch.view_as_complex(pairs.contiguous()) * torch.polar(1 + 0 * angles, angles)
            pairs = torch.view_as_real(z)
            pairs = pairs.mT if layout == "half" else pairs
            return torch.cat([pairs.flatten(-2), still], -1)

        places = torch.arange(S).double()
        q = turned(heads(query, "q", H), "q", places[S - n["T"] :])
        k, v = turned(heads(key, "k", n["K"]), "k", places), heads(key, "v", n["K"])
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        weights = (q @ k.mT / D**0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ p["wo"] + p["bo"], weights

    return Case(mha, inputs, forward, {"rope": Rotary(layout=layout, base=50.0, size=R)})


VARIANTS = {
    "annotated": annotated,
    "without biases": without_biases,
    "packed in chunks": packed_in_chunks,
    "packed by head": lambda rng: packed_by_head(rng, "concat"),
    "packed by head, merged by reshape": lambda rng: packed_by_head(rng, "reshape"),
    "any head size": any_head_size,
    "torch module": torch_module,
    "grouped with norm": grouped_with_norm,
    "rotary": rotary,
}


def near(name, actual, expected, size=0.0):
    """Within 1e-12 of the largest number, or of `size` where terms cancel."""
    assert actual.shape == expected.shape, name
    limit = 1e-12 * max(abs(expected).max(initial=0), size)
    assert abs(actual - expected).max(initial=0) <= limit, name


@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_agrees_with_torch_forward_and_backward(variant, seed):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    case = VARIANTS[variant](rng)
    fwd = case.mha.forward(*case.inputs.values(), **case.options)
    leaves = {**case.mha.parameters, **case.inputs}
    leaves |= {"bias": case.options["bias"]} if "bias" in case.options else {}
    tensors = {n: torch.tensor(x, requires_grad=True) for n, x in leaves.items()}
    inputs = {n: tensors[n] for n in case.inputs}
    out, weights = case.torch(
        torch, {n: x for n, x in tensors.items() if n not in inputs}, **inputs
    )
    near("out", fwd.out, out.detach().numpy())
    near("weights", fwd.weights, weights.detach().numpy())
    dout, dweights = normal(rng, *out.shape), normal(rng, *weights.shape)
    loss = (out * torch.tensor(dout)).sum() + (weights * torch.tensor(dweights)).sum()
    loss.backward()
    grads = case.mha.backward(fwd, dout, dweights=dweights)
    for name, tensor in tensors.items():
        # Adding the same to all keys changes nothing: its gradient is 0, a sum of terms that are
        # as large as the gradient of the weight.
        beside = "wk" if name in ("bk", "norm_k_bias") else name
        size = abs(tensors[beside].grad.numpy()).max()
        near(f"d{name}", getattr(grads, name), tensor.grad.numpy(), size)
    for name in set(vars(grads)) - set(tensors):
        assert getattr(grads, name) is None, name


# --- parts ----------------------------------------------------------------------------------------


def test_number_of_parameters_is_that_of_torch():
    torch = pytest.importorskip("torch")
    for kwargs in ({}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 7, "vdim": 11}):
        theirs = torch.nn.MultiheadAttention(15, 3, **kwargs)
        names = {"kdim": "key_size", "vdim": "value_in"}
        ours = MultiHeadAttention.init(
            15, 3, seed=0, **{names.get(n, n): x for n, x in kwargs.items()}
        )
        assert ours.num_parameters == sum(x.numel() for x in theirs.parameters())


def test_single_head_is_attention_of_projections():
    """Integers have exact projections, in whatever order BLAS adds them."""
    rng = np.random.default_rng(0)
    shapes = (7, 3), (7, 3), (7, 5), (11, 7)
    wq, wk, wv, x = (rng.integers(-3, 4, shape).astype(float) for shape in shapes)
    fwd = MultiHeadAttention(wq, wk, wv, num_heads=1).forward(x, causal=True)
    (comparison,) = compare(fwd.out, Problem(x @ wq, x @ wk, x @ wv, causal=True))
    assert comparison.passed, str(comparison)


def test_leading_axes_broadcast():
    rng = np.random.default_rng(1)
    mha = MultiHeadAttention.init(6, 2, seed=3)
    query, key = normal(rng, 5, 1, 3, 6), normal(rng, 2, 7, 6)
    fwd = mha.forward(query, key)
    assert fwd.out.shape == (5, 2, 3, 6)
    assert fwd.weights.shape == (5, 2, 2, 3, 7)
    grads = mha.backward(fwd, np.ones_like(fwd.out))
    assert grads.query.shape == query.shape
    assert grads.key.shape == key.shape
    assert grads.value is None


def test_gradient_of_omitted_input_is_added_to_its_substitute():
    rng = np.random.default_rng(2)
    mha, x = MultiHeadAttention.init(6, 2, seed=3), normal(rng, 2, 5, 6)
    dout = normal(rng, 2, 5, 6)
    apart = mha.forward(x, x.copy(), x.copy())
    three = mha.backward(apart, dout)
    one = mha.backward(mha.forward(x), dout)
    two = mha.backward(mha.forward(x, x.copy()), dout)
    np.testing.assert_allclose(one.query, three.query + three.key + three.value, rtol=1e-12)
    np.testing.assert_allclose(two.key, three.key + three.value, rtol=1e-12)
    assert one.key is one.value is two.value is None


# --- properties -----------------------------------------------------------------------------------


@st.composite
def modules(draw):
    """A module of any kind, an input, options and cotangents."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    K, group, D, E, width = (int(rng.choice(PRIMES[:4])) for _ in range(5))
    kind = draw(st.sampled_from([None, "rms", "layer"]))
    norms = (
        {}
        if kind is None
        else {n: normal(rng, D) for n in ("norm_q", "norm_k", "norm_q_bias", "norm_k_bias")}
    )
    mha = MultiHeadAttention.init(
        width, K * group, seed=int(rng.integers(99)), num_kv_heads=K, head_size=D, value_size=E,
        out_size=3, add_bias_kv=draw(st.booleans()), add_zero_attn=draw(st.booleans()),
        qk_norm=kind, **norms,
    )  # fmt: skip
    biases = {n: normal(rng, *x.shape) for n, x in mha.parameters.items() if x.ndim == 1}
    mha = mha.replace(**biases)
    x = normal(rng, 2, 5, width)
    rope = Rotary(size=D - D % 2, base=9.0)
    options = draw(
        st.sampled_from(
            [{}, {"causal": True}, {"window": (1, 2)}, {"softcap": 2.0}, {"scale": -0.5},
             {"rope": rope}]
        )
    )  # fmt: skip
    fwd = mha.forward(x, **options)
    return mha, x, options, normal(rng, *fwd.out.shape), normal(rng, *fwd.weights.shape)


@given(modules())
def test_shared_heads_are_repeated_heads(example):
    mha, x, options, dout, dweights = example
    one, shared = mha.unshared(), mha.forward(x, **options)
    assert one.num_kv_heads == one.num_heads == mha.num_heads
    repeated = one.forward(x, **options)
    np.testing.assert_allclose(repeated.out, shared.out, rtol=1e-10, atol=1e-12)
    grads, theirs = (
        mha.backward(shared, dout, None, dweights),
        one.backward(repeated, dout, None, dweights),
    )
    np.testing.assert_allclose(grads.query, theirs.query, rtol=1e-9, atol=1e-11)
    summed = theirs.wk.reshape(len(theirs.wk), mha.num_kv_heads, -1, mha.head_size).sum(2)
    np.testing.assert_allclose(grads.wk, summed.reshape(grads.wk.shape), rtol=1e-9, atol=1e-11)


@pytest.mark.thorough
@given(modules())
def test_pruning_heads_equals_zeroing_their_outputs(example):
    mha, x, options, dout, _ = example
    same = mha.prune([])
    assert all(np.array_equal(a, same.parameters[n]) for n, a in mha.parameters.items())
    one = mha.unshared()
    if one.num_heads == 1:
        return
    gone = [0, -1] if one.num_heads > 2 else [0]
    wo = one.wo.copy().reshape(one.num_heads, one.value_size, -1)
    wo[gone] = 0
    zeroed, pruned = one.replace(wo=wo.reshape(one.wo.shape)), one.prune(gone)
    assert pruned.num_parameters < one.num_parameters
    a, b = zeroed.forward(x, **options), pruned.forward(x, **options)
    np.testing.assert_allclose(b.out, a.out, rtol=1e-12, atol=1e-13)
    ga, gb = zeroed.backward(a, dout), pruned.backward(b, dout)
    np.testing.assert_allclose(gb.query, ga.query, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
@given(modules())
def test_gradients_agree_with_complex_step(example):
    mha, x, options, dout, dweights = example
    fwd = mha.forward(x, **options)
    grads = mha.backward(fwd, dout, None, dweights)
    rng, tiny = np.random.default_rng(0), 1e-30

    def loss(module, query):
        fwd = module.forward(query, **options)
        return ((fwd.out * dout).sum() + (fwd.weights * dweights).sum()).imag / tiny

    for name, array in {**mha.parameters, "query": x}.items():
        direction = rng.standard_normal(array.shape)
        shifted = array + 1j * tiny * direction
        slope = loss(mha, shifted) if name == "query" else loss(mha.replace(**{name: shifted}), x)
        expected = (getattr(grads, name) * direction).sum()
        size = (abs(getattr(grads, name)) * abs(direction)).sum()
        assert abs(slope - expected) <= 1e-10 * max(size, 1e-3), name


@pytest.mark.thorough
@given(modules())
def test_keeping_only_inputs_gives_the_same_bits(example):
    mha, x, options, dout, dweights = example
    kept, recomputed = mha.forward(x, **options), mha.forward(x, **options, keep="inputs")
    assert recomputed.saved is None
    for name in ("out", "lse", "weights"):
        np.testing.assert_array_equal(getattr(recomputed, name), getattr(kept, name))
    one, other = (mha.backward(f, dout, None, dweights) for f in (kept, recomputed))
    for name, array in vars(one).items():
        np.testing.assert_array_equal(getattr(other, name), array, err_msg=name)


# --- visibility -----------------------------------------------------------------------------------


def test_appended_keys_are_visible_under_any_mask():
    mha = MultiHeadAttention.init(6, 2, seed=3, add_bias_kv=True, add_zero_attn=True)
    x = normal(np.random.default_rng(0), 3, 5, 6)
    for options in ({"mask": np.zeros((5, 5), bool)}, {"window": (0, 0)}, {"causal": True}):
        appended = mha.forward(x, **options).weights[..., 5:]
        assert appended.shape[-1] == 2
        assert (appended > 0).all()
    hide = Conventions(mask_true="hide")
    weights = mha.forward(x, mask=np.ones((5, 5), bool), conventions=hide).weights
    assert (weights[..., :5] == 0).all()
    np.testing.assert_allclose(weights[..., 5:].sum(-1), 1, rtol=1e-12)


def test_bias_does_not_apply_to_appended_keys():
    mha = MultiHeadAttention.init(6, 2, seed=3, add_zero_attn=True)
    rng = np.random.default_rng(0)
    x, bias = normal(rng, 3, 5, 6), normal(rng, 1, 5, 1)
    fwd = mha.forward(x, bias=bias)
    dout = normal(rng, *fwd.out.shape)
    grad = mha.backward(fwd, dout).bias
    assert grad.shape == bias.shape
    step = 1e-6 * normal(rng, 1, 5, 1)
    ends = [(mha.forward(x, bias=bias + s).out * dout).sum() for s in (step, -step)]
    np.testing.assert_allclose((ends[0] - ends[1]) / 2, (grad * step).sum(), rtol=1e-6)
    flat = mha.forward(x, bias=0 * bias).weights
    assert abs(fwd.weights - flat).max() > 1e-3
    np.testing.assert_array_equal(flat, mha.forward(x).weights)


def test_sinks_have_a_gradient():
    mha, rng = MultiHeadAttention.init(6, 2, seed=3), np.random.default_rng(0)
    fwd = mha.forward(normal(rng, 3, 5, 6), sinks=np.array([0.5, -1.0]))
    assert mha.backward(fwd, np.ones_like(fwd.out)).sinks.shape == (2,)


# --- rotary positions -----------------------------------------------------------------------------


def test_last_queries_stand_beside_the_last_keys():
    """A call with the keys of a cache gives the last rows of the call with all queries."""
    mha, x = MultiHeadAttention.init(6, 1, seed=0), normal(np.random.default_rng(0), 7, 6)
    whole = mha.forward(x, rope=Rotary(base=3.0)).out
    near("out", mha.forward(x[5:], x, rope=Rotary(base=3.0)).out, whole[5:])
    first = mha.forward(x[:2], x, rope=Rotary(base=3.0, alignment="top_left")).out
    near("out", first, whole[:2])
    given = Rotary(base=3.0, positions=np.arange(5, 7), key_positions=np.arange(7))
    near("out", mha.forward(x[5:], x, rope=given).out, whole[5:])


def test_appended_keys_do_not_turn():
    """The score of bias_k with a query of zeros is 0 whatever the positions."""
    rng = np.random.default_rng(0)
    mha = MultiHeadAttention.init(6, 1, seed=3, add_bias_kv=True)
    mha = mha.replace(wq=0 * mha.wq, bq=normal(rng, 6), wk=0 * mha.wk)
    fwd = mha.forward(normal(rng, 1, 6), rope=Rotary(positions=[0.0]))
    score = mha.bq @ mha.bias_k / 6**0.5
    near("weights", fwd.weights[0, 0, 1:], np.array([1 / (1 + np.exp(-score))]))


def test_description_names_rotary_positions():
    mha = MultiHeadAttention.init(6, 1, seed=0)
    names = [step.name for step in mha.describe(np.ones((5, 6)), rope=Rotary()).steps]
    assert names.index("rotary positions of q and k") == 3


# --- mixed precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("option", [{}, {"causal": True}, {"softcap": 2.0}])
def test_narrow_attention_is_within_tolerance_of_fused_kernels(dtype, option):
    rng = np.random.default_rng(0)
    q, k, v, dout = (normal(rng, 2, 3, 7, 5).astype(dtype) for _ in range(4))
    fwd = npattn.forward(q, k, v, dtype=dtype, **option)
    assert (fwd.out.dtype, fwd.lse.dtype) == (np.dtype(dtype), np.float32)
    grads = npattn.backward(fwd, dout)
    exact = npattn.forward(q, k, v, **option)
    exact_grads = npattn.backward(exact, dout.astype(float))
    tolerances = bounds(
        Problem(q, k, v, **option), dtype, Rounding.fused(), dout=dout.astype(float)
    )
    pairs = {"o": (fwd.out, exact.out), "lse": (fwd.lse, exact.lse)}
    pairs |= {f"d{n}": (getattr(grads, n), getattr(exact_grads, n)) for n in "qkv"}
    for name, (actual, expected) in pairs.items():
        assert compare_arrays(name, actual, expected, tolerances[name]).passed, name
        assert abs(actual.astype(float) - expected).max() > 0, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_error_of_narrow_module_is_a_few_roundings(dtype):
    rng = np.random.default_rng(0)
    mha = MultiHeadAttention.init(12, 3, seed=3, qk_norm="rms")
    x = normal(rng, 2, 5, 12)
    exact, narrow = mha.forward(x), mha.forward(x, dtype=dtype)
    assert narrow.out.dtype == np.dtype(dtype)
    off = abs(narrow.out.astype(float) - exact.out).max() / abs(exact.out).max()
    u = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert u / 8 < off < 8 * u
    grads = mha.backward(narrow, np.ones_like(exact.out))
    assert {g.dtype for g in vars(grads).values() if g is not None} == {np.dtype(dtype)}


# --- illegal arguments ----------------------------------------------------------------------------


def module(**kwargs):
    w = {n: np.zeros((6, 6)) for n in ("wq", "wk", "wv", "wo")}
    return MultiHeadAttention(**(w | {"num_heads": 3} | kwargs))


@pytest.mark.every
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_heads": 4}, r"wq has shape \(6, 6\), must be \(input, 4 heads · size of a head\)"),
        ({"num_heads": 0}, "num_heads is 0, must be an integer ≥ 1"),
        ({"num_heads": 2.0}, "num_heads is 2.0, must be an integer ≥ 1"),
        ({"num_kv_heads": 2}, "num_kv_heads is 2, which does not divide the 3 query heads"),
        ({"wk": np.zeros((6, 3))}, r"wk has shape \(6, 3\), must have shape \(6, 6\)"),
        ({"wo": np.zeros((5, 6))}, r"wo has shape \(5, 6\), must have shape \(6, 6\)"),
        ({"wq": np.zeros(6)}, r"wq has shape \(6,\)"),
        ({"wq": np.zeros((6, 6), int)}, "wq is int64, must be floating"),
        ({"bq": np.zeros(5)}, r"bq has shape \(5,\), must have shape \(6,\)"),
        ({"bo": np.zeros(6), "wo": None}, "got bo without wo"),
        ({"bias_k": np.zeros(6)}, "got bias_k without bias_v; pass both or neither"),
        ({"merge": "sum"}, "merge is 'sum', must be one of"),
        ({"qk_norm": "l1"}, "qk_norm is 'l1', must be one of"),
        ({"norm_q": np.zeros(2)}, "got norm_q without qk_norm"),
        ({"qk_norm": "rms", "norm_q": np.zeros(3)}, r"norm_q has shape \(3,\)"),
        ({"norm_eps": -1.0}, "norm_eps is -1.0, must be a finite number ≥ 0"),
        ({"add_zero_attn": 1}, "add_zero_attn is 1, must be True or False"),
        ({"wq": None}, "wq is object, must be floating"),
    ],
)
def test_illegal_module_raises(kwargs, message):
    with pytest.raises(NpattnError, match=message):
        module(**kwargs)


X = np.zeros((2, 5, 6))


@pytest.mark.every
@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        (
            (np.zeros((5, 7)),),
            {},
            ShapeError,
            r"query has shape \(5, 7\), must be \(..., length, 6\)",
        ),
        ((np.zeros(6),), {}, ShapeError, r"query has shape \(6,\)"),
        ((X.astype(int),), {}, DtypeError, "query is int64, must be floating"),
        ((X, np.zeros((2, 4, 5))), {}, ShapeError, r"key has shape \(2, 4, 5\)"),
        ((X, X, np.zeros((2, 4, 6))), {}, ShapeError, "v has 4 keys, but k has 5"),
        ((X, X[:, :3]), {"causal": True}, OptionError, "causal=True is ambiguous for T = 5"),
        ((X,), {"mask": np.ones((2, 5), bool)}, ShapeError, r"mask\[:, None, None, :\]"),
        ((X,), {"mask": np.ones((5, 5))}, DtypeError, "pass it as bias"),
        ((X,), {"keep": "nothing"}, OptionError, "keep is 'nothing'"),
        ((X,), {"rope": 10000.0}, OptionError, r"rope is 10000.0, must be a npattn.positions.Rot"),
        ((X,), {"rope": Rotary(size=4)}, OptionError, "size is 4, must be even and at most D"),
        ((X,), {"dtype": "int8"}, DtypeError, "dtype is 'int8'"),
        ((X,), {"dropout_rate": 0.5}, OptionError, "but there is no dropout_mask"),
        ((X,), {"is_causal": True}, OptionError, "forward has no option is_causal: pass causal"),
        ((X,), {"conventions": "torch"}, OptionError, "conventions is 'torch', must be a Conv"),
    ],
)
def test_illegal_forward_argument_raises_before_any_work(inputs, options, error, message):
    with pytest.raises(error, match=message):
        module().forward(*inputs, **options)


def test_score_mod_with_appended_keys_raises():
    def plain(s, *_):
        return s

    with pytest.raises(OptionError, match="got score_mod with bias_k or add_zero_attn"):
        module(add_zero_attn=True).forward(X, score_mod=plain)


def test_backward_requires_forward_of_same_module():
    mha = module()
    fwd = mha.forward(X)
    with pytest.raises(ShapeError, match=r"dout has shape \(2, 5\), but out has shape"):
        mha.backward(fwd, np.zeros((2, 5)))
    for use in (module().backward, module().importance):
        with pytest.raises(OptionError, match="fwd comes from another module"):
            use(fwd, fwd.out)
        with pytest.raises(OptionError, match="fwd is a Forward, must be the MultiHeadForward"):
            use(npattn.forward(X, X, X), X)


@pytest.mark.parametrize(
    ("kwargs", "heads", "message"),
    [
        ({}, [0, 1, 2], "cannot prune all 3 heads; keep at least one"),
        ({}, [3], "heads contains 3, must contain integers from -3 to 2"),
        ({}, [True], "heads contains True"),
        ({}, 1, "heads is 1, must be a sequence of indices"),
        ({"merge": "reshape"}, [0], "which mixes them"),
        ({"num_heads": 6, "num_kv_heads": 3, "wk": np.zeros((6, 3)), "wv": np.zeros((6, 3))},
         [0], r"pruning leaves \[1, 2, 2\] query heads"),
    ],
)  # fmt: skip
def test_illegal_pruning_raises(kwargs, heads, message):
    with pytest.raises(OptionError, match=message):
        module(**kwargs).prune(heads)


def test_unused_key_head_is_pruned():
    mha = MultiHeadAttention.init(6, 6, seed=0, num_kv_heads=3)
    pruned = mha.prune([0, 1])
    assert (pruned.num_heads, pruned.num_kv_heads) == (4, 2)
    np.testing.assert_array_equal(pruned.wk, mha.wk[:, 1:])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"order": "kqv"}, "order is 'kqv'"),
        (
            {"num_heads": 5},
            r"w has shape \(7, 18\), must be \(input, 15 heads · size\): 5 of queri",
        ),
        ({"num_kv_heads": 2}, "num_kv_heads is 2, which does not divide the 3 query heads"),
        ({"b": np.zeros(3)}, r"b has shape \(3,\), must have shape \(18,\)"),
    ],
)
def test_illegal_packed_weight_raises(kwargs, message):
    arguments = {"w": np.zeros((7, 18)), "num_heads": 3, "order": "qkv"} | kwargs
    with pytest.raises(NpattnError, match=message):
        MultiHeadAttention.from_packed(arguments.pop("w"), arguments.pop("b", None), **arguments)


@pytest.mark.parametrize("order", ["qkv", "per_head"])
def test_packed_weight_with_shared_heads(order):
    """Columns name what they are: head, then index in the head."""
    K, G, D, width = 2, 3, 5, 7
    names = {"q": range(K * G), "k": range(K), "v": range(K)}
    blocks = [(c, h) for c, heads in names.items() for h in heads]
    if order == "per_head":
        groups = [[("q", h) for h in range(G * g, G * g + G)] for g in range(K)]
        blocks = [b for g, group in enumerate(groups) for b in (*group, ("k", g), ("v", g))]
    number = {block: i for i, block in enumerate((c, h) for c in names for h in names[c])}
    columns = np.array([number[block] * D + d for block in blocks for d in range(D)], float)
    mha = MultiHeadAttention.from_packed(
        np.tile(columns, (width, 1)), columns, num_heads=K * G, num_kv_heads=K, order=order
    )
    ends = np.cumsum([0, K * G * D, K * D, K * D])
    for c, first, last in zip("qkv", ends, ends[1:], strict=False):
        np.testing.assert_array_equal(getattr(mha, "b" + c), np.arange(first, last))
        np.testing.assert_array_equal(getattr(mha, "w" + c)[3], np.arange(first, last))


def test_initial_weights_are_within_limits_of_xavier():
    mha = MultiHeadAttention.init(64, 4, seed=1)
    limit = np.sqrt(6 / (64 + 3 * 64))  # of the three side by side
    assert 0.98 * limit < abs(mha.wq).max() <= limit
    apart = MultiHeadAttention.init(64, 4, seed=1, key_size=32)
    assert 0.98 * np.sqrt(6 / 128) < abs(apart.wq).max() <= np.sqrt(6 / 128)
    assert 0.98 * np.sqrt(6 / 96) < abs(apart.wk).max() <= np.sqrt(6 / 96)
    assert 0.98 / 8 < abs(mha.wo).max() <= 1 / 8
    assert not mha.bq.any()
    again = MultiHeadAttention.init(64, 4, seed=1)
    np.testing.assert_array_equal(again.wo, mha.wo)
    assert (MultiHeadAttention.init(64, 4, seed=2).wo != mha.wo).any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"in_size": "6"}, "in_size is '6', must be an integer ≥ 1"),
        ({"in_size": 0}, "in_size is 0, must be an integer ≥ 1"),
        ({"in_size": 7}, "in_size is 7, must be a multiple of 2, or pass head_size"),
        ({"head_size": 0}, "head_size is 0, must be an integer ≥ 1"),
        ({"out_size": 2.5}, "out_size is 2.5, must be an integer ≥ 1"),
        ({"seed": -1}, "seed is -1, must be an integer ≥ 0"),
    ],
)
def test_illegal_sizes_raise(kwargs, message):
    with pytest.raises(OptionError, match=message):
        MultiHeadAttention.init(**({"in_size": 6, "num_heads": 2, "seed": 0} | kwargs))


@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6), (0, 0, 6)])
def test_size_of_0_gives_gradients_of_0(shape):
    mha = MultiHeadAttention.init(6, 2, seed=0, qk_norm="rms", norm_q=np.ones(3))
    fwd = mha.forward(np.ones(shape))
    grads = mha.backward(fwd, np.ones_like(fwd.out))
    assert fwd.out.shape == grads.query.shape == shape
    assert not grads.wq.any()
    assert len(mha.describe(np.ones(shape)).heads) == 2


def test_float16_overflows():
    mha = MultiHeadAttention.init(6, 2, seed=0)
    assert not np.isfinite(mha.forward(1e9 * X + 1e9, dtype="float16").out.astype(float)).all()


def test_repr_names_parameters_and_options():
    assert repr(module(merge="reshape")) == (
        "MultiHeadAttention(wq=float64 (6, 6), wk=float64 (6, 6), wv=float64 (6, 6), "
        "wo=float64 (6, 6), num_heads=3, merge='reshape')"
    )


def test_arguments_are_not_modified():
    rng = np.random.default_rng(0)
    mha, x = MultiHeadAttention.init(6, 2, seed=3, add_bias_kv=True), normal(rng, 2, 5, 6)
    before = {n: a.copy() for n, a in {**mha.parameters, "x": x}.items()}
    for dtype in (None, "float32", "bfloat16"):
        mha.backward(mha.forward(x, dtype=dtype, rope=Rotary(size=2)), np.ones((2, 5, 6)))
    for name, array in {**mha.parameters, "x": x}.items():
        np.testing.assert_array_equal(array, before[name])


# --- gates ----------------------------------------------------------------------------------------


def gated_module(**options):
    return MultiHeadAttention.init(
        7, 6, seed=0, head_size=4, value_size=5, num_kv_heads=3, out_size=11, gate=True, **options
    )


@pytest.mark.parametrize("merge", ["concat", "reshape"])
@pytest.mark.parametrize("name", ["query", "wg", "bg", "wq", "wo", "gate"])
def test_complex_step_through_the_gate_of_a_module(name, merge):
    """The derivative along a direction, by complex step, is the gradient times that direction."""
    rng = np.random.default_rng(3)
    mha = gated_module(merge=merge)
    x, y, gate = (rng.standard_normal(n) for n in ((2, 5, 7), (2, 8, 7), (6, 1, 1)))
    fwd = mha.forward(x, y, gate=gate)
    dout = rng.standard_normal(fwd.out.shape)
    slope = getattr(mha.backward(fwd, dout), name)
    along = 1e-200j * rng.standard_normal(slope.shape)
    if name == "query":
        moved = mha.forward(x + along, y, gate=gate)
    elif name == "gate":
        moved = mha.forward(x, y, gate=gate + along)
    else:
        moved = mha.replace(**{name: getattr(mha, name) + along}).forward(x, y, gate=gate)
    rise, want = (dout * moved.out.imag).sum() * 1e200, (slope * along.imag).sum() * 1e200
    size = (abs(slope) * abs(along.imag)).sum() * 1e200 + abs(dout).sum()
    terms = 2 * 5 * 8 * 6 * 7 * 11  # of the longest sum
    assert abs(rise - want) <= terms * 2.0**-53 * size


def test_gate_of_a_module_multiplies_the_heads():
    mha = gated_module()
    x = np.random.default_rng(4).standard_normal((2, 5, 7))
    fwd = mha.forward(x)
    plain = mha.replace(wg=None, bg=None).forward(x).attention
    z = (x @ mha.wg + mha.bg).reshape(2, 5, 6, 5).swapaxes(1, 2)
    gate = 1 / (1 + np.exp(-z))
    allowed = 8 * 2.0**-53 * (8 + abs(x) @ abs(mha.wg)).max() * abs(plain.out)
    assert (abs(fwd.attention.out - gate * plain.out) <= allowed).all()
    assert fwd.weights.shape == plain.weights.shape


def test_head_mask_of_0_is_pruning():
    mha = gated_module()
    x = np.random.default_rng(5).standard_normal((2, 5, 7))
    mask = np.array([0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    masked, pruned = mha.forward(x, gate=mask[:, None, None]), mha.prune([0, 1]).forward(x)
    assert abs(masked.out - pruned.out).max() <= 64 * 2.0**-53 * abs(masked.out).max()


def test_importance_is_the_size_of_the_gradient_of_a_head_mask():
    mha = gated_module()
    x = np.random.default_rng(6).standard_normal((2, 5, 7))
    fwd = mha.forward(x, gate=np.ones((6, 1, 1)))
    dgate = mha.backward(fwd, np.ones_like(fwd.out)).gate
    importance = mha.importance(fwd, np.ones_like(fwd.out))
    assert abs(abs(dgate[:, 0, 0]) - importance).max() <= 2.0**-44 * importance.max()


def test_sigmoid_does_not_overflow():
    x = np.array([-1e4, -745.0, 0.0, 40.0, 1e4])
    with np.errstate(all="raise", under="ignore"):
        y = projections.sigmoid(x)
    assert y[0] == 0
    assert y[2] == 0.5
    assert y[-1] == 1
    assert 0 < y[1] < 1e-322


def test_gate_in_mixed_precision_is_rounded():
    mha = gated_module()
    x = np.random.default_rng(7).standard_normal((2, 5, 7))
    fwd = mha.forward(x, dtype="bfloat16")
    gate = fwd.steps.gate
    np.testing.assert_array_equal(gate, gate.astype("bfloat16").astype("f4"))
    grads = mha.backward(fwd, np.ones(fwd.out.shape))
    assert grads.wg.dtype == grads.wq.dtype


def test_errors_of_the_parameters_of_a_gate():
    mha = gated_module()
    with pytest.raises(OptionError, match="got bg without wg"):
        mha.replace(wg=None)
    with pytest.raises(ShapeError, match=r"wg has shape \(7, 29\), must have shape \(7, 30\)"):
        mha.replace(wg=mha.wg[:, 1:])
    with pytest.raises(ShapeError, match="bg has shape"):
        mha.replace(bg=mha.bg[1:])
    assert MultiHeadAttention.init(7, 7, seed=0, gate=True, bias=False).bg is None
    assert "o · sigmoid(query Wg + bg)" in str(mha.describe())
    with pytest.raises(OptionError, match="got wg, must be None: no gate is written there"):
        npattn.weights.to_torch(MultiHeadAttention.init(8, 2, seed=0, gate=True))
