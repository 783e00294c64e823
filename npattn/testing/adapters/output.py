"""Output of 8 bits: the factor of o that a call is given, and o by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npattn.arrays import Array
from npattn.descales import spread
from npattn.problem import Problem
from npattn.quantization import largest
from npattn.testing.adapters.base import ResultError

__all__ = ["QuantizedOutput"]

BEYOND, WITHIN = -2, 1
"""Powers of two by which a factor is off that just holds the largest value: then o is saturated in
rows of few keys, or else it never is."""
MOST = 100
"""Largest power of two of a factor: float32 holds it and its reciprocal."""


@dataclass(frozen=True)
class QuantizedOutput:
    """o of 8 bits, and the parts that have a factor of their own.

    Attributes
    ----------
    dtype : str
        One of `npattn.quantization.FORMATS`.
    per : {"tensor", "head", "block", "token"}
        With "head", a factor for each sample and query head.
    meaning : str
        That of the parameter for the factors, among `npattn.meanings.DESCALES`.
    rows : int or None
        Number of rows in a block.
    """

    dtype: str
    per: str
    meaning: str
    rows: int | None = None

    @property
    def multiplies(self) -> bool:
        """True if o is multiplied by the factor, as by cuDNN's ``scale_o``, and not divided."""
        return self.meaning.startswith("scale")

    def factors(self, problem: Problem) -> Array:
        """Return the factors of a call, float32, as the parameter takes them.

        They follow the largest value of each head, which o does not exceed; no two beside each
        other are alike, and every other one has o saturated.
        """
        values = np.where(np.isfinite(problem.v), abs(problem.v.astype(np.float64)), 0)
        shape = self._shape(problem)
        size = np.asarray(values.max(initial=0))
        if self.per != "tensor":
            heads = np.repeat(values.max((-2, -1), initial=0), problem.H // max(problem.K, 1), 1)
            size = np.broadcast_to(heads, shape[:2]) if heads.size else np.zeros(shape[:2])
            size = np.broadcast_to(size.reshape(*shape[:2], *(1,) * (len(shape) - 2)), shape)
        # By the values alone, so that parts of a problem have the factors of the whole.
        number = np.arange(size.size).reshape(shape) + (16 * np.frexp(size)[0]).astype(int)
        least = np.where(size > 0, size, 1.0) / largest(self.dtype)
        power = np.ceil(np.log2(least)) + np.where(number % 2, BEYOND, WITHIN)
        descale = (1 + number % 7 / 8) * np.exp2(np.clip(power, -MOST, MOST))
        return np.asarray(1 / descale if self.multiplies else descale, np.float32)

    def _shape(self, problem: Problem) -> tuple[int, ...]:
        if self.per == "tensor":
            return ()
        lead = (problem.lead[0], problem.H)
        if self.per == "head":
            return lead
        return (*lead, -(-problem.T // (self.rows or 1)))

    def descales(self, problem: Problem) -> Array:
        """Return what o of 8 bits is multiplied by, float64; it broadcasts against o."""
        factors = self.factors(problem).astype(np.float64)
        shape = (*problem.lead, *(() if problem.headless else (problem.H,)), problem.T, problem.E)
        return spread(1 / factors if self.multiplies else factors, shape, self.rows)

    def restore(self, o: Array, problem: Problem) -> Array:
        """Return o as it is meant, float64.

        Raises
        ------
        ResultError
            If it has another dtype.
        """
        if o.dtype != np.dtype(self.dtype):
            raise ResultError(
                f"o has dtype {o.dtype}, must be {self.dtype}, since it has a factor for o: wrap "
                "it without that parameter to have o in another"
            )
        wide, descales = o.astype(np.float64), self.descales(problem)
        fits = wide.ndim >= descales.ndim and all(
            n in (1, m) for n, m in zip(descales.shape[::-1], wide.shape[::-1], strict=False)
        )
        return wide * descales if fits else wide  # another shape is the business of shape-dtype
