"""Steps of dropout: its place, and the factors that backward takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.problem.arrays import Array
from npattn.testing.diagnosis.steps.step import overrides


def _keep_mask(c: Inputs) -> Any:
    return np.sign(c.keep)


def _rate(c: Inputs) -> float:
    """Return the rate of dropout, 0 without."""
    most = float(np.max(c.keep, initial=1))
    return 1 - 1 / most


def _undrop_by(factor: Any) -> Any:
    """Return the gradient of the weights where kept, times a factor of the rate."""

    def undrop(self: Attention, dp: Array, c: Inputs) -> Array:
        return np.asarray(dp * _keep_mask(c) * factor(_rate(c))) if _rate(c) else dp

    return undrop


for _text, _factor in (
    ("not divided by 1 − rate", lambda rate: 1.0),
    ("multiplied by the rate", lambda rate: rate),
    ("divided by the rate", lambda rate: 1 / rate),
    ("multiplied by 1 − rate", lambda rate: 1 - rate),
    ("divided by 1 − rate twice", lambda rate: 1 / (1 - rate) ** 2),
):
    overrides(
        "dropout",
        f"where dropout keeps, the gradient of the weights is {_text}",
        undrop=_undrop_by(_factor),
        backward_only=True,
    )


def _drop_scores(self: Attention, c: Inputs) -> Array:
    return np.asarray(Attention.visible(self, c) & (np.asarray(c.keep) > 0))


overrides(
    "dropout",
    "dropout is applied to the scores, before the softmax: the weights left sum to 1",
    visible=_drop_scores,
)


def _dv_with(keep: Any) -> Any:
    """Return gradients whose dv has another factor of dropout."""

    def gradients(self: Attention, c: Inputs, *given: Any) -> tuple[Array, ...]:
        dq, dk, _, ds, ds_sink = Attention.gradients(self, c, *given)
        dv = Attention.gradients(self, c._replace(keep=keep(c)), *given)[2]
        return dq, dk, dv, ds, ds_sink

    return gradients


overrides(
    "dropout",
    "dv uses the weights before dropout",
    gradients=_dv_with(lambda c: 1.0),
    backward_only=True,
)
overrides(
    "dropout",
    "dv leaves out 1/(1 − rate) of the dropout",
    gradients=_dv_with(_keep_mask),
    backward_only=True,
)


def _drop_dweights(self: Attention, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
    return Attention.gradients(self, c, do, dlse, dw * c.keep)


def _delta_without(self: Attention, c: Inputs, do: Array, dlse: Any, dw: Any) -> tuple[Array, ...]:
    """Return gradients whose delta is that of an o before dropout."""
    s, live = self.scores(c)
    p, _, _ = self.softmax(s, c, live)
    dp = do @ self.share(c.v, c.q.shape[-3]).swapaxes(-1, -2) + dw
    delta = Attention.delta(self, p, np.where(live, dp, 0))
    fixed: Attention = type("Fixed", (Attention,), {"delta": lambda self, p, dp: delta})()
    return fixed.gradients(c, do, dlse, dw)


overrides(
    "dropout",
    "dropout is applied to the gradient of the weights that are returned before it",
    gradients=_drop_dweights,
    backward_only=True,
)
overrides(
    "dropout",
    "delta is Σ do·o of an o without dropout",
    gradients=_delta_without,
    backward_only=True,
)
