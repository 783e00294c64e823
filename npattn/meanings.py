"""Meanings of the parameters of attention functions beside the options, by name."""

from __future__ import annotations

from npattn.options import OPTIONS, RESULTS

__all__ = ["DESCALES", "LATENT", "LISTS", "MEANINGS", "PACKED", "PLACES", "STORED"]

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
