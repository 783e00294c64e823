# ruff: noqa: E501 a line for each mistake
"""Functions on packed and paged sequences in plain loops, and the same with one mistake each."""

import math

__all__ = ["KERNELS", "MISTAKES", "build"]

ATTEND = '''
import numpy as np

def attend(q, k, v, causal, shift=None, mask=None):
    """One sequence: q (T, H, D), k (S, K, D), v (S, K, E), mask (T, S)."""
    (T, H, D), S = q.shape, len(k)
    k, v = (x.repeat(H // x.shape[1] if x.shape[1] else 1, 1).astype(float) for x in (k, v))
    shift = S - T if shift is None else shift
    o = np.zeros((T, H, v.shape[-1]))
    for t in range(T):
        n = max(min(shift + t + 1, S), 0) if causal else S
        seen = slice(n) if mask is None else np.flatnonzero(mask[t, :n])
        for h in range(H if len(k[seen]) else 0):
            s = k[seen, h] @ q[t, h].astype(float) / (D**0.5 or 1)
            p = np.exp(s - s.max())
            o[t, h] = p / p.sum() @ v[seen, h]
    return o
'''

TURN = """
def turn(x, cos, sin, at, interleaved):
    x, half = x.copy(), cos.shape[1]
    for t in range(len(x)):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s = cos[at[t], i], sin[at[t], i]
            first, second = x[t, :, a].copy(), x[t, :, b].copy()
            x[t, :, a] = first * c - second * s
            x[t, :, b] = first * s + second * c
    return x
"""

KERNELS = {
    "packed": """
def f(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    out = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype)
    for b in range(len(cu_seqlens_q) - 1):
        first, last = cu_seqlens_q[b], cu_seqlens_q[b + 1]
        begin, end = cu_seqlens_k[b], cu_seqlens_k[b + 1]
        out[first:last] = attend(q[first:last], k[begin:end], v[begin:end], causal)
    return out
""",
    "self": """
def f(q, k, v, cu_seqlens, max_seqlen, causal=False):
    out = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype)
    for b in range(len(cu_seqlens) - 1):
        own = slice(cu_seqlens[b], cu_seqlens[b + 1])
        out[own] = attend(q[own], k[own], v[own], causal)
    return out
""",
    "cache": """
def f(q, k_cache, v_cache, cache_seqlens, causal=False):
    out = np.zeros((*q.shape[:3], v_cache.shape[-1]), q.dtype)
    for b, length in enumerate(cache_seqlens):
        out[b] = attend(q[b], k_cache[b, :length], v_cache[b, :length], causal)
    return out
""",
    "lengths": """
def f(q, k, v, query_seq_lengths, key_value_seq_lengths, causal=False):
    out = np.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
    for b, (n, m) in enumerate(zip(query_seq_lengths, key_value_seq_lengths)):
        out[b, :n] = attend(q[b, :n], k[b, :m], v[b, :m], causal)
    return out
""",
    "pages": """
def f(q, k_cache, v_cache, cache_seqlens, block_table, causal=False):
    P = k_cache.shape[1]
    out = np.zeros((*q.shape[:3], v_cache.shape[-1]), q.dtype)
    for b, length in enumerate(cache_seqlens):
        pages = block_table[b, : -(-length // P)]
        k, v = (x[pages].reshape(-1, *x.shape[2:])[:length] for x in (k_cache, v_cache))
        out[b] = attend(q[b], k, v, causal)
    return out
""",
    "page list": """
def f(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, last_page_len, causal=False):
    P = k_cache.shape[1]
    out = np.zeros((*q.shape[:2], v_cache.shape[-1]), q.dtype)
    for b in range(len(qo_indptr) - 1):
        own = slice(qo_indptr[b], qo_indptr[b + 1])
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        length = max(len(pages) - 1, 0) * P + last_page_len[b]
        k, v = (x[pages].reshape(-1, *x.shape[2:])[:length] for x in (k_cache, v_cache))
        out[own] = attend(q[own], k, v, causal)
    return out
""",
    "packed queries, pages": """
def f(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, block_table, causal=False):
    P = k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype)
    for b, length in enumerate(seqused_k):
        own = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        pages = block_table[b, : -(-length // P)]
        keys, values = (x[pages].reshape(-1, *x.shape[2:])[:length] for x in (k, v))
        out[own] = attend(q[own], keys, values, causal)
    return out
""",
    "new keys": """
def f(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, *, cache_seqlens, cache_batch_idx=None, cache_leftpad=None, block_table=None, causal=False, rotary_interleaved=True):
    B, T = q.shape[:2]
    out = np.zeros((*q.shape[:3], v_cache.shape[-1]), q.dtype)
    for b in range(B):
        length = cache_seqlens[b]
        first = 0 if cache_leftpad is None else cache_leftpad[b]
        n = 0 if k is None else k.shape[1]
        query = q[b]
        if rotary_cos is not None:
            at = length + np.arange(T) * bool(causal)
            query = turn(q[b], rotary_cos, rotary_sin, at, rotary_interleaved)
        parts = []
        for cache, new, turned in ((k_cache, k, rotary_cos is not None), (v_cache, v, False)):
            if block_table is None:
                row = b if cache_batch_idx is None else cache_batch_idx[b]
                page, slot = np.full(length + n, row), np.arange(length + n)
            else:
                s = np.arange(length + n)
                page, slot = block_table[b, s // cache.shape[1]], s % cache.shape[1]
            if n:
                at = length + np.arange(n)
                fresh = turn(new[b], rotary_cos, rotary_sin, at, rotary_interleaved) if turned else new[b]
                cache[page[length:], slot[length:]] = fresh
            parts.append(cache[page[first:], slot[first:]])
        out[b] = attend(query, *parts, causal)
    return out
""",
    "head-major pages": """
def f(q, k_cache, v_cache, cache_seqlens, block_table, causal=False, kv_layout="NHD"):
    if kv_layout == "HND":
        k_cache, v_cache = (x.swapaxes(1, 2) for x in (k_cache, v_cache))
    P = k_cache.shape[1]
    out = np.zeros((*q.shape[:3], v_cache.shape[-1]), q.dtype)
    for b, length in enumerate(cache_seqlens):
        pages = block_table[b, : -(-length // P)]
        k, v = (x[pages].reshape(-1, *x.shape[2:])[:length] for x in (k_cache, v_cache))
        out[b] = attend(q[b], k, v, causal)
    return out
""",
    "combined pages": """
def f(q, paged_kv_cache, qo_indptr, kv_indptr, kv_indices, last_page_len, custom_mask=None, causal=False, kv_layout="NHD"):
    k_cache, v_cache = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.swapaxes(1, 2), v_cache.swapaxes(1, 2)
    P, begin = k_cache.shape[1], 0
    out = np.zeros((*q.shape[:2], v_cache.shape[-1]), q.dtype)
    for b in range(len(qo_indptr) - 1):
        own = slice(qo_indptr[b], qo_indptr[b + 1])
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
        length = max(len(pages) - 1, 0) * P + last_page_len[b]
        k, v = (x[pages].reshape(-1, *x.shape[2:])[:length] for x in (k_cache, v_cache))
        T, mask = qo_indptr[b + 1] - qo_indptr[b], None
        if custom_mask is not None:
            mask = custom_mask[begin : begin + T * length].reshape(T, length)
            begin += T * length
        out[own] = attend(q[own], k, v, causal and mask is None, mask=mask)
    return out
""",
    "packed array": """
def f(qkv, cu_seqlens, max_seqlen, causal=False):
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    out = np.zeros_like(q)
    for b in range(len(cu_seqlens) - 1):
        own = slice(cu_seqlens[b], cu_seqlens[b + 1])
        out[own] = attend(q[own], k[own], v[own], causal)
    return out
""",
}
"""Functions named by their storage."""

MISTAKES = {
    "a key of the sequence before": ("packed", "begin, end = cu", "begin, end = -1 + cu"),
    "a key of the sequence behind": ("packed", "k[b + 1]\n", "k[b + 1] + 1\n"),
    "the last key is left out": ("packed", "k[b + 1]\n", "k[b + 1] - 1\n"),
    "offsets of queries for keys": ("packed", "= cu_seqlens_k[b], cu_seqlens_k", "= cu_seqlens_q[b], cu_seqlens_k"),
    "offsets counted in longest lengths": ("packed", "= cu_seqlens_k[b], cu", "= b * max_seqlen_k, cu"),
    "the last sequence is not computed": ("packed", "len(cu_seqlens_q) - 1", "len(cu_seqlens_q) - 2"),
    "the first sequence begins at its length": ("packed", "first, last = cu_seqlens_q[b]", "first, last = cu_seqlens_q[b or 1]"),
    "the diagonal of the longest": ("packed", "v[begin:end], causal", "v[begin:end], causal, max_seqlen_k - max_seqlen_q"),
    "an empty sequence ends the loop": ("packed", "        out[first", "        if begin == end:\n            break\n        out[first"),
    "one more query than there is": ("self", "        out[own]", "        own = slice(own.start, min(own.stop + 1, len(q)))\n        out[own]"),
    "no more than the longest": ("self", "cu_seqlens[b + 1])", "min(cu_seqlens[b + 1], cu_seqlens[b] + max_seqlen - 1))"),
    "a slot behind the last key": ("cache", "k_cache[b, :length]", "k_cache[b, :length + 1]", "v_cache[b, :length]", "v_cache[b, :length + 1]"),
    "the longest length for all": ("cache", "k_cache[b, :length]", "k_cache[b, :max(cache_seqlens)]", "v_cache[b, :length]", "v_cache[b, :max(cache_seqlens)]"),
    "the length of the sample before": ("cache", "enumerate(cache_seqlens)", "enumerate(np.roll(cache_seqlens, 1))"),
    "lengths of keys for queries": ("lengths", "(n, m) in", "(m, n) in"),
    "the diagonal of the longest lengths": ("lengths", "causal)\n    return", "causal, max(key_value_seq_lengths) - max(query_seq_lengths))\n    return"),
    "a diagonal of all queries": ("lengths", "out[b, :n] = attend(q[b, :n]", "out[b] = attend(q[b]"),
    "a key behind the last": ("lengths", "k[b, :m], v[b, :m]", "k[b, : m + 1], v[b, : m + 1]"),
    "the whole last page": ("pages", "[:length] for", " for"),
    "the first row of the table for all": ("pages", "block_table[b,", "block_table[0,"),
    "pages in the order of memory": ("pages", "        k, v", "        pages = np.sort(pages)\n        k, v"),
    "pages behind each other": ("pages", "block_table[b, : -(-length // P)]", "block_table[b, 0] + np.arange(-(-length // P))"),
    "the second page of a pair": ("pages", "        k, v", "        second = np.arange(len(pages)) % 2 == 1\n        pages = np.where(second, (np.roll(pages, 1) + 1) % len(k_cache), pages)\n        k, v"),
    "the last page is left out": ("pages", "-(-length // P)", "length // P"),
    "a table with the stride of its longest row": ("pages", "block_table[b, ", "block_table.reshape(-1)[b * -(-max(cache_seqlens) // P) :][ "),
    "hidden slots times 0": ("pages", "        out[b] =", "        rest = v_cache[pages].reshape(-1, *v.shape[1:])[length:]\n        out[b] = (0 * rest).sum(0).repeat(q.shape[2] // (v.shape[1] or 1), 0) +"),
    "the cache is cleared behind the last key": ("pages", "        out[b] =", "        if length % P:\n            v_cache[pages[-1], length % P :] = 0\n        out[b] ="),
    "page ids of 16 bits": ("pages", "        k, v", "        pages = pages.astype(np.uint16)\n        k, v"),
    "offsets of 16 bits": ("page list", "        length", "        pages = (pages * P).astype(np.uint16) // P\n        length"),
    "a full last page is empty": ("page list", "last_page_len[b]", "last_page_len[b] % P"),
    "last pages are full": ("page list", "last_page_len[b]", "P * bool(len(pages))"),
    "the list is not read": ("page list", "kv_indices[kv_indptr[b] : kv_indptr[b + 1]]", "np.arange(kv_indptr[b], kv_indptr[b + 1])"),
    "offsets of queries for pages": ("page list", "kv_indices[kv_indptr[b] :", "kv_indices[qo_indptr[b] :"),
    "lengths without the new tokens": ("packed queries, pages", "enumerate(seqused_k)", "enumerate(np.maximum(seqused_k - np.diff(cu_seqlens_q), 0))"),
    "a new key a slot late": ("new keys", "cache[page[length:], slot[length:]] = fresh", "cache[page[length:][1:], slot[length:][1:]] = fresh[:-1]"),
    "new values are not written": ("new keys", "            if n:", "            if n and cache is k_cache:"),
    "new keys are left in the cache unturned": ("new keys", "            parts.append(cache[page[first:], slot[first:]])", "            parts.append(cache[page[first:], slot[first:]].copy())\n            if n:\n                cache[page[length:], slot[length:]] = new[b]"),
    "the cache is not updated": ("new keys", "        for cache, new", "        caches = k_cache.copy(), v_cache.copy()\n        for cache, new", "((k_cache, k,", "((caches[0], k,", "(v_cache, v, F", "(caches[1], v, F"),
    "a slot behind the new keys is cleared": ("new keys", "            parts.append", "            if n and block_table is None and length + n < cache.shape[1]:\n                cache[row, length + n] = 0\n            parts.append"),
    "positions of new keys from 0": ("new keys", "at = length + np.arange(n)", "at = np.arange(n)"),
    "positions of queries from 0": ("new keys", "at = length + np.arange(T)", "at = np.arange(T)"),
    "positions from 0": ("new keys", "at = length + np.arange(n)", "at = np.arange(n)", "at = length + np.arange(T)", "at = np.arange(T)"),
    "all queries at the first position": ("new keys", " * bool(causal)", " * 0"),
    "each query at its position": ("new keys", " * bool(causal)", ""),
    "halves are always paired": ("new keys", "rotary_sin, at, rotary_interleaved)", "rotary_sin, at, False)"),
    "the other direction": ("new keys", "turn(q[b], rotary_cos, rotary_sin", "turn(q[b], rotary_cos, -rotary_sin", "turn(new[b], rotary_cos, rotary_sin", "turn(new[b], rotary_cos, -rotary_sin"),
    "values are turned too": ("new keys", "(v_cache, v, False)", "(v_cache, v, rotary_cos is not None)"),
    "left padding is ignored": ("new keys", "cache_leftpad[b]\n", "0\n"),
    "left padding moves the positions": ("new keys", "at = length + np.arange(n)", "at = length - first + np.arange(n)", "at = length + np.arange(T)", "at = length - first + np.arange(T)"),
    "rows of the cache are ignored": ("new keys", "else cache_batch_idx[b]", "else b"),
    "head-major pages are read as slot-major": ("head-major pages", 'kv_layout == "HND"', "False"),
    "k and v of pages change places": ("combined pages", "paged_kv_cache[:, 0], paged_kv_cache[:, 1]", "paged_kv_cache[:, 1], paged_kv_cache[:, 0]"),
    "a mask by columns": ("combined pages", ".reshape(T, length)", ".reshape(length, T).T"),
    "the mask of the first sequence": ("combined pages", "            begin += T * length\n", ""),
    "a mask with the stride of whole pages": ("combined pages", "begin += T * length", "begin += T * len(pages) * P"),
    "k and v change places": ("packed array", "qkv[:, 1], qkv[:, 2]", "qkv[:, 2], qkv[:, 1]"),
    "parts behind the heads": ("packed array", "q, k, v = qkv", "qkv = qkv.reshape(len(qkv), -1, 3, qkv.shape[3]).swapaxes(1, 2)\n    q, k, v = qkv"),
}  # fmt: skip
"""Mistakes: the storage, and pairs of what stands there and what stands in its place."""


def build(name):
    """Return a function by its storage, or by its mistake."""
    storage, *changes = MISTAKES.get(name, (name,))
    source = KERNELS[storage]
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source, (name, old)
        source = source.replace(old, new)
    scope = {"math": math}
    exec(ATTEND + TURN + source, scope)
    return scope["f"]
