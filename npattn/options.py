"""The options of attention, each once: name, kind, default, documentation, examples.

`Problem`, the engines' refusals, the signature reader and the judge read this table.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from npattn.errors import UnknownOptionError

__all__ = [
    "ALIGNMENTS",
    "ENGINES",
    "FEATURES",
    "FOREIGN",
    "LATENT",
    "LISTS",
    "MEANINGS",
    "OPTIONS",
    "PACKED",
    "PLACES",
    "RESULTS",
    "STORED",
    "Alignment",
    "ForeignName",
    "Option",
    "ScoreMod",
    "Window",
    "reject_unknown_options",
    "unknown_option",
]

P = ParamSpec("P")
R = TypeVar("R")

_Array = np.ndarray[Any, Any]
Alignment = Literal["bottom_right", "top_left"]
Precision = Literal["extended"]
Window = tuple[int | None, int | None]
ScoreMod = Callable[[_Array, _Array, _Array, _Array, _Array], _Array]

ALIGNMENTS = ("bottom_right", "top_left")
ENGINES = ("auto", "dense", "tiled")


@dataclass(frozen=True)
class Option:
    """One option of attention: a parameter that changes the result.

    Parameters
    ----------
    name : str
        The keyword of `npattn.attention`.
    kind : {"array", "flag", "pair", "number", "callable"}
    default : object
        The value that leaves the result unchanged; the one of `scale` is computed from D.
    doc : str
        One line for the documentation and for help.
    refusable : tuple of str
        The fast paths that may refuse it: "sdpa" (PyTorch's scaled_dot_product_attention), "flex"
        (its FlexAttention), "row_norms" (the judge's cheap bounds).
    examples : tuple
        Values of a pair or a number to judge with, the simplest first.
    legal : str
        Legal values of a number in words, for errors.
    accepts : callable
        True for a legal number.
    """

    name: str
    kind: Literal["array", "flag", "pair", "number", "callable"]
    default: Any
    doc: str
    refusable: tuple[str, ...] = ()
    examples: tuple[Any, ...] = ()
    legal: str = "a finite number"
    accepts: Callable[[float], bool] = math.isfinite


_ALL = ("sdpa", "flex", "row_norms")

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("mask", "array", None, "boolean, True = may attend"),
        Option("causal", "flag", False, "visible: s ≤ t + (S − T), or s ≤ t"),
        Option(
            "window",
            "pair",
            None,
            "keys (left, right) beside the diagonal",
            examples=(
                *((0, 0), (1, 0), (0, 1), (2, 3), (3, None)),
                *((None, 1), (7, 0), (16, 5), (0, 2**31 - 1)),
            ),
        ),
        Option("bias", "array", None, "added to the scores after scale and softcap"),
        Option(
            "scale",
            "number",
            None,
            "multiplies q·k",
            examples=(0.5, 1.0, -0.75, 0.0, 1.7),
            legal="a finite number or None (1/√D)",
        ),
        Option(
            "softcap",
            "number",
            None,
            "c > 0: scores become c·tanh(s/c)",
            refusable=("sdpa", "row_norms"),
            examples=(2.0, 0.5, 1.0, 30.0),
            legal="a finite number > 0 or None (no cap)",
            accepts=lambda c: 0 < c < math.inf,
        ),
        Option(
            "score_mod",
            "callable",
            None,
            "f(s, b, h, t, s_index) of the scores",
            refusable=("sdpa", "row_norms"),
        ),
        Option("sinks", "array", None, "one more logit per head, without a value", refusable=_ALL),
        Option("dropout_mask", "array", None, "boolean, True = keep the weight", refusable=_ALL),
        Option(
            "dropout_rate",
            "number",
            0.0,
            "kept weights are divided by 1 − rate",
            refusable=_ALL,
            examples=(0.5, 0.0, 0.3),
            legal="a number in [0, 1)",
            accepts=lambda rate: 0 <= rate < 1,
        ),
        Option("gate", "array", None, "multiplies o elementwise", refusable=("row_norms",)),
    )
}
"""Every option, in the order of attention's signature."""

FEATURES = tuple(OPTIONS)
"""Their names: what an implementation under test may have."""

RESULTS = ("return_lse", "return_weights", "return_max_score")
"""Flags that make an implementation return more than o."""

PLACES = (
    "offsets of both",
    "offsets of queries",
    "offsets of keys",
    "longest of both",
    "longest queries",
    "longest keys",
    "lengths of queries",
    "lengths of keys",
    "page table",
    "page offsets",
    "page list",
    "keys on last page",
    "page size",
)
"""Meanings of the parameters that say where sequences of different lengths are stored."""

STORED = (
    *PLACES,
    "packed mask",
    "new keys",
    "new values",
    "new keys of any number",
    "new values of any number",
    "cosines",
    "sines",
    "adjacent pairs",
    "left padding",
    "rows of the cache",
    "order of pages",
    "heads before slots",
)
"""Meanings of all parameters that only functions on such sequences have."""

PACKED = {
    "packed q, k and v": "qkv",
    "packed q, k and v by head": "qkv",
    "packed k and v": "kv",
    "packed k and v by head": "kv",
    "packed k and v, one behind the other": "kv",
    "packed k and v, heads before slots": "kv",
}
"""Meanings of the parameters that have several of q, k and v in one array → which."""

_SHARES = {"heads of": "head", "all of": "tensor", "blocks of": "block", "tokens of": "token"}
DESCALES: dict[str, str] = {
    **{f"descale of {words} {name}": per for words, per in _SHARES.items() for name in "qkvo"},
    **{f"scale of {words} o": per for words, per in _SHARES.items()},
}
"""Meanings of the parameters that have the factors of arrays of 8 bits → what has a factor."""

LATENT = ("latent queries", "rotary queries", "compressed keys", "rotary keys")
"""Meanings of the parameters of latent attention, in the order of their gradients."""

LISTS = ("key lists", "key lists of heads")
"""Meanings of a parameter that lists the keys of each query."""

MEANINGS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*OPTIONS, *RESULTS)},
    "mask or bias": ("mask", "bias"),
    "added mask or bias": ("mask", "bias"),
    "key padding": ("mask",),
    "head mask": ("gate",),
    "window or −1": ("window",),
    "window of numbers": ("window",),
    "lse without gradient": ("return_lse",),
    "lse (B, T, H) without gradient": ("return_lse",),
    "need_weights": ("return_weights",),
    "shared heads": (),
    "no dropout": (),
    "module": (),
    **dict.fromkeys((*STORED, *PACKED, *DESCALES, *LATENT, *LISTS), ()),
    **dict.fromkeys(
        ("offsets of keys", "lengths of keys", "page offsets", "packed mask"), ("mask",)
    ),
}
"""Meanings of a parameter → the options or results that it carries.

An option's own name means its plain form. Of the others,

"mask or bias"
    takes a boolean array as the mask, a float one as the bias, and −inf where both hide a key.
"added mask or bias"
    is float: 0 where a key may be seen and the least finite number elsewhere, plus the bias.
"key padding"
    is boolean, of shape (B, S); True hides the key from every query.
"head mask"
    is the gate of each head, of shape (H,).
"window or −1"
    has −1 for an unlimited side; "window of numbers" has a number there, as large as need be.
"lse without gradient"
    is ``return_lse`` of an lse that is not differentiated; "lse (B, T, H) without gradient" has
    these axes.
"need_weights"
    returns the pair (o, weights), or (o, None) if it is False.
"shared heads"
    must be True where K < H.
"no dropout"
    is the rate of a dropout with a generator of its own: it stays 0.
"module"
    stands before q, k, v in the attention functions of Hugging Face's models. They return o of
    shape (B, T, H, E), and something beside it.

Those of `STORED` say where sequences are, each an int32 array if nothing else is said; the longest
and the page size are ints. Masks of shape (B, 1, 1, S) become lengths.

"offsets of queries", "offsets of keys", "offsets of both"
    (B + 1,): the first of each packed sequence, and their total.
"longest queries", "longest keys", "longest of both"
    of all sequences.
"lengths of keys", "lengths of queries"
    (B,): of sequences in a cache or in pages, and of q, whose rest nobody reads.
"page table"
    (B, M): the pages of each sequence, and anything behind those that it needs.
"page offsets", "page list", "keys on last page"
    (B + 1,), (pages in use,), (B,): sequence b has the pages of the list from offset b to b + 1.
"packed mask"
    boolean, (Σ T·S,): the matrix (T, S) of each sequence in turn, True for what may be seen; causal
    is in it too.
"new keys", "new values"
    (B, T, K, D): written behind the keys of a cache, in place, before attention; "lengths of keys"
    are those without them. "new keys of any number" and "new values of any number" may be more or
    fewer than queries.
"cosines", "sines"
    (positions, R/2), in the dtype of q: turn the first R features of new keys at their positions,
    length + 0, 1, …; those of q likewise with causal or a window, and else all at the length.
"adjacent pairs"
    is a bool: features 2i and 2i + 1 are a pair, which is so without it; else i and i + R/2.
"left padding"
    (B,): first slot of a cache that a sequence has; its length counts the slots before it.
"rows of the cache"
    (B,): row of a cache that each sequence has.
"order of pages", "heads before slots"
    "NHD" for pages (N, P, K, D), "HND" for (N, K, P, D); the latter is said of the parameter of k,
    or of k and v, whose pages are always (N, K, P, D).

Those of `PACKED` stand first, for q, k and v, or second, for k and v. All have one T, K = H and
E = D, as far as they are in it.

"packed q, k and v", "packed k and v"
    (B, T, 3, H, D) and (B, S, 2, K, D); packed sequences are (total, 3, H, D), and pages
    (N, 2, P, K, D).
"packed q, k and v by head", "packed k and v by head"
    (B, T, H, 3, D) and (B, S, K, 2, D), and likewise.
"packed k and v, one behind the other"
    (2, …), of whatever k is without it.
"packed k and v, heads before slots"
    (N, 2, K, P, D).

Those of `DESCALES` are the factors of q, k, v and o where these have 8 bits; of k and v likewise:

"descale of heads of q"
    float32 (B, K): a factor for each sample and key head, which its query heads share; of o (B, H).
"descale of all of q"
    is a float.
"descale of blocks of q"
    float32 (B, H, blocks), of k and v (B, K, blocks): a factor for each block of rows.
"descale of tokens of q"
    float32 (B, H, T), of k and v (B, K, S): a factor for each row. Of sequences in packed arrays,
    caches and pages it is stored as q, k or v is, without their last axis.
"descale of all of o"
    o is divided by it, rounded and saturated: o8 · descale is o. "scale of all of o" multiplies.

Those of `LATENT` are parts of q, k and v, where v is the first C columns of k:

"latent queries", "rotary queries"
    (..., H, T, C), (..., H, T, R): q without its last R columns, and these.
"compressed keys", "rotary keys"
    (..., S, C), (..., S, R): v, and the last R columns of k, without an axis of heads. Beside q, k
    and v "latent queries" alone are the parameter qv of FlashAttention: q, k and v then are the
    other three, and have their heads.

Those of `LISTS` hold a mask as lists of keys in any order, int32, −1 in unused entries:

"key lists", "key lists of heads"
    (B, T, n), which heads share, and (B, H, T, n).
"""


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
    """
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise unknown_option(function.__name__, name, names[3:])  # without q, k, v
        return function(*args, **kwargs)

    return wrapper


def unknown_option(function: str, name: str, options: Sequence[str]) -> UnknownOptionError:
    """Return the error that answers an unknown option with the one that was meant."""
    near = get_close_matches(name, options, 1)
    foreign = FOREIGN.get(name)
    answer = foreign.hint if foreign else f"did you mean {near[0]}?" if near else ""
    return UnknownOptionError(
        f"{function} has no option {name}{answer and ': '}{answer} [options: {', '.join(options)}]"
    )
