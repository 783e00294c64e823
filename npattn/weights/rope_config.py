"""Rotary positions by the words of a model's configuration."""

import math
from collections.abc import Mapping
from typing import Any

from npattn.errors import OptionError
from npattn.positions import Frequencies, Rotary, dynamic_ntk, linear, llama3, longrope, yarn

Config = Mapping[str, Any]
KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
OLD = {"su": "longrope"}  # names in older files


def read_rotary(
    config: Config, D: int, *, share: float | None = None, length: int | None = None
) -> Rotary:
    """Return the rotary positions of heads of size D.

    ``rope_parameters`` are those of transformers 5; files of version 4 have ``rope_theta`` and
    ``rope_scaling`` instead, GPT-NeoX ``rotary_emb_base`` and ``rotary_pct``. `share` is the part
    of the features that turn where neither version says so; None for models that turn them all,
    and do not read ``partial_rotary_factor``.

    Raises OptionError if the kind is unknown, a number that it needs is missing, the frequencies
    depend on a length that is None, or a model that turns all features is to stretch a part.
    """
    named = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = named.get("rope_type", named.get("type", "default"))
    kind = OLD.get(kind, kind)
    if kind not in KINDS:
        raise OptionError(f"rope_type is {kind!r}, must be one of {', '.join(KINDS)}")
    base = _first((named, "rope_theta"), (config, "rope_theta"), (config, "rotary_emb_base"))
    base = 10000.0 if base is None else base
    partial = _first(
        (named, "partial_rotary_factor"), (config, "partial_rotary_factor"), (config, "rotary_pct")
    )
    if share is None and kind != "default" and partial not in (None, 1):
        raise OptionError(
            f"rope_type is {kind!r} beside partial_rotary_factor {partial}, at which this model "
            "raises: it turns all features; leave partial_rotary_factor out"
        )
    R = D if share is None else int(D * (share if partial is None else partial))
    if kind == "default":
        return Rotary(base=base, size=None if R == D else R)
    return Rotary(frequencies=_stretch(kind, R, base, named, config, length))


def _stretch(
    kind: str, R: int, base: float, named: Config, config: Config, length: int | None
) -> Frequencies:
    """Return the frequencies of a kind of rope; raise OptionError if a number is missing."""

    def need(name: str) -> Any:
        if named.get(name) is None:
            raise OptionError(f"rope_type is {kind!r}, which needs {name} beside it")
        return named[name]

    longest: Any = config.get("max_position_embeddings")
    trained = _first(
        (config, "original_max_position_embeddings"),
        (named, "original_max_position_embeddings"),
        (config, "max_position_embeddings"),
    )
    if kind == "linear":
        return linear(R, need("factor"), base=base)
    if trained is None or (longest is None and kind in ("dynamic", "longrope")):
        raise OptionError(f"rope_type is {kind!r}, which needs max_position_embeddings in config")
    if kind == "llama3":
        low, high = need("low_freq_factor"), need("high_freq_factor")
        return llama3(R, need("factor"), trained_length=trained, low=low, high=high, base=base)
    if kind == "yarn":
        return yarn(
            R, need("factor"), trained_length=trained, base=base,
            fast=named.get("beta_fast") or 32.0, slow=named.get("beta_slow") or 1.0,
            truncate=named.get("truncate", True), amplitude=_yarn_amplitude(named),
        )  # fmt: skip
    if length is None:
        raise OptionError(
            f"rope_type is {kind!r}, which depends on the length of the sequence: pass length="
        )
    if kind == "dynamic":
        return dynamic_ntk(R, need("factor"), length=length, trained_length=longest, base=base)
    return longrope(
        R, short=[float(x) for x in need("short_factor")],
        long=[float(x) for x in need("long_factor")], length=length, trained_length=trained,
        factor=named.get("factor") or max(1.0, longest / trained), base=base,
        amplitude=named.get("attention_factor"),
    )  # fmt: skip


def _yarn_amplitude(named: Config) -> float | None:
    """Return attention_factor, or the quotient of DeepSeek's two; None: that of the factor."""
    first, second = named.get("mscale"), named.get("mscale_all_dim")
    if named.get("attention_factor") is not None or not first or not second:
        return named.get("attention_factor")
    grown = 0.1 * math.log(max(1.0, named["factor"]))
    return float((grown * first + 1) / (grown * second + 1))


def _first(*places: tuple[Config, str]) -> Any:
    """Return the first value that is there."""
    return next((at[name] for at, name in places if at.get(name) is not None), None)
