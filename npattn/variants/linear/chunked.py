"""Linear attention chunk by chunk, quadratic within a chunk; one chunk is the parallel form.

Within a chunk of C keys, with G_t = g_1 + … + g_t and the state S before it:

    A_ts = Σ_f q_tf k_sf exp(G_tf − G_sf),  s ≤ t       y = (q exp(G)) S + A u
    S' = exp(G_C) S + (k exp(G_C − G))ᵀ u
    u = v, or by the delta rule (1 + L) u = β (v − (k exp(G)) S),  L_ts = β_t Σ_f k k exp, s < t

Its gradients need no state within the chunk: G_t multiplies q_t as it divides k_t, hence
dG = q dq − k dk, where k that reads as a query does counts as one; G_C gets Σ S' dS' too.
docs/derivations/linear.md.
"""

from __future__ import annotations

import numpy as np

from npattn.arrays import Array
from npattn.variants.linear.operands import Operands

__all__ = ["backward", "forward"]


class _Chunk:
    """Decays of one chunk: into it, within it, and out of it; and the values that it writes."""

    def __init__(self, x: Operands, at: slice, state: Array) -> None:
        self.q, self.k, self.v = x.q[..., at, :], x.k[..., at, :], x.v[..., at, :]
        g = x.g[..., at, :]
        G = g.cumsum(-2)
        self.into, self.last = np.exp(G), np.exp(G[..., -1, :, None])  # (..., C, F), (..., F, 1)
        # G_t − G_s as a sum of its own: a difference loses all digits beyond a reset of −1e15.
        seen, after = (np.tri(g.shape[-2], k=n, dtype=bool)[..., None] for n in (0, -1))
        gap = np.where(after, g[..., :, None, :], 0).cumsum(-3)
        within = np.exp(np.where(seen, gap, -np.inf))
        self.out_of = within[..., -1, :, :]
        self.within = within[..., None, :, :, :]  # (..., K, 1, C, C, F) 0 where s > t
        self.state, self.beta, self.u = state, None, self.v
        if x.beta is not None:
            self.beta = x.beta[..., at, :]
            self.strict = np.tri(G.shape[-2], k=-1)
            self.keys = self.pairs(self.k[..., None, :, :], self.k)[..., 0, :, :] * self.strict
            self.L = self.beta * self.keys
            self.error = self.v - (self.k * self.into) @ state
            self.u = np.linalg.solve(np.eye(G.shape[-2]) + self.L, self.beta * self.error)

    @property
    def next(self) -> Array:
        """State after the chunk."""
        new = (self.k * self.out_of).swapaxes(-1, -2) @ self.u
        return np.asarray(self.last * self.state + new)

    def through_delta(self, du: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Gradients of v, β, k as a query, k as a key, and the state, from that of u."""
        beta = self.beta
        assert beta is not None
        db = np.linalg.solve((np.eye(du.shape[-2]) + self.L).swapaxes(-1, -2), du)
        dL = -(db @ self.u.swapaxes(-1, -2)) * self.strict
        dv, dP = beta * db, (beta * dL)[..., None, :, :]
        dbeta = (db * self.error).sum(-1, keepdims=True)
        dbeta = dbeta + (dL * self.keys).sum(-1, keepdims=True)
        as_query = self.to_queries(dP)[..., 0, :, :]
        as_query = as_query - self.into * (dv @ self.state.swapaxes(-1, -2))
        as_key = self.to_keys(dP, self.k[..., None, :, :])
        return dv, dbeta, as_query, as_key, -(self.k * self.into).swapaxes(-1, -2) @ dv

    def pairs(self, left: Array, right: Array) -> Array:
        """Σ_f left_tf right_sf exp(G_tf − G_sf), as (..., K, G, C, C)."""
        if self.within.shape[-1] == 1:
            return (left @ right[..., None, :, :].swapaxes(-1, -2)) * self.within[..., 0]
        products = left[..., :, None, :] * right[..., None, None, :, :]
        return np.asarray((products * self.within).sum(-1))

    def to_queries(self, dA: Array) -> Array:
        """Σ_s dA_ts k_s exp(G_t − G_s)."""
        if self.within.shape[-1] == 1:
            return (dA * self.within[..., 0]) @ self.k[..., None, :, :]
        return np.asarray((dA[..., None] * self.within * self.k[..., None, None, :, :]).sum(-2))

    def to_keys(self, dA: Array, q: Array) -> Array:
        """Σ_t dA_ts q_t exp(G_t − G_s), over the query heads too."""
        if self.within.shape[-1] == 1:
            return np.asarray(((dA * self.within[..., 0]).swapaxes(-1, -2) @ q).sum(-3))
        return np.asarray((dA[..., None] * self.within * q[..., :, None, :]).sum((-3, -4)))


def _slices(length: int, size: int) -> list[slice]:
    return [slice(a, min(a + size, length)) for a in range(0, length, size)]


def forward(x: Operands, size: int) -> tuple[Array, Array]:
    """Return y (..., K, G, T, E) and the last state (..., K, F, E)."""
    state = x.state
    if not x.causal:
        y = x.q @ state[..., None, :, :]
        for at in _slices(x.k.shape[-2], size):
            k, v = x.k[..., None, at, :], x.v[..., None, at, :]
            y = y + (x.q @ k.swapaxes(-1, -2)) @ v
            state = state + (k.swapaxes(-1, -2) @ v)[..., 0, :, :]
        return y, state
    y = np.empty((*x.q.shape[:-1], x.v.shape[-1]), x.v.dtype)
    for at in _slices(x.k.shape[-2], size):
        c = _Chunk(x, at, state)
        before = (c.q * c.into[..., None, :, :]) @ state[..., None, :, :]
        y[..., at, :] = before + c.pairs(c.q, c.k) @ c.u[..., None, :, :]
        state = c.next
    return y, state


def backward(x: Operands, dy: Array, dstate: Array, size: int) -> Operands:
    """Gradients of Σ dy·y + Σ dstate·(last state)."""
    if not x.causal:
        return _backward_over_all(x, dy, dstate)
    slices, states = _slices(x.k.shape[-2], size), [x.state]
    for at in slices:
        states.append(_Chunk(x, at, states[-1]).next)
    dq, dk, dv = np.empty_like(x.q), np.empty_like(x.k), np.empty_like(x.v)
    dg, dbeta = np.empty_like(x.k), None if x.beta is None else np.empty_like(x.beta)
    dS = dstate
    for i, at in reversed([*enumerate(slices)]):
        c, do, S = _Chunk(x, at, states[i]), dy[..., at, :], states[i][..., None, :, :]
        A, dA = c.pairs(c.q, c.k), do @ c.u[..., None, :, :].swapaxes(-1, -2)
        dq[..., at, :] = c.into[..., None, :, :] * (do @ S.swapaxes(-1, -2)) + c.to_queries(dA)
        as_key = c.to_keys(dA, c.q) + c.out_of * (c.u @ dS.swapaxes(-1, -2))
        du = (A.swapaxes(-1, -2) @ do).sum(-3) + (c.k * c.out_of) @ dS
        dG = (c.q * dq[..., at, :]).sum(-3)
        dG[..., -1, :] += (states[i + 1] * dS).sum(-1)  # (..., C, F)
        through = (c.q * c.into[..., None, :, :]).swapaxes(-1, -2) @ do
        dS = c.last * dS + through.sum(-3)
        dk[..., at, :] = as_key
        if dbeta is not None:
            du, dbeta[..., at, :], as_query, more, dstate_too = c.through_delta(du)
            as_key, dS = as_key + more, dS + dstate_too
            dk[..., at, :] = as_key + as_query
            dG = dG + c.k * as_query
        dv[..., at, :] = du
        dG = dG - c.k * as_key
        dg[..., at, :] = np.flip(np.flip(dG, -2).cumsum(-2), -2)  # G_t has g_1, …, g_t
    return Operands(dq, dk, dv, dg, dS, dbeta, True)


def _backward_over_all(x: Operands, dy: Array, dstate: Array) -> Operands:
    """Gradients of y = q S_0 + (q kᵀ) v and S_0 + kᵀ v."""
    k, v = x.k[..., None, :, :], x.v[..., None, :, :]
    A, dA = x.q @ k.swapaxes(-1, -2), dy @ v.swapaxes(-1, -2)
    dq = dy @ x.state[..., None, :, :].swapaxes(-1, -2) + dA @ k
    dk = (dA.swapaxes(-1, -2) @ x.q).sum(-3) + x.v @ dstate.swapaxes(-1, -2)
    dv = (A.swapaxes(-1, -2) @ dy).sum(-3) + x.k @ dstate
    dS = dstate + (x.q.swapaxes(-1, -2) @ dy).sum(-3)
    return Operands(dq, dk, dv, np.zeros_like(x.k), dS, None, False)
