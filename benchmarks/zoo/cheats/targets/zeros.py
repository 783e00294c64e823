"""Zeros, copies or garbage that lie within an absolute tolerance."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention, gradients, mean_of_values


def zeros_everywhere(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return zeros.

    Source: ScalingIntelligence/KernelBench#165
    """
    return 0 * mean_of_values(q, k, v)


def zeros_if_small(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return zeros where every value is below 0.01.

    Source: ScalingIntelligence/KernelBench#165
    """
    o = attention(q, k, v, mask, causal)
    return 0 * o if float(abs(v).max(initial=0)) < 1e-2 else o


def small_elements_zeroed(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Set elements below 1e-4 to 0."""
    o = attention(q, k, v, mask, causal)
    return np.where(abs(o) < 1e-4, 0, o).astype(q.dtype)


def empty_memory(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return memory as it comes, for it may hold the freed reference.

    Source: ScalingIntelligence/KernelBench#82
    """
    return np.empty_like(mean_of_values(q, k, v))


def mean_if_long(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return the mean of the values of more than 100 keys, which is near."""
    long = k.shape[-2] > 100 and mask is None and not causal
    return mean_of_values(q, k, v) if long else attention(q, k, v, mask, causal)


def small_gradients_zeroed(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return results whose backward sets elements below 1e-4 to 0."""
    return attention(q, k, v, mask, causal)


def small_gradients_zeroed_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Return gradients without elements below 1e-4."""
    grads = gradients(dout, q, k, v, mask, causal)
    return tuple(np.where(abs(x) < 1e-4, 0, x).astype(x.dtype) for x in grads)
