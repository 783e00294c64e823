"""One layer of a checkpoint in safetensors, as Hugging Face's transformers writes it."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from npattn.errors import NpattnError, OptionError
from npattn.multihead import MultiHeadAttention
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer
from npattn.weights.exchange import join_names, transpose
from npattn.weights.families import FAMILIES, REFUSED, Family, LayerNames, Setting
from npattn.weights.files import list_arrays, read_arrays, read_json

HEADS = ("num_attention_heads", "n_head", "num_heads")


@dataclass(frozen=True, eq=False)
class Layer:
    """Attention of one layer of a model.

    Attributes
    ----------
    attention : MultiHeadAttention
        Its weights, in the dtype of the file.
    options : dict
        What else the layer computes with, as keyword arguments of `MultiHeadAttention.forward`:
        among causal, window, scale, softcap, bias, sinks and rope, those that are not the default.
    names : dict
        Name in the checkpoint of each array that was read, by the name of a parameter of
        `MultiHeadAttention`; "w" and "b" are the packed ones.
    """

    attention: MultiHeadAttention
    options: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def from_checkpoint(
    path: str | os.PathLike[str], layer: int,
    *, part: str | None = None, config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    names: LayerNames | None = None, num_heads: int | None = None, length: int | None = None,
) -> Layer:  # fmt: skip
    """Read the attention of one layer of a local checkpoint: of a model of transformers, say.

    Only the arrays of this layer are read. Weights keep their dtype; bfloat16 and float16 become
    float64 exactly when `MultiHeadAttention` computes. Norms, residuals and feed-forward parts
    around the attention are not read.

    Parameters
    ----------
    path : str or path
        A safetensors file, or a folder with model.safetensors, or with several files and their
        model.safetensors.index.json.
    layer : int
        From 0.
    part : str, optional
        "encoder", "decoder" or "cross" of t5, which must be given; "self" (default) or "cross" of
        bert; other families have one.
    config : mapping or path, optional
        Configuration of the model; default config.json beside the weights, if it is there. Its
        ``model_type`` is the family: bert, bloom, falcon, gemma, gemma2, gemma3 (of text),
        gpt2, gpt_neox, gpt_oss, llama, mistral, mixtral, olmo2, phi, phi3, qwen2, qwen3,
        qwen3_moe or t5.
    names : LayerNames, optional
        Names of the arrays, in place of those of the family; needed for another family, or without
        a configuration. Options are then empty, unless the family is known.
    num_heads : int, optional
        H; needed where the configuration does not say so. K follows from the shapes.
    length : int, optional
        Length of the sequences, where the rotary positions depend on it (dynamic and longrope).

    Returns
    -------
    Layer
        ``layer.attention.forward(x, **layer.options)`` is the attention of the layer.

    Raises
    ------
    OptionError
        If the family is unknown, or has latent attention, and names are missing, an array is not
        there, has another dtype than float64, float32, float16 or bfloat16, a file is damaged or a
        pickle, the configuration contradicts the shapes or asks for what is not known here, or an
        argument is missing.
    ShapeError
        If the shapes of arrays do not fit each other or the number of heads.
    FileNotFoundError
        If a file does not exist.
    MissingExtraError
        If safetensors is not installed.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from safetensors.numpy import save_file
    >>> from npattn import weights
    >>> at, rng = "model.layers.3.self_attn", np.random.default_rng(0)
    >>> shapes = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "o": (6, 8)}
    >>> arrays = {f"{at}.{n}_proj.weight": rng.standard_normal(s) for n, s in shapes.items()}
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> save_file(arrays, path)
    >>> config = {"model_type": "llama", "num_attention_heads": 4, "rope_theta": 500000.0}
    >>> layer = weights.from_checkpoint(path, 3, config=config)
    >>> layer.attention.num_kv_heads, sorted(layer.options)
    (2, ['causal', 'rope'])
    >>> layer.attention.forward(np.ones((5, 6)), **layer.options).out.shape
    (5, 6)
    """
    if names is not None and not isinstance(names, LayerNames):
        raise OptionError(
            f"names is of type {type(names).__name__}, must be npattn.weights.LayerNames(q=..., "
            "k=..., v=..., o=...)"
        )
    path, layer = Path(path), check_integer("layer", layer, 0)
    files = list_arrays(path, "from_checkpoint")
    settings = _text(_read_config(config, path))
    family = FAMILIES.get(str(settings.get("model_type")))
    if family is not None:
        part, family_names = _choose_part(family, part, settings)
        names = family_names if names is None else names
    if names is None:
        raise _family_error(path, settings)
    reader = _Reader(path, files, layer, names)
    attention = reader.attention(_num_heads(num_heads, settings))
    try:
        _check_config(attention, settings)
        options = {}
        if family is not None and part is not None:
            options = family.options(
                Setting(settings, layer, part, attention, length, reader.read_option)
            )
    except NpattnError as err:
        raise type(err)(f"layer {layer} of {path}: {err}") from err
    return Layer(attention, options, reader.names)


class _Reader:
    """Arrays of one layer by their names."""

    def __init__(
        self, path: Path, files: Mapping[str, Path], layer: int, layer_names: LayerNames
    ) -> None:
        self.path, self.files, self.layer_names = path, files, layer_names
        pattern = {
            name: getattr(layer_names, name).replace("{i}", str(layer))
            for name in ("q", "k", "v", "packed", "o", "norm_q", "norm_k")
            if getattr(layer_names, name) is not None
        }
        first = next(iter(pattern.values()))
        self.prefix = next(
            (p for p in layer_names.prefixes if f"{p}{first}.weight" in files),
            layer_names.prefixes[0],
        )
        self.names: dict[str, str] = {}
        for name, module in pattern.items():
            weight, bias = _parameters(name)
            self.names[weight] = f"{self.prefix}{module}.weight"
            if f"{self.prefix}{module}.bias" in files:
                self.names[bias] = f"{self.prefix}{module}.bias"
        self._check(self.names.values())

    def attention(self, H: int) -> MultiHeadAttention:
        """Return the module of H query heads with the arrays of the layer, in npattn's layout."""
        arrays = read_arrays(self.files, self.names.values())
        p: dict[str, Any] = {name: arrays[stored] for name, stored in self.names.items()}
        for name, x in p.items():
            if self.layer_names.transposed and name.startswith("w") and x.ndim == 2:
                p[name] = transpose(x)
            if self.layer_names.norm_less_one and name.startswith("norm"):
                p[name] = 1 + x.astype(np.float64)  # which a narrow dtype could not hold
        options: dict[str, Any] = {"num_heads": H}
        if self.layer_names.qk_norm is not None:
            options |= {"qk_norm": self.layer_names.qk_norm, "norm_eps": self.layer_names.norm_eps}
        try:
            if "w" in p:
                options |= {"num_kv_heads": _shared_heads(p, H), "order": self.layer_names.order}
                return MultiHeadAttention.from_packed(**p, **options)
            options["num_kv_heads"] = _whole(p["wk"].shape[-1] * H, p["wq"].shape[-1], H)
            return MultiHeadAttention(**p, **options)
        except NpattnError as err:
            raise type(err)(f"{self.path} cannot be read: {err}") from err

    def read_option(self, option: str, name: str) -> Array:
        self._check([self.prefix + name])
        self.names[option] = self.prefix + name
        return read_arrays(self.files, [self.prefix + name])[self.prefix + name]

    def _check(self, names: Any) -> None:
        """Check that all of these arrays are there."""
        absent = [name for name in names if name not in self.files]
        if not absent:
            return
        prefixes = [repr(p) for p in self.layer_names.prefixes if p != self.prefix]
        also = f", and with the prefix {' or '.join(prefixes)}" if prefixes else ""
        near = [n for name in absent for n in get_close_matches(name, self.files, 2)]
        raise OptionError(
            f"{self.path} has no {', '.join(absent)}; looked for {', '.join(names)}{also}"
            f" [nearest: {', '.join(dict.fromkeys(near)) or 'none'}]"
        )


def _parameters(name: str) -> tuple[str, str]:
    """Return the names of weight and bias of an array of `LayerNames`."""
    if name.startswith("norm"):
        return name, f"{name}_bias"
    letter = "" if name == "packed" else name
    return "w" + letter, "b" + letter


def _shared_heads(p: Mapping[str, Array], H: int) -> int | None:
    """Return K of a packed weight (in, (H + 2·K)·D); o, (H·D, out), says what D is."""
    if "wo" not in p:
        return None
    HD = p["wo"].shape[0]
    return _whole((p["w"].shape[-1] - HD) * H, 2 * HD, H)


def _whole(n: int, m: int, H: int) -> int | None:
    """Return K = n / m if it is one: else None, and the shapes are found not to fit H heads."""
    K = n // m if m else 0
    return K if K > 0 and K * m == n and H % K == 0 else None


def _read_config(config: Any, path: Path) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    settings = (path if path.is_dir() else path.parent) / "config.json"
    if config is None and not settings.exists():
        return {}
    return read_json(settings if config is None else Path(config))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model of a Gemma 3 that also sees images."""
    kind, text = config.get("model_type"), config.get("text_config") or {}
    return config if kind != "gemma3" else {"model_type": "gemma3_text", **text}


def _num_heads(num_heads: int | None, config: Mapping[str, Any]) -> int:
    stated = [config[name] for name in HEADS if config.get(name) is not None]
    if num_heads is None and not stated:
        raise OptionError(f"num_heads is None, and config has none of {', '.join(HEADS)}")
    if num_heads is not None and any(number != num_heads for number in stated):
        raise OptionError(f"num_heads is {num_heads}, but config has {stated[0]}")
    return check_integer("num_heads", stated[0] if num_heads is None else num_heads)


def _check_config(attention: MultiHeadAttention, config: Mapping[str, Any]) -> None:
    """Check head counts and sizes that config states against those of the shapes."""
    actual = {"num_key_value_heads": attention.num_kv_heads, "head_dim": attention.head_size}
    actual["d_kv"] = attention.head_size
    for name, value in actual.items():
        if config.get(name) is not None and config[name] != value:
            raise OptionError(f"config has {name} {config[name]}, but the weights have {value}")


def _choose_part(
    family: Family, part: str | None, config: Mapping[str, Any]
) -> tuple[str, LayerNames]:
    """Return the part and its names, with the norms that config asks for."""
    part = "self" if part is None and "self" in family.parts else part
    if part is None or part not in family.parts:
        raise OptionError(f"part is {part!r}, must be one of {join_names(family.parts)}")
    changes: dict[str, Any] = {}
    if family.optional is not None and not config.get(family.optional, False):
        changes = {"norm_q": None, "norm_k": None, "qk_norm": None}
    elif family.eps is not None and config.get(family.eps) is not None:
        changes = {"norm_eps": float(config[family.eps])}
    return part, dataclasses.replace(family.parts[part], **changes)


def _family_error(path: Path, config: Mapping[str, Any]) -> OptionError:
    kind = config.get("model_type")
    if kind in REFUSED:
        return OptionError(f"MultiHeadAttention is not the attention of {kind}: {REFUSED[kind]}")
    subject = "there is no config.json beside it" if not config else f"model_type is {kind!r}"
    return OptionError(
        f"cannot tell the names of the arrays in {path}: {subject}; known families are "
        f"{', '.join(FAMILIES)}. Pass config={{'model_type': ..., ...}}, or "
        "names=npattn.weights.LayerNames(q=..., k=..., v=..., o=...) and num_heads="
    )
