"""What engine and conventions both ask of a problem: its operands and its score_mod.

Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

from typing import Any

import torch

from npattn.errors import OptionError
from npattn.problem import sum_to

__all__ = ["bias_gradient", "call_score_mod", "operands", "slope"]

Tensor = torch.Tensor
Indices = tuple[Tensor, Tensor, Tensor, Tensor]


def operands(problem: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the dtype computed in, with a head axis, shared heads repeated.  [1, 15]"""
    q, k, v = (problem.stored(problem.computed(x)) for x in (problem.q, problem.k, problem.v))
    if problem.headless:
        return q[None], k[None], v[None]
    q = q.expand(*problem.lead, problem.H, problem.T, problem.D)
    group = problem.H // max(problem.K, 1)
    k, v = (x if group == 1 else x.repeat_interleave(group, -3) for x in (k, v))
    return q, k, v


def call_score_mod(problem: Any, s: Tensor, at: Indices | None = None) -> Tensor:
    """score_mod of scores; `at` are b, h, t, s_index where they are not all of them.  [3]"""
    if at is None:
        before = (1,) * len(problem.lead)
        sizes = (problem.H, problem.T, problem.S)
        h, t, s_index = torch.meshgrid(
            *(torch.arange(n, device=s.device) for n in sizes), indexing="ij"
        )
        h, t, s_index = h[:, :1, :1], t[:1, :, :1], s_index[:1, :1]
        b = torch.arange(s[..., :1, :1, :1].numel(), device=s.device)
        b = b.reshape(*s.shape[:-3], 1, 1, 1)
        at = (b, *(x.reshape(*before, *x.shape) for x in (h, t, s_index)))
    modified = problem.score_mod(s, *at)
    if not isinstance(modified, Tensor):
        raise OptionError(
            f"score_mod returned a {type(modified).__qualname__}, must return a torch tensor"
        )
    try:
        return modified.to(s.dtype).expand(s.shape)
    except RuntimeError:
        raise OptionError(
            f"score_mod returned shape {tuple(modified.shape)}, must return that of s, "
            f"{tuple(s.shape)}"
        ) from None


def bias_gradient(problem: Any, ds: Tensor) -> Any:
    """The gradient of the bias from that of the scores (..., H, T, S).  [13]"""
    if isinstance(problem.bias, Tensor):
        return sum_to(ds, problem.bias.shape)  # type: ignore[arg-type, return-value]
    raise NotImplementedError


def check_closes_over_nothing(problem: Any) -> None:
    """OptionError where score_mod uses a tensor that wants a gradient, which would be lost."""
    one = (1,) * len(problem.lead)
    s = torch.zeros((*one, 1, 1, 1), dtype=problem.dtype, device=problem.device)
    at = (torch.zeros_like(s, dtype=torch.int64),) * 4
    if 0 in (*problem.lead, problem.H, problem.T, problem.S):
        return
    with torch.enable_grad():
        modified = problem.score_mod(s, *at)
    if isinstance(modified, Tensor) and modified.requires_grad:
        raise OptionError(
            "score_mod closes over a tensor that requires grad, must use none: its gradient would "
            "be lost; pass it as bias, or detached"
        )
