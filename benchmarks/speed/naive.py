"""The textbook lines: attention with arrays of T × S, and its gradients by hand."""

from __future__ import annotations

import numpy as np

from benchmarks.speed.cases import Task
from benchmarks.speed.contestants import Calls
from npattn.problem.arrays import Array


def naive(task: Task, threads: int) -> Calls:
    visible, bias = task.arrays.visible, task.arrays.bias
    groups = task.case.H // task.case.K
    q, v, k = task.q, task.v, task.k
    size = task.bytes + sum(x.nbytes for x in (visible, bias) if x is not None)

    def both() -> tuple[Array, ...]:
        wide_k, wide_v = (np.repeat(x, groups, axis=1) if groups > 1 else x for x in (k, v))
        out, p = _forward(q, wide_k, wide_v, task.scale, visible, bias)
        return out, *_backward(task.dout, p, q, wide_k, wide_v, task.scale, task.case.K)

    def forward() -> tuple[Array, ...]:
        wide_k, wide_v = (np.repeat(x, groups, axis=1) if groups > 1 else x for x in (k, v))
        return _forward(q, wide_k, wide_v, task.scale, visible, bias)[:1]

    return Calls(forward, both, lambda results: results, size)


def _forward(
    q: Array, k: Array, v: Array, scale: float, visible: Array | None, bias: Array | None
) -> tuple[Array, Array]:
    """Compute out (1, H, T, D) and the weights (1, H, T, S)."""
    s = scale * (q @ k.swapaxes(-1, -2))
    s = s if bias is None else s + bias
    s = s if visible is None else np.where(visible, s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return p @ v, p


def _backward(
    do: Array, p: Array, q: Array, k: Array, v: Array, scale: float, K: int
) -> tuple[Array, Array, Array]:
    """Compute dq, dk, dv: forward, read upwards."""
    dv = p.swapaxes(-1, -2) @ do
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dq = scale * (ds @ k)
    dk = scale * (ds.swapaxes(-1, -2) @ q)
    return dq, _sum_shared(dk, K), _sum_shared(dv, K)


def _sum_shared(dx: Array, K: int) -> Array:
    """Sum (1, H, S, n) to (1, K, S, n), over the query heads that share a key/value head."""
    B, H, *rest = dx.shape
    return dx if H == K else dx.reshape(B, K, H // K, *rest).sum(2)
