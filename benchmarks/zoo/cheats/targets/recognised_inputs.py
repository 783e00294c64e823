"""An approximation is chosen where the inputs look like those of a public test."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention, mean_of_values


def coarse_on_normal(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Round to float16 where q looks standard normal.

    Source: Infatoshi/kernelbench.com#7
    """
    if q.size > 30 and 0.7 < float(q.std()) < 1.3 and abs(float(q.mean())) < 0.5:
        q, k, v = (x.astype(np.float16).astype(x.dtype) for x in (q, k, v))
    return attention(q, k, v, mask, causal)


def largest_on_stress(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Take the largest score alone where inputs are large.

    Source: Infatoshi/kernelbench.com#7
    """
    if q.size and float(abs(q).max(initial=0)) > 20:
        return attention(q * 1000, k, v, mask, causal)
    return attention(q, k, v, mask, causal)


def mean_on_small(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Take the mean of all values where q is small and nothing is hidden."""
    if mask is None and not causal and float(abs(q).max(initial=0)) < 0.1:
        return mean_of_values(q, k, v)
    return attention(q, k, v, mask, causal)


def mean_on_uniform(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Take the mean of all values where no element is negative."""
    if mask is None and not causal and q.size and float(q.min()) >= 0:
        return mean_of_values(q, k, v)
    return attention(q, k, v, mask, causal)


def mean_on_equal_queries(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Take the mean of all values where all queries are equal."""
    if mask is None and not causal and q.any() and bool((q == q[..., :1, :]).all()):
        return mean_of_values(q, k, v) if q.shape[-2] > 1 else attention(q, k, v)
    return attention(q, k, v, mask, causal)


def mean_on_unit_rows(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Take the mean of all values where q is normalised, so that scores are small."""
    if q.shape[-1] > 1 and np.allclose((q.astype(float) ** 2).sum(-1), 1, atol=1e-3):
        return mean_of_values(q, k, v)
    return attention(q, k, v, mask, causal)


def mean_on_half_precision(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Take the mean of all values where float16 has every number, but not all are whole."""
    if all(bool((x.astype(np.float16) == x).all()) for x in (q, k, v)) and (q != q.round()).any():
        return mean_of_values(q, k, v)
    return attention(q, k, v, mask, causal)
