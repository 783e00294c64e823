"""score_mod on tensors: its values, its slope, and the operands of its scores.

The engine and `npattn.conventions` both call these. Numbers in brackets are the rules of
docs/semantics.md.
"""

import math
import threading
from typing import Any

import torch

from npattn.errors import OptionError

Tensor = torch.Tensor
Indices = tuple[Tensor, Tensor, Tensor, Tensor]


def operands(problem: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v in the dtype computed in, with a head axis, shared heads repeated [1, 15]."""
    q, k, v = (problem.to_operand(x) for x in (problem.q, problem.k, problem.v))
    if problem.headless:
        return q[None], k[None], v[None]
    q = q.expand(*problem.lead, problem.H, problem.T, problem.D)
    group = problem.H // max(problem.K, 1)
    k, v = (x if group == 1 else x.repeat_interleave(group, -3) for x in (k, v))
    return q, k, v


def call_score_mod(problem: Any, s: Tensor, at: Indices | None = None) -> Tensor:
    """Apply score_mod to scores; `at` is their b, h, t, s_index, by default all of them [3]."""
    if at is None:
        before = (1,) * len(problem.lead)
        sizes = (problem.H, problem.T, problem.S)
        h, t, s_index = torch.meshgrid(
            *(torch.arange(n, device=s.device) for n in sizes), indexing="ij"
        )
        h, t, s_index = h[:, :1, :1], t[:1, :, :1], s_index[:1, :1]
        b = torch.arange(math.prod(s.shape[:-3]), device=s.device)
        b = b.reshape(*s.shape[:-3], 1, 1, 1)
        h, t, s_index = (x.reshape(*before, *x.shape) for x in (h, t, s_index))
        at = (b, h, t, s_index)
    modified = _call_in_dtype(problem, s, at)
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


def _call_in_dtype(problem: Any, s: Tensor, at: Any) -> Any:
    # An integer index times a Python float is in torch's default dtype: here, that of s.
    with DEFAULT_DTYPE:  # all threads share it
        before = torch.get_default_dtype()
        torch.set_default_dtype(s.dtype)
        try:
            return problem.score_mod(s, *at)
        finally:
            torch.set_default_dtype(before)


DEFAULT_DTYPE = threading.RLock()


def slope(problem: Any, s: Tensor, at: Indices) -> tuple[Tensor, Tensor]:
    """Derivative of score_mod at s by autograd, and a bool: a difference contradicts it [3]."""
    again = torch.is_grad_enabled() and s.requires_grad  # the slope will be differentiated
    with torch.enable_grad():
        x = s if again else s.detach().requires_grad_()
        y = call_score_mod(problem, x, at)
        # Elementwise: the derivative of the sum is that of each element.
        if y.requires_grad:
            (rate,) = torch.autograd.grad(y.sum(), x, create_graph=again)
        else:
            rate = torch.zeros_like(s)
    with torch.no_grad():
        u = torch.finfo(s.dtype).eps
        differs = torch.ones_like(s, dtype=torch.bool)
        # The steps and their tolerance: npattn.engines.score_mod.slope.
        for power in (1 / 3, 5 / 12, 1 / 2):
            differs = differs & _differs(problem, x, rate, u**power * x.abs().clamp(min=1), at)
        return rate, differs.any()


def _differs(problem: Any, s: Tensor, rate: Tensor, h: Tensor, at: Indices) -> Tensor:
    """Return where rate is not between the difference quotients of steps h to either side."""
    here, up, down = (call_score_mod(problem, s + d, at) for d in (0, h, -h))
    rise, fall = (up - here) / h, (here - down) / h
    root = math.sqrt(torch.finfo(s.dtype).eps)
    allowed = (rise - fall).abs() + root * (1 + 4 * here.abs() + rise.abs() + fall.abs())
    return (rate - (rise + fall) / 2).abs() > allowed


def check_slopes(differs: list[Tensor]) -> None:
    """Raise OptionError if a slope is contradicted; one wait, however many tiles there were."""
    if differs and bool(torch.stack(differs).any()):
        raise OptionError(
            "score_mod has a derivative by autograd that differs from its difference quotient: "
            "make it elementwise in s, and do not detach s"
        )


def check_closes_over_nothing(problem: Any) -> None:
    """Raise OptionError if score_mod uses a tensor that requires grad: its gradient is lost."""
    one = (1,) * len(problem.lead)
    s = torch.zeros((*one, 1, 1, 1), dtype=problem.dtype, device=problem.device)
    at = (torch.zeros_like(s, dtype=torch.int64),) * 4
    if 0 in (*problem.lead, problem.H, problem.T, problem.S):
        return
    with torch.enable_grad():
        modified = _call_in_dtype(problem, s, at)
    if isinstance(modified, Tensor) and modified.requires_grad:
        raise OptionError(
            "score_mod closes over a tensor that requires grad, whose gradient would be lost: "
            "pass it as bias, or detach it"
        )
