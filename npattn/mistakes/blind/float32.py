"""Exponentials with the range of float32, which overflow about a wrong pivot."""

from __future__ import annotations

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.problem.arrays import Array


def as_float32(x: Array) -> Array:
    """Round x to float32, with its range: 1e39 becomes inf, 1e−46 becomes 0."""
    return x.astype(np.float32).astype(np.float64)


class PivotedFloat32(Attention):
    """Softmax with exponentials in the range of float32; mistakes override the pivot."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        m = self.pivot(s, c, live)
        pivot = np.where(m == -np.inf, 0, m)
        e, e_sink = as_float32(np.exp(s - pivot)), as_float32(np.exp(c.sinks - pivot))
        total = e.sum(-1, keepdims=True) + e_sink
        safe = np.where(total == 0, 1, total)
        return np.where(s == -np.inf, 0, e / safe), e_sink / safe, self.lse(pivot, total, e_sink)

    def pivot(self, s: Array, c: Inputs, live: Array) -> Array:
        return np.asarray(np.maximum(s.max(-1, keepdims=True, initial=-np.inf), c.sinks))
