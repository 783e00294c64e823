"""Two targets in NumPy: `flash` keeps every rule, `naive` breaks the usual two.

    B batch   H query heads   K key/value heads (K divides H)   T queries   S keys
    D query/key size   E value size
    q (..., H, T, D)   k (..., K, S, D)   v (..., K, S, E)   out (..., H, T, E)   lse (..., H, T)

`flash` walks over tiles of keys with a running maximum m and a running sum l, and never holds
T × S; `flash_backward` rebuilds the weights from lse, tile by tile. Numbers in brackets are the
rules of docs/semantics.md. Nothing here is shared with the oracle.
Source: Dao 2023 (arXiv 2307.08691), algorithms 1 and 2; Milakov and Gimelshein 2018 (1805.02867).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Window = tuple[int | None, int | None]

TILE = 48  # keys a step; most S leave a tail


class KeyTile(NamedTuple):
    """One tile of keys, with the scores of all queries for them."""

    keys: slice
    s: Array  # (..., H, T, s) the final scores, −inf where hidden
    slope: Array | None  # (..., H, T, s) 1 − tanh², what the softcap does to a gradient


@np.errstate(all="ignore")  # hidden scores may be anything
def flash(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_mask: Array | None = None,
    dropout_rate: float = 0.0,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention by online softmax, with out in the dtype of q and lse in float32 or float64.

    q is (..., H, T, D), k (..., K, S, D), v (..., K, S, E); or all have rank 2, one head. `causal`
    and `window` are aligned bottom-right: query t stands at key t + S − T.
    """
    wide, rows, sink = _wide(q), _rows(q, k, v), _sink(q, sinks)
    m = np.empty((*rows.shape[:-1], 1), wide)
    m[...] = sink  # the sink is a first key without value  [8]
    total = np.ones_like(m)
    acc = np.zeros((*rows.shape[:-1], v.shape[-1]), wide)
    k_rows, v_rows = (_repeat(x.astype(wide), rows.shape[-3]) for x in (k, v))
    for tile in _tiles(rows, k_rows, mask, causal, window, bias, scale, softcap):
        top = np.maximum(m, tile.s.max(-1, keepdims=True))  # (..., H, T, 1)
        # −inf − −inf is NaN. The pivot is not stored: a later tile may hold a top below 0.
        pivot = np.where(top == -np.inf, 0, top)
        shrink = np.exp(m - pivot)
        p = np.exp(tile.s - pivot)  # (..., H, T, s)
        total = total * shrink + p.sum(-1, keepdims=True)
        keep = _keep(dropout_mask, dropout_rate, tile.keys, wide)
        w = p if keep is None else p * keep
        acc = acc * shrink + _weighted_sum(w, v_rows[..., tile.keys, :], tile.s != -np.inf)
        m = top
    out = acc / np.where(total == 0, 1, total)
    lse = (m + np.log(total))[..., 0]
    if q.ndim == 2:
        out, lse = out[0], lse[0]
    return (out.astype(q.dtype), lse) if return_lse else out.astype(q.dtype)


@np.errstate(all="ignore")
def flash_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array,
    lse: Array,
    dlse: Array | None = None,
    mask: Array | None = None,
    causal: bool = False,
    window: Window | None = None,
    bias: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout_mask: Array | None = None,
    dropout_rate: float = 0.0,
) -> dict[str, Array]:
    """Gradients of Σ dout·out + Σ dlse·lse, for the out and lse that `flash` returned.

    dout and out are (..., H, T, E), lse and dlse (..., H, T), q, k and v as for `flash`.
    """
    wide, rows, sink = _wide(q), _rows(q, k, v), _sink(q, sinks)
    scale = _scale(q, scale)
    k_rows, v_rows = (_repeat(x.astype(wide), rows.shape[-3]) for x in (k, v))
    options = (mask, causal, window, bias, scale, softcap)
    do = dout.astype(wide).reshape(*rows.shape[:-1], v.shape[-1])
    delta = (do * out.reshape(do.shape).astype(wide)).sum(-1, keepdims=True)  # (..., H, T, 1)
    if dlse is not None:
        delta = delta - dlse.reshape(delta.shape).astype(wide)
    dq = np.zeros(rows.shape, wide)
    dk, dv = np.zeros(k.shape, wide), np.zeros(v.shape, wide)
    dbias = None if bias is None else np.zeros(bias.shape, wide)

    # lse is held to |lse| · 2⁻²⁴, which at a bias of −1e9 is 64: weights rebuilt from it alone
    # would not sum to 1. So it is only the pivot, and one more pass over the keys gives the sum.
    pivot = np.where(lse == -np.inf, 0, lse).astype(wide).reshape(delta.shape)
    p_sink = np.exp(sink - pivot)
    total = p_sink
    for tile in _tiles(rows, k_rows, *options):
        total = total + np.exp(tile.s - pivot).sum(-1, keepdims=True)
    total = np.where(total == 0, 1, total)

    for tile in _tiles(rows, k_rows, *options):
        k_tile, v_tile = (x[..., tile.keys, :] for x in (k_rows, v_rows))
        live = tile.s != -np.inf
        p = np.where(live, np.exp(tile.s - pivot) / total, 0)  # NaN of a row stays in it
        keep = _keep(dropout_mask, dropout_rate, tile.keys, wide)
        w = p if keep is None else p * keep
        dp = do @ v_tile.swapaxes(-1, -2)
        dp = dp if keep is None else dp * keep  # from out = (p · keep) v
        dx = ds = np.where(live, p * (dp - delta), 0)  # from p = softmax(s); hidden NaN stays out
        if tile.slope is not None:
            dx = np.where(live, ds * tile.slope, 0)  # from s = softcap · tanh(x / softcap) + bias
        seen = live.swapaxes(-1, -2)
        dq += scale * _weighted_sum(dx, k_tile, live)  # from x = scale · q kᵀ
        _add(dk[..., tile.keys, :], scale * _weighted_sum(dx.swapaxes(-1, -2), rows, seen))
        _add(dv[..., tile.keys, :], _weighted_sum(w.swapaxes(-1, -2), do, seen))
        if dbias is not None:
            part = _cut(dbias, tile.keys)
            part += _sum_to(ds, part.shape)

    grads = {"q": _sum_to(dq, q.shape).astype(q.dtype), "k": dk.astype(k.dtype)}
    grads["v"] = dv.astype(v.dtype)
    if dbias is not None:
        grads["bias"] = dbias
    if sinks is not None:
        grads["sinks"] = _sum_to(-p_sink / total * delta, (rows.shape[-3], 1, 1))[:, 0, 0]
    return grads


def naive(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Textbook attention: fully masked rows are NaN, and NaN leaks from hidden keys."""
    with np.errstate(all="ignore"):
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return np.asarray(weights @ v).astype(q.dtype, copy=False)


# --- parts ----------------------------------------------------------------------------------------


def _tiles(
    rows: Array,
    k: Array,
    mask: Array | None,
    causal: bool,
    window: Window | None,
    bias: Array | None,
    scale: float | None,
    softcap: float | None,
) -> Iterator[KeyTile]:
    """Yield the keys, `TILE` at a time, with the final scores of all queries for them.

    rows are (..., H, T, D), k is (..., H, S, D).
    """
    T, S, wide = rows.shape[-2], k.shape[-2], rows.dtype.type
    left_keys, right_keys = window or (None, None)
    right_keys = 0 if causal else right_keys  # the window's right side is 0 or more  [6, 7]
    diagonal = np.arange(T)[:, None] + S - T  # (T, 1) the key on the diagonal
    for start in range(0, S, TILE):
        keys = slice(start, min(start + TILE, S))
        visible: Array | bool = True if mask is None else _cut(mask, keys)
        if left_keys is not None or right_keys is not None:
            offset = np.arange(keys.start, keys.stop) - diagonal
            visible = visible if right_keys is None else visible & (offset <= right_keys)
            visible = visible if left_keys is None else visible & (offset >= -left_keys)

        s = _scale(rows, scale) * (rows @ k[..., keys, :].swapaxes(-1, -2))  # (..., H, T, s)  [1]
        slope = None
        if softcap is not None:
            tanh = np.tanh(s / softcap)
            s, slope = softcap * tanh, 1 - tanh**2  # [2]
        if bias is not None:
            s = s + _cut(bias, keys).astype(wide)  # [4]
        if visible is not True:
            s = np.where(visible, s, -np.inf)  # [5] not an addition: NaN + −inf is NaN
        yield KeyTile(keys, s, slope)


def _keep(mask: Array | None, rate: float, keys: slice, wide: type[Any]) -> Array | None:
    """Return the factor of weights, (..., H, T, s): 1 / (1 − rate) where kept, else 0  [9]."""
    return None if mask is None else _cut(mask, keys) / wide(1 - rate)


def _wide(q: Array) -> type[Any]:
    """Return the compute dtype."""
    return np.float64 if q.dtype == np.float64 else np.float32


def _rows(q: Array, k: Array, v: Array) -> Array:
    """Return q in the compute dtype, with all leading axes and a head axis."""
    rows = q.astype(_wide(q))
    rows = rows if q.ndim > 2 else rows[None]
    if q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        return rows
    lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    return np.broadcast_to(rows, (*lead, *rows.shape[-3:]))


def _sink(q: Array, sinks: Array | None) -> Array:
    """Return the sinks as (H, 1, 1); no sink is a sink of −inf, whose weight is 0."""
    column = np.array([-np.inf]) if sinks is None else sinks
    return column.astype(_wide(q))[:, None, None]


def _scale(q: Array, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1] or 1) if scale is None else scale


def _cut(x: Array, keys: slice) -> Array:
    """Return a view of x at these keys; x itself if it has one entry for all keys."""
    return x if x.shape[-1] == 1 else x[..., keys]


def _repeat(x: Array, H: int) -> Array:
    """Repeat heads, (..., K, s, n) → (..., H, s, n): query head h uses head h // (H / K)."""
    x = x if x.ndim > 2 else x[None]
    return x if x.shape[-3] == H else np.repeat(x, H // max(x.shape[-3], 1), axis=-3)


def _weighted_sum(w: Array, x: Array, live: Array) -> Array:
    """Return w @ x without the entries of x that are not live: 0 · NaN is NaN [10]."""
    finite = np.isfinite(x)
    if finite.all():
        return np.asarray(w @ x)
    touched = live.astype(w.dtype) @ ~finite > 0
    return np.where(touched, np.nan, w @ np.where(finite, x, 0))


def _add(dx: Array, parts: Array) -> None:
    """Add parts (..., H, s, n), summed over heads and axes that share dx (..., K, s, n) [13]."""
    *lead, H, s, n = parts.shape
    K = dx.shape[-3] if dx.ndim > 2 else 1
    if H != K:
        parts = parts.reshape(*lead, K, H // max(K, 1), s, n).sum(-3)
    dx += _sum_to(parts, dx.shape)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x over the axes along which an array of `shape` was broadcast to it."""
    if x.shape == shape:
        return x
    extra = x.ndim - len(shape)
    kept = zip(x.shape[extra:], shape, strict=True)
    axes = (*range(extra), *[extra + i for i, (n, m) in enumerate(kept) if n != m])
    return np.asarray(x.sum(axis=axes, keepdims=True)).reshape(shape)
