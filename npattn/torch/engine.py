"""Attention and its gradients in torch operations."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from npattn.problem import Gradients, sum_to
from npattn.torch import textbook

__all__ = ["Saved", "backward", "forward", "jvp", "weights"]

Tensor = torch.Tensor


class Saved(NamedTuple):
    """What backward and jvp need: in the dtype computed in, with a head axis."""

    out: Tensor  # (..., H, T, E)
    log: Tensor  # (..., H, T)
    shift: Tensor  # (..., H, T)


def _scores(problem: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = textbook.operands(problem)
    s = problem.scale * (q @ k.mT)
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    if problem.score_mod is not None:
        s = textbook.call_score_mod(problem, s)
    if problem.bias_array is not None:
        s = s + problem.bias_array.to(s.dtype)
    if problem.visible is not None:
        s = torch.where(problem.visible, s, -math.inf)
    return q, k, v, s


def _keep(problem: Any) -> Any:
    if problem.dropout_mask is None:
        return 1.0
    return problem.computed(problem.dropout_mask) / (1 - problem.dropout_rate)


def forward(problem: Any, whole: bool = False) -> Saved:
    _, _, v, s = _scores(problem)
    m = s.amax(-1) if problem.S else s.new_full(s.shape[:-1], -math.inf)
    if problem.sinks is not None:
        m = torch.maximum(m, problem.computed(problem.sinks)[:, None])
    m = torch.where(m == -math.inf, 0, m)
    e = torch.exp(s - m[..., None])
    total = e.sum(-1)
    if problem.sinks is not None:
        total = total + torch.exp(problem.computed(problem.sinks)[:, None] - m)
    safe = torch.where(total == 0, 1, total)
    w = problem.stored(e / safe[..., None] * _keep(problem))
    return Saved(w @ v, torch.log(total), m)


def backward(
    problem: Any, saved: Saved, do: Tensor, dlse: Any = None, dweights: Any = None,
    whole: bool = False,
) -> Gradients:  # fmt: skip
    q, k, v, s = _scores(problem)
    empty = saved.log == -math.inf
    log = torch.where(empty, 0, saved.log)
    p = torch.exp(s - saved.shift[..., None] - log[..., None])
    keep = _keep(problem)
    dv = (p * keep).mT @ do
    dp = (do @ v.mT) * keep
    dp = dp if dweights is None else dp + dweights
    delta = (p * dp).sum(-1)
    if dlse is not None:
        delta = delta - torch.where(empty, 0, dlse)
    ds = p * (dp - delta[..., None])
    dq, dk = problem.scale * (ds @ k), problem.scale * (ds.mT @ q)
    group = problem.H // max(problem.K, 1)

    def shared(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-3], problem.K, group, *x.shape[-2:]).sum(-3)

    dsinks = None
    if problem.sinks is not None:
        p_sink = torch.exp(problem.computed(problem.sinks)[:, None] - saved.shift - log)
        dsinks = sum_to(-p_sink * delta, (problem.H, 1))[:, 0]
    return Gradients(
        q=sum_to(dq, problem.q.shape), k=sum_to(shared(dk), problem.k.shape),
        v=sum_to(shared(dv), problem.v.shape), bias=problem.bias_gradient(ds), sinks=dsinks,
    )  # fmt: skip


def jvp(
    problem: Any, saved: Saved, dq: Any = None, dk: Any = None, dv: Any = None, dbias: Any = None,
    dsinks: Any = None, whole: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    raise NotImplementedError


def weights(problem: Any, saved: Saved) -> Tensor:
    s = _scores(problem)[3]
    log = torch.where(saved.log == -math.inf, 0, saved.log)
    return torch.exp(s - saved.shift[..., None] - log[..., None])
