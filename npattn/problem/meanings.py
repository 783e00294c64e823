"""Meanings of the parameters of attention functions, and their names in other libraries."""

from typing import NamedTuple

from npattn.problem.options import OPTIONS, RESULTS


class Names(NamedTuple):
    """Names of a meaning in other libraries: what npattn answers to one, and what it carries.

    `{name}` in a hint is the name.
    """

    hint: str = ""
    names: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()


_IN_PACKED = "call npattn.cache.varlen for packed sequences"
_IN_PAGES = "call npattn.cache.paged for keys in pages"
_APPENDED, _TURNED = "call npattn.cache.append first", "turn q and k by npattn.positions.rope"
_PARTS = "pass q, k and v: npattn.cache.unpack gives them"
_LSE = "call npattn.forward, whose result has .lse"
_LATENT = "call npattn.variants.latent.attention, or pass [latent | rotary] parts as q and k"
_QUANTIZED = "dequantize it first: npattn.quantization.dequantize(values, descale)"
_IN_8_BITS = "quantize the result: npattn.quantization.quantize(o, "

_PLACES = {
    "offsets of both": Names(_IN_PACKED, ("cu_seqlens",)),
    "offsets of queries": Names(_IN_PACKED, ("cu_seqlens_q", "qo_indptr")),
    "offsets of keys": Names(_IN_PACKED, ("cu_seqlens_k", "cu_seqlens_kv"), ("mask",)),
    "longest of both": Names(_IN_PACKED, ("max_seqlen",)),
    "longest queries": Names(_IN_PACKED, ("max_seqlen_q",)),
    "longest keys": Names(_IN_PACKED, ("max_seqlen_k", "max_seqlen_kv")),
    "lengths of queries": Names(_IN_PACKED, ("query_seq_lengths", "seqused_q")),
    "lengths of keys": Names(
        _IN_PAGES,
        ("cache_seqlens", "context_lens", "key_value_seq_lengths", "seq_lens", "seqused_k"),
        ("mask",),
    ),
    "page table": Names(_IN_PAGES, ("block_table", "block_tables", "page_table")),
    "page offsets": Names(_IN_PAGES, ("kv_indptr", "paged_kv_indptr"), ("mask",)),
    "page list": Names(_IN_PAGES, ("kv_indices", "paged_kv_indices")),
    "keys on last page": Names(
        _IN_PAGES, ("last_page_len", "kv_last_page_len", "paged_kv_last_page_len")
    ),
    "page size": Names(_IN_PAGES, ("page_size",)),
}
PLACES = tuple(_PLACES)
"""Meanings of the parameters that say where sequences of different lengths are stored."""

_STORED = {
    **_PLACES,
    "packed mask": Names("pass it as mask=", ("custom_mask",), ("mask",)),
    "new keys": Names(_APPENDED, ("k",)),
    "new values": Names(_APPENDED, ("v",)),
    "new keys of any number": Names(),
    "new values of any number": Names(),
    "cosines": Names(_TURNED, ("rotary_cos",)),
    "sines": Names(_TURNED, ("rotary_sin",)),
    "adjacent pairs": Names(_TURNED, ("rotary_interleaved",)),
    "left padding": Names("leave the slots before a sequence out of its cache", ("cache_leftpad",)),
    "rows of the cache": Names("pass the rows of the cache that are used", ("cache_batch_idx",)),
    "order of pages": Names("pass pages (N, P, K, D)", ("kv_layout",)),
    "heads before slots": Names(),
}
STORED = tuple(_STORED)
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

_PARTS_OF_Q_AND_K = {
    "latent queries": Names(_LATENT, ("q_nope", "qv")),
    "rotary queries": Names(_LATENT, ("q_pe", "q_rope", "q_rot")),
    "compressed keys": Names(_LATENT, ("ckv", "c_kv", "compressed_kv", "kv_c")),
    "rotary keys": Names(_LATENT, ("k_pe", "k_rope", "k_rot", "kpe")),
}
LATENT = tuple(_PARTS_OF_Q_AND_K)
"""Meanings of the parameters of latent attention, in the order of their gradients."""

LISTS = ("key lists", "key lists of heads")
"""Meanings of a parameter that lists the keys of each query."""

NAMES: dict[str, Names] = {
    **{name: Names(carries=(name,)) for name in (*OPTIONS, *RESULTS)},
    "bias": Names("pass it as bias=", ("attn_bias",), ("bias",)),
    "causal": Names(
        'pass causal=True; where T != S, PyTorch means causal="top_left"',
        ("is_causal",),
        ("causal",),
    ),
    "gate": Names("pass it as gate=", ("output_gate",), ("gate",)),
    "scale": Names(
        "pass it as scale=", ("scale_factor", "scaling", "sm_scale", "softmax_scale"), ("scale",)
    ),
    "sinks": Names("pass it as sinks=", ("s_aux",), ("sinks",)),
    "softcap": Names(
        "pass it as softcap=",
        ("attn_logits_soft_cap", "logit_cap", "logits_soft_cap", "soft_cap"),
        ("softcap",),
    ),
    "mask or bias": Names(
        "pass a boolean array as mask= (True = may attend), a float array as bias=",
        ("attention_mask", "attn_mask"),
        ("mask", "bias"),
    ),
    "added mask or bias": Names(carries=("mask", "bias")),
    "key padding": Names(
        "its True hides: pass mask=~key_padding_mask[:, None, None, :]",
        ("key_padding_mask",),
        ("mask",),
    ),
    "head mask": Names("pass gate=head_mask[:, None, None]", ("head_mask",), ("gate",)),
    "window or −1": Names(
        "pass window=; −1 becomes None: window_size=(-1, 0) is window=(None, 0)",
        ("window_size",),
        ("window",),
    ),
    "window of numbers": Names(
        "pass window=(left, right); None is unlimited", ("local_window_size",), ("window",)
    ),
    "lse without gradient": Names(
        _LSE, ("return_attn_probs", "return_softmax_lse"), ("return_lse",)
    ),
    "lse (B, T, H) without gradient": Names(_LSE, ("return_residual",), ("return_lse",)),
    "need_weights": Names(
        "call npattn.forward, whose result has .weights", ("need_weights",), ("return_weights",)
    ),
    "shared heads": Names(
        "leave it out: k and v with fewer heads than q are shared without a flag", ("enable_gqa",)
    ),
    "no dropout": Names(
        "nothing here is random: pass dropout_mask= (True = keep) and dropout_rate=", ("dropout_p",)
    ),
    "no effect": Names(),
    "module": Names("leave it out: attention is a function here", ("module",)),
    **_STORED,
    **dict.fromkeys(PACKED, Names()),
    "packed q, k and v": Names(_PARTS, ("qkv",)),
    "packed k and v": Names(_PARTS, ("kv", "paged_kv_cache")),
    **dict.fromkeys(DESCALES, Names()),
    **{f"descale of heads of {name}": Names(_QUANTIZED, (f"{name}_descale",)) for name in "qkv"},
    **{f"descale of all of {name}": Names(_QUANTIZED, (f"{name}_scale",)) for name in "qkv"},
    "descale of all of o": Names(
        _IN_8_BITS + "descale={name})", ("o_descale", "o_scale", "output_scale")
    ),
    "scale of all of o": Names(_IN_8_BITS + "scale={name})", ("scale_o",)),
    **_PARTS_OF_Q_AND_K,
    "key lists": Names(
        "call npattn.variants.gathered.attention for lists of keys",
        ("gather_kv_indices", "indices", "topk_indices"),
    ),
    "key lists of heads": Names(),
}
"""Meanings of a parameter → its names in other libraries, and the options that it carries."""

MEANINGS = {meaning: row.carries for meaning, row in NAMES.items()}
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
"no effect"
    may have any value, on which results do not depend: the size of a tile, for instance.
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
