"""Mistakes in dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import change, mistake
from npattn.problem.arrays import Array


@mistake("blind-dropout-in-lse", "dropout", step="lse", where="dropout", equivalent=True)
class DropoutInLse(Attention):
    """lse is the log of the sum of the weights that dropout keeps."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, _ = super().results(c)
        s, live = self.scores(c)
        p, p_sink, _ = self.softmax(s, c, live)
        kept = (p * (np.asarray(c.keep) != 0)).sum(-1) + p_sink[..., 0]
        lost = np.where(live.any(-1), np.log(kept), 0)
        return o, lse + lost, self.returned_weights(p, c)


change("blind-dweights-dropped", "dropout",
       "Dropout is applied to dweights, though the returned weights are those before dropout.",
       step="dp", where="dropout and dweights",
       gradients=lambda up, c, do, dlse, dw: up(c, do, dlse, dw * c.keep))  # fmt: skip
change("blind-delta-dropped", "dropout",
       "D is multiplied by the dropped weights w: ds = p dp − w D.", step="ds", where="dropout",
       jacobian=lambda up, p, dp, delta, c: np.asarray(p * dp - p * c.keep * delta))  # fmt: skip


@mistake("blind-dropped-row-dlse", "dropout", step="delta", where="dropout and dlse")
class DroppedRowDlse(Attention):
    """A row whose weights are all dropped is skipped, and the gradient of its lse is lost."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        _, live = self.scores(c)
        kept = (live & (np.asarray(c.keep) != 0)).any(-1, keepdims=True)
        empty = ~live.any(-1, keepdims=True)
        return super().gradients(c, do, np.where(kept | empty, dlse, 0), dw)


change("blind-weights-path-without-dropout", "dropout",
       "out has no dropout if the weights are requested.", step="p", where="dropout and weights",
       results=lambda up, c: up(c._replace(keep=1.0) if c.returns_weights else c))  # fmt: skip
