"""Linear attention chunk by chunk, quadratic within a chunk.

S is the state before a chunk, decayed by g_1; H_t = g_2 + … + g_t. Features that grow and shrink
with H carry the decays, so that the rest is attention without any:

    q̂_t = q_t exp(H_t)      k̂_t = k_t exp(−H_t)      y = q̂ S + tril(q̂ k̂ᵀ) u
    S' = exp(H_C) (S + k̂ᵀ u)
    u = v, or by the delta rule (1 + β P) u = β (v − ǩ S),  P = tril(ǩ k̂ᵀ, −1),  ǩ_t = k_t exp(H_t)

A chunk ends before |H| exceeds LIMIT, so that exp(H) exp(−H) loses no digits: a reset, g = −∞,
begins one. Gradients: docs/derivations/linear.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from npattn.problem.arrays import Array
from npattn.variants.linear.recurrent import LinearOperands

LIMIT = 16.0
"""Largest |H|: exp(H) exp(−H) errs by some LIMIT units in the last place."""


def forward(x: LinearOperands, size: int) -> tuple[Array, Array]:
    """Return y (..., K, G, T, E) and the last state (..., K, F, E)."""
    if not x.causal:
        last = _sum_all(x, size)
        return x.q @ last[..., None, :, :], last
    y, state = np.empty((*x.q.shape[:-1], x.v.shape[-1]), x.v.dtype), x.state
    for at, c in _chunks(x, size):
        y[..., at, :] = c.q @ c.state[..., None, :, :] + c.pairs() @ c.u[..., None, :, :]
        state = c.next
    return y, state


def backward(x: LinearOperands, dy: Array, dstate: Array, size: int) -> LinearOperands:
    """Gradients of Σ dy·y + Σ dstate·(last state): (..., K, G, T, E) and (..., K, F, E)."""
    dS = dstate
    if not x.causal:
        dS = dS + (_t(x.q) @ dy).sum(-3)
        dq = dy @ _t(_sum_all(x, size))[..., None, :, :]
        return LinearOperands(dq, x.v @ _t(dS), x.k @ dS, np.zeros_like(x.k), dS, None, False)
    dq, dk, dv = np.empty_like(x.q), np.empty_like(x.k), np.empty_like(x.v)
    dg, dbeta = np.empty_like(x.k), None if x.beta is None else np.empty_like(x.beta)
    for at, c in reversed([*_chunks(x, size)]):
        do, dS = dy[..., at, :], _t(c.last) * dS
        dA = np.tril(do @ _t(c.u)[..., None, :, :])
        of_q = do @ _t(c.state)[..., None, :, :] + dA @ c.k[..., None, :, :]  # gradient of q̂
        of_k = (_t(dA) @ c.q).sum(-3) + c.u @ _t(dS)  # of k̂
        du = (_t(c.pairs()) @ do).sum(-3) + c.k @ dS
        dH = (c.q * of_q).sum(-3)
        dH[..., -1, :] += (c.written * dS).sum(-1)
        dS = dS + (_t(c.q) @ do).sum(-3)
        dq[..., at, :] = c.grow[..., None, :, :] * of_q
        dk[..., at, :] = 0
        if c.beta is not None and dbeta is not None:
            db = solve_transposed(c.beta * c.P, du)
            dL = -np.tril(db @ _t(c.u), -1)
            dbeta[..., at, :] = (db * c.error).sum(-1, keepdims=True)
            dbeta[..., at, :] += (dL * c.P).sum(-1, keepdims=True)
            du, dP = c.beta * db, c.beta * dL
            of_reader = dP @ c.k - du @ _t(c.state)  # of ǩ
            of_k = of_k + _t(dP) @ c.reader
            dS = dS - _t(c.reader) @ du
            dk[..., at, :] = c.grow * of_reader
            dH = dH + c.reader * of_reader
        dv[..., at, :] = du
        dk[..., at, :] += of_k / c.grow
        dH = dH - c.k * of_k
        dg[..., at, :] = np.flip(np.flip(dH, -2).cumsum(-2), -2)  # H_t has g_2, …, g_t
        dg[..., at.start, :] = (c.state * dS).sum(-1)
        dS = _t(c.first) * dS
    return LinearOperands(dq, dk, dv, dg, dS, dbeta, True)


def _sum_all(x: LinearOperands, size: int) -> Array:
    """State of all keys, without decay."""
    state = x.state
    for a in range(0, x.k.shape[-2], size):
        state = state + _t(x.k[..., a : a + size, :]) @ x.v[..., a : a + size, :]
    return state


def _chunks(x: LinearOperands, size: int) -> Iterator[tuple[slice, _Chunk]]:
    """Chunks of at most `size` keys, without an |H| beyond LIMIT."""
    state, start, length = x.state, 0, x.k.shape[-2]
    while start < length:
        H = x.g[..., start : start + size, :].copy()
        H[..., 0, :] = 0
        H = H.cumsum(-2)
        beyond = (abs(H) > LIMIT).any((*range(H.ndim - 2), -1))
        stop = start + int(beyond.argmax()) if beyond.any() else start + H.shape[-2]
        c = _Chunk(x, slice(start, stop), H[..., : stop - start, :], state)
        yield slice(start, stop), c
        state, start = c.next, stop


class _Chunk:
    """Features of one chunk that carry its decays, and the values that it writes."""

    def __init__(self, x: LinearOperands, at: slice, H: Array, state: Array) -> None:
        q, k, self.u, g = x.q[..., at, :], x.k[..., at, :], x.v[..., at, :], x.g[..., at, :]
        self.grow, self.first, self.last = np.exp(H), np.exp(g[..., :1, :]), np.exp(H[..., -1:, :])
        self.q, self.k = q * self.grow[..., None, :, :], k / self.grow  # q̂, k̂
        self.state = _t(self.first) * state  # S
        self.beta = None
        if x.beta is not None:
            self.beta, self.reader = x.beta[..., at, :], k * self.grow  # ǩ
            self.P = np.tril(self.reader @ _t(self.k), -1)
            self.error = self.u - self.reader @ self.state
            self.u = solve(self.beta * self.P, self.beta * self.error)
        self.written = self.state + _t(self.k) @ self.u
        self.next = _t(self.last) * self.written  # S'

    def pairs(self) -> Array:
        """tril(q̂ k̂ᵀ), as (..., K, G, C, C)."""
        return np.tril(self.q @ _t(self.k)[..., None, :, :])


def solve(L: Array, b: Array) -> Array:
    """Return u of (1 + L) u = b, where L is 0 from the diagonal on: row by row.

    np.linalg.solve exchanges rows, and loses all digits of the small ones where L is large.
    """
    u = b.copy()
    for t in range(1, L.shape[-2]):
        u[..., t, :] -= (L[..., t, None, :t] @ u[..., :t, :])[..., 0, :]
    return u


def solve_transposed(L: Array, b: Array) -> Array:
    """Return u of (1 + L)ᵀ u = b, from the last row on."""
    return np.flip(solve(np.flip(_t(L), (-2, -1)), np.flip(b, -2)), -2)


def _t(x: Array) -> Array:
    """Transpose of the last two axes."""
    return x.swapaxes(-1, -2)
