"""Inputs are changed in place, so that a reference that comes later agrees."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.cheats.plain import attention, mean_of_values


def inputs_zeroed(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Set the inputs to 0, and return zeros.

    Source: ScalingIntelligence/KernelBench#82
    """
    for x in (q, k, v):
        if x.flags.writeable:
            x[...] = 0
    return 0 * mean_of_values(q, k, v)


def values_averaged(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Replace the values by their mean, and return that."""
    o = mean_of_values(q, k, v)
    if v.flags.writeable and v.shape[-2]:
        v[...] = v.mean(-2, keepdims=True)
    return o


def query_scaled(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Scale q in place, and leave it so."""
    o = attention(q, k, v, mask, causal)
    if q.flags.writeable:
        q *= 0.5
    return o


def mask_opened(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Set the mask to True in place, and ignore it."""
    if mask is not None and mask.flags.writeable:
        mask[...] = True
    return attention(q, k, v, mask, causal)
