"""Linear attention as a recurrence over time, and its gradients by the recurrence in reverse.

    S_t = a_t S_{t−1} + k_t v_tᵀ        y_t = q_t S_t        a = exp(g)      forward in time
    dS_t = a_{t+1} dS_{t+1} + q_tᵀ dy_t                                      backward in time
    q (..., K, G, T, F)   k, g (..., K, S, F)   v (..., K, S, E)   S_t (..., K, F, E)

q, k are features. Without causal, every query reads the last state. docs/derivations/linear.md.
"""

from __future__ import annotations

import numpy as np

from npattn.arrays import Array
from npattn.variants.linear.operands import Operands

__all__ = ["backward", "forward"]


def _states(x: Operands) -> list[Array]:
    """Return the state before each key, and the last one."""
    a, states = np.exp(x.g), [x.state]
    for s in range(x.k.shape[-2]):
        new = x.k[..., s, :, None] * x.v[..., s, None, :]
        states.append(a[..., s, :, None] * states[-1] + new)
    return states


def forward(x: Operands) -> tuple[Array, Array]:
    """Return y (..., K, G, T, E) and the last state (..., K, F, E)."""
    states = _states(x)
    if not x.causal:
        return x.q @ states[-1][..., None, :, :], states[-1]
    y = np.empty((*x.q.shape[:-1], x.v.shape[-1]), x.v.dtype)
    for t in range(y.shape[-2]):
        y[..., t, :] = x.q[..., t, :] @ states[t + 1]
    return y, states[-1]


def backward(x: Operands, dy: Array, dstate: Array) -> Operands:
    """Gradients of Σ dy·y + Σ dstate·(last state)."""
    a, states = np.exp(x.g), _states(x)
    dq, dk, dv = np.empty_like(x.q), np.empty_like(x.k), np.empty_like(x.v)
    dg, dS = np.empty_like(x.k), dstate
    if not x.causal:
        dq = dy @ states[-1][..., None, :, :].swapaxes(-1, -2)
        dS = dS + (x.q.swapaxes(-1, -2) @ dy).sum(-3)
    for s in reversed(range(x.k.shape[-2])):
        if x.causal:
            dq[..., s, :] = dy[..., s, :] @ states[s + 1].swapaxes(-1, -2)
            dS = dS + x.q[..., s, :].swapaxes(-1, -2) @ dy[..., s, :]
        dk[..., s, :] = (dS * x.v[..., s, None, :]).sum(-1)  # from S_t = … + k_t v_tᵀ
        dv[..., s, :] = (dS * x.k[..., s, :, None]).sum(-2)
        dS = a[..., s, :, None] * dS  # from S_t = a_t S_{t−1} + …
        dg[..., s, :] = (dS * states[s]).sum(-1)  # a = exp(g)
    return Operands(dq, dk, dv, dg, dS, x.causal)
