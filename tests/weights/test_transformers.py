"""Layers of tiny random models of transformers, read from their files, against their own modules.

The modules run in float32 and the tolerance is a bound on their rounding: running_error.py.
"""

import json

import numpy as np
import pytest

from npattn import positions, weights
from npattn.biases.distances import Alibi
from npattn.errors import OptionError
from tests.weights.running_error import U32, U64, Layer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

B, T, S, LAYERS, VOCABULARY = 2, 7, 5, 2, 31
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "intermediate_size": 11}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = SIZES | {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 2}
GROUPED |= {"head_dim": 4}
# torch multiplies groups of rows whose strides are multiples of 16 bytes.
EXPERTS = GROUPED | {"hidden_size": 24, "intermediate_size": 12}
EQUAL = SIZES | {"hidden_size": 12, "num_attention_heads": 3}
AT = "model.layers.{i}.self_attn"

# Configuration, model, module of the attention, its output projection, what its arguments are.
MODELS = {
    "bert": ("Bert", "BertModel", EQUAL, "encoder.layer.{i}.attention.self",
             "encoder.layer.{i}.attention.output.dense"),
    "bert decoder": ("Bert", "BertLMHeadModel", EQUAL | {"is_decoder": True},
                     "bert.encoder.layer.{i}.attention.self",
                     "bert.encoder.layer.{i}.attention.output.dense"),
    "bloom": ("Bloom", "BloomForCausalLM", SIZES | {"hidden_size": 12, "n_head": 3},
              "transformer.h.{i}.self_attention", "transformer.h.{i}.self_attention.dense"),
    "falcon": ("Falcon", "FalconForCausalLM", EQUAL, "transformer.h.{i}.self_attention",
               "transformer.h.{i}.self_attention.dense"),
    "falcon, not multi-query": ("Falcon", "FalconModel", EQUAL | {"multi_query": False},
                                "h.{i}.self_attention", "h.{i}.self_attention.dense"),
    "falcon, new": ("Falcon", "FalconForCausalLM",
                    EQUAL | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True,
                             "num_attention_heads": 6, "hidden_size": 24},
                    "transformer.h.{i}.self_attention", "transformer.h.{i}.self_attention.dense"),
    "falcon, alibi": ("Falcon", "FalconForCausalLM",
                      EQUAL | {"alibi": True, "num_attention_heads": 4},
                      "transformer.h.{i}.self_attention", "transformer.h.{i}.self_attention.dense"),
    "gemma": ("Gemma", "GemmaForCausalLM", GROUPED, AT, AT + ".o_proj"),
    "gemma2": ("Gemma2", "Gemma2ForCausalLM",
               GROUPED | {"sliding_window": 3, "query_pre_attn_scalar": 13,
                          "attn_logit_softcapping": 1.5}, AT, AT + ".o_proj"),
    "gemma3": ("Gemma3Text", "Gemma3ForCausalLM",
               GROUPED | {"sliding_window": 3, "query_pre_attn_scalar": 13, "rms_norm_eps": 0.1,
                          "attn_logit_softcapping": 1.5, "sliding_window_pattern": 2},
               AT, AT + ".o_proj"),
    "gpt_oss": ("GptOss", "GptOssForCausalLM",
                EXPERTS | {"sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
                AT, AT + ".o_proj"),
    "gpt2": ("GPT2", "GPT2LMHeadModel",
             {"vocab_size": VOCABULARY, "n_embd": 12, "n_layer": LAYERS, "n_head": 3,
              "bos_token_id": 1, "eos_token_id": 2}, "transformer.h.{i}.attn",
             "transformer.h.{i}.attn.c_proj"),
    "gpt2 with other scales": ("GPT2", "GPT2Model",
                               {"vocab_size": VOCABULARY, "n_embd": 12, "n_layer": LAYERS,
                                "n_head": 3, "bos_token_id": 1, "eos_token_id": 2,
                                "scale_attn_by_inverse_layer_idx": True,
                                "scale_attn_weights": False},
                               "h.{i}.attn", "h.{i}.attn.c_proj"),
    "gpt_neox": ("GPTNeoX", "GPTNeoXForCausalLM", EQUAL | {"hidden_size": 24},
                 "gpt_neox.layers.{i}.attention", "gpt_neox.layers.{i}.attention.dense"),
    "llama": ("Llama", "LlamaForCausalLM", GROUPED, AT, AT + ".o_proj"),
    "llama with biases": ("Llama", "LlamaModel", GROUPED | {"attention_bias": True},
                          "layers.{i}.self_attn", "layers.{i}.self_attn.o_proj"),
    "mistral": ("Mistral", "MistralForCausalLM", GROUPED | {"sliding_window": 3}, AT,
                AT + ".o_proj"),
    "mixtral": ("Mixtral", "MixtralForCausalLM",
                EXPERTS | {"sliding_window": 3, "num_local_experts": 2}, AT, AT + ".o_proj"),
    "olmo2": ("Olmo2", "Olmo2ForCausalLM",
              {**EQUAL, "num_key_value_heads": 1, "rms_norm_eps": 0.1}, AT, AT + ".o_proj"),
    "phi": ("Phi", "PhiForCausalLM", EQUAL | {"hidden_size": 24, "num_key_value_heads": 1}, AT,
            AT + ".dense"),
    "phi with norms": ("Phi", "PhiForCausalLM",
                       EQUAL | {"hidden_size": 24, "qk_layernorm": True, "layer_norm_eps": 0.1},
                       AT, AT + ".dense"),
    "phi3": ("Phi3", "Phi3ForCausalLM", EQUAL | {"num_key_value_heads": 1, "sliding_window": 4},
             AT, AT + ".o_proj"),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM",
              {**EQUAL, "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 3,
               "max_window_layers": 1}, AT, AT + ".o_proj"),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", GROUPED | {"rms_norm_eps": 0.1}, AT, AT + ".o_proj"),
    "qwen3_moe": ("Qwen3Moe", "Qwen3MoeForCausalLM",
                  EXPERTS | {"rms_norm_eps": 0.1, "use_sliding_window": True, "sliding_window": 3,
                             "moe_intermediate_size": 12, "num_experts": 2,
                             "num_experts_per_tok": 1}, AT, AT + ".o_proj"),
    "t5": ("T5", "T5ForConditionalGeneration",
           {"vocab_size": VOCABULARY, "d_model": 10, "d_kv": 3, "d_ff": 11, "num_layers": LAYERS,
            "num_heads": 5, "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 7, "decoder_start_token_id": 0},
           "{part}.block.{i}.layer.{j}.{kind}", "{part}.block.{i}.layer.{j}.{kind}.o"),
}  # fmt: skip
T5_PARTS = {
    "encoder": {"part": "encoder", "j": "0", "kind": "SelfAttention"},
    "decoder": {"part": "decoder", "j": "0", "kind": "SelfAttention"},
    "cross": {"part": "decoder", "j": "1", "kind": "EncDecAttention"},
}
CASES = [(name, None) for name in MODELS if name != "t5"] + [("t5", part) for part in T5_PARTS]


@pytest.fixture
def make(tmp_path):
    """A function that makes a model of a kind and writes it to tmp_path."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def make(name, dtype=None, **changes):
        kind, model, settings, *_ = MODELS[name]
        config = getattr(transformers, f"{kind}Config")(**(settings | changes))
        # Falcon's eager attention adds ALiBi twice: with the mask, and to the scores.
        config._attn_implementation = "sdpa" if "alibi" in name else "eager"
        torch.manual_seed(0)
        made = getattr(transformers, model)(config).eval()
        generator = torch.Generator().manual_seed(1)
        for parameter in made.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
        if dtype is not None:
            made = made.to(getattr(torch, dtype))
        made.save_pretrained(tmp_path, **({} if dtype is None else {"max_shard_size": "2KB"}))
        return made

    return make


def run(model, name, layer, part=None):
    """The inputs and the output of the attention of a layer, as tensors of the graph."""
    torch = pytest.importorskip("torch")
    seen = {}
    words = {"i": layer, **T5_PARTS.get(part, {})}
    attention, projection = (text.format(**words) for text in MODELS[name][3:])

    def keep_inputs(module, args, kwargs):
        seen["x"] = args[0] if args else kwargs["hidden_states"]
        seen["key"] = kwargs.get("key_value_states")

    def keep_output(module, args, out):
        seen["out"] = out

    model.get_submodule(attention).register_forward_pre_hook(keep_inputs, with_kwargs=True)
    model.get_submodule(projection).register_forward_hook(keep_output)
    ids = torch.from_numpy(np.random.default_rng(2).integers(3, VOCABULARY, (B, T)))
    if name == "t5":
        model(input_ids=ids[:, :S], decoder_input_ids=ids)
    else:
        model(input_ids=ids)
    return seen


def plain(x):
    return None if x is None else x.detach().double().numpy()


def in_formulas(layer, x, key, u):
    """The layer by formulas, with bounds for unit roundoff u."""
    options = dict(layer.options)
    bias = options.pop("bias", None)
    if isinstance(bias, Alibi):  # relative to the first key, as the models have it
        bias = bias.slopes[:, None, None] * np.arange(x.shape[-2])
    elif bias is not None:
        bias = bias.to_array(T=x.shape[-2], S=(x if key is None else key).shape[-2])
    return Layer(layer.attention, x, key, **options, bias=bias, u=u)


def assert_within(name, actual, expected, allowed):
    assert actual.shape == expected.shape, name
    gap = abs(actual - expected)
    assert (gap <= allowed).all(), f"{name} is off by {(gap / allowed).max():.3g} × the bound"
    assert allowed.max() < 1e-2 * abs(expected).max(), f"the bound of {name} says nothing"


@pytest.mark.parametrize("i", range(LAYERS))
@pytest.mark.parametrize(("name", "part"), CASES)
def test_layer_computes_what_the_model_computes(make, tmp_path, name, part, i):
    seen = run(make(name), name, i, part)
    layer = weights.from_checkpoint(tmp_path, i, part=part)
    x, key = plain(seen["x"]), plain(seen["key"])
    out = layer.attention.forward(x, key, **layer.options).out
    narrow, wide = (in_formulas(layer, x, key, u).forward() for u in (U32, U64))
    assert_within("formulas", out, wide.value, 2 * wide.error)
    assert_within("out", plain(seen["out"]), out, narrow.error + wide.error)


# Where torch keeps the gradient of each parameter, by our name.
def llama_gradients(module, grads):
    return {f"w{c}": grads[getattr(module, f"{c}_proj").weight].T for c in "qkvo"} | {
        f"b{c}": grads[getattr(module, f"{c}_proj").bias] for c in "qkvo"
    }


def gpt2_gradients(module, grads):
    w, b = (np.split(grads[x], 3, -1) for x in (module.c_attn.weight, module.c_attn.bias))
    own = {f"w{c}": x for c, x in zip("qkv", w, strict=True)}
    own |= {f"b{c}": x for c, x in zip("qkv", b, strict=True)}
    return own | {"wo": grads[module.c_proj.weight], "bo": grads[module.c_proj.bias]}


@pytest.mark.parametrize("i", range(LAYERS))
@pytest.mark.parametrize(
    ("name", "read"), [("llama with biases", llama_gradients), ("gpt2", gpt2_gradients)]
)
def test_gradients_are_those_of_the_model(make, tmp_path, name, read, i):
    torch = pytest.importorskip("torch")
    model = make(name)
    seen = run(model, name, i)
    dout = np.random.default_rng(3).standard_normal(seen["out"].shape).astype(np.float32)
    module = model.get_submodule(MODELS[name][3].format(i=i))
    leaves = [*module.parameters(), seen["x"]]
    grads = torch.autograd.grad(seen["out"], leaves, torch.from_numpy(dout))
    by_leaf = {leaf: plain(grad) for leaf, grad in zip(leaves, grads, strict=True)}
    actual = {"query": by_leaf[seen["x"]], **read(module, by_leaf)}
    layer, x = weights.from_checkpoint(tmp_path, i), plain(seen["x"])
    fwd = layer.attention.forward(x, **layer.options)
    want = layer.attention.backward(fwd, dout)
    bounded = {}
    for u in (U32, U64):
        formulas = in_formulas(layer, x, None, u)
        formulas.forward()
        bounded[u] = formulas.backward(dout)
    assert set(actual) == {"query", *layer.attention.parameters}
    for key, exact in ((key, getattr(want, key)) for key in actual):
        narrow, wide = (bounded[u][key] for u in (U32, U64))
        shape = exact.shape
        gaps = (narrow.error + wide.error).reshape(shape)
        if key == "bk" and layer.options.get("rope") is None:
            # It adds one number to all scores of a query: 0, but for rounding.
            assert (abs(exact) <= wide.error.reshape(shape)).all()
            assert (abs(actual[key]) <= gaps).all()
            continue
        assert_within(f"formulas of {key}", exact, wide.value.reshape(shape),
                      2 * wide.error.reshape(shape))  # fmt: skip
        assert_within(key, actual[key], exact, gaps)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_narrow_shards_are_read_to_the_bit(make, tmp_path, name, dtype):
    model = make(name, dtype)
    assert not (tmp_path / "model.safetensors").exists()
    layer = weights.from_checkpoint(tmp_path, 1)
    assert {str(x.dtype) for x in layer.attention.parameters.values()} == {dtype}
    for letter in "qkvo" if name == "llama" else "o":
        own = model.get_parameter(layer.names[f"w{letter}"]).detach()
        own = plain(own.T if name == "llama" else own)
        np.testing.assert_array_equal(layer.attention.parameters[f"w{letter}"].astype(float), own)


TRAINED, R = 512, 16
ROPES = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn with a factor": {"factor": 4.0, "attention_factor": 1.5, "truncate": False},
    "yarn of DeepSeek": {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.5] * (R // 2), "long_factor": [2.5] * (R // 2), "factor": 5.0},
}
PARTLY = {"hidden_size": 6 * R, "num_attention_heads": 3, "num_key_value_heads": 3}


@pytest.mark.parametrize(("name", "more"), [("llama", {"head_dim": R}), ("phi", PARTLY)])
@pytest.mark.parametrize("length", [11, 5 * TRAINED])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary_positions_are_those_of_the_configuration(make, tmp_path, kind, length, name, more):
    """Half of the features of phi turn."""
    torch = pytest.importorskip("torch")
    parameters = {"rope_type": kind.split()[0], "rope_theta": 5e5, **ROPES[kind]}
    parameters |= {"partial_rotary_factor": 0.5} if name == "phi" else {}
    stretched = parameters["rope_type"] in ("yarn", "llama3", "longrope")
    parameters |= {"original_max_position_embeddings": TRAINED} if stretched else {}
    longest = 5 * TRAINED if stretched else TRAINED
    model = make(name, **more, rope_parameters=parameters, max_position_embeddings=longest)
    cos, sin = model.model.rotary_emb(torch.zeros(1, length, 1), torch.arange(length)[None])
    cos, sin = (plain(x)[0, :, : R // 2] for x in (cos, sin))
    layer = weights.from_checkpoint(tmp_path, 0, length=length)
    queries, _ = layer.options["rope"].arguments(length, length)
    ones = np.zeros((length, layer.attention.head_size))
    ones[:, : R // 2] = 1
    turned = positions.rope(ones, **queries)
    # Frequencies in float32: an exponent, whose rounding counts log(base) times, a power, a
    # reciprocal, a division, and a ramp of up to twelve operations between 0 and 1.
    roundings = np.log(5e5) + 2 + 1 + 1 + 12
    allowed = 2 * (np.arange(length)[:, None] * roundings + 1 + 2 + 1) * U32
    assert (abs(turned[:, : R // 2] - cos) <= allowed).all()
    assert (abs(turned[:, R // 2 : R] - sin) <= allowed).all()
    assert not turned[:, R:].any()


@pytest.mark.parametrize(
    "name", ["gemma2", "gpt_neox", "llama", "mistral", "phi", "qwen2", "qwen3"]
)
def test_configuration_of_version_4_means_the_same(make, tmp_path, name):
    """Without the names that version 5 added, and with the defaults left out."""
    make(name)
    config = json.loads((tmp_path / "config.json").read_text())
    older = {n: x for n, x in config.items() if n not in ("layer_types", "rope_parameters")}
    older["rope_theta"] = config["rope_parameters"]["rope_theta"]
    for i in range(LAYERS):
        new, old = (weights.from_checkpoint(tmp_path, i, config=c) for c in (config, older))
        assert new.options.keys() == old.options.keys()
        assert new.options.get("window") == old.options.get("window")
        assert vars(new.options["rope"]) == vars(old.options["rope"])


def test_defaults_are_those_of_transformers(tmp_path):
    """A file of version 4 has only what differs from them."""
    transformers = pytest.importorskip("transformers")
    from npattn.weights.families import GEMMA2, GEMMA3, GPT_OSS_ROPE, QWEN

    oss = transformers.GptOssConfig()
    assert {**oss.rope_parameters, **GPT_OSS_ROPE} == oss.rope_parameters
    assert (oss.sliding_window, oss.rope_parameters["rope_theta"]) == (128, 150000.0)
    gemma3 = transformers.Gemma3TextConfig().rope_parameters
    assert gemma3["full_attention"]["rope_theta"] == 1e6
    assert gemma3["sliding_attention"]["rope_theta"] == 1e4

    assert transformers.MixtralConfig().sliding_window is None
    assert transformers.Olmo2Config().rms_norm_eps == 1e-5
    for kind, plain in (
        ("Gemma2", GEMMA2),
        ("Gemma3Text", GEMMA3),
        ("Qwen3", QWEN),
        ("Qwen2", QWEN),
    ):
        config = getattr(transformers, f"{kind}Config")(use_sliding_window=True)
        assert {name: getattr(config, name) for name in plain} == plain | (
            {"use_sliding_window": True} if "use_sliding_window" in plain else {}
        )
    assert transformers.MistralConfig().sliding_window == 4096
    assert transformers.T5Config().relative_attention_max_distance == 128
    assert transformers.PhiConfig().rope_parameters["partial_rotary_factor"] == 0.5
    assert transformers.GPTNeoXConfig().rope_parameters["partial_rotary_factor"] == 0.25
    assert transformers.LlamaConfig().rope_parameters["rope_theta"] == 10000.0


def test_pickled_model_is_refused(make, tmp_path):
    torch = pytest.importorskip("torch")
    model = make("llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OptionError, match=r"pytorch_model.bin is a pickle, which runs code"):
        weights.from_checkpoint(tmp_path, 0)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
