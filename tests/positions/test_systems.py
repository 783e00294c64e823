"""Rotary positions as real systems compute them, in float32."""

import numpy as np
import pytest

from npattn.positions import linear, plain, rope, yarn

B, H, T, D, R = 2, 3, 29, 16, 8
U = 2.0**-24


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def assert_agree(got, want, x, last):
    """Angles come from a rounded power times a position; cos and sin, two products, a sum."""
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.all(abs(got - want) <= (8 * last + 8) * U * 2 * abs(x).max())


@pytest.fixture
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


PARAMETERS = {
    "default": ({}, lambda: plain(D, base=5e5)),
    "linear": ({"factor": 4.0}, lambda: linear(D, 4.0, base=5e5)),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 32},
        lambda: yarn(D, 4.0, trained_length=32, base=5e5),
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_llama(torch, name):
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    more, frequencies = PARAMETERS[name]
    config = LlamaConfig(
        hidden_size=H * D, num_attention_heads=H, max_position_embeddings=128,
        rope_parameters={"rope_type": name, "rope_theta": 5e5, **more},
    )  # fmt: skip
    q, k = normal(B, H, T, D), normal(B, 1, T, D, seed=1)
    places = np.stack([np.arange(T), np.arange(T) + 57])
    tensors = torch.tensor(q), torch.tensor(k)
    cos, sin = llama.LlamaRotaryEmbedding(config)(tensors[0], torch.tensor(places))
    for x, turned in zip((q, k), llama.apply_rotary_pos_emb(*tensors, cos, sin), strict=True):
        want = rope(x, positions=places[:, None], frequencies=frequencies())
        assert_agree(turned, want, x, places.max())


def test_gpt_neox(torch):
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    config = GPTNeoXConfig(
        hidden_size=H * D, num_attention_heads=H,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": R / D},
    )  # fmt: skip
    x = normal(B, H, T, D)
    tensor = torch.tensor(x)
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(tensor, torch.arange(T)[None] + 7)
    assert cos.shape[-1] == R
    turned, _ = neox.apply_rotary_pos_emb(tensor, tensor, cos, sin)
    assert_agree(turned, rope(x, size=R, offset=7), x, T + 7)


def test_gpt_j(torch):
    from transformers.models.gptj import modeling_gptj as gptj

    x = normal(B, T, H, R)  # heads after T
    sin, cos = torch.split(gptj.create_sinusoidal_positions(T, R), R // 2, dim=-1)
    turned = gptj.apply_rotary_pos_emb(torch.tensor(x), sin[None], cos[None]).transpose(1, 2)
    assert_agree(turned, rope(x.swapaxes(1, 2), layout="interleaved"), x, T)


def test_qwen2_vl(torch):
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

    sections = [2, 3, 3]
    config = Qwen2VLTextConfig(
        hidden_size=H * D, num_attention_heads=H, num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections},
    )  # fmt: skip
    x = normal(B, H, T, D)
    places = np.random.default_rng(3).integers(0, 50, (3, B, T))  # time, height, width
    tensor = torch.tensor(x)
    cos, sin = qwen.Qwen2VLRotaryEmbedding(config)(tensor, torch.tensor(places))
    turned, _ = qwen.apply_rotary_pos_emb(tensor, tensor, cos, sin)
    want = rope(x, positions=places[:, :, None], sections=sections, base=1e6)
    assert_agree(turned, want, x, 50)


@pytest.mark.parametrize(("layout", "traditional"), [("half", False), ("interleaved", True)])
def test_mlx(layout, traditional):
    mx = pytest.importorskip("mlx.core")
    x = normal(B, H, T, D)
    turned = mx.fast.rope(
        mx.array(x), R, traditional=traditional, base=500.0, scale=0.25, offset=11
    )
    want = rope(x, layout=layout, frequencies=linear(R, 4.0, base=500.0), offset=11)
    assert_agree(turned, want, x, T + 11)


@pytest.mark.parametrize(("layout", "interleaved"), [("half", 0), ("interleaved", 1)])
def test_onnx(layout, interleaved):
    """Its caches hold cos and sin of every position."""
    pytest.importorskip("onnx")
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    names = ["x", "cos", "sin", "ids"]
    node = helper.make_node(
        "RotaryEmbedding", names, ["y"], interleaved=interleaved, rotary_embedding_dim=R
    )
    types = [TensorProto.FLOAT] * 3 + [TensorProto.INT64]
    inputs = [
        helper.make_tensor_value_info(name, kind, None)
        for name, kind in zip(names, types, strict=True)
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
    x, places = normal(B, H, T, D), np.stack([np.arange(T), np.arange(T)[::-1] + 5])
    angles = np.arange(64)[:, None] * plain(R).values
    given = [x, np.cos(angles).astype("f4"), np.sin(angles).astype("f4"), places]
    turned = ReferenceEvaluator(model).run(None, dict(zip(names, given, strict=True)))[0]
    want = rope(x, layout=layout, size=R, positions=places[:, None])
    assert_agree(turned, want, x, 64)
