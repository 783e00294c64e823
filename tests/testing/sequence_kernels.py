# ruff: noqa: E501 a line for each mistake
"""Functions on packed and paged sequences in plain loops, and the same with one mistake each."""

import math

__all__ = ["KERNELS", "MISTAKES", "build"]

ATTEND = '''
import numpy as np

def attend(q, k, v, causal, shift=None):
    """One sequence: q (T, H, D), k (S, K, D), v (S, K, E)."""
    (T, H, D), S = q.shape, len(k)
    k, v = (x.repeat(H // x.shape[1] if x.shape[1] else 1, 1).astype(float) for x in (k, v))
    shift = S - T if shift is None else shift
    o = np.zeros((T, H, v.shape[-1]))
    for t in range(T):
        n = max(min(shift + t + 1, S), 0) if causal else S
        for h in range(H if n else 0):
            s = k[:n, h] @ q[t, h].astype(float) / (D**0.5 or 1)
            p = np.exp(s - s.max())
            o[t, h] = p / p.sum() @ v[:n, h]
    return o
'''

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
    "the last page is left out": ("pages", "-(-length // P)", "length // P"),
    "a table with the stride of its longest row": ("pages", "block_table[b, ", "block_table.reshape(-1)[b * -(-max(cache_seqlens) // P) :][ "),
    "hidden slots times 0": ("pages", "        out[b] =", "        rest = v_cache[pages].reshape(-1, *v.shape[1:])[length:]\n        out[b] = (0 * rest).sum(0).repeat(q.shape[2] // (v.shape[1] or 1), 0) +"),
    "the cache is cleared behind the last key": ("pages", "        out[b] =", "        if length % P:\n            v_cache[pages[-1], length % P :] = 0\n        out[b] ="),
    "a full last page is empty": ("page list", "last_page_len[b]", "last_page_len[b] % P"),
    "last pages are full": ("page list", "last_page_len[b]", "P * bool(len(pages))"),
    "the list is not read": ("page list", "kv_indices[kv_indptr[b] : kv_indptr[b + 1]]", "np.arange(kv_indptr[b], kv_indptr[b + 1])"),
    "offsets of queries for pages": ("page list", "kv_indices[kv_indptr[b] :", "kv_indices[qo_indptr[b] :"),
    "lengths without the new tokens": ("packed queries, pages", "enumerate(seqused_k)", "enumerate(np.maximum(seqused_k - np.diff(cu_seqlens_q), 0))"),
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
    exec(ATTEND + source, scope)
    return scope["f"]
