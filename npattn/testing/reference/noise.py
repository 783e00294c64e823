"""Rounding errors at random."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npattn.problem.arrays import Array


@dataclass(frozen=True)
class Noise:
    """Rounding errors to imitate: relative and absolute size, and where they are drawn from."""

    relative: float
    absolute: float
    rng: np.random.Generator

    def round(self, x: Array, terms: Array | None = None) -> Array:
        """Return float64 numbers, each rounded at random; `terms` are √(Σ term²) of sums."""
        first, second = self.rng.uniform(-1, 1, (2, *x.shape))
        size = abs(x) if terms is None else abs(x) + terms
        with np.errstate(all="ignore"):
            noise = self.relative * size * first + self.absolute * second
        return np.asarray(np.where(np.isfinite(x), x + noise, x))
