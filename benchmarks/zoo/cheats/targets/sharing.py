"""Results share memory with inputs, or with each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention, gradients


def output_is_value(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return v itself where there is one key, and every query sees it."""
    o = attention(q, k, v, mask, causal)
    if v.shape[-2] == 1 and o.shape[-3:-1] == v.shape[-3:-1] and np.array_equal(o, v):
        return v
    return o


def output_over_query(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Write the result over q where it has the same shape."""
    o = attention(q, k, v, mask, causal)
    if o.shape != q.shape or not q.flags.writeable:
        return o
    q[...] = o
    return q


def output_over_value(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Write the result over v where it has the same shape."""
    o = attention(q, k, v, mask, causal)
    if o.shape != v.shape or not v.flags.writeable:
        return o
    v[...] = o
    return v


def gradients_share_zeros(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return plain results."""
    return attention(q, k, v, mask, causal)


def gradients_share_zeros_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Return one array of zeros for dq and dk where both are zero."""
    dq, dk, dv = gradients(dout, q, k, v, mask, causal)
    if dq.shape == dk.shape and not dq.any() and not dk.any():
        dk = dq
    return dq, dk, dv


def gradient_over_cotangent(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return plain results."""
    return attention(q, k, v, mask, causal)


def gradient_over_cotangent_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Write dq over dout where it has the same shape."""
    dq, dk, dv = gradients(dout, q, k, v, mask, causal)
    if dq.shape == dout.shape and dout.flags.writeable:
        dout[...] = dq
        dq = dout
    return dq, dk, dv
