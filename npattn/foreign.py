"""Parameters as other libraries name them, and errors that say how npattn spells them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

from npattn.errors import OptionError, UnknownOptionError
from npattn.options import Alignment

__all__ = ["FOREIGN", "ForeignName", "reject_unknown_options", "unknown_option"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ForeignName:
    """A parameter as other libraries name it.

    Parameters
    ----------
    hint : str
        How npattn spells it, for errors.
    meaning : str, optional
        One of `MEANINGS`; without one, a parameter of this name keeps its default.
    causal : {"bottom_right", "top_left"}, optional
        Alignment that the systems with this name have in common.
    """

    hint: str
    meaning: str = ""
    causal: Alignment | None = None


_MASK_OR_BIAS = ForeignName(
    "pass a boolean array as mask= (True = may attend), a float array as bias=", "mask or bias"
)

_SCALE = ForeignName("pass it as scale=", "scale")
_SOFTCAP = ForeignName("pass it as softcap=", "softcap")
_LSE = ForeignName("call npattn.forward, whose result has .lse", "lse without gradient")
_PARTS = "pass q, k and v: npattn.cache.unpack gives them"
_IN_PACKED = "call npattn.cache.varlen for packed sequences"
_IN_PAGES = "call npattn.cache.paged for keys in pages"
_APPENDED = "call npattn.cache.append first"
_TURNED = "turn q and k by npattn.positions.rope"

_STORED = {
    "offsets of both": (_IN_PACKED, "cu_seqlens"),
    "offsets of queries": (_IN_PACKED, "cu_seqlens_q", "qo_indptr"),
    "offsets of keys": (_IN_PACKED, "cu_seqlens_k", "cu_seqlens_kv"),
    "longest of both": (_IN_PACKED, "max_seqlen"),
    "longest queries": (_IN_PACKED, "max_seqlen_q"),
    "longest keys": (_IN_PACKED, "max_seqlen_k", "max_seqlen_kv"),
    "lengths of queries": (_IN_PACKED, "query_seq_lengths", "seqused_q"),
    "lengths of keys": (
        _IN_PAGES,
        *("cache_seqlens", "context_lens", "key_value_seq_lengths", "seq_lens", "seqused_k"),
    ),
    "page table": (_IN_PAGES, "block_table", "block_tables", "page_table"),
    "page offsets": (_IN_PAGES, "kv_indptr", "paged_kv_indptr"),
    "page list": (_IN_PAGES, "kv_indices", "paged_kv_indices"),
    "keys on last page": (
        _IN_PAGES,
        "last_page_len",
        "kv_last_page_len",
        "paged_kv_last_page_len",
    ),
    "page size": (_IN_PAGES, "page_size"),
    "packed mask": ("pass it as mask=", "custom_mask"),
    "new keys": (_APPENDED, "k"),
    "new values": (_APPENDED, "v"),
    "cosines": (_TURNED, "rotary_cos"),
    "sines": (_TURNED, "rotary_sin"),
    "adjacent pairs": (_TURNED, "rotary_interleaved"),
    "left padding": ("leave the slots before a sequence out of its cache", "cache_leftpad"),
    "rows of the cache": ("pass the rows of the cache that are used", "cache_batch_idx"),
    "order of pages": ("pass pages (N, P, K, D)", "kv_layout"),
}

_QUANTIZED = "dequantize it first: npattn.quantization.dequantize(values, descale)"
_IN_8_BITS = "quantize the result: npattn.quantization.quantize(o, "

_DESCALES = {
    **{
        f"{name}_{word}": ForeignName(_QUANTIZED, f"descale of {per}{name}")
        for word, per in (("descale", "heads of "), ("scale", "all of "))
        for name in "qkv"
    },
    **{
        name: ForeignName(f"{_IN_8_BITS}descale={name})", "descale of all of o")
        for name in ("o_descale", "o_scale", "output_scale")
    },
    "scale_o": ForeignName(f"{_IN_8_BITS}scale=scale_o)", "scale of all of o"),
}

_LATENT = "call npattn.variants.latent.attention, or pass [latent | rotary] parts as q and k"

_LATENT_PARTS = {
    "latent queries": ("q_nope", "qv"),
    "rotary queries": ("q_pe", "q_rope", "q_rot"),
    "compressed keys": ("ckv", "c_kv", "compressed_kv", "kv_c"),
    "rotary keys": ("k_pe", "k_rope", "k_rot", "kpe"),
}

_LISTED = ForeignName("call npattn.variants.gathered.attention for lists of keys", "key lists")

FOREIGN = {
    "alibi_slopes": ForeignName("pass bias=npattn.biases.alibi(slopes)"),
    "alignment": ForeignName('pass causal="bottom_right" or causal="top_left", or conventions='),
    "attention_mask": _MASK_OR_BIAS,
    "attn_bias": ForeignName("pass it as bias=", "bias"),
    "attn_logits_soft_cap": _SOFTCAP,
    "attn_mask": _MASK_OR_BIAS,
    "block_mask": ForeignName("pass mask=npattn.masks.custom(mask_mod)"),
    "dropout_p": ForeignName(
        "nothing here is random: pass dropout_mask= (True = keep) and dropout_rate=", "no dropout"
    ),
    "enable_gqa": ForeignName(
        "leave it out: k and v with fewer heads than q are shared without a flag", "shared heads"
    ),
    "head_mask": ForeignName("pass gate=head_mask[:, None, None]", "head mask"),
    "is_causal": ForeignName(
        'pass causal=True; where T != S, PyTorch means causal="top_left"', "causal", "top_left"
    ),
    "kv": ForeignName(_PARTS, "packed k and v"),
    "key_padding_mask": ForeignName(
        "its True hides: pass mask=~key_padding_mask[:, None, None, :]", "key padding"
    ),
    "local_window_size": ForeignName(
        "pass window=(left, right); None is unlimited", "window of numbers"
    ),
    "logit_cap": _SOFTCAP,
    "logits_soft_cap": _SOFTCAP,
    "module": ForeignName("leave it out: attention is a function here", "module"),
    "output_gate": ForeignName("pass it as gate=", "gate"),
    "need_weights": ForeignName("call npattn.forward, whose result has .weights", "need_weights"),
    "paged_kv_cache": ForeignName(_PARTS, "packed k and v"),
    "qkv": ForeignName(_PARTS, "packed q, k and v"),
    "return_attn_probs": _LSE,
    "return_lse": ForeignName("call npattn.forward, whose result has .lse"),
    "return_residual": ForeignName(_LSE.hint, "lse (B, T, H) without gradient"),
    "return_softmax_lse": _LSE,
    "return_max_score": ForeignName("call npattn.forward, whose result has .max_score"),
    "return_weights": ForeignName("call npattn.forward, whose result has .weights"),
    "s_aux": ForeignName("pass it as sinks=", "sinks"),
    "scale_factor": _SCALE,
    "scaling": _SCALE,
    "sm_scale": _SCALE,
    "soft_cap": _SOFTCAP,
    "softmax_scale": _SCALE,
    "window_size": ForeignName(
        "pass window=; −1 becomes None: window_size=(-1, 0) is window=(None, 0)", "window or −1"
    ),
    **{
        name: ForeignName(hint, meaning)
        for meaning, (hint, *names) in _STORED.items()
        for name in names
    },
    **_DESCALES,
    **{
        name: ForeignName(_LATENT, meaning)
        for meaning, names in _LATENT_PARTS.items()
        for name in names
    },
    **dict.fromkeys(("gather_kv_indices", "indices", "topk_indices"), _LISTED),
}
"""Parameters as other libraries name them → how npattn spells them, and what they mean."""


def reject_unknown_options(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` to answer a keyword that it lacks with the one that was meant.

    The signature stays that of `function`, for `inspect.signature` and for type checkers.

    Raises
    ------
    UnknownOptionError
        When the decorated function is called with a keyword that it lacks.
    OptionError
        When it is called without a keyword that has no default.
    """
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    needed = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    options = [n for n, p in parameters.items() if n in needed or p.default is not p.empty]
    name = function.__name__
    if name == "__init__":  # of a class
        name = function.__qualname__.split(".")[0]

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for keyword in kwargs:
            if keyword not in parameters and not open_ended:
                raise unknown_option(name, keyword, options)
        for keyword in needed:
            if keyword not in kwargs:
                raise OptionError(f"{name} needs {keyword}, which has no default: pass {keyword}=")
        return function(*args, **kwargs)

    return wrapper


def unknown_option(function: str, name: str, options: Sequence[str]) -> UnknownOptionError:
    """Return the error that answers an unknown option with the one that was meant."""
    near = get_close_matches(name, options, 1)
    foreign = FOREIGN.get(name) if "causal" in options else None  # they are words of attention
    answer = foreign.hint if foreign else f"did you mean {near[0]}?" if near else ""
    return UnknownOptionError(
        f"{function} has no option {name}{answer and ': '}{answer} [options: {', '.join(options)}]"
    )
