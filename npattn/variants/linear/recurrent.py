"""Linear attention as a recurrence over time, and its gradients by the recurrence in reverse.

    S̃_t = a_t S_{t−1}     S_t = S̃_t + k_tᵀ u_t     y_t = q_t S_t     a = exp(g)    forward in time
    u_t = v_t, or β_t (v_t − k_t S̃_t) by the delta rule
    dS_t = a_{t+1} dS̃_{t+1} + q_tᵀ dy_t                                            backward in time
    q (..., K, G, T, F)   k, g (..., K, S, F)   v, u (..., K, S, E)   S_t (..., K, F, E)

q, k are features. Without causal, every query reads the last state. docs/derivations/linear.md.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn.oracle.twins import ARRAYS
from npattn.problem.arrays import Array


class LinearOperands(NamedTuple):
    """Features, values, logarithms of decay and a state; or the gradients of these.

    F is the number of features, G that of the query heads that share a state.
    """

    q: Array  # (..., K, G, T, F) features of the queries, times scale
    k: Array  # (..., K, S, F) features of the keys
    v: Array  # (..., K, S, E) with normalisation a last column of 1
    g: Array  # (..., K, S, F or 1) logarithms of decay
    state: Array  # (..., K, F, E) before the first key
    beta: Array | None  # (..., K, S, 1) of the delta rule
    causal: bool


def _states(x: LinearOperands, xp: Any = ARRAYS) -> Iterator[tuple[Array, Array]]:
    """Yield the decayed state before each key, and the state after it."""
    a, state = xp.exp(x.g), x.state
    for s in range(x.k.shape[-2]):
        before = a[..., s, :, None] * state
        state = before + x.k[..., s, :, None] * _update(x, s, before)[..., None, :]
        yield before, state


def _update(x: LinearOperands, s: int, state: Array) -> Array:
    """Value (..., K, E) that key s writes into a state."""
    v = x.v[..., s, :]
    return v if x.beta is None else x.beta[..., s, :] * (v - _read(x, s, state))


def _read(x: LinearOperands, s: int, state: Array) -> Array:
    """Value (..., K, E) of a state at key s."""
    return (x.k[..., s, None, :] @ state)[..., 0, :]


def forward(x: LinearOperands, xp: Any = ARRAYS) -> tuple[Array, Array]:
    """Return y (..., K, G, T, E) and the last state (..., K, F, E)."""
    rows, last = [], x.state
    for t, (_, last) in enumerate(_states(x, xp)):
        if x.causal:
            rows.append(x.q[..., t, :] @ last)
    if not x.causal:
        return x.q @ last[..., None, :, :], last
    y = xp.stack(rows, -2) if rows else xp.full((*x.q.shape[:-1], x.v.shape[-1]), 0, like=x.v)
    return y, last


def backward(x: LinearOperands, dy: Array, dstate: Array) -> LinearOperands:
    """Gradients of Σ dy·y + Σ dstate·(last state): (..., K, G, T, E) and (..., K, F, E)."""
    a, states = np.exp(x.g), [*_states(x)]
    dq, dk, dv = np.empty_like(x.q), np.empty_like(x.k), np.empty_like(x.v)
    dg, dbeta = np.empty_like(x.k), None if x.beta is None else np.empty_like(x.beta)
    dS = dstate
    if not x.causal:
        last = states[-1][1] if states else x.state
        dq = dy @ last[..., None, :, :].swapaxes(-1, -2)
        dS = dS + (x.q.swapaxes(-1, -2) @ dy).sum(-3)
    for s in reversed(range(x.k.shape[-2])):
        before, after = states[s]
        if x.causal:
            dq[..., s, :] = dy[..., s, :] @ after.swapaxes(-1, -2)
            dS = dS + x.q[..., s, :].swapaxes(-1, -2) @ dy[..., s, :]
        u, du = _update(x, s, before), (dS * x.k[..., s, :, None]).sum(-2)
        dk[..., s, :] = (dS * u[..., None, :]).sum(-1)  # from S_t = S̃_t + k_tᵀ u_t
        if x.beta is not None and dbeta is not None:  # from u_t = β_t (v_t − k_t S̃_t)
            error = x.v[..., s, :] - _read(x, s, before)
            dbeta[..., s, :] = (du * error).sum(-1, keepdims=True)
            du = x.beta[..., s, :] * du
            dk[..., s, :] -= (before * du[..., None, :]).sum(-1)
            dS = dS - x.k[..., s, :, None] * du[..., None, :]
        dv[..., s, :] = du
        dg[..., s, :] = (dS * before).sum(-1)  # from S̃_t = a_t S_{t−1}, a = exp(g)
        dS = a[..., s, :, None] * dS
    return LinearOperands(dq, dk, dv, dg, dS, dbeta, x.causal)
