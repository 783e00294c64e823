"""Slopes that a vjp or a jvp claims, with the rounding that they may have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.gradients.case import Case
from npattn.testing.gradients.function import Gradient, flatten
from npattn.testing.gradients.slopes import DEVIATIONS, norm

PERTURBATIONS = 3
"""Calls near the arguments from which the rounding of a claim is measured."""
ROUNDINGS = 4
"""Roundings of its own that each element of a claim may have."""


@dataclass(frozen=True)
class VjpClaims:
    """Gradients for each cotangent; not finite elements and arrays without a gradient are 0.

    Attributes
    ----------
    gradient, spread : (k, n) float64 arrays
        What the vjp returned, and by how much it changes if the arguments change by a rounding.
    raw : (k, n) float64 array
        The gradient with what is not finite.
    units : (n,) float64 array
        Distance of 1 to the next number, in the dtype of each element.
    shapes : dict
        Leaf → the wrong shape of its gradient.
    missing : frozenset of str
        Leaves for which the vjp returned None.
    """

    gradient: Array
    spread: Array
    raw: Array
    units: Array
    gap: Array
    shapes: dict[str, tuple[int, ...]]
    missing: frozenset[str]

    @classmethod
    def ask(cls, case: Case) -> VjpClaims:
        """Ask the vjp for the gradients of each cotangent."""
        function = case.function
        shapes: dict[str, tuple[int, ...]] = {}
        missing: set[str] = set()

        def vector(gradient: Gradient) -> Array:
            parts = []
            for leaf, g in zip(function.inputs, gradient, strict=True):
                if g is None:
                    missing.add(leaf.name)
                elif g.shape != leaf.shape:
                    shapes[leaf.name] = g.shape
                fits = g is not None and g.shape == leaf.shape
                own = g if fits and g is not None else np.zeros(leaf.shape)
                parts.append(own.astype(complex) if leaf.dtype.kind == "c" else np.real(own))
            return flatten(parts)

        raw = np.stack([vector(function.vjp(w, case.x)) for w in case.cotangents])
        gradient = np.where(np.isfinite(raw), raw, 0)
        spread = np.zeros_like(gradient)
        for _ in range(PERTURBATIONS):
            x = case.nearby()
            rounded = [w * (1 + case.own_eps * case.rng.uniform(-1, 1, len(w))) for w in case.cotangents]
            near = np.stack([vector(function.vjp(w, x)) for w in rounded])
            with np.errstate(invalid="ignore"):
                moved = abs(near - gradient)
            spread = np.maximum(spread, np.where(np.isfinite(moved), moved, 0))
        units = np.zeros(raw.shape[1])
        for leaf in function.inputs:
            units[leaf.part] = max(leaf.eps, case.own_eps)
        return cls(gradient, spread, raw, units, case.gap, shapes, frozenset(missing))

    def slopes(self, u: Array) -> tuple[Array, Array, Array]:
        """Return ⟨g, u⟩, the rounding it may have, and √Σ (g u)²."""
        terms = self.gradient * u
        size = norm(terms)
        independent = DEVIATIONS * norm(self.spread * u)
        own = ROUNDINGS * abs(terms) @ self.units
        return terms.sum(1), independent + own + DEVIATIONS * self.gap * size, size


@dataclass(frozen=True)
class JvpClaims:
    """Derivatives along a direction, asked one by one."""

    case: Case

    def slopes(self, u: Array) -> tuple[Array, Array, Array]:
        """Return ⟨w, J u⟩ for each cotangent, the rounding it may have, and √Σ (w J u)²."""
        case, function = self.case, self.case.function
        w, claim = case.cotangents, function.jvp(u, case.x)
        near = [function.jvp(u, case.nearby()) for _ in range(PERTURBATIONS)]
        spread = np.max([abs(y - claim) for y in near], axis=0)
        size = norm(w * claim)
        independent = DEVIATIONS * norm(w * spread)
        own = ROUNDINGS * case.own_eps * abs(w) @ abs(claim)
        return w @ claim, independent + own + DEVIATIONS * case.gap * size, size
