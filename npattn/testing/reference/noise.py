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

    def round(self, x: Array, terms: Array | None = None, exact: Array | None = None) -> Array:
        """Return float64 numbers, of any shape, each rounded at random.

        In their shape, `terms` is √(Σ term²) of sums, and `exact` is True where nothing is rounded.
        """
        first, second = self.rng.uniform(-1, 1, (2, *x.shape))
        size = abs(x) if terms is None else abs(x) + terms
        with np.errstate(all="ignore"):
            noise = self.relative * size * first + self.absolute * second
            rounded = np.where(abs(x) > self.largest, np.sign(x) * np.inf, x + noise)
        kept = ~np.isfinite(x) if exact is None else exact | ~np.isfinite(x)
        return np.asarray(np.where(kept, x, rounded))


def is_power_of_two(x: Array) -> Array:
    """Return where multiplying by x rounds nothing: at ±2ⁿ, and at 0."""
    part = abs(np.frexp(x)[0])
    return np.asarray((part == 0.5) | (part == 0))


def find_exact(name: str, operands: list[Array], shape: tuple[int, ...]) -> Array | None:
    """Return where the result of an operation of two arrays is not rounded; None if unknown.

    It is called "add", "subtract", "multiply", "divide", or as torch does for short; its result has
    the shape `shape`.
    """
    if len(operands) != 2:
        return None
    a, b = operands
    if name in ("add", "sub", "subtract", "rsub"):
        exact = (a == 0) | (b == 0)
    elif name in ("mul", "multiply"):
        exact = is_power_of_two(a) | is_power_of_two(b)
    elif name in ("div", "divide", "true_divide"):
        exact = is_power_of_two(b)
    else:
        return None
    return np.broadcast_to(exact, shape)
