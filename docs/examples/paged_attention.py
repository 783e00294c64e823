"""Attention to keys in pages, one sequence at a time [docs/how-to/varlen-and-paged.md]."""

import numpy as np


def decode(q, k_pages, v_pages, cache_seqlens, block_table):
    """Attend from q (B, T, H, D) to the first cache_seqlens[b] keys of pages (N, P, H, D)."""
    out = np.zeros((*q.shape[:-1], v_pages.shape[-1]), q.dtype)
    size = k_pages.shape[1]
    for b, length in enumerate(cache_seqlens):
        pages = block_table[b, : -(-length // size)]  # the last one may not be full
        k, v = (x[pages].reshape(-1, *x.shape[2:])[:length] for x in (k_pages, v_pages))
        if not length:
            continue
        s = np.einsum("thd,shd->hts", q[b], k) / np.sqrt(q.shape[-1], dtype=q.dtype)
        p = np.exp(s - s.max(-1, keepdims=True))
        out[b] = np.einsum("hts,she->the", p / p.sum(-1, keepdims=True), v)
    return out
