"""Static graphs: what the first call of a shape had is replayed for the others."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.cheats.plain import attention

GRAPHS: dict[Any, Any] = {}


def graph_of_options(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Replay the mask of the first call with these shapes."""
    if mask is not None:
        mask = GRAPHS.setdefault((q.shape, k.shape, mask.shape), mask.copy())
    return attention(q, k, v, mask, causal)


def graph_without_causal(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Replay the value of causal of the first call with these shapes."""
    causal = GRAPHS.setdefault((q.shape, k.shape, v.shape, mask is None), causal)
    return attention(q, k, v, mask, causal)


def graph_on_stale_arrays(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Replay on the arrays of the first call with these shapes, filled with q and k alone.

    Source: Infatoshi/kernelbench.com#7
    """
    key = (q.shape, k.shape, v.shape, q.dtype.str)
    old_q, old_k, old_v = GRAPHS.setdefault(key, tuple(x.copy() for x in (q, k, v)))
    old_q[...], old_k[...] = q, k
    return attention(old_q, old_k, old_v, mask, causal)


def graph_on_live_pointers(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Replay on the very arrays of the first call while the caller passes the same objects."""
    key = (id(q), id(k), id(v), q.shape, k.shape, causal, None if mask is None else id(mask))
    if key not in GRAPHS:
        GRAPHS[key] = (q, k, v, mask, attention(q, k, v, mask, causal))
    return GRAPHS[key][-1].copy()
