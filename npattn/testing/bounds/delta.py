"""Errors of what the delta rule writes: u of (1 + L) u = b, and of its adjoint.

    b = β (v − k S_0)        L_ts = β_t Σ_f k_tf k_sf exp(g_{s+1} + … + g_t),  s < t

Given u, the delta rule is linear attention of the values u, whose keys are one more query head.
An algorithm that computes u, key after key or in chunks, leaves a residual ρ of its sums, hence an
error (1 + L)⁻¹ ρ. If it multiplies by a computed inverse, ρ becomes ρ + |L| |(1 + L)⁻¹| ρ.
"""

from __future__ import annotations

import numpy as np

from npattn.problem.arrays import Array
from npattn.variants.linear import recurrent
from npattn.variants.linear.chunked import solve
from npattn.variants.linear.recurrent import LinearOperands


class Written:
    """Values u (..., K, S, E) that the delta rule writes, and how residuals grow on their way."""

    def __init__(self, x: LinearOperands, sizes: LinearOperands) -> None:
        """Solve for u; the features of `sizes` bound the features of x from above."""
        assert x.beta is not None
        products, read = _products(x)
        L, one = x.beta * products, np.eye(products.shape[-1])
        self.u = solve(L, x.beta * (x.v - read))
        inverse = abs(solve(L, np.broadcast_to(one, L.shape)))
        self.growth = inverse @ (one + abs(x.beta) * _products(sizes)[0]) @ inverse

    def error(self, residual: Array) -> Array:
        """Error of u."""
        return np.asarray(self.growth @ residual)

    def error_of_adjoint(self, residual: Array) -> Array:
        """Error of w in (1 + L)ᵀ w = du."""
        return np.asarray(self.growth.swapaxes(-1, -2) @ residual)


def _products(x: LinearOperands) -> tuple[Array, Array]:
    """Return the decayed products of each key with those before it, and k S_0."""
    S = x.k.shape[-2]
    steps = np.broadcast_to(np.eye(S), (*x.k.shape[:-1], S))
    values = np.concatenate([steps, np.zeros_like(x.v)], -1)
    state = np.concatenate([np.zeros((*x.state.shape[:-1], S)), x.state], -1)
    reads = x._replace(q=x.k[..., None, :, :], v=values, state=state, beta=None)
    y = recurrent.forward(reads)[0][..., 0, :, :]
    return np.tril(y[..., :S], -1), y[..., S:]


def interleave(first: Array, second: Array) -> Array:
    """Return rows (..., 2 S, ·): of the first array, then of the second, and so on."""
    rows = np.stack(np.broadcast_arrays(first, second), -2)
    return rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])


def add_readers(x: LinearOperands, u: Array) -> LinearOperands:
    """Return linear attention of the values u, two steps a key: it reads, then it is written."""
    readers = interleave(x.k, 0 * x.k)[..., None, :, :]  # the last query head
    q = np.concatenate([interleave(0 * x.q, x.q), readers], -3)
    k, v, g = interleave(0 * x.k, x.k), interleave(0 * u, u), interleave(x.g, 0 * x.g)
    return LinearOperands(q, k, v, g, x.state, None, x.causal)


def add_cotangents(dy: Array, dread: Array) -> Array:
    """Return the cotangent of y and of what the keys read, in the steps of `add_readers`."""
    return np.concatenate(
        [interleave(0 * dy, dy), interleave(dread, 0 * dread)[..., None, :, :]], -3
    )


def split(y: Array) -> tuple[Array, Array]:
    """Return y and what the keys read, from the steps of `add_readers`."""
    return y[..., :-1, 1::2, :], y[..., -1, ::2, :]


def merge(d: LinearOperands) -> LinearOperands:
    """Return gradients of queries, keys and values, from those in the steps of `add_readers`."""
    dq, of_readers = split(d.q)
    return d._replace(q=dq, k=d.k[..., 1::2, :] + of_readers, v=d.v[..., 1::2, :])
