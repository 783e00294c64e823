"""Attention and its gradients in plain NumPy: correct, and the beginning of every cheat."""

from __future__ import annotations

from typing import Any

import numpy as np


def weigh(q: Any, k: Any, mask: Any, causal: bool) -> tuple[Any, int]:
    """Return the weights, (..., H, T, S), and the number of query heads to a key head."""
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 and k.shape[-3] else 1
    k = np.repeat(k, group, axis=-3) if group > 1 else k
    s = q.astype(float) @ k.astype(float).swapaxes(-1, -2) / np.sqrt(max(q.shape[-1], 1))
    T, S = s.shape[-2:]
    visible = np.tri(T, S, S - T, dtype=bool) if causal else np.ones((T, S), bool)
    visible = visible if mask is None else visible & mask
    s = np.where(visible, s, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.where(visible, np.exp(s - np.where(np.isneginf(m), 0, m)), 0)
    total = p.sum(-1, keepdims=True)
    return np.where(visible, p / np.where(total == 0, 1, total), 0), group


def mix(p: Any, x: Any) -> Any:
    """Return p @ x, in which a weight of 0 keeps even NaN out."""
    if np.isfinite(x).all():
        return p @ x
    p, x = p[..., None], x[..., None, :, :]
    return np.where(p == 0, 0, p * x).sum(-2)


def attention(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return softmax(q kᵀ / √D) v; a query that sees no key gives 0."""
    p, group = weigh(q, k, mask, causal)
    v = np.repeat(v, group, axis=-3) if group > 1 else v
    return mix(p, v.astype(float)).astype(q.dtype)


def fold(gradient: Any, like: Any, group: int = 1) -> Any:
    """Sum a gradient over shared heads and broadcast axes, to the shape and dtype of its input."""
    if group > 1:
        *lead, H, n, m = gradient.shape
        gradient = gradient.reshape(*lead, H // group, group, n, m).sum(-3)
    gradient = gradient.sum(tuple(range(gradient.ndim - like.ndim)))
    axes = tuple(i for i, n in enumerate(like.shape) if n == 1 != gradient.shape[i])
    return gradient.sum(axes, keepdims=True).astype(like.dtype)


def gradients(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> tuple[Any, Any, Any]:
    """Return dq, dk, dv of sum(dout * o)."""
    p, group = weigh(q, k, mask, causal)
    wide = [np.repeat(x, group, axis=-3) if group > 1 else x for x in (k, v)]
    qq, kk, vv, do = (x.astype(float) for x in (q, *wide, dout))
    dv = mix(p.swapaxes(-1, -2), do)
    dp = np.where(p == 0, 0, do @ vv.swapaxes(-1, -2))
    delta = np.where(p == 0, 0, p * dp).sum(-1, keepdims=True)
    ds = np.where(p == 0, 0, p * (dp - delta)) / np.sqrt(max(q.shape[-1], 1))
    dq, dk = mix(ds, kk), mix(ds.swapaxes(-1, -2), qq)
    return fold(dq, q), fold(dk, k, group), fold(dv, v, group)


def mean_of_values(q: Any, k: Any, v: Any) -> Any:
    """Return the mean of all values for every query: fast, finite, and wrong."""
    group = q.shape[-3] // k.shape[-3] if q.ndim > 2 and k.shape[-3] else 1
    v = np.repeat(v, group, axis=-3) if group > 1 else v
    mean = v.sum(-2, keepdims=True) / max(v.shape[-2], 1)
    lead = np.broadcast_shapes(q.shape[:-2], v.shape[:-2])
    return np.broadcast_to(mean, (*lead, q.shape[-2], v.shape[-1])).astype(q.dtype)
