"""Latent and gathered attention by their formulas, with bounds; and query by query in loops.

They share no code with npattn: the textbook softmax and its gradient, in `Bounded` numbers, and
plain Python numbers, real or complex.
"""

from __future__ import annotations

import cmath
import itertools
import math

import numpy as np

from tests.variants.running_error import Bounded, join, wrap


def softmax_attention(q, k, v, visible, scale, softcap=None, bias=0.0, do=None, dlse=None):
    """Attention of (..., H, T, ·), (..., H, S, ·) in which each query sees a key; its gradients."""
    x = scale * (q @ k.T)
    capped = softcap * (x / Bounded(softcap)).tanh() if softcap else x
    s = capped + bias
    m = np.where(visible, s.x, -np.inf).max(-1, keepdims=True)
    e = (s - m).exp().where(visible)
    total = e.sum(-1, keepdims=True)
    p = e / total
    lse = (total.log() + m)[..., 0]
    results = {"out": p @ v, "lse": lse, "weights": p}
    if do is None:
        return results
    dp = Bounded(do) @ v.T
    g = dp - (p * dp).sum(-1, keepdims=True) + dlse[..., None]
    ds = p * g
    dx = ds
    if softcap:
        tanh = capped / Bounded(softcap)
        dx = ds * (Bounded(1.0) - tanh * tanh)
    results |= {"q": scale * (dx @ k), "k": scale * (dx.T @ q), "v": p.T @ Bounded(do), "bias": ds}
    return results


def latent(arrays, visible, do=None, dlse=None, scale=None, softcap=None, bias=0.0):
    """Multi-head latent attention as its paper defines it, by expanded keys; its gradients."""
    query, rotary, c, k_rope, w_uk, w_uv = map(wrap, arrays)
    N = query.x.shape[-1]
    scale = 1 / math.sqrt(N + rotary.x.shape[-1]) if scale is None else scale
    c, k_rope = c[..., None, :, :], k_rope[..., None, :, :]
    q, k, v = join(query, rotary), join(c @ w_uk, k_rope), c @ w_uv
    results = softmax_attention(q, k, v, visible, scale, softcap, bias, do, dlse)
    if do is None:
        return results
    dq, dk, dv = (results.pop(name) for name in "qkv")
    whole = {
        "q_nope": dq[..., :N],
        "q_rope": dq[..., N:],
        "c": (dk[..., :N] @ w_uk.T + dv @ w_uv.T).sum(-3),
        "k_rope": dk[..., N:].sum(-3),
        "w_uk": c.T @ dk[..., :N],
        "w_uv": c.T @ dv,
    }
    for (name, dx), x in zip(whole.items(), arrays, strict=True):
        results[name] = dx.sum_to(wrap(x).x.shape)
    return results


def latent_in_loops(arrays, visible, scale):
    """Output and lse, query by query, of one sample without axes of 1: plain Python numbers."""
    query, rotary, c, k_rope, w_uk, w_uv = (x.tolist() for x in arrays)
    H, T, S = len(query), len(query[0]), len(c)
    E = arrays[-1].shape[-1]
    out, lse = np.zeros((H, T, E), complex), np.zeros((H, T), complex)
    for h, t in itertools.product(range(H), range(T)):
        sizes, values = [], []
        for s in range(S):
            if not visible[t, s]:
                continue
            key = [sum(a * w[n] for a, w in zip(c[s], w_uk[h], strict=True))
                   for n in range(len(query[h][t]))]  # fmt: skip
            terms = [a * b for a, b in zip(query[h][t], key, strict=True)]
            terms += [a * b for a, b in zip(rotary[h][t], k_rope[s], strict=True)]
            sizes.append(cmath.exp(scale * sum(terms)))
            values.append([sum(a * w[e] for a, w in zip(c[s], w_uv[h], strict=True))
                           for e in range(E)])  # fmt: skip
        total = sum(sizes)
        lse[h, t] = cmath.log(total)
        for e in range(E):
            out[h, t, e] = sum(z * v[e] for z, v in zip(sizes, values, strict=True)) / total
    return out, lse


def gathered_in_loops(q, k, v, lists, scale, sees=lambda h, t, s: True):
    """Output and lse of (H, T, D), (K, S, D), (K, S, E) and lists (H, T, n), entry by entry."""
    H, T, _ = q.shape
    G = H // len(k)
    out, lse = np.zeros((H, T, v.shape[-1]), complex), np.full((H, T), -np.inf, complex)
    for h, t in itertools.product(range(H), range(T)):
        keys = [s for s in lists[h][t] if s >= 0 and sees(h, t, s)]
        sizes = [
            cmath.exp(scale * sum(a * b for a, b in zip(q[h, t], k[h // G, s], strict=True)))
            for s in keys
        ]
        if keys:
            lse[h, t] = cmath.log(sum(sizes))
        for e in range(v.shape[-1]):
            terms = [z * v[h // G, s, e] for z, s in zip(sizes, keys, strict=True)]
            out[h, t, e] = sum(terms) / sum(sizes) if keys else 0
    return out, lse
