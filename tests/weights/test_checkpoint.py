"""Layers of checkpoints: hand-made files of every family against formulas, names, refusals."""

import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from npattn import positions, weights
from npattn.biases.distances import Relative
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.weights.families import FAMILIES
from npattn.weights.rope_config import read_rotary
from tests.weights.running_error import U64, Layer

files = pytest.importorskip("safetensors.numpy")

B, T, S, WIDTH, D, E, OUT = 2, 7, 5, 13, 4, 3, 11
K, G = 2, 3
H = K * G
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape)


def apart(at, ends, o, bias=True, kv=K, e=D):
    """Arrays of torch.nn.Linear, and how a module has them."""
    sizes = {"q": H * D, "k": kv * D, "v": kv * e}
    p = {"w" + c: normal(WIDTH, n) for c, n in sizes.items()} | {"wo": normal(H * e, OUT)}
    if bias:
        p |= {"b" + c: normal(n) for c, n in sizes.items()} | {"bo": normal(OUT)}
    names = dict(zip("qkvo", (*(f"{at}.{end}" for end in ends.split()), o), strict=True))
    arrays = {f"{names[n[1]]}.weight": x.T for n, x in p.items() if n[0] == "w"}
    arrays |= {f"{names[n[1]]}.bias": x for n, x in p.items() if n[0] == "b"}
    return arrays, p, kv


def packed(name, o, kv, order, transposed=True):
    """One array, whose columns are put side by side one head after the other."""
    p = {"wq": normal(WIDTH, H * D), "bq": normal(H * D), "wo": normal(H * D, OUT)}
    p |= {"wk": normal(WIDTH, kv * D), "bk": normal(kv * D), "bo": normal(OUT)}
    p |= {"wv": normal(WIDTH, kv * D), "bv": normal(kv * D)}
    group, w, b = H // kv, [], []
    if order == "qkv":
        heads = [(c, h) for c, n in (("q", H), ("k", kv), ("v", kv)) for h in range(n)]
    else:
        heads = []
        for g in range(kv):
            heads += [("q", g * group + i) for i in range(group)] + [("k", g), ("v", g)]
    for c, h in heads:
        w.append(p["w" + c][:, h * D : h * D + D])
        b.append(p["b" + c][h * D : h * D + D])
    w, b = np.concatenate(w, 1), np.concatenate(b)
    turn = np.transpose if transposed else np.asarray
    arrays = {f"{name}.weight": turn(w), f"{name}.bias": b}
    arrays |= {f"{o}.weight": turn(p["wo"]), f"{o}.bias": p["bo"]}
    return arrays, p, kv


LLAMA, PROJ = "model.layers.1.self_attn", "q_proj k_proj v_proj"
BERT = "bert.encoder.layer.1"
HEADS = {"num_attention_heads": H}
TABLE = normal(8, H)
SINKS = normal(H)
ROPE = {"rope": positions.Rotary()}


def t5(at, table=None):
    arrays, p, kv = apart(at, "q k v", f"{at}.o", bias=False, kv=H, e=D)
    if table is not None:
        arrays["x.block.0.layer.0.SelfAttention.relative_attention_bias.weight".replace(
            "x", at.split(".")[0])] = table  # fmt: skip
    return arrays, p, kv


def normed(ends, kind):
    arrays, p, kv = apart(LLAMA, PROJ, f"{LLAMA}.{'dense' if kind == 'layer' else 'o_proj'}")
    for (c, heads), end in zip((("q", H), ("k", kv)), ends, strict=True):
        size = heads * D if kind == "rms_projection" else D
        p["norm_" + c] = arrays[f"{LLAMA}.{end}.weight"] = normal(size)
        if kind == "layer":
            p[f"norm_{c}_bias"] = arrays[f"{LLAMA}.{end}.bias"] = normal(D)
    return arrays, p | {"qk_norm": kind, "norm_eps": 0.1}, kv


def less_one():
    arrays, p, kv = normed(("q_norm", "k_norm"), "rms")
    return arrays, p | {"norm_q": p["norm_q"] + 1, "norm_k": p["norm_k"] + 1}, kv


def with_sinks():
    arrays, p, kv = apart(LLAMA, PROJ, f"{LLAMA}.o_proj")
    return arrays | {f"{LLAMA}.sinks": SINKS}, p, kv


def llama(**more):
    return apart(LLAMA, PROJ, f"{LLAMA}.o_proj", bias=False, **more)


def causal(**options):
    return {"causal": True, **options}


PER_HEAD = "transformer.h.1.self_attention"
ALIBI = positions.alibi_slopes(H)
# Model type, more of the configuration, part, arrays, options by hand.
CASES = {
    "bert": ("bert", HEADS, None,
             lambda: apart(f"{BERT}.attention.self", "query key value",
                           f"{BERT}.attention.output.dense", kv=H), {}),
    "bert decoder": ("bert", HEADS | {"is_decoder": True}, "self",
                     lambda: apart(f"{BERT}.attention.self", "query key value",
                                   f"{BERT}.attention.output.dense", kv=H), causal()),
    "bert cross": ("bert", HEADS | {"is_decoder": True}, "cross",
                   lambda: apart(f"{BERT}.crossattention.self", "query key value",
                                 f"{BERT}.crossattention.output.dense", kv=H), {}),
    "bloom": ("bloom", {"n_head": H}, None,
              lambda: packed(f"{PER_HEAD}.query_key_value", f"{PER_HEAD}.dense", H, "per_head"),
              causal(slopes=ALIBI)),
    "falcon": ("falcon", HEADS | {"multi_query": True}, None,
               lambda: packed(f"{PER_HEAD}.query_key_value", f"{PER_HEAD}.dense", 1, "per_head"),
               causal(**ROPE)),
    "falcon new": ("falcon", HEADS | {"new_decoder_architecture": True}, None,
                   lambda: packed(f"{PER_HEAD}.query_key_value", f"{PER_HEAD}.dense", K,
                                  "per_head"), causal(**ROPE)),
    "falcon alibi": ("falcon", HEADS | {"alibi": True}, None,
                     lambda: packed(f"{PER_HEAD}.query_key_value", f"{PER_HEAD}.dense", H,
                                    "per_head"),
                     causal(slopes=ALIBI.astype(ml_dtypes.bfloat16).astype(float) / D**0.5)),
    "gemma": ("gemma", HEADS | {"head_dim": D}, None, llama, causal(**ROPE)),
    "gemma2 slides": ("gemma2", HEADS | {"layer_types": ["full_attention", "sliding_attention"],
                                         "sliding_window": 3, "query_pre_attn_scalar": 9}, None,
                      llama, causal(**ROPE, window=(2, None), scale=1 / 3, softcap=50.0)),
    "gemma2": ("gemma2", HEADS | {"attn_logit_softcapping": None}, None, llama,
               causal(**ROPE, scale=1 / 16)),
    "gemma3 slides": ("gemma3_text", HEADS | {"rms_norm_eps": 0.1, "sliding_window": 3,
                                             "rope_local_base_freq": 300.0}, None, less_one,
                      causal(rope=positions.Rotary(base=300.0), window=(2, None), scale=1 / 16)),
    "gemma3, older": ("gemma3_text", HEADS | {"rms_norm_eps": 0.1, "sliding_window_pattern": 2,
                                              "rope_theta": 500.0, "query_pre_attn_scalar": 9},
                      None, less_one, causal(rope=positions.Rotary(base=500.0), scale=1 / 3)),
    "gemma3 without a base": ("gemma3_text", HEADS | {
        "rms_norm_eps": 0.1, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default"}}}, None, less_one,
                              causal(rope=positions.Rotary(base=1e6), scale=1 / 16)),
    "gemma3 of images": ("gemma3", {"text_config": HEADS | {
        "rms_norm_eps": 0.1, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_theta": 700.0}}}}, None, less_one,
                         causal(rope=positions.Rotary(base=700.0), scale=1 / 16)),
    "gpt_oss": ("gpt_oss", HEADS | {"rope_parameters": {"rope_type": "default"}}, None,
                with_sinks, causal(rope=positions.Rotary(base=150000.0), sinks=SINKS)),
    "gpt2": ("gpt2", {"n_head": H}, None,
             lambda: packed("transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_proj", H, "qkv",
                            False), causal()),
    "gpt2 scaled": ("gpt2", {"n_head": H, "scale_attn_weights": False,
                             "scale_attn_by_inverse_layer_idx": True}, None,
                    lambda: packed("h.1.attn.c_attn", "h.1.attn.c_proj", H, "qkv", False),
                    causal(scale=0.5)),
    "gpt_neox": ("gpt_neox", HEADS | {"rotary_pct": 0.5, "rotary_emb_base": 300}, None,
                 lambda: packed("gpt_neox.layers.1.attention.query_key_value",
                                "gpt_neox.layers.1.attention.dense", H, "per_head"),
                 causal(rope=positions.Rotary(size=2, base=300.0))),
    "llama": ("llama", HEADS | {"num_key_value_heads": K, "rope_theta": 5e5}, None,
              lambda: llama(e=E), causal(rope=positions.Rotary(base=5e5))),
    "mistral": ("mistral", HEADS | {"sliding_window": 2}, None, llama,
                causal(**ROPE, window=(1, None))),
    "mixtral": ("mixtral", HEADS, None, llama, causal(**ROPE)),
    "mixtral slides": ("mixtral", HEADS | {"sliding_window": 2}, None, llama,
                       causal(**ROPE, window=(1, None))),
    "olmo2": ("olmo2", HEADS | {"rms_norm_eps": 0.1}, None,
              lambda: normed(("q_norm", "k_norm"), "rms_projection"), causal(**ROPE)),
    "phi": ("phi", HEADS, None, lambda: apart(LLAMA, PROJ, f"{LLAMA}.dense"),
            causal(rope=positions.Rotary(size=2))),
    "phi norms": ("phi", HEADS | {"qk_layernorm": True, "layer_norm_eps": 0.1}, None,
                  lambda: normed(("q_layernorm", "k_layernorm"), "layer"),
                  causal(rope=positions.Rotary(size=2))),
    "phi3": ("phi3", HEADS | {"sliding_window": 3}, None,
             lambda: packed(f"{LLAMA}.qkv_proj", f"{LLAMA}.o_proj", K, "qkv"),
             causal(**ROPE, window=(2, None))),
    "qwen2": ("qwen2", HEADS | {"sliding_window": 3}, None,
              lambda: apart(LLAMA, PROJ, f"{LLAMA}.o_proj"), causal(**ROPE)),
    "qwen2 slides": ("qwen2", HEADS | {"sliding_window": 3, "use_sliding_window": True,
                                       "max_window_layers": 1}, None,
                     llama, causal(**ROPE, window=(2, None))),
    "qwen3": ("qwen3", HEADS | {"rms_norm_eps": 0.1}, None,
              lambda: normed(("q_norm", "k_norm"), "rms"), causal(**ROPE)),
    "qwen3_moe slides": ("qwen3_moe", HEADS | {"rms_norm_eps": 0.1, "sliding_window": 3,
                                              "use_sliding_window": True}, None,
                         lambda: normed(("q_norm", "k_norm"), "rms"),
                         causal(**ROPE, window=(2, None))),
    "t5 encoder": ("t5", {"num_heads": H, "d_kv": D, "relative_attention_max_distance": 9},
                   "encoder", lambda: t5("encoder.block.1.layer.0.SelfAttention", TABLE),
                   {"scale": 1.0, "table": True}),
    "t5 decoder": ("t5", {"num_heads": H, "relative_attention_max_distance": 9}, "decoder",
                   lambda: t5("decoder.block.1.layer.0.SelfAttention", TABLE),
                   causal(scale=1.0, table=False)),
    "t5 cross": ("t5", {"num_heads": H}, "cross",
                 lambda: t5("decoder.block.1.layer.1.EncDecAttention"), {"scale": 1.0}),
}  # fmt: skip


def write(path, arrays, dtype=np.float64, **config):
    plain = {n: np.ascontiguousarray(x, dtype) for n, x in arrays.items()}
    files.save_file(plain, path / "model.safetensors")
    if config:
        (path / "config.json").write_text(json.dumps(config))


def bias_of(options, T):
    """ALiBi relative to the first key, or T5's table looked up: exact distances, then one."""
    options, t = dict(options), np.arange(T)
    if "slopes" in options:
        options["bias"] = options.pop("slopes")[:, None, None] * t
    if "table" in options:
        both = options.pop("table")
        rows, after = np.zeros((T, T), int), t - t[:, None]
        count = len(TABLE) // 2 if both else len(TABLE)
        for i, j in np.ndindex(T, T):
            n = abs(after[i, j]) if both else max(-after[i, j], 0)
            if n >= count // 2:
                grown = np.log(n / (count // 2)) / np.log(9 / (count // 2)) * (count - count // 2)
                n = min(count // 2 + int(grown), count - 1)
            rows[i, j] = n + count * (both and after[i, j] > 0)
        options["bias"] = np.moveaxis(TABLE[rows], -1, 0)
    return options


@pytest.mark.every
@pytest.mark.parametrize("name", CASES)
def test_hand_made_file_of_each_family_computes_its_formulas(tmp_path, name):
    kind, config, part, make, options = CASES[name]
    arrays, p, kv = make()
    write(tmp_path, arrays, model_type=kind, **config)
    layer = weights.from_checkpoint(tmp_path, 1, part=part)
    mha = layer.attention
    assert (mha.num_heads, mha.num_kv_heads, mha.qk_norm) == (H, kv, p.pop("qk_norm", None))
    assert mha.norm_eps == p.pop("norm_eps", mha.norm_eps)
    assert mha.parameters.keys() == p.keys()
    for parameter, array in p.items():
        np.testing.assert_array_equal(mha.parameters[parameter], array, parameter)
    assert set(layer.names.values()) == set(arrays)
    x = normal(B, T, WIDTH)
    key = normal(B, S, WIDTH) if part == "cross" else None
    want = Layer(mha, x, key, **bias_of(options, T), u=U64).forward()
    gap = abs(mha.forward(x, key, **layer.options).out - want.value)
    assert (gap <= 2 * want.error).all()


def test_every_family_has_a_case():
    assert {case[0] for case in CASES.values()} - {"gemma3"} == set(FAMILIES)  # a gemma3_text


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "gemma2"}, [(2, None), None]),
        ({"model_type": "gemma2", "layer_types": ["full_attention", "sliding_attention"]},
         [None, (2, None)]),
        ({"model_type": "qwen2"}, [None, None]),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
         [None, (2, None)]),
        ({"model_type": "mistral"}, [(2, None), (2, None)]),
        ({"model_type": "gpt_oss"}, [(2, None), None]),
    ],
)  # fmt: skip
def test_windows_of_layers_follow_the_rules_of_the_family(tmp_path, config, windows):
    """By layer_types, or as older files are read: every other layer, or the later ones."""
    arrays = llama()[0]
    arrays |= {f"{LLAMA}.sinks": SINKS}
    arrays |= {name.replace("layers.1", "layers.0"): x for name, x in arrays.items()}
    write(tmp_path, arrays, sliding_window=3, **HEADS, **config)
    layers = [weights.from_checkpoint(tmp_path, i) for i in range(2)]
    assert [layer.options.get("window") for layer in layers] == windows


def test_gpt_neox_turns_a_quarter_of_the_features_by_default(tmp_path):
    arrays = CASES["gpt_neox"][3]()[0]
    write(tmp_path, arrays, model_type="gpt_neox", num_attention_heads=H // 2)  # of size 8
    assert weights.from_checkpoint(tmp_path, 1).options["rope"].size == 2


def test_only_options_that_are_not_the_default_are_returned(tmp_path):
    write(tmp_path, llama()[0], model_type="llama", **HEADS)
    assert weights.from_checkpoint(tmp_path, 1).options.keys() == {"causal", "rope"}


def test_options_of_a_layer_are_its_own(tmp_path):
    arrays = {
        f"encoder.layer.0.attention.{name}.weight": np.eye(2 * H)
        for name in ("self.query", "self.key", "self.value", "output.dense")
    }
    write(tmp_path, arrays, model_type="bert", is_decoder=True, **HEADS)
    weights.from_checkpoint(tmp_path, 0).options["causal"] = "top_left"
    assert weights.from_checkpoint(tmp_path, 0).options["causal"] == "bottom_right"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays_keep_their_dtype_and_bits(tmp_path, dtype):
    arrays = llama()[0]
    write(tmp_path, arrays, dtype, model_type="llama", **HEADS)
    mha = weights.from_checkpoint(tmp_path, 1).attention
    stored = arrays[f"{LLAMA}.v_proj.weight"].T.astype(dtype)
    assert mha.wv.dtype == dtype
    assert mha.wv.tobytes() == stored.tobytes()
    assert mha.wv.flags.writeable
    x = normal(T, WIDTH)
    wide = mha.replace(**{n: a.astype(float) for n, a in mha.parameters.items()})
    np.testing.assert_array_equal(mha.forward(x).out, wide.forward(x).out)


def test_arrays_of_several_files_are_found_by_their_index(tmp_path):
    arrays, p, _ = llama()
    shards = {}
    for i, (name, array) in enumerate(arrays.items()):
        shards[name] = f"model-0000{i}.safetensors"
        files.save_file({name: np.ascontiguousarray(array)}, tmp_path / shards[name])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    config = {"model_type": "llama", **HEADS}
    layer = weights.from_checkpoint(tmp_path, 1, config=config)
    for name, array in p.items():
        np.testing.assert_array_equal(layer.attention.parameters[name], array)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(shards, "model-00000.safetensors")}))
    with pytest.raises(OptionError, match=r"0.safetensors has no model.layers.1\S*, though model"):
        weights.from_checkpoint(tmp_path, 1, config=config)
    for wrong in ("[]", '{"weight_map": {"x": "../x"}}', '{"weight_map": {"x": 3}}', "{}"):
        index.write_text(wrong)
        with pytest.raises(OptionError, match=r"index.json (has no weight_map|is a list)"):
            weights.from_checkpoint(tmp_path, 1, config=config)


def test_configuration_is_beside_the_file_or_given(tmp_path):
    write(tmp_path, llama()[0], model_type="llama", **HEADS)
    one = weights.from_checkpoint(tmp_path / "model.safetensors", 1)
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    two = weights.from_checkpoint(str(tmp_path), 1, config=tmp_path / "other.json")
    np.testing.assert_array_equal(one.attention.wq, two.attention.wq)
    with pytest.raises(OptionError, match=r"there is no config.json beside it; known families are"):
        weights.from_checkpoint(tmp_path, 1)


def test_own_names_without_a_configuration(tmp_path):
    arrays, p, _ = packed("blocks.1.qkv", "blocks.1.out", K, "per_head")
    write(tmp_path, {f"net.{n}": x for n, x in arrays.items()})
    names = weights.LayerNames(
        packed="blocks.{i}.qkv", o="blocks.{i}.out", order="per_head", prefixes=("", "net.")
    )
    layer = weights.from_checkpoint(tmp_path, 1, names=names, num_heads=H)
    assert layer.options == {}
    for name, array in p.items():
        np.testing.assert_array_equal(layer.attention.parameters[name], array)
    assert layer.names["w"] == "net.blocks.1.qkv.weight"


def test_own_names_with_norms_and_without_output(tmp_path):
    arrays, p, _ = normed(("nq", "nk"), "rms")
    write(tmp_path, arrays)
    names = weights.LayerNames(
        q=f"{LLAMA}.q_proj", k=f"{LLAMA}.k_proj", v=f"{LLAMA}.v_proj",
        norm_q=f"{LLAMA}.nq", norm_k=f"{LLAMA}.nk", qk_norm="rms", norm_eps=0.1,
    )  # fmt: skip
    mha = weights.from_checkpoint(tmp_path, 0, names=names, num_heads=H).attention
    assert (mha.wo, mha.norm_eps, mha.qk_norm) == (None, 0.1, "rms")
    np.testing.assert_array_equal(mha.norm_k, p["norm_k"])


def test_packed_names_without_output_have_equal_heads(tmp_path):
    arrays, p, _ = packed("qkv", "out", H, "qkv")
    write(tmp_path, arrays)
    names = weights.LayerNames(packed="qkv")
    mha = weights.from_checkpoint(tmp_path, 0, names=names, num_heads=H).attention
    np.testing.assert_array_equal(mha.wk, p["wk"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, "pass q, k and v, or packed"),
        ({"q": "a", "k": "b"}, "pass q, k and v, or packed"),
        ({"q": "a", "k": "b", "v": "c", "packed": "d"}, "pass q, k and v, or packed"),
        ({"packed": "d", "norm_q": "n"}, 'pass qk_norm="rms" or "layer" with norms'),
    ],
)
def test_illegal_names_are_refused(names, message):
    with pytest.raises(OptionError, match=message):
        weights.LayerNames(**names)


LLAMA_CONFIG = {"model_type": "llama", **HEADS}


def without(arrays, *ends):
    return {n: x for n, x in arrays.items() if not n.endswith(ends)}


@pytest.mark.every
@pytest.mark.parametrize(
    ("arrays", "config", "options", "error", "message"),
    [
        (llama()[0], {"model_type": "mamba"}, {}, OptionError,
         r"model_type is 'mamba'; known families are bert, .*LayerNames\(q="),
        (llama()[0], {"model_type": "deepseek_v3"}, {}, OptionError,
         r"not the attention of deepseek_v3: its keys .*npattn.variants.latent.attention"),
        (llama()[0], {"model_type": "gpt_oss", **HEADS}, {}, OptionError,
         r"has no model.layers.1.self_attn.sinks"),
        (llama()[0], {"model_type": "llama"}, {}, OptionError,
         "num_heads is None, and config has none of num_attention_heads, n_head"),
        (llama()[0], LLAMA_CONFIG, {"num_heads": 3}, OptionError,
         "num_heads is 3, but config has 6"),
        (llama()[0], LLAMA_CONFIG, {"part": "cross"}, OptionError,
         "part is 'cross', must be one of self"),
        (t5("encoder.block.1.layer.0.SelfAttention")[0], {"model_type": "t5", "num_heads": H}, {},
         OptionError, "part is None, must be one of cross, decoder, encoder"),
        (t5("encoder.block.1.layer.0.SelfAttention")[0], {"model_type": "t5", "num_heads": H},
         {"part": "encoder"}, OptionError, r"has no encoder.block.0\S*relative_attention_bias.wei"),
        (llama()[0], LLAMA_CONFIG, {"layer": 2}, OptionError,
         r"has no model.layers.2.self_attn.q_proj.weight, .*looked for model.layers.2.self_attn.q_"
         r"proj.weight, .*, and with the prefix '' .nearest: model.layers.1.self_attn.q_proj.weig"),
        (without(llama()[0], "v_proj.weight"), LLAMA_CONFIG, {}, OptionError,
         r"has no model.layers.1.self_attn.v_proj.weight; looked for model.layers.1"),
        ({"xyz": np.ones(3)}, LLAMA_CONFIG, {}, OptionError, "nearest: none"),
        (llama()[0], LLAMA_CONFIG, {"layer": -1}, OptionError, "layer is -1, must be an integer"),
        (llama()[0], LLAMA_CONFIG | {"num_key_value_heads": 3}, {}, OptionError,
         "layer 1 of .*: config has num_key_value_heads 3, but the weights have 2"),
        (llama()[0], LLAMA_CONFIG | {"head_dim": 8}, {}, OptionError,
         "config has head_dim 8, but the weights have 4"),
        (llama()[0], LLAMA_CONFIG | {"num_attention_heads": 5}, {}, ShapeError,
         r"cannot be read: wq has shape \(13, 24\), must be \(input, 5 heads"),
        (llama()[0], LLAMA_CONFIG | {"num_attention_heads": 2.5}, {}, OptionError,
         "num_heads is 2.5, must be an integer"),
        (llama()[0] | {f"{LLAMA}.v_proj.weight": np.ones((8, 12), np.int8)}, LLAMA_CONFIG, {},
         OptionError, r"v_proj.weight is I8 in .*, must be one of BF16, .*: dequantise weights"),
        (packed("transformer.h.1.attn.c_attn", "transformer.h.1.attn.c_proj", K, "qkv", False)[0]
         | {"transformer.h.1.attn.c_attn.weight": np.ones((3, 61))},
         {"model_type": "gpt2", "n_head": H}, {}, ShapeError,
         r"cannot be read: w has shape \(3, 61\), must be \(input, 18 heads"),
        (llama()[0], LLAMA_CONFIG | {"model_type": "gemma", "use_bidirectional_attention": True},
         {}, OptionError, "use_bidirectional_attention is set"),
        (apart(f"{BERT}.attention.self", "query key value", f"{BERT}.attention.output.dense")[0],
         {"model_type": "bert", "position_embedding_type": "relative_key", **HEADS}, {},
         OptionError, "position_embedding_type is 'relative_key', must be 'absolute'"),
    ],
)  # fmt: skip
def test_unsupported_checkpoint_is_refused(tmp_path, arrays, config, options, error, message):
    plain = {n: np.ascontiguousarray(x) for n, x in arrays.items()}
    files.save_file(plain, tmp_path / "model.safetensors")
    with pytest.raises(error, match=message):
        weights.from_checkpoint(tmp_path, options.pop("layer", 1), config=config, **options)


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.pth", "x.ckpt"])
def test_pickles_are_refused_unread(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"cos\nsystem\n(S'touch here'\ntR.")
    for given in (path, tmp_path):
        with pytest.raises(OptionError, match=rf"{name} is a pickle, which runs code when it is"):
            weights.from_checkpoint(given, 0)


def test_damaged_and_missing_files_are_refused(tmp_path):
    with pytest.raises(
        OptionError, match=r"has neither model\.safetensors nor model.safetensors\.i"
    ):
        weights.from_checkpoint(tmp_path, 0)
    write(tmp_path, llama()[0], **LLAMA_CONFIG)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OptionError, match=r"model.safetensors is no whole safetensors file \("):
        weights.from_checkpoint(tmp_path, 0)
    with pytest.raises(FileNotFoundError):
        weights.from_checkpoint(tmp_path / "absent.safetensors", 0)
    write(tmp_path, llama()[0])
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(OptionError, match=r"config.json is no JSON"):
        weights.from_checkpoint(tmp_path, 0)


# --- rotary positions -----------------------------------------------------------------------------

LONG = {"max_position_embeddings": 40, "original_max_position_embeddings": 10}
BOTH = {"short_factor": [2, 3], "long_factor": [5, 7]}


@pytest.mark.parametrize(
    ("named", "config", "length", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_theta": 9.0}, None,
         positions.linear(4, 4.0, base=9.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, LONG, 99,
         positions.dynamic_ntk(4, 2.0, length=99, trained_length=40)),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0},
         LONG, None, positions.llama3(4, 2.0, trained_length=10, low=1.5, high=3.0, base=1e4)),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 9.0, "beta_slow": 2.0,
          "truncate": False, "original_max_position_embeddings": 20, "rope_theta": 7.0},
         {"max_position_embeddings": 40, "rope_theta": 8.0}, None,
         positions.yarn(4, 2.0, trained_length=20, base=7.0, fast=9.0, slow=2.0, truncate=False)),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 3.0, "mscale": 5.0,
          "mscale_all_dim": 7.0}, LONG, None,
         positions.yarn(4, 2.0, trained_length=10, amplitude=3.0)),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 5.0, "mscale_all_dim": 7.0}, LONG, None,
         positions.yarn(4, 2.0, trained_length=10,
                        amplitude=(0.5 * np.log(2) + 1) / (0.7 * np.log(2) + 1))),
        ({"type": "su", **BOTH}, LONG, 11,
         positions.longrope(4, short=[2.0, 3.0], long=[5.0, 7.0], length=11, trained_length=10,
                            factor=4.0)),
        ({"rope_type": "longrope", "attention_factor": 1.5, **BOTH}, LONG, 10,
         positions.longrope(4, short=[2.0, 3.0], long=[5.0, 7.0], length=10, trained_length=10,
                            factor=4.0, amplitude=1.5)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_stretched_frequencies_are_read(key, named, config, length, expected):
    rotary = read_rotary(config | {key: named}, 4, length=length)
    np.testing.assert_array_equal(rotary.frequencies.values, expected.values)
    assert rotary.frequencies.amplitude == expected.amplitude


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "other"}}, "rope_type is 'other', must be one of default, dyn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type is 'linear', which needs factor beside"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "needs max_position_embeddings in con"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, **LONG},
         "rope_type is 'dynamic', which depends on the length of the sequence: pass length="),
        ({"rope_scaling": {"type": "longrope", **BOTH},
          "original_max_position_embeddings": 10}, "needs max_position_embeddings in config"),
    ],
)  # fmt: skip
def test_illegal_rotary_configuration_is_refused(config, message):
    with pytest.raises(OptionError, match=message):
        read_rotary(config, 4)


def test_layers_with_a_table_train_it(tmp_path):
    """The gradient of T5's table comes with those of the weights."""
    arrays = t5("encoder.block.1.layer.0.SelfAttention", TABLE)[0]
    write(tmp_path, arrays, model_type="t5", num_heads=H)
    layer = weights.from_checkpoint(tmp_path, 1, part="encoder")
    assert isinstance(layer.options["bias"], Relative)
    fwd = layer.attention.forward(normal(B, T, WIDTH), **layer.options)
    assert layer.attention.backward(fwd, np.ones_like(fwd.out)).bias.shape == TABLE.shape


def test_integer_arrays_of_norms_are_refused(tmp_path):
    arrays = normed(("q_norm", "k_norm"), "rms")[0]
    arrays[f"{LLAMA}.q_norm.weight"] = np.ones(D, np.int32)
    files.save_file({n: np.ascontiguousarray(x) for n, x in arrays.items()},
                    tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises((OptionError, DtypeError), match=r"q_norm.weight is I32"):
        weights.from_checkpoint(tmp_path, 1, config={"model_type": "qwen3", **HEADS})


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "falcon", "phi", "phi3"]
)
@pytest.mark.parametrize("place", ["rope_parameters", "config"])
def test_a_part_turns_in_models_that_read_the_factor(family, place):
    """Others turn all features, and transformers' modules raise if they are to stretch a part."""
    part = {"partial_rotary_factor": 0.5}
    own = {"rope_parameters": part} if place == "rope_parameters" else part
    setting = SimpleNamespace(
        config={"model_type": family, **own}, layer=0, length=None,
        attention=SimpleNamespace(head_size=8),
    )  # fmt: skip
    reads = family in ("phi", "phi3")
    assert FAMILIES[family].options(setting)["rope"].size == (4 if reads else None)
    setting.config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    if reads:
        assert FAMILIES[family].options(setting)["rope"].frequencies.values.shape == (2,)
    else:
        with pytest.raises(OptionError, match=r"beside partial_rotary_factor 0\.5, at which"):
            FAMILIES[family].options(setting)
