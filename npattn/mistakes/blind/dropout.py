"""Mistakes in dropout."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import mistake


@mistake("blind-dropout-in-lse", "dropout", equivalent=True)
class DropoutInLse(Attention):
    """lse is the log of the sum of the weights that dropout keeps."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, _ = super().results(c)
        s, live = self.scores(c)
        p, p_sink, _ = self.softmax(s, c, live)
        kept = (p * (np.asarray(c.keep) != 0)).sum(-1) + p_sink[..., 0]
        lost = np.where(live.any(-1), np.log(kept), 0)
        return o, lse + lost, self.returned_weights(p, c)


@mistake("blind-dweights-dropped", "dropout")
class DweightsDropped(Attention):
    """Dropout is applied to dweights, though the returned weights are those before dropout."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        return super().gradients(c, do, dlse, dw * c.keep)


@mistake("blind-delta-dropped", "dropout")
class DeltaDropped(Attention):
    """D is multiplied by the dropped weights w: ds = p dp − w D."""

    def jacobian(self, p: Array, dp: Array, delta: Array, c: Inputs) -> Array:
        return np.asarray(p * dp - p * c.keep * delta)


@mistake("blind-dropped-row-dlse", "dropout")
class DroppedRowDlse(Attention):
    """A row whose weights are all dropped is skipped, and the gradient of its lse is lost."""

    def gradients(self, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
        _, live = self.scores(c)
        kept = (live & (np.asarray(c.keep) != 0)).any(-1, keepdims=True)
        empty = ~live.any(-1, keepdims=True)
        return super().gradients(c, do, np.where(kept | empty, dlse, 0), dw)


@mistake("blind-weights-path-without-dropout", "dropout")
class WeightsPathWithoutDropout(Attention):
    """out has no dropout if the weights are requested."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        return super().results(c._replace(keep=1.0) if c.returns_weights else c)
