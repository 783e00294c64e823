"""Numbers as the hardware under a kernel has them: its formats, its sums, its exponential."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from npattn.arrays import Array
from npattn.zoo.correct.arithmetic import cast, dot, flush, stored, summed, truncate

if TYPE_CHECKING:
    from npattn.zoo.correct.kernel import Kernel

__all__ = ["LOG2E", "Machine"]

LOG2E = 1 / math.log(2)


class Machine:
    """What a kernel computes with, for inputs of one dtype."""

    def __init__(self, kernel: Kernel, dtype: np.dtype[Any]) -> None:
        self.kernel, self.rounding, self.dtype = kernel, kernel.rounding, dtype
        wide = kernel.rounding.accumulator or ("float64" if dtype == "float64" else "float32")
        # What is cut off to float32 is first computed in float64.
        self.wide: Any = np.float32 if wide == "float32" else np.float64
        self.truncates = wide == "truncated"
        self.log2e = self.wide(LOG2E if kernel.binary else 1)

    def fit(self, x: Array) -> Array:
        """What becomes of the result of an operation."""
        x = truncate(x) if self.truncates else x
        return flush(x) if self.kernel.flushes else x

    def dot(self, a: Array, b: Array) -> Array:
        a, b = (self.store("operands", self.fit(x)) for x in (a, b))
        return dot(a, b, self.kernel.order, self.rounding.sum_block, self.fit)

    def sum(self, x: Array) -> Array:
        return summed(x, self.kernel.order, self.rounding.sum_block, self.fit)

    def row_sum(self, p: Array) -> Array:
        """Σ p along a row, in the format that is declared for it."""
        if self.rounding.row_sum == "accumulator":
            return self.sum(p)
        return summed(p, "first", None, lambda x: self.store("row_sum", x))

    def see(self, w: Array, x: Array, live: Array) -> Array:
        """w @ x in which x counts only where it is live: 0 · NaN is NaN.  [10]"""
        finite = np.isfinite(x)
        if finite.all():
            return self.dot(w, x)
        touched = live.astype(self.wide) @ ~finite > 0
        return np.where(touched, np.nan, self.dot(w, np.where(finite, x, self.wide(0))))

    def exp(self, x: Array) -> Array:
        return self.fit(self.inexact(np.exp2(x) if self.kernel.binary else np.exp(x)))

    def log(self, x: Array) -> Array:
        return np.asarray(np.log2(x) if self.kernel.binary else np.log(x))

    def inexact(self, x: Array) -> Array:
        """A fast exp or tanh: in error by all that is declared, up or down as its bits fall."""
        if self.rounding.exp_error is None:
            return x
        odd = np.ascontiguousarray(x).view(f"u{x.itemsize}") % 7 < 3
        error = np.where(odd, 0.99, -0.99) * self.rounding.exp_error
        return np.asarray(x * (1 + error).astype(x.dtype))

    def low(self, x: Array) -> Array:
        return self.store("scores", x)

    def store(self, what: str, x: Array) -> Array:
        """x as it is after it was stored where the rounding model says."""
        where = getattr(self.rounding, what)
        if where == "accumulator":
            return x
        return stored(x, self.dtype.name if where == "input" else where)

    def deliver(self, x: Array) -> Array:
        """x rounded to the dtype of the inputs, still in the accumulator."""
        return cast(self.fit(x), self.dtype).astype(self.wide)
