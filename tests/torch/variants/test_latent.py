"""Latent attention on tensors: that of NumPy, by autograd; and the layer of DeepSeek-V3."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch as npt  # noqa: E402
from npattn import variants  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402
from npattn.variants.latent import NAMES  # noqa: E402
from tests.variants import formulas  # noqa: E402
from tests.variants.running_error import Bounded, assert_within  # noqa: E402
from tests.variants.test_latent import BANDS, FORMS, B, C, E, H, N, R, S, T, sample  # noqa: E402


def leaves(arrays, dtype=torch.float64):
    return [torch.tensor(x, dtype=dtype, requires_grad=True) for x in arrays]


def cotangents(seed=9):
    normal = np.random.default_rng(seed).standard_normal
    return normal((B, H, T, E)), normal((B, H, T))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("band", BANDS)
def test_is_the_formula_and_so_are_gradients(form, band):
    options, visible = BANDS[band]
    arrays, (do, dlse) = sample(), cotangents()
    tensors = leaves(arrays)
    got = npt.variants.latent.forward(*tensors, form=form, **options)
    torch.autograd.backward((got.out, got.lse), (torch.tensor(do), torch.tensor(dlse)))
    exact = formulas.latent(arrays, visible, do, dlse)
    assert_within("out", got.out.detach(), exact["out"])
    assert_within("lse", got.lse.detach(), exact["lse"])
    assert_within("weights", got.weights.detach(), exact["weights"])
    for name, x in zip(NAMES, tensors, strict=True):
        assert_within(f"d{name}", x.grad, exact[name])
    out = npt.variants.latent.attention(*tensors, form=form, **options)
    assert torch.equal(out, got.out)


@pytest.mark.parametrize("form", FORMS)
def test_float32_computes_in_float32(form):
    arrays, (do, dlse) = [x.astype(np.float32) for x in sample()], cotangents()
    do, dlse = do.astype(np.float32), dlse.astype(np.float32)
    tensors = leaves(arrays, torch.float32)
    got = npt.variants.latent.forward(*tensors, form=form, dtype=torch.float32)
    assert got.out.dtype == torch.float32
    torch.autograd.backward((got.out, got.lse), (torch.tensor(do), torch.tensor(dlse)))
    exact = formulas.latent(arrays, BANDS["full"][1], do, dlse)
    assert_within("out", got.out.detach(), exact["out"], 2.0**-24)
    for name, x in zip(NAMES, tensors, strict=True):
        assert x.grad.dtype == torch.float32
        assert_within(f"d{name}", x.grad, exact[name], 2.0**-24)


@pytest.mark.parametrize("form", FORMS)
def test_options_and_leading_axes_are_those_of_numpy(form):
    arrays = sample(2, (2, 3), (1,))
    bias, sinks = np.random.default_rng(3).standard_normal((H, 1, S)), np.array([0.5, -1, 2])
    options = {"softcap": 1.5, "scale": 0.3, "causal": "bottom_right"}
    want = variants.latent.forward(*arrays, form=form, bias=bias, sinks=sinks, **options)
    tensors = leaves((*arrays, bias, sinks))
    got = npt.variants.latent.forward(
        *tensors[:6], form=form, bias=tensors[6], sinks=tensors[7], **options
    )
    normal = np.random.default_rng(4).standard_normal
    do, dlse = normal(want.out.shape), normal(want.lse.shape)
    torch.autograd.backward((got.out, got.lse), (torch.tensor(do), torch.tensor(dlse)))
    grads = variants.latent.backward(want, do, dlse)
    visible = np.tri(T, S, S - T, dtype=bool)
    sizes = formulas.latent(arrays, visible, do, dlse, scale=0.3, softcap=1.5, bias=bias)
    # A sink takes weight from the others: every number is at most what it is without one.
    for name, x in zip(NAMES, tensors, strict=False):
        gap = abs(x.grad.numpy() - getattr(grads, name))
        assert gap.max() <= 2.0**-52 * sizes[name].e.max()
    assert abs(tensors[6].grad.numpy() - grads.bias).max() <= 2.0**-52 * sizes["bias"].e.sum()
    assert abs(tensors[7].grad.numpy() - grads.sinks).max() <= 2.0**-52 * sizes["bias"].e.sum()


@pytest.mark.parametrize("form", FORMS)
def test_a_hidden_key_matters_to_nobody(form):
    arrays, (do, _) = sample(9), cotangents()
    mask = np.ones((T, S), bool)
    mask[:, 3] = False
    exact = formulas.latent(arrays, mask, do, np.zeros((B, H, T)))
    arrays[2][:, 3], arrays[3][:, 3] = np.nan, np.inf
    tensors = leaves(arrays)
    out = npt.variants.latent.attention(*tensors, form=form, mask=mask)
    out.backward(torch.tensor(do))
    assert_within("out", out.detach(), exact["out"])
    for name, x in zip(NAMES, tensors, strict=True):
        assert_within(f"d{name}", x.grad, exact[name])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_have_gradients(form):
    rng = np.random.default_rng(6)
    shapes = ((2, 3, 2), (2, 3, 1), (4, 3), (4, 1), (2, 3, 2), (2, 3, 2))
    tensors = leaves([rng.standard_normal(shape) for shape in shapes])
    function = lambda *xs: npt.variants.latent.attention(*xs, form=form)  # noqa: E731
    assert torch.autograd.gradgradcheck(function, tensors)


def test_wrong_arguments_are_errors():
    arrays = sample()
    tensors = leaves(arrays)
    attend = npt.variants.latent.attention
    with pytest.raises(DtypeError, match=r"c is ndarray, must be a tensor: use npattn.variants"):
        attend(*tensors[:2], arrays[2], *tensors[3:])
    with pytest.raises(DtypeError, match=r"dtype is torch.bfloat16, must be float32 or float64"):
        attend(*tensors, dtype=torch.bfloat16)
    with pytest.raises(OptionError, match="form is None"):
        attend(*tensors, form=None)
    with pytest.raises(ShapeError, match="k_rope has sizes"):
        attend(*tensors[:3], tensors[3][:, :2], *tensors[4:])
    with pytest.raises(ShapeError, match=r"pass c\.squeeze\(-3\)"):
        attend(*tensors[:2], tensors[2][:, None], *tensors[3:])


# --- a layer of DeepSeek-V3 -----------------------------------------------------------------------


def make_layer(low_rank, dtype):
    """A layer of transformers with random weights, its rotary part, and its configuration."""
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        DeepseekV3RotaryEmbedding,
    )

    config = DeepseekV3Config(
        hidden_size=19, num_attention_heads=H, num_key_value_heads=H, kv_lora_rank=C,
        q_lora_rank=7 if low_rank else None, qk_nope_head_dim=N, qk_rope_head_dim=R, v_head_dim=E,
        attention_bias=True, max_position_embeddings=64, rope_parameters=ROPE,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    layer = DeepseekV3Attention(config, 0).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
            parameter /= parameter.shape[-1] ** 0.5
    return layer.eval(), DeepseekV3RotaryEmbedding(config), config


ROPE = {"rope_type": "default", "rope_theta": 100.0}


def with_our_attention(layer, x, form, layout="interleaved"):
    """The layer's projections and norms, and our rotary positions and attention."""
    shape = (*x.shape[:-1], H, N + R)
    if layer.q_proj is None:
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))
    else:
        q = layer.q_proj(x)
    query, rotary = q.view(shape).transpose(1, 2).split([N, R], -1)
    c, k_rope = layer.kv_a_proj_with_mqa(x).split([C, R], -1)
    up = layer.kv_b_proj.weight.view(H, N + E, C).swapaxes(-1, -2)  # y = x wᵀ in torch
    turn = {"layout": layout, "base": ROPE["rope_theta"], "dtype": x.dtype}
    results = npt.variants.latent.forward(
        query, npt.positions.rope(rotary, **turn), layer.kv_a_layernorm(c),
        npt.positions.rope(k_rope, **turn), up[..., :N], up[..., N:], form=form, causal=True,
        dtype=x.dtype,
    )  # fmt: skip
    out = results.out.transpose(1, 2).flatten(-2)
    return layer.o_proj(out), results.weights


def bounded_layer(layer, x, do):
    """The layer by its formula, with bounds of every rounding; gradients of x's projections."""
    weights = {name: Bounded(w.detach().double().numpy()) for name, w in layer.named_parameters()}

    def project(name, y):
        y = y @ weights[f"{name}.weight"].T
        bias = weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def normalise(name, y):
        mean = (y * y).sum(-1, keepdims=True) * Bounded(1 / y.x.shape[-1])
        eps = Bounded(getattr(layer, name).variance_epsilon)
        root = (mean + eps).log() * Bounded(-0.5)  # 1/√ by exp and log: more roundings than theirs
        return y * root.exp() * weights[f"{name}.weight"]

    def turn(y):
        """Turn pairs; angles of the layer, their cosines and sines are float32."""
        t = np.arange(T)[:, None] * ROPE["rope_theta"] ** (-2 * np.arange(R // 2) / R)
        own = 2.0**-24 / U[x.dtype] * (3 * t + 2)
        cos, sin = Bounded(np.cos(t), own), Bounded(np.sin(t), own)
        a, b = y[..., 0::2], y[..., 1::2]
        parts = (a * cos - b * sin, b * cos + a * sin)
        stacked = [np.stack([getattr(p, n) for p in parts], -1) for n in "xe"]
        return Bounded(*(z.reshape(y.x.shape) for z in stacked))

    given = Bounded(x.detach().double().numpy())
    if layer.q_proj is None:
        q = project("q_b_proj", normalise("q_a_layernorm", project("q_a_proj", given)))
    else:
        q = project("q_proj", given)
    split = [z.reshape(B, T, H, N + R).swapaxes(1, 2) for z in (q.x, q.e)]
    q = Bounded(*split)
    compressed = project("kv_a_proj_with_mqa", given)
    up = weights["kv_b_proj.weight"].x.reshape(H, N + E, C).swapaxes(-1, -2)
    c = normalise("kv_a_layernorm", compressed[..., :C])
    arrays = (q[..., :N], turn(q[..., N:]), c, turn(compressed[..., C:]), up[..., :N], up[..., N:])
    visible = np.tri(T, dtype=bool)
    results = formulas.latent(arrays, visible, do, np.zeros((B, H, T)))
    heads = results["out"]
    joined = Bounded(*(z.swapaxes(1, 2).reshape(B, T, H * E) for z in (heads.x, heads.e)))
    return project("o_proj", joined), results


U = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("low_rank", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_is_the_layer_of_deepseek_v3(form, low_rank, dtype):
    """Forward and gradients of the input and of every weight, from the layer's own weights."""
    layer, rotary, _ = make_layer(low_rank, dtype)
    x = torch.randn(B, T, 19, dtype=dtype, requires_grad=True)
    mask = torch.full((T, T), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    theirs, weights = layer(x, rotary(x, torch.arange(T)[None]), mask)
    do = torch.randn_like(theirs)
    parameters = [x, *layer.parameters()]
    wants = torch.autograd.grad(theirs, parameters, do)
    ours, own_weights = with_our_attention(layer, x, form)
    grads = torch.autograd.grad(ours, parameters, do)

    of_heads = (do.double() @ layer.o_proj.weight.detach().double()).view(B, T, H, E)
    exact, inside = bounded_layer(layer, x, of_heads.transpose(1, 2).numpy())
    for name, got in (("theirs", theirs), ("ours", ours)):
        assert_within(name, got.detach(), exact, U[dtype])
    for got in (weights, own_weights):
        assert_within("weights", got.detach(), inside["weights"], U[dtype])
    w = dict(layer.named_parameters())["kv_b_proj.weight"]
    at = [p is w for p in parameters].index(True)
    up = [np.concatenate([getattr(inside[n], z) for n in ("w_uk", "w_uv")], -1) for z in "xe"]
    expected = Bounded(*(z.swapaxes(-1, -2).reshape(H * (N + E), C) for z in up))
    for name, found in (("theirs", wants), ("ours", grads)):
        assert_within(name, found[at], expected, U[dtype])
    # The other gradients are those of q, c and k_rope, times the layer's own Jacobians: as many
    # roundings relative to their size, for each is a sum over all queries and heads as this one is.
    relative = 2 * U[dtype] * expected.e.max() / abs(expected.x).max()
    for got, want in zip(grads, wants, strict=True):
        assert abs(got - want).max() <= relative * abs(want).max()
    wrong, _ = with_our_attention(layer, x, form, "half")
    with pytest.raises(AssertionError, match="half is off by"):
        assert_within("half", wrong.detach(), exact, U[dtype])
