"""Mistakes in the gradients of weights and of inputs that broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import mistake
from npattn.problem.arrays import Array


@mistake("blind-delta-without-dweights", "gradients", step="delta", where="dweights")
class DeltaWithoutDweights(Attention):
    """D is Σ do·out, which lacks the share of dweights."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        s, live = self.scores(c)
        p, _, _ = self.softmax(s, c, live)
        missing = (p * np.where(live, dw, 0)).sum(-1, keepdims=True)
        return super().gradients(c, do, dlse + missing, dw)


@mistake("blind-broadcast-last-wins", "gradients", step="dv", where="B > 1")
class BroadcastLastWins(Attention):
    """If k or v broadcasts along the batch, its gradient is that of the last entry."""

    def reduce(self, dx: Array, shape: tuple[int, ...]) -> Array:
        if dx.size == 0:
            return super().reduce(dx, shape)
        full = (*(1,) * (dx.ndim - len(shape)), *shape)
        return np.asarray(dx[tuple(slice(-n, None) for n in full)].reshape(shape))
