"""A part of the keys or values is left out."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention


def _see(visible: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Attend to these positions alone."""
    return attention(q, k, v, visible if mask is None else mask & visible, causal)


def last_keys(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """See the last 64 keys alone.

    Source: Infatoshi/kernelbench.com#7
    """
    S = k.shape[-2]
    return _see(np.arange(S)[None] >= S - 64, q, k, v, mask, causal)


def first_keys(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """See the first 256 keys alone."""
    return _see(np.arange(k.shape[-2])[None] < 256, q, k, v, mask, causal)


def near_keys(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """See keys that are at most 128 positions away."""
    T, S = q.shape[-2], k.shape[-2]
    distance = np.arange(T)[:, None] + S - T - np.arange(S)[None]
    return _see(abs(distance) <= 128, q, k, v, mask, causal)


def prefix_of_values(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Compute the first 64 columns of the values, and leave the others 0.

    Source: Infatoshi/kernelbench.com#7
    """
    o = attention(q, k, v, mask, causal)
    o[..., 64:] = 0
    return o
