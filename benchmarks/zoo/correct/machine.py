"""Arithmetic of the hardware under a kernel: its formats, its sums, its exponential."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.zoo.correct.arithmetic import cast, dot, flush, store_as, sum_last, truncate
from benchmarks.zoo.correct.choices import Choices
from npattn.problem.arrays import Array

LOG2E = 1 / math.log(2)


class Machine:
    """Arithmetic of a kernel for inputs of one dtype."""

    def __init__(self, choices: Choices, dtype: np.dtype[Any]) -> None:
        self.choices, self.rounding, self.dtype = choices, choices.rounding, dtype
        wide = choices.rounding.accumulator or ("float64" if dtype == "float64" else "float32")
        # Truncation to float32 starts from a result in float64.
        self.wide: Any = np.float32 if wide == "float32" else np.float64
        self.truncates = wide == "truncated"
        self.log2e = self.wide(LOG2E if choices.binary else 1)
        self.unit = self.wide(1)  # log₂e where scores are in base 2

    def fit(self, x: Array) -> Array:
        """Fit the result of an operation to the accumulator: truncate, flush subnormals."""
        x = truncate(x) if self.truncates else x
        return flush(x) if self.choices.flushes else x

    def dot(self, a: Array, b: Array) -> Array:
        a, b = (self.store("operands", self.fit(x)) for x in (a, b))
        return dot(a, b, self.choices.order, self.rounding.sum_block, self.fit)

    def sum(self, x: Array) -> Array:
        return sum_last(x, self.choices.order, self.rounding.sum_block, self.fit)

    def row_sum(self, p: Array) -> Array:
        """Return Σ p along a row, in the format that the rounding model declares for it."""
        if self.rounding.row_sum == "accumulator":
            return self.sum(p)
        return sum_last(p, "first", None, lambda x: self.store("row_sum", x))

    def masked_matmul(self, w: Array, x: Array, live: Array) -> Array:
        """Return w @ x over the live positions only, since 0 · NaN is NaN [10]."""
        finite = np.isfinite(x)
        if finite.all():
            return self.dot(w, x)
        touched = live.astype(self.wide) @ ~finite > 0
        return np.where(touched, np.nan, self.dot(w, np.where(finite, x, self.wide(0))))

    def exp(self, x: Array) -> Array:
        """Return e to the power of a difference of scores, which is multiplied by log₂e if need be.

        Multiplied before they are subtracted, scores lose their difference beyond 2¹⁴.
        """
        if not self.choices.binary:
            return self.fit(self.inexact(np.exp(x)))
        return self.fit(self.inexact(np.exp2(self.fit(x * (self.log2e / self.unit)))))

    def log(self, x: Array) -> Array:
        if not self.choices.binary:
            return np.asarray(np.log(x))
        return np.asarray(np.log2(x) * (self.unit / self.log2e))

    def inexact(self, x: Array) -> Array:
        """Add the declared error of a fast exp or tanh, with a sign taken from the bits of x."""
        if self.rounding.exp_error is None:
            return x
        odd = np.ascontiguousarray(x).view(f"u{x.itemsize}") % 7 < 3
        error = np.where(odd, 0.99, -0.99) * self.rounding.exp_error
        return np.asarray(x * (1 + error).astype(x.dtype))

    def low(self, x: Array) -> Array:
        return self.store("scores", x)

    def store(self, name: str, x: Array) -> Array:
        """Round x to the format in which the rounding model stores the array `name`."""
        format = getattr(self.rounding, name)
        if format == "accumulator":
            return x
        return store_as(x, self.dtype.name if format == "input" else format)

    def deliver(self, x: Array) -> Array:
        """Round x to the dtype of the inputs and hold it in the accumulator."""
        return cast(self.fit(x), self.dtype).astype(self.wide)
