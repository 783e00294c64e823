"""Rounding errors at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npattn.problem.arrays import Array


@dataclass(frozen=True)
class Noise:
    """Rounding errors to imitate: relative and absolute size, and where they are drawn from.

    What is larger than `largest` overflows.
    """

    relative: float
    absolute: float
    rng: np.random.Generator
    largest: float = np.inf

    def round(self, x: Array, terms: Array | None = None) -> Array:
        """Return float64 numbers, each rounded at random; `terms` are √(Σ term²) of sums."""
        first, second = self.rng.uniform(-1, 1, (2, *x.shape))
        size = abs(x) if terms is None else abs(x) + terms
        with np.errstate(all="ignore"):
            noise = self.relative * size * first + self.absolute * second
            rounded = np.where(abs(x) > self.largest, np.sign(x) * np.inf, x + noise)
        return np.asarray(np.where(np.isfinite(x), rounded, x))
