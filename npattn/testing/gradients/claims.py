"""Slopes that a vjp or a jvp claims, with the rounding that they may have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npattn.problem.arrays import Array, finfo
from npattn.testing.gradients.case import Case
from npattn.testing.gradients.function import Gradient, flatten
from npattn.testing.gradients.slopes import DEVIATIONS, norm

ROUNDINGS = 4
"""Roundings of its own that each element of a claim may have."""


@dataclass(frozen=True)
class VjpClaims:
    """Gradients for each cotangent; not finite elements and arrays without a gradient are 0."""

    gradient: Array  # (k, n): what the vjp returned
    spread: Array  # (number, k, n): by how much it varies near the arguments: see `Case.spread`
    raw: Array  # (k, n): the gradient with what is not finite
    # (n,): distance of 1 to the next number, and the least number, in the dtype of each element
    units: Array
    least: Array
    gap: Array  # (k,): of the case
    coarse: Array
    shapes: dict[str, tuple[int, ...]]  # leaf → the wrong shape of its gradient
    missing: frozenset[str]  # leaves for which the vjp returned None

    @classmethod
    def ask(cls, case: Case) -> VjpClaims:
        """Ask the vjp for the gradients of each cotangent."""
        function = case.function
        shapes: dict[str, tuple[int, ...]] = {}
        missing: set[str] = set()

        def vector(gradient: Gradient) -> Array:
            """Return a gradient as a vector, (n,), 0 where it is missing; note what is missing."""
            parts = []
            for leaf, g in zip(function.inputs, gradient, strict=True):
                if g is None:
                    missing.add(leaf.name)
                elif g.shape != leaf.shape:
                    shapes[leaf.name] = g.shape
                fits = g is not None and g.shape == leaf.shape
                claimed = g if fits and g is not None else np.zeros(leaf.shape)
                real = np.where(
                    np.imag(claimed) == 0, np.real(claimed), np.nan
                )  # none of a real array
                parts.append(claimed.astype(complex) if leaf.dtype.kind == "c" else real)
            return flatten(parts)

        def ask(x: Array, wide: bool) -> Array:
            """Return gradients, (k, n), at x, (n,) or (k, n); moved x has rounded cotangents."""
            # Rounded cotangents show roundings that saturated arguments do not.
            here = x is case.x
            move, rough = 0 if here else case.own_eps, None
            if not (here or wide):
                rough = int(case.rng.integers(2**31))
            signs = case.rng.uniform(-1, 1, case.cotangents.shape)
            points = np.broadcast_to(x, (len(case.cotangents), x.shape[-1]))
            moved = case.cotangents * (1 + move * signs)
            return np.stack(
                [
                    vector(function.vjp(w, x, wide, rough))
                    for w, x in zip(moved, points, strict=True)
                ]
            )

        raw = ask(case.x, False)
        gradient = np.where(np.isfinite(raw), raw, 0)
        spread = case.spread(ask, gradient)
        units = np.maximum(function.units, case.own_eps)
        least = np.zeros(raw.shape[1])
        for leaf in function.inputs:
            least[leaf.part] = float(finfo(leaf.dtype).smallest_subnormal)
        return cls(
            gradient, spread, raw, units, least, case.gap, case.coarse, shapes, frozenset(missing)
        )

    def slopes(self, u: Array) -> tuple[Array, Array, Array]:
        """Return ⟨g, u⟩, the rounding it may have, and √Σ (g u)²."""
        terms = self.gradient * u
        size = norm(terms)
        spread = np.fmax(norm(abs(self.spread).max(0) * u), abs(self.spread @ u).max(0))
        rounding = ROUNDINGS * (abs(terms) @ self.units + abs(u) @ self.least + self.coarse)
        return terms.sum(1), DEVIATIONS * (spread + self.gap * size) + rounding, size


@dataclass(frozen=True)
class JvpClaims:
    """Derivatives along a direction, asked one by one."""

    case: Case

    def slopes(self, u: Array) -> tuple[Array, Array, Array]:
        """Return ⟨w, J u⟩ for each cotangent, the rounding it may have, and √Σ (w J u)²."""
        case, function = self.case, self.case.function
        w, claim = case.cotangents, function.jvp(u, case.x)
        spread = case.spread(lambda x, wide: function.jvp(u, x, wide))
        numbers = np.where(np.isnan(claim), 0, claim)  # a NaN is wrong by any amount
        size = norm(w * numbers)
        independent = np.fmax(norm(w * abs(spread).max(0)), abs(spread @ w.T).max(0))
        rounding = ROUNDINGS * (case.own_eps * abs(w) @ abs(numbers) + case.coarse)
        return w @ claim, DEVIATIONS * (independent + case.gap * size) + rounding, size


Claims = VjpClaims | JvpClaims
