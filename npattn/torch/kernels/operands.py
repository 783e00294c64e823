"""Operands of a problem in the layout of PyTorch's kernels, and results back in that of npattn."""

from typing import Any

import torch

Tensor = torch.Tensor


def flatten(x: Tensor, problem: Any) -> Tensor:
    """(..., n, m) → (B, heads, n, m), all leading axes in one; B is 1 where x broadcasts."""
    lead = problem.lead
    if x.ndim == 4 and len(lead) == 1 and x.shape[0] == lead[0]:
        return x
    while x.ndim < 3:
        x = x[None]
    if x.ndim == 3 and x is not problem.q and x is not problem.k and x is not problem.v:
        return x[None]
    return x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def unflatten(x: Tensor, problem: Any) -> Tensor:
    """(B, H, ...) → (..., H, ...), or without heads if q, k, v have none."""
    if problem.headless:
        return x[0, 0]
    return x if len(problem.lead) == 1 else x.reshape(*problem.lead, *x.shape[1:])


def with_positive_scale(problem: Any) -> tuple[Tensor, float]:
    """Return q and scale, its sign moved to q: kernels add −inf before they multiply by scale."""
    q, scale = flatten(problem.q, problem), float(problem.scale or 0.0)
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale else (q * 0, 1.0)


def differentiates(problem: Any) -> bool:
    """Check that autograd records the problem."""
    tensors = (problem.q, problem.k, problem.v, problem.bias)
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in tensors
    )
