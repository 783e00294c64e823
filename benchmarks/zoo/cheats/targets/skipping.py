"""Samples, heads or queries are not computed, but copied from their neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention


def first_sample_for_all(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Copy the result of the first sample to all."""
    o = attention(q, k, v, mask, causal)
    if o.ndim > 3 and len(o):
        o[1:] = o[:1]
    return o


def last_sample_skipped(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Leave the last sample of several 0."""
    o = attention(q, k, v, mask, causal)
    if o.ndim > 3 and len(o) > 1:
        o[-1] = 0
    return o


def alike_samples_skipped(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Copy the result of a sample whose q begins with the same number.

    Source: gpu-mode/reference-kernels#167
    """
    o = attention(q, k, v, mask, causal)
    if o.ndim == 4 and q.ndim == 4 and q.size and len(q) == len(o):
        starts = q.reshape(len(q), -1)[:, 0].tolist()
        o = o[[starts.index(x) if x == x else i for i, x in enumerate(starts)]]
    return o


def third_head_copied(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Copy the second head to the third."""
    o = attention(q, k, v, mask, causal)
    if o.ndim > 2 and o.shape[-3] > 2:
        o[..., 2, :, :] = o[..., 1, :, :]
    return o


def last_query_skipped(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Copy the last query but one to the last, beyond 64 queries."""
    o = attention(q, k, v, mask, causal)
    if o.shape[-2] > 64:
        o[..., -1, :] = np.asarray(o[..., -2, :])
    return o
