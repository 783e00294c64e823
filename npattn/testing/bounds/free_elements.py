"""Elements of which nothing is asked: what a NaN reaches only through a weight of 0 [10].

A key whose bias is −inf, and a weight that dropout drops, have a share of exactly 0 in every sum.
The oracle leaves out the one and multiplies the other by 0; kernels do either. Beside numbers both
are the same, beside a NaN they are not, and nothing is promised.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npattn.conventions import Conventions
from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to


def free_elements(problem: Problem, conventions: Conventions | None = None) -> dict[str, Array]:
    """Return the elements of each result of which nothing is asked; {} without a NaN.

    Returns
    -------
    dict of str to bool array
        By the names of results: o (..., H, T, E), lse (..., H, T), weights (..., H, T, S), and
        gradients, each in the shape of its input.
    """
    if all(np.isfinite(x).all() for x in (problem.q, problem.k, problem.v)):
        return {}
    if problem.bias_array is None and problem.dropout_mask is None:
        return {}
    conventions = conventions or Conventions()
    shares = _Shares.of(conventions.canonical(problem))
    o, lse, weights, ds, dv = shares.elements()
    ds, weights = ds[..., : problem.S], weights[..., : problem.S]
    by_key = {"dk": ds, "dv": dv[..., : problem.S] | dv[..., -problem.S :]}
    free = {"o": o, "lse": lse, "weights": weights}
    free = {name: x[0] if problem.headless else x for name, x in free.items()}
    free["dq"] = _reduce(shares.dq_row[..., None], (*problem.q.shape[:-1], 1))
    for name, x in by_key.items():
        key_input = getattr(problem, name[1:])
        heads = _by_shared_head(conventions, problem, np.any(x, -2)[..., None])
        free[name] = _reduce(heads, (*key_input.shape[:-1], 1))
    if problem.bias_array is not None:
        free["dbias"] = _reduce(ds, problem.bias_array.shape)
    if problem.sinks is not None:
        free["dsinks"] = _reduce(np.any(shares.dq_row, -1)[..., None, None], (problem.H, 1, 1))[
            :, 0, 0
        ]
    return {name: x for name, x in free.items() if x.any()}


class _Shares(NamedTuple):
    """Places of NaN, and of shares of 0, in a canonical problem; H heads everywhere."""

    bad_q: Array  # (..., H, T, 1)
    bad_k: Array  # (..., H, 1, S)
    bad_v: Array  # (..., H, S, E)
    live: Array  # (..., H, T, S): visible, and not behind a bias of −inf
    behind: Array  # (..., H, T, S): visible, and behind one
    kept: Array  # (..., H, T, S): not dropped

    @classmethod
    def of(cls, problem: Problem) -> _Shares:
        bad = [~np.isfinite(x) for x in (problem.q, problem.k, problem.v)]
        q, k, v = (x[None] if problem.headless else x for x in bad)
        k, v = (np.repeat(x, problem.H // max(problem.K, 1), axis=-3) for x in (k, v))
        score_shape = (*problem.lead, problem.H, problem.T, problem.S)
        bias, visible, kept = problem.bias_array, problem.visible, problem.dropout_mask
        seen = np.broadcast_to(True if visible is None else visible, score_shape)
        dead = np.zeros((), bool) if bias is None else np.isneginf(bias.astype(np.float64))
        kept = np.broadcast_to(True if kept is None else kept, score_shape)
        any_q, any_k = np.any(q, -1, keepdims=True), np.any(k, -1)[..., None, :]
        return cls(any_q, any_k, v, seen & ~dead, seen & dead, kept)

    @property
    def nan_score(self) -> Array:
        """Positions with a NaN in their query or key, (..., H, T, S)."""
        return self.bad_q | self.bad_k

    @property
    def bad_value(self) -> Array:
        """Keys with a NaN in their value, (..., H, 1, S)."""
        return np.any(self.bad_v, -1)[..., None, :]

    @property
    def nan_row(self) -> Array:
        """Rows whose weights are NaN, (..., H, T, 1)."""
        return np.any(self.live & self.nan_score, -1, keepdims=True)

    @property
    def odd_row(self) -> Array:
        """Rows with a NaN behind a bias of −inf, (..., H, T, 1): −inf + NaN is NaN, or left out."""
        odd = self.behind & (self.nan_score | self.bad_value)
        return np.any(odd, -1, keepdims=True)

    @property
    def dropped_row(self) -> Array:
        """Rows that drop a value with a NaN, (..., H, T, 1): its product with dout may be 0."""
        dropped = self.live & ~self.kept & self.bad_value
        return np.any(dropped, -1, keepdims=True)

    @property
    def dq_row(self) -> Array:
        """Rows of dq of which nothing is asked, (..., H, T)."""
        return (self.odd_row | self.dropped_row)[..., 0]

    def elements(self) -> tuple[Array, Array, Array, Array, Array]:
        """Return the free elements of o, lse and weights, and shares of dS and of dv."""
        odd, visible, dropped = self.odd_row, self.live | self.behind, ~self.kept
        value_row = (self.live & self.bad_value).any(-1, keepdims=True)
        sure = (self.live & self.kept & self.nan_score).any(-1, keepdims=True)
        sure = sure | _reaches(self.live & self.kept, self.bad_v)
        touched = self.nan_row | _reaches(self.live & dropped, self.bad_v)
        o = odd | (touched & ~sure)
        weights = odd | (self.nan_row & self.behind)
        ds = visible & (odd | self.dropped_row)
        ds = ds | (self.behind & (self.nan_row | value_row))
        dv = (visible & odd) | (self.nan_row & (self.behind | (self.live & dropped)))
        return o, odd[..., 0], np.broadcast_to(weights, visible.shape), ds, dv


def _reaches(positions: Array, bad: Array) -> Array:
    """Return True where one of these keys has a NaN in a column: (..., H, T, E)."""
    return positions.astype(np.float64) @ bad > 0


def _by_shared_head(conventions: Conventions, problem: Problem, x: Array) -> Array:
    """Combine the query heads that share a key/value head: (..., H, S, 1) → (..., K, S, 1)."""
    H, K = problem.H, problem.K
    if H == K:
        return x
    used = np.arange(H) % K if conventions.kv_head == "tile" else np.arange(H) // (H // K)
    return np.stack([x[..., used == head, :, :].any(-3) for head in range(K)], axis=-3)


def _reduce(x: Array, shape: tuple[int, ...]) -> Array:
    """Combine along the axes that an input lacks, or along which it broadcasts."""
    return sum_to(x.astype(np.float64), shape) > 0
