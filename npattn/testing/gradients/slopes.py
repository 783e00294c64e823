"""Slopes of a function along a line, each with an estimate of its own error.

With φ(t) = ⟨w, f(x + t u)⟩ at the nodes −4h … 4h, a slope is the central difference of order 8,

    D₈ = Σ_j c_j (φ(jh) − φ(−jh)) / h,     truncation ≤ 4 max(|D₈ − D₆|, |D₆ − D₄| / 16),

and rounding is measured: the differences Δ⁶, Δ⁷, Δ⁸ of a smooth φ vanish, and those of independent
errors with standard deviation σ have √C(2k, k) σ.  The error of D₈ is then the truncation and eight
standard deviations, 8 √(2 Σ c²) σ / h.  σ is at least the rounding of the results, and at least
that measured at any smaller h.

One step proves nothing: φ may bend at a smaller scale, and an estimate may be lucky.  So a
difference counts if it *persists*: it is beyond its error at two neighbouring steps, and at each
smaller step that would still show half of it.  It must also stay as large as it is: the remainder
φ(h) − φ(−h) − 2h g falls like h if g is wrong, and like h³ if it is right (the Taylor test).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import comb, sqrt
from typing import Any

import numpy as np

from npattn.problem.arrays import Array

CENTRAL = np.array(
    [[4 / 5, -1 / 5, 4 / 105, -1 / 280], [3 / 4, -3 / 20, 1 / 60, 0], [2 / 3, -1 / 12, 0, 0]]
)
"""Weights of φ(jh) − φ(−jh), j = 1 … 4, in differences of order 8, 6 and 4."""
ONE_SIDED = np.array([[-25 / 12, 4, -3, 4 / 3, -1 / 4], [-11 / 6, 3, -3 / 2, 1 / 3, 0]])
"""Weights of φ(0) … φ(4h) in one-sided differences of order 4 and 3."""


def _differences(order: int, nodes: int = 9) -> Array:
    """Return Δᵏ of the nodes, of which errors with a deviation of 1 have a deviation of 1."""
    return np.diff(np.eye(nodes), order, axis=0) / sqrt(comb(2 * order, order))


_NOISE = np.vstack([_differences(k) for k in (6, 7, 8)])  # (6, 9)
_SIDE_NOISE = np.vstack([_differences(k, 5) for k in (3, 4)])  # (3, 5)
_ZEROS = np.zeros((3, 4))
STENCILS = np.vstack(
    [
        np.hstack([-CENTRAL[:, ::-1], np.zeros((3, 1)), CENTRAL]),
        np.eye(9)[[5, 6, 8]] / 2 - np.eye(9)[[3, 2, 0]] / 2,
        np.hstack([-ONE_SIDED[:, ::-1], np.zeros((2, 4))]),
        np.hstack([np.zeros((2, 4)), ONE_SIDED]),
        np.hstack([_SIDE_NOISE, _ZEROS]),
        np.hstack([_ZEROS, _SIDE_NOISE]),
        _NOISE,
    ]
)
"""Everything that is linear in φ(−4h) … φ(4h), one row each: see `Line.slope`."""
DEVIATIONS = 8
"""Standard deviations of rounding within which a slope may lie."""
AMPLIFIED, SIDE_AMPLIFIED = (sqrt(2 * float((w[0] ** 2).sum())) for w in (CENTRAL, ONE_SIDED))
"""Deviation of a central slope, and of both one-sided ones, in units of σ / h."""
STEPS = 2.0 ** -np.array([*range(0, 16, 2), *range(16, 50, 4)])
"""Steps h, in units of the direction."""
FIRST = 3
"""Index of the step that is tried first."""
PRECISION = 1e-9
"""Part of a gradient beyond which no error is looked for once a step agrees."""
ORDERS = (0.5, 2)
"""Orders of the remainder of a wrong gradient, 1; that of a right one is 3, that of noise 0."""
Evaluate = Callable[[Array], "tuple[Array, float] | None"]


@dataclass(frozen=True)
class Slope:
    """Slopes of ⟨w, f⟩ at one step h, for each of k cotangents w."""

    h: float
    value: Array  # (k,): the truncation is inf where a node is not finite
    truncation: Array
    odd: Array  # (3, k): half of φ(jh) − φ(−jh) for j = 1, 2, 4
    left: Array  # (k,): one-sided slopes, and the error of both
    right: Array
    side_error: Array


class Line:
    """Values of f on a line x + t u.

    Parameters
    ----------
    evaluate : callable
        Returns f at a vector, or None where f raises.
    x, u : (n,) float64 vectors
    value : (m,) float64 vector
        f(x).
    cotangents : (k, m) float64 array
    eps : float
        Distance of 1 to the next number, in the dtype of the results.
    moved : (k,) float64 array
        √Σ (g u)², by which a rounding of the arguments moves φ, in units of that rounding.
    grain : (k,) float64 array
        Deviation of φ by roundings that were measured along other lines. It counts where φ does not
        change along this one: f may round what u moves to fewer digits.
    """

    def __init__(
        self, evaluate: Evaluate, x: Array, u: Array, value: Array, cotangents: Array, eps: float,
        moved: Array, grain: Array | float = 0.0,
    ) -> None:  # fmt: skip
        self.evaluate, self.x, self.u, self.value = evaluate, x, u, value
        self.w, self.computed = cotangents, {0.0: value}
        self.slopes: dict[int, Slope] = {}
        self.noise: dict[int, Array] = {}
        self.eps, self.moved = eps, moved
        self.response, silent = self._response()
        self.grain = np.where(silent, grain, 0.0)

    def _response(self) -> tuple[Array, Array]:
        """Return the smallest t at which each φ changes, and where it does not for any small one.

        The function may round x to fewer digits.
        """
        response = np.full(len(self.w), self.eps)
        silent = np.ones(len(self.w), bool)
        for exponent in (50, 44, 37, 30, 24, 20, 16, 12, 9):
            t = 2.0**-exponent
            if silent.any() and t >= self.eps / 8:
                changed = (self.at(t) != self.value) @ (self.w != 0).T
                response[silent & changed] = max(t if exponent < 50 else 0.0, self.eps)
                silent &= ~changed
        return response, silent

    def at(self, t: float) -> Array:
        """Return f(x + t u); NaN where f raises: outside of its domain."""
        if t not in self.computed:
            result = self.evaluate(self.x + t * self.u)
            self.computed[t] = np.full(len(self.value), np.nan) if result is None else result[0]
        return self.computed[t]

    @property
    def count(self) -> int:
        """Number of steps that are not too small for the digits to which f rounds x."""
        return max(int(np.sum(64 * self.response.min() <= STEPS)), 2)

    def slope(self, i: int) -> Slope:
        """Return the slopes at step i; the noise is its own, not yet that of smaller steps."""
        if i not in self.slopes:
            self.slopes[i] = self._measure(i)
        return self.slopes[i]

    @np.errstate(all="ignore")
    def _measure(self, i: int) -> Slope:
        """Return the slopes at step i, of k cotangents, with their errors; keep their noise."""
        h = float(STEPS[i])
        f = np.stack([self.at(j * h) for j in range(-4, 5)]) - self.value  # (9, m)
        finite = np.isfinite(f)
        p = np.where(finite, f, 0) @ self.w.T  # (9, k)
        # A rounding is at most eps / 2, and uniform: √(1/3) of that.
        floor = (self.eps * norm(self.w * self.value) + self.response * self.moved) / sqrt(12)

        rows = STENCILS @ p
        (d8, d6, d4), odd, (left, low, right, high) = rows[:3] / h, rows[3:6], rows[6:10] / h
        truncation = 4 * np.maximum(abs(d8 - d6), abs(d6 - d4) / 16)
        floor = np.maximum(floor, self.grain)
        noise = np.maximum(abs(rows[16:]).max(0), floor)
        side_noise = np.maximum(abs(rows[10:16]).max(0), floor)
        side_error = (
            4 * (abs(left - low) + abs(right - high)) + DEVIATIONS * SIDE_AMPLIFIED * side_noise / h
        )

        lost = ~finite.all(0) @ (self.w != 0).T
        usable = np.isfinite(p).all(0) & ~lost
        self.noise[i] = np.where(usable, noise, 0)
        truncation, side_error = (np.where(usable, x, np.inf) for x in (truncation, side_error))
        return Slope(h, d8, truncation, odd, left, right, side_error)

    def error(self, i: int, finest: int) -> Array:
        """Return the error of step i: truncation, and the noise of all steps down to `finest`."""
        slope = self.slope(i)
        noise = np.maximum.reduce([self.noise[j] for j in range(i, finest + 1) if j in self.noise])
        return np.asarray(slope.truncation + DEVIATIONS * AMPLIFIED * noise / slope.h)


def norm(a: Array, axis: int = -1) -> Array:
    """Return the root of the sum of squares, which do not underflow."""
    largest = np.abs(a).max(axis, keepdims=True, initial=0)
    with np.errstate(all="ignore"):
        sums = np.where(largest > 0, (a / largest) ** 2, 0).sum(axis)
    result: Array = largest.squeeze(axis) * np.sqrt(sums)
    return result


def persists(size: Array, error: Array) -> Array:
    """Return where a difference persists to the smallest steps that could show it.

    Parameters
    ----------
    size, error : (steps, k) arrays
        The difference at each step, the largest step first, and its error.

    Returns
    -------
    (k,) bool array
    """
    beyond = size > error
    found = np.zeros(size.shape[1:], bool)
    for i in range(len(size) - 1):
        blind = error[i + 1 :] >= size[i] / 2
        found |= beyond[i] & beyond[i + 1] & (beyond[i + 1 :] | blind).all(0)
    return found


def remainder_order(slope: Slope, claim: Array) -> Array:
    """Return the order of φ(jh) − φ(−jh) − 2jh g from j = 1 to 4, for a claimed slope g."""
    with np.errstate(all="ignore"):
        near, _, far = abs(slope.odd - np.array([[1.0], [2.0], [4.0]]) * slope.h * claim)
        order: Any = np.log2(far / near) / 2
    return np.asarray(np.where(np.isnan(order), 1.0, order))
