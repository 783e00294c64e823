"""Dtypes of training: float64, float32, and mixed precision with its scale of the loss.

Mixed precision keeps parameters, sums, norms and the loss in float32, and rounds the operands and
the result of each product to bfloat16 or float16. Source: Micikevicius et al. 2018, "Mixed
precision training", section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from npattn.errors import OptionError
from npattn.multihead.projections import linear, linear_backward
from npattn.problem.arrays import Array

START, GROWTH = 2.0**16, 200
"""Scale of the loss at first, and the steps without an overflow after which it doubles."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of a model: of its parameters and sums, and of the operands of products."""

    name: str
    master: np.dtype[Any]
    storage: np.dtype[Any] | None = None

    @property
    def attention(self) -> str | None:
        """Argument ``dtype`` of `npattn.MultiHeadAttention.forward`; None lets complex through."""
        return None if self.name == "float64" else self.name

    def round(self, x: Array) -> Array:
        """Round to the storage dtype, if there is one; overflow gives inf."""
        if self.storage is None:
            return x
        with np.errstate(over="ignore"):
            return x.astype(self.storage).astype(self.master)

    def widen(self, x: Array) -> Array:
        """Convert a result of mixed precision to the dtype of the parameters."""
        return x if self.storage is None else x.astype(self.master)

    def linear(self, x: Array, w: Array, b: Array) -> Array:
        """x w + b."""
        return self.round(linear(self.round(x), self.round(w), self.round(b)))

    def linear_backward(self, dy: Array, x: Array, w: Array) -> tuple[Array, Array, Array]:
        """Gradients of x, w and b."""
        dx, dw, db = linear_backward(self.round(dy), self.round(x), self.round(w))
        return self.round(dx), self.round(dw), self.round(db)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float64", np.dtype(np.float64)),
        Precision("float32", np.dtype(np.float32)),
        Precision("bfloat16", np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)),
        Precision("float16", np.dtype(np.float32), np.dtype(np.float16)),
    )
}


@dataclass
class LossScale:
    """Factor of the loss that keeps small gradients above the smallest float16.

    A step whose gradients overflow is left out, and halves the scale; `GROWTH` steps without one
    double it. bfloat16 has the range of float32, and needs none.
    """

    scale: float = 1.0
    steps: int = 0
    """Steps since the scale changed."""

    @classmethod
    def of(cls, precision: Precision) -> LossScale:
        """Return the scale to begin with."""
        return cls(START if precision.name == "float16" else 1.0)

    def accept(self, loss: float, gradients: Iterable[Array]) -> bool:
        """Return True if a step is finite, to be taken; update the scale.

        Raises
        ------
        OptionError
            If it is not, and no smaller scale is left to try.
        """
        finite = np.isfinite(loss) and all(np.isfinite(d).all() for d in gradients)
        if not finite and self.scale <= 1:
            raise OptionError(
                f"the loss is {loss:.4g} and its gradient is not finite: pass a smaller lr, more "
                "warmup, or a dtype of a wider range"
            )
        self.steps += 1
        if not finite:
            self.scale, self.steps = self.scale / 2, 0
        elif self.scale > 1 and self.steps == GROWTH:
            self.scale, self.steps = self.scale * 2, 0
        return bool(finite)
