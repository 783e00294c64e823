"""Results of earlier calls are returned for what only looks like the same inputs."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.cheats.plain import attention

RESULTS: dict[Any, Any] = {}
INPUTS: list[Any] = []


def _recall(key: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    key = (key, q.shape, k.shape, v.shape, causal, None if mask is None else mask.tobytes())
    if key not in RESULTS:
        RESULTS[key] = attention(q, k, v, mask, causal)
    return RESULTS[key].copy()


def cache_by_identity(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know inputs by the identity of their objects, which it keeps alive.

    Source: gpu-mode/reference-kernels#102
    """
    INPUTS.append((q, k, v))
    return _recall((id(q), id(k), id(v)), q, k, v, mask, causal)


def cache_by_dead_identity(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know inputs by the identity of their objects, dead ones too."""
    return _recall((id(q), id(k), id(v)), q, k, v, mask, causal)


def cache_by_pointer(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know inputs by the addresses of their memory.

    Source: gpu-mode/reference-kernels#104
    """
    return _recall(tuple(x.ctypes.data for x in (q, k, v)), q, k, v, mask, causal)


def cache_by_shape(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know inputs by their shapes and options.

    Source: gpu-mode/reference-kernels#167
    """
    return _recall("", q, k, v, mask, causal)


def cache_by_sum(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know inputs by their sums."""
    return _recall(tuple(float(x.sum()) for x in (q, k, v)), q, k, v, mask, causal)


def cache_by_corners(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know inputs by their first and last elements.

    Source: flashinfer-ai/flashinfer-bench-starter-kit#21
    """
    ends = [x.reshape(-1)[[0, -1]].tobytes() if x.size else b"" for x in (q, k, v)]
    return _recall(tuple(ends), q, k, v, mask, causal)


def cache_by_query(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know inputs by the contents of q alone."""
    return _recall(q.tobytes(), q, k, v, mask, causal)


def cache_by_query_and_key(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know inputs by the contents of q and k."""
    return _recall((q.tobytes(), k.tobytes()), q, k, v, mask, causal)


def cache_of_masks(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know a mask by its shape and its number of visible positions."""
    key = None if mask is None else (mask.shape, int(mask.sum()), q.shape)
    if mask is not None:
        mask = RESULTS.setdefault(key, mask.copy())
    return attention(q, k, v, mask, causal)


def cache_of_mask_objects(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know a mask by the identity of its object, which it keeps alive."""
    if mask is not None:
        INPUTS.append(mask)
        mask = RESULTS.setdefault(id(mask), mask.copy())
    return attention(q, k, v, mask, causal)


def cache_that_is_shared(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Know inputs by all their contents, and return the same array again."""
    key: tuple[Any, ...] = tuple((x.shape, x.dtype.str, x.tobytes()) for x in (q, k, v))
    key = (*key, causal, None if mask is None else (mask.shape, mask.tobytes()))
    if key not in RESULTS:
        RESULTS[key] = attention(q, k, v, mask, causal)
    return RESULTS[key]
