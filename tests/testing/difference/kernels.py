"""Kernels that differ in one thing from `right`: a rounding, an alignment, a mistake, a crash."""

import math
import os

import ml_dtypes
import numpy as np


def through_bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def identity(x):
    return x


def attend(
    q, k, v, causal, return_lse, *, weights=identity, scores=identity, top_left=False, factor=1.0
):
    """Attention in float32, with a rounding of the weights or scores."""
    T, S = q.shape[-2], k.shape[-2]
    q32, k32, v32 = (x.astype(np.float32) for x in (q, k, v))
    s = scores(q32 @ k32.swapaxes(-1, -2) * np.float32(factor / math.sqrt(q.shape[-1])))
    if causal:
        s = np.where(np.tri(T, S, 0 if top_left else S - T, dtype=bool), s, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isinf(m), 0, m))
    total = p.sum(-1, keepdims=True)
    o = weights(p / np.where(total == 0, 1, total)) @ v32
    lse = (m + np.log(total))[..., 0]
    return (o.astype(q.dtype), lse) if return_lse else o.astype(q.dtype)


def right(q, k, v, causal=False, *, return_lse=False):
    return attend(q, k, v, causal, return_lse)


def backward(dout, q, k, v, *, causal=False):
    return gradients(dout, q, k, v, causal, identity)


def gradients(dout, q, k, v, causal, rounding):
    q32, k32, v32, do = (x.astype(np.float32) for x in (q, k, v, dout))
    scale = np.float32(1 / math.sqrt(q.shape[-1]))
    s = q32 @ k32.swapaxes(-1, -2) * scale
    T, S = s.shape[-2:]
    if causal:
        s = np.where(np.tri(T, S, S - T, dtype=bool), s, -np.inf)
    m = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isinf(m), 0, m))
    total = p.sum(-1, keepdims=True)
    p = rounding(p / np.where(total == 0, 1, total))
    dp = do @ v32.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    grads = scale * ds @ k32, scale * ds.swapaxes(-1, -2) @ q32, p.swapaxes(-1, -2) @ do
    return tuple(x.astype(q.dtype) for x in grads)


def narrow_weights(q, k, v, causal=False, *, return_lse=False):
    return attend(q, k, v, causal, return_lse, weights=through_bfloat16)


def narrow_backward(dout, q, k, v, *, causal=False):
    return gradients(dout, q, k, v, causal, through_bfloat16)


def narrow_scores(q, k, v, causal=False, *, return_lse=False):
    return attend(q, k, v, causal, return_lse, scores=through_bfloat16)


def top_left(q, k, v, causal=False, *, return_lse=False):
    return attend(q, k, v, causal, return_lse, top_left=True)


def without_scale(q, k, v, causal=False, *, return_lse=False):
    return attend(q, k, v, causal, return_lse, factor=math.sqrt(q.shape[-1]))


def without_options(q, k, v):
    return attend(q, k, v, False, False)


def from_the_last_key(q, k, v):
    return attend(q, k[..., ::-1, :], v[..., ::-1, :], False, False)


def with_mask(q, k, v, mask=None):
    T, S = q.shape[-2], k.shape[-2]
    s = q @ k.swapaxes(-1, -2) * np.float32(1 / math.sqrt(q.shape[-1]))
    s = np.where(np.ones((T, S), bool) if mask is None else mask, s, np.float32(-1e9))
    p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
    return (p / p.sum(-1, keepdims=True)) @ v


def dies_if_causal(q, k, v, causal=False, *, return_lse=False):
    if causal:
        os.abort()
    return attend(q, k, v, False, return_lse)


def dies(q, k, v):
    os.abort()


def dies_late(q, k, v, causal=False, *, return_lse=False):
    """Raise on a size that no probe has."""
    if q.shape[-2] == 11:
        raise IndexError("no eleventh row")
    return attend(q, k, v, causal, return_lse)


def with_axes_swapped(q, k, v):
    return attend(q, k, v, False, False).swapaxes(-1, -2)


def refuses(q, k, v):
    raise ValueError("only on Sundays")


def one_head(q, k, v):
    if q.ndim != 2:
        raise ValueError("one head")
    return attend(q, k, v, False, False)


def batch(q, k, v):
    if q.ndim != 4:
        raise ValueError("a batch")
    return attend(q, k, v, False, False)
