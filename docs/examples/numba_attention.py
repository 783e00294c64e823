"""Attention in numba's CUDA, one thread for each query [docs/how-to/triton-on-a-laptop.md]."""

import math

import numpy as np
from numba import cuda


@cuda.jit
def attend(q, k, v, causal, scale, o):
    """Row by row with an online softmax; a query that sees no key gives 0."""
    row = cuda.grid(1)
    heads, T, D = q.shape
    S, E = v.shape[1:]
    if row >= heads * T:
        return
    h, t = row // T, row % T
    shared = h // (heads // k.shape[0])
    top, total = -math.inf, 0.0
    for e in range(E):
        o[h, t, e] = 0
    for s in range(S):
        if causal and s > t + S - T:
            continue
        x = 0.0
        for d in range(D):
            x += q[h, t, d] * k[shared, s, d]
        x *= scale
        new = max(top, x)
        shrink, p = math.exp(top - new), math.exp(x - new)
        total = total * shrink + p
        for e in range(E):
            o[h, t, e] = o[h, t, e] * shrink + p * v[shared, s, e]
        top = new
    for e in range(E):
        o[h, t, e] = o[h, t, e] / total if total > 0 else 0


def attention(q, k, v, *, causal=False, scale=None):
    if q.ndim != 4 or q.shape[0] != k.shape[0] or 0 in q.shape + v.shape:
        raise ValueError("q, k, v must have four axes, one B and no size of 0")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    flat = [np.ascontiguousarray(x.reshape(-1, *x.shape[2:])) for x in (q, k, v)]
    o = np.empty((*flat[0].shape[:2], v.shape[-1]), q.dtype)
    threads = 32
    blocks = -(-o.shape[0] * o.shape[1] // threads)
    attend[blocks, threads](*flat, causal, scale, o)
    return o.reshape(*q.shape[:3], v.shape[-1])
