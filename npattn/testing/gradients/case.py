"""The function under test near its arguments: cotangents, differences, and the rounding of claims."""

from __future__ import annotations

import numpy as np

from npattn.errors import NpattnError
from npattn.problem.arrays import Array
from npattn.testing.gradients.directions import tied
from npattn.testing.gradients.function import Function, Leaf
from npattn.testing.gradients.slopes import Line, norm

COTANGENTS = 8
"""Results up to which each has a cotangent of its own."""


class Case:
    """The function near its arguments, its cotangents, and what is claimed of them.

    Attributes
    ----------
    cotangents : (k, m) float64 array
    wide : bool
        Differences are of float64 calls; else of calls in the dtypes of the arguments.
    gap : (k,) float64 array
        Part by which ⟨w, f⟩ in the dtypes of the arguments differs from that of the differences.
    raised : str
        The last exception of a call near the arguments.
    """

    def __init__(self, function: Function, seed: int) -> None:
        self.function, self.rng = function, np.random.default_rng(seed)
        self.x, self.raised = function.x, ""
        own, self.own_eps = function.values(self.x)
        self.noise = self._repeat(own)
        self.finite = np.isfinite(own)
        own = np.where(self.finite, own, 0)
        self.value, self.eps = own, self.own_eps
        near = self._evaluate(self.x + tied(self.x, self.rng) / 512, False)
        live = abs(own[own != near[0]]) if near is not None else abs(own)
        self.typical = float(np.median(live)) if live.size else 0.0
        self.cotangents = self._sample_cotangents()
        self.wide, self.gap = False, np.zeros(len(self.cotangents))
        if max(self.own_eps, *(leaf.eps for leaf in function.inputs)) > 2.0**-50:
            self._widen(own)

    def _repeat(self, own: Array) -> float:
        """Return the largest difference of two calls, as a part of the largest result."""
        again, _ = self.function.values(self.x)
        with np.errstate(invalid="ignore"):
            differ = np.where(np.isfinite(own), abs(again - own), 0)
        largest = np.abs(own[np.isfinite(own)]).max(initial=0)
        return float(differ.max(initial=0) / largest) if largest else float(differ.max(initial=0))

    def _widen(self, own: Array) -> None:
        """Take differences in float64 if f takes it and computes the same."""
        result = self._evaluate(self.x, True)
        if result is None or result[1] >= self.own_eps:
            return
        w = self.cotangents
        with np.errstate(invalid="ignore"):
            difference, size = norm(w * (own - result[0])), norm(w * own)
        gap = np.divide(difference, size, out=np.zeros_like(size), where=size > 0)
        if (gap < 1 / 8).all():
            self.wide, self.gap, (self.value, self.eps) = True, gap, result

    def _sample_cotangents(self) -> Array:
        results, m = self.function.results, len(self.value)
        rows = [self.rng.standard_normal(m) for _ in range(2)]
        for row in rows:
            for leaf in results:
                sizes = abs(self.value[leaf.part])
                # A few fills of −1e9 must not make all others small.
                row[leaf.part] /= np.median(sizes[sizes > 0]) if sizes.any() else 1
        if len(results) > 1:
            for leaf in results:
                one = np.zeros(m)
                one[leaf.part] = rows[0][leaf.part]
                rows.append(one)
        if 1 < m <= COTANGENTS:
            rows += list(np.eye(m) * np.abs(rows[1]))
        w = np.stack(rows) * self.finite
        for leaf in results:  # the numbers that the function is given
            w[:, leaf.part] = w[:, leaf.part].astype(_real(leaf)).astype(float)
        return w

    def evaluate(self, x: Array) -> tuple[Array, float] | None:
        return self._evaluate(x, self.wide)

    def _evaluate(self, x: Array, wide: bool) -> tuple[Array, float] | None:
        try:
            y, eps = self.function.values(x, wide)
        except (NpattnError, ArithmeticError, ValueError, RuntimeError, TypeError) as err:
            # Outside of its domain, or not in this dtype: nothing is judged there.
            self.raised = f"{type(err).__name__}: {err}"
            return None
        # Results that are not finite at x have no slope.
        return (np.where(self.finite, y, 0), eps) if len(y) == len(self.finite) else None

    def line(self, u: Array, moved: Array) -> Line:
        """Return the line x + t u; `moved` is the norm of the terms of a slope."""
        w, eps, typical = self.cotangents, self.eps, self.typical
        return Line(self.evaluate, self.x, u, self.value, w, eps, typical, moved)

    def nearby(self) -> Array:
        """Return the arguments, each changed by about a rounding; ties stay ties."""
        units = np.concatenate([np.full(y.part.stop - y.part.start, y.eps) for y in self.function.inputs])
        return np.asarray(self.x + units * tied(self.x, self.rng))


def _real(leaf: Leaf) -> np.dtype[np.generic]:
    return np.dtype(f"f{leaf.dtype.itemsize // 2}") if leaf.dtype.kind == "c" else leaf.dtype
