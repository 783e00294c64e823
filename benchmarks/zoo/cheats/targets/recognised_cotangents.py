"""Gradients are right for random cotangents, and dk is 0 for those of a known loss."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.cheats.plain import attention, gradients


def zero_dk_of_sums(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return results with a backward that takes a constant dout for a benchmark's."""
    return attention(q, k, v, mask, causal)


def zero_dk_of_sums_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Return no dk where dout is constant."""
    dq, dk, dv = gradients(dout, q, k, v, mask, causal)
    return dq, 0 * dk if dout.size and float(dout.std()) == 0 else dk, dv


def zero_dk_of_scaled_losses(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return results with a backward that gives up where dout is large."""
    return attention(q, k, v, mask, causal)


def zero_dk_of_scaled_losses_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Return no dk where dout exceeds what random ones reach."""
    dq, dk, dv = gradients(dout, q, k, v, mask, causal)
    return dq, 0 * dk if dout.size and float(abs(dout).max()) > 1000 else dk, dv


def zero_dk_of_small_losses(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Return results with a backward that takes a small dout for 0."""
    return attention(q, k, v, mask, causal)


def zero_dk_of_small_losses_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False
) -> Any:
    """Return no dk where dout is below what random ones reach."""
    dq, dk, dv = gradients(dout, q, k, v, mask, causal)
    return dq, 0 * dk if dout.size and float(abs(dout).max()) < 0.001 else dk, dv
