"""Families of models: how a checkpoint names the arrays of a layer, and what goes with them.

    bert       encoder.layer.{i}.attention.self.query      bloom, falcon, gpt_neox   packed by head
    llama ...  layers.{i}.self_attn.q_proj                 gpt2, phi3                packed [Q|K|V]
    t5         encoder.block.{i}.layer.0.SelfAttention.q

Source of the names and of the defaults of a configuration: transformers 5, `model_type` by
`model_type`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from npattn import biases, positions
from npattn.errors import OptionError
from npattn.multihead import MultiHeadAttention
from npattn.multihead.build import Order
from npattn.multihead.projections import Norm
from npattn.problem.arrays import Array
from npattn.weights.rope_config import read_rotary


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """Names of the arrays of one layer's attention in a checkpoint.

    ``{i}`` stands for the number of the layer. Names come without their ending ``.weight``; a bias
    is read where there is a name that ends with ``.bias`` instead.

    Parameters
    ----------
    q, k, v : str, optional
        All three, or `packed`.
    packed : str, optional
        One weight for queries, keys and values.
    order : {"qkv", "per_head"}
        Of the columns of `packed`, as in `npattn.MultiHeadAttention.from_packed`.
    o : str, optional
        Output projection.
    transposed : bool, default True
        Weights are (out, in), as in torch.nn.Linear. False: (in, out), as in GPT-2.
    norm_q, norm_k : str, optional
        Norms of the heads of q and k, or of their whole projections.
    qk_norm : {"rms", "layer", "rms_projection", "layer_projection"}, optional
        Their kind.
    norm_eps : float, default 1e-6
    norm_less_one : bool, default False
        The checkpoint has the weights of the norms less 1, as Gemma's.
    prefixes : tuple of str, default ("",)
        What may stand before all names; the first counts with which one of them exists.

    Raises
    ------
    OptionError
        If there are neither q, k and v nor packed, or both, or norms without qk_norm.
    """

    q: str | None = None
    k: str | None = None
    v: str | None = None
    packed: str | None = None
    order: Order = "qkv"
    o: str | None = None
    transposed: bool = True
    norm_q: str | None = None
    norm_k: str | None = None
    qk_norm: Norm | None = None
    norm_eps: float = 1e-6
    norm_less_one: bool = False
    prefixes: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        apart = [name for name in (self.q, self.k, self.v) if name is not None]
        if (len(apart), self.packed is None) not in ((3, True), (0, False)):
            raise OptionError(f"got {self!r}; pass q, k and v, or packed")
        if (self.norm_q or self.norm_k) and self.qk_norm is None:
            raise OptionError(f'got {self!r}; pass qk_norm="rms" or "layer" with norms')


class Setting(NamedTuple):
    """Facts about a layer that its options depend on."""

    config: Mapping[str, Any]
    layer: int
    part: str
    attention: MultiHeadAttention
    length: int | None
    read: Callable[[str, str], Array]  # the array of an option, by its name without a prefix


@dataclass(frozen=True)
class Family:
    """Names of the arrays by part of the model, and the options of forward that go with them."""

    parts: Mapping[str, LayerNames]
    options: Callable[[Setting], dict[str, Any]]
    eps: str | None = None  # name of norm_eps in the configuration
    optional: str | None = None  # name of the switch of the norms in the configuration


# --- options --------------------------------------------------------------------------------------

CAUSAL = {"causal": "bottom_right"}


def _rotary(share: float | None = None, **plain: Any) -> Callable[[Setting], dict[str, Any]]:
    """Return the options of decoders with rotary positions; `plain` are defaults of config."""

    def options(s: Setting) -> dict[str, Any]:
        """Return rope, window, scale and softcap of a layer, as its configuration has them."""
        config = {**plain, **s.config}
        if config.get("use_bidirectional_attention"):
            raise OptionError("use_bidirectional_attention is set, which is not known here")
        rope = read_rotary(config, s.attention.head_size, share=share, length=s.length)
        options: dict[str, Any] = {**CAUSAL, "rope": rope}
        window = _window(config, s.layer)
        if window is not None:  # it counts the query itself
            options["window"] = (window - 1, None)
        if config.get("query_pre_attn_scalar") is not None:
            options["scale"] = config["query_pre_attn_scalar"] ** -0.5
        if config.get("attn_logit_softcapping") is not None:
            options["softcap"] = config["attn_logit_softcapping"]
        return options

    return options


def _window(config: Mapping[str, Any], layer: int) -> int | None:
    """Return the sliding window of a layer: of all, by layer_types, or by the older rules."""
    window, kind = config.get("sliding_window"), config["model_type"]
    if config.get("layer_types"):
        sliding = config["layer_types"][layer] == "sliding_attention"
    elif kind == "gemma3_text":
        sliding = (layer + 1) % config.get("sliding_window_pattern", 6) != 0
    elif kind == "qwen3_moe":  # max_window_layers means nothing to it
        sliding = bool(config["use_sliding_window"])
    elif kind.startswith("qwen"):
        sliding = bool(config["use_sliding_window"]) and layer >= config["max_window_layers"]
    else:
        sliding = kind not in ("gemma2", "gpt_oss") or layer % 2 == 0
    return window if sliding else None


def _gemma3_options(s: Setting) -> dict[str, Any]:
    """Return the options of a layer, which turns by its own base if it slides."""
    config = {**GEMMA3, **s.config, "attn_logit_softcapping": None}  # stored, and used by nobody
    slides = _window(config, s.layer) is not None
    old = {"rope_theta": config.get("rope_theta", 1e6), **(config.get("rope_scaling") or {})}
    if slides:
        old = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    new = config.get("rope_parameters") or {}
    rope = new.get("sliding_attention" if slides else "full_attention", old)
    rope = {"rope_theta": old["rope_theta"], **rope}
    return _rotary()(s._replace(config={**config, "rope_parameters": rope, "rope_scaling": None}))


def _gpt_oss_options(s: Setting) -> dict[str, Any]:
    stretched = s.config.get("rope_parameters") or s.config.get("rope_scaling") or GPT_OSS_ROPE
    plain = {"sliding_window": 128, "rope_theta": 150000.0}
    options = _rotary(**plain)(s._replace(config={**s.config, "rope_parameters": stretched}))
    return options | {"sinks": s.read("sinks", f"layers.{s.layer}.self_attn.sinks")}


def _gpt2_options(s: Setting) -> dict[str, Any]:
    scale = s.attention.head_size**-0.5 if s.config.get("scale_attn_weights", True) else 1.0
    if s.config.get("scale_attn_by_inverse_layer_idx", False):
        scale /= s.layer + 1
    return {**CAUSAL, "scale": scale}


def _bert_options(s: Setting) -> dict[str, Any]:
    kind = s.config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise OptionError(f"position_embedding_type is {kind!r}, must be 'absolute'")
    return {**CAUSAL} if s.config.get("is_decoder") and s.part == "self" else {}


def _t5_options(s: Setting) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": 1.0}
    if s.part != "cross":  # the first layer's table is that of all
        name = f"{s.part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        reach = s.config.get("relative_attention_max_distance", 128)
        options["bias"] = biases.relative(
            s.read("bias", name), max_distance=reach, bidirectional=s.part == "encoder"
        )
    return options if s.part != "decoder" else options | CAUSAL


def _bloom_options(s: Setting) -> dict[str, Any]:
    return {**CAUSAL, "bias": biases.alibi(s.attention.num_heads)}


def _falcon_options(s: Setting) -> dict[str, Any]:
    if not s.config.get("alibi", False):
        return _rotary()(s)
    # Slopes are stored in bfloat16, and the sum of scores and ALiBi is scaled.
    slopes = positions.alibi_slopes(s.attention.num_heads).astype(ml_dtypes.bfloat16)
    return {**CAUSAL, "bias": biases.alibi(slopes.astype(np.float64) / s.attention.head_size**0.5)}


# --- names ----------------------------------------------------------------------------------------


def _separate(at: str, names: str = "q_proj k_proj v_proj", **others: Any) -> LayerNames:
    q, k, v = (f"{at}.{name}" for name in names.split())
    return LayerNames(q=q, k=k, v=v, **others)


DECODER, BERT, T5 = "layers.{i}.self_attn", "encoder.layer.{i}", "block.{i}.layer"
MODEL, TRANSFORMER = ("model.", ""), ("transformer.", "")
LLAMA = {"self": _separate(DECODER, o=f"{DECODER}.o_proj", prefixes=MODEL)}
NORMED = _separate(
    DECODER, o=f"{DECODER}.o_proj", prefixes=MODEL,
    norm_q=f"{DECODER}.q_norm", norm_k=f"{DECODER}.k_norm", qk_norm="rms",
)  # fmt: skip
GEMMA3_NAMES = dataclasses.replace(
    NORMED, norm_less_one=True, prefixes=(*MODEL, "model.language_model.", "language_model.model.")
)
OLMO2 = dataclasses.replace(NORMED, qk_norm="rms_projection", norm_eps=1e-5)
PHI = _separate(
    DECODER, o=f"{DECODER}.dense", prefixes=MODEL,
    norm_q=f"{DECODER}.q_layernorm", norm_k=f"{DECODER}.k_layernorm", qk_norm="layer",
    norm_eps=1e-5,
)  # fmt: skip
PHI3 = LayerNames(packed=f"{DECODER}.qkv_proj", o=f"{DECODER}.o_proj", prefixes=MODEL)
GPT2 = LayerNames(
    packed="h.{i}.attn.c_attn", o="h.{i}.attn.c_proj", transposed=False, prefixes=TRANSFORMER
)
PACKED = LayerNames(
    packed="h.{i}.self_attention.query_key_value", order="per_head",
    o="h.{i}.self_attention.dense", prefixes=TRANSFORMER,
)  # fmt: skip
NEOX = LayerNames(
    packed="layers.{i}.attention.query_key_value", order="per_head",
    o="layers.{i}.attention.dense", prefixes=("gpt_neox.", ""),
)  # fmt: skip


def _bert(name: str) -> LayerNames:
    at = f"{BERT}.{name}"
    return _separate(
        f"{at}.self", "query key value", o=f"{at}.output.dense", prefixes=("bert.", "")
    )


def _t5(at: str) -> LayerNames:
    return _separate(at, "q k v", o=f"{at}.o", prefixes=("", "transformer."))


QWEN: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096}
QWEN["max_window_layers"] = 28
GEMMA2: dict[str, Any] = {"sliding_window": 4096, "query_pre_attn_scalar": 256}
GEMMA2["attn_logit_softcapping"] = 50.0
GEMMA3: dict[str, Any] = {"sliding_window": 4096, "query_pre_attn_scalar": 256}
GPT_OSS_ROPE: dict[str, Any] = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
GPT_OSS_ROPE["original_max_position_embeddings"] = 4096

FAMILIES: dict[str, Family] = {
    "bert": Family({"self": _bert("attention"), "cross": _bert("crossattention")}, _bert_options),
    "bloom": Family({"self": PACKED}, _bloom_options),
    "falcon": Family({"self": PACKED}, _falcon_options),
    "gemma": Family(LLAMA, _rotary()),
    "gemma2": Family(LLAMA, _rotary(**GEMMA2)),
    "gemma3_text": Family({"self": GEMMA3_NAMES}, _gemma3_options, "rms_norm_eps"),
    "gpt2": Family({"self": GPT2}, _gpt2_options),
    "gpt_neox": Family({"self": NEOX}, _rotary(0.25)),
    "gpt_oss": Family(LLAMA, _gpt_oss_options),
    "llama": Family(LLAMA, _rotary()),
    "mistral": Family(LLAMA, _rotary(sliding_window=4096)),
    "mixtral": Family(LLAMA, _rotary()),
    "olmo2": Family({"self": OLMO2}, _rotary(), "rms_norm_eps"),
    "phi": Family({"self": PHI}, _rotary(0.5), "layer_norm_eps", "qk_layernorm"),
    "phi3": Family({"self": PHI3}, _rotary(1.0)),
    "qwen2": Family(LLAMA, _rotary(**QWEN)),
    "qwen3": Family({"self": NORMED}, _rotary(**QWEN), "rms_norm_eps"),
    "qwen3_moe": Family({"self": NORMED}, _rotary(**QWEN), "rms_norm_eps"),
    "t5": Family(
        {
            "encoder": _t5("encoder.block.{i}.layer.0.SelfAttention"),
            "decoder": _t5("decoder.block.{i}.layer.0.SelfAttention"),
            "cross": _t5("decoder.block.{i}.layer.1.EncDecAttention"),
        },
        _t5_options,
    ),
}
"""By the ``model_type`` of config.json."""

_LATENT = (
    "its keys and values are normalised between two projections (kv_a_layernorm), and features "
    "that turn stand beside others: npattn.variants.latent.attention computes it from q and latents"
)
REFUSED = dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT)
"""``model_type`` of models whose attention `MultiHeadAttention` is not → the reason."""
