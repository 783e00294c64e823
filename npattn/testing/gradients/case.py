"""The function near its arguments: cotangents, differences, and the rounding of claims."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TypeVar

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.gradients.directions import LEAST, random_signs, scale_of, tied_direction
from npattn.testing.gradients.function import Function, Leaf
from npattn.testing.gradients.slopes import Line, norm

Result = TypeVar("Result")
PERTURBATIONS = 4
"""Points near the arguments at which the rounding of a claim is measured."""
SMALL = 64
"""Roundings of an argument by which it moves unasked; beyond, the results must stay as they are."""
FINE = 7
"""Index of the first step at which differences of high order show rounding alone."""
TRIES = 64
"""Moves of arguments that are tried for a cotangent."""
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
        values, self.own_eps = function.values(self.x)
        self.noise = self._repeat(values)
        self.finite = np.isfinite(values)
        values = np.where(self.finite, values, 0)
        self.value, self._own, self.eps = values, values, self.own_eps
        self.cotangents = self._sample_cotangents()
        self.wide, self.gap = False, np.zeros(len(self.cotangents))
        if max(self.own_eps, *(leaf.eps for leaf in function.inputs)) > 2.0**-50:
            self._widen(values)

    def _repeat(self, values: Array) -> float:
        """Return the largest difference of two calls, as a part of the largest result."""
        again, _ = self.function.values(self.x)
        with np.errstate(invalid="ignore"):
            differ = np.where(np.isfinite(values), abs(again - values), 0)
        largest = np.abs(values[np.isfinite(values)]).max(initial=0)
        return float(differ.max(initial=0) / largest) if largest else float(differ.max(initial=0))

    def _widen(self, values: Array) -> None:
        """Take differences in float64 if f takes it and computes the same."""
        result = self._evaluate(self.x, True)
        if result is None or result[1] >= self.own_eps:
            return
        w = self.cotangents
        with np.errstate(invalid="ignore"):
            difference, size = norm(w * (values - result[0])), norm(w * values)
        near = difference <= size / 8
        if near.any():
            self.cotangents, self.wide, (self.value, self.eps) = w[near], True, result
            self.gap = (difference / np.where(size > 0, size, 1))[near]

    def _sample_cotangents(self) -> Array:
        """Return random cotangents: of all results, of each array, of a few single results.

        Results that do not change when the arguments move (a fill of −1e9, a weight rounded to 1)
        get a cotangent of their own: their rounding would hide all others. So do results far below
        the largest, or below 1.
        """
        m = len(self.value)
        self.live = live = np.zeros(m, bool)
        for _ in range(2):
            near = self._evaluate(self.x + tied_direction(self.x, self.rng) / 512, False)
            live |= True if near is None else near[0] != self.value
        for leaf in self.function.results:
            sizes = np.abs(self.value[leaf.part])
            # A fill may be as large as it likes; what weights and sigmoids saturate to is 1.
            live[leaf.part] &= sizes > self.own_eps * min(sizes.max(initial=0), 1)
        rows = []
        for part in (live, live, ~live & self.finite):
            sizes = np.abs(self.value[part])
            unit = np.median(sizes[sizes >= LEAST]) if (sizes >= LEAST).any() else 1.0
            rows += [part * self.rng.standard_normal(m) / unit] if part.any() else []
        for leaf in self.function.results:
            one = np.zeros(m)
            one[leaf.part] = np.sum(rows, axis=0)[leaf.part] if rows else 0
            rows += [one] if len(self.function.results) > 1 and one.any() else []
        if 1 < m <= COTANGENTS:
            sizes = np.where(np.abs(self.value) < LEAST, 1, np.abs(self.value))
            rows += list(np.eye(m)[self.finite] / sizes)
        w = np.stack(rows) if rows else np.zeros((1, m))
        for leaf in self.function.results:  # the numbers that the function is given
            rounded = w[:, leaf.part].astype(_real(leaf)).astype(float)
            w[:, leaf.part] = np.where(np.isfinite(rounded), rounded, np.sign(w[:, leaf.part]))
        return w

    @property
    def coarse(self) -> Array:
        """Rounding of the results that stay as they are, or disappear beside the largest.

        A result of 0 may be a difference that vanished: it is rounded like a median result.
        """
        sizes = np.abs(self.value)
        typical = np.median(sizes[sizes > 0]) if sizes.any() else 1.0
        still = np.where(self.live, 0, np.maximum(sizes, typical))
        return self.own_eps * norm(self.cotangents * still)

    def evaluate(self, x: Array) -> tuple[Array, float] | None:
        return self._evaluate(x, self.wide)

    def _evaluate(self, x: Array, wide: bool) -> tuple[Array, float] | None:
        result = self._attempt(partial(self.function.values, wide=wide), x)
        if result is None or len(result[0]) != len(self.finite):
            return None
        return np.where(self.finite, result[0], 0), result[1]

    def _attempt(self, call: Callable[[Array], Result], x: Array) -> Result | None:
        """Return the result of a call; None outside of the domain, or if the dtype is refused."""
        try:
            return call(x)
        except Exception as err:  # noqa: BLE001  whatever f raises there; the report has it
            self.raised = f"{type(err).__name__}: {err}"
            return None

    @cached_property
    def grain(self) -> Array:
        """Deviation of each ⟨w, f⟩ by rounding, measured where all arguments move, (k,)."""
        u, none = tied_direction(self.x, self.rng), np.zeros(len(self.cotangents))
        line = Line(self.evaluate, self.x, u, self.value, self.cotangents, self.eps, none)
        for i in range(FINE, max(line.count, FINE + 1)):
            line.slope(i)
        return np.asarray(np.maximum.reduce([*line.noise.values()]))

    def line(self, u: Array, moved: Array) -> Line:
        """Return the line x + t u; `moved` is the norm of the terms of a slope."""
        fixed = self.value, self.cotangents, self.eps, moved, self.grain
        return Line(self.evaluate, self.x, u, *fixed)

    def nearby(self, part: float) -> Array:
        """Return the arguments, each changed by a part or at least a rounding; ties stay ties."""
        units = np.maximum(self.function.units, part)
        return np.asarray(self.x + units * tied_direction(self.x, self.rng))

    def indistinct(self, gradient: Array, signs: Array) -> Array:
        """Return arguments (k, n) at which ⟨w, f⟩ is what it is here, but for its rounding.

        A saturated unit computes its slope from its result, as 1 − y², so that what it claims may
        be the slope at any argument with that result. Elements with a large slope move by their
        own rounding, those with a small one by as much as moves ⟨w, f⟩ by a rounding.

        Parameters
        ----------
        gradient : (k, n) float64 array
            Claims at the arguments.
        signs : (k, n) float64 array
            Parts by which they move, up or down.
        """
        x, units = np.nan_to_num(self.x, posinf=0, neginf=0), self.function.units
        rounding = self.own_eps * norm(self.cotangents * self.value)
        with np.errstate(all="ignore"):
            reach = rounding[:, None] / abs(gradient)
        least, most = units * abs(x), np.maximum(abs(x), scale_of(x))
        reach = np.clip(np.nan_to_num(reach, nan=np.inf), least, most)
        found = np.tile(self.x, (len(gradient), 1))
        sizes, ties = np.unique(abs(x), return_inverse=True)  # ties stay ties
        for row, allowed in enumerate(2 * rounding):
            part = np.full(len(sizes), np.inf)
            np.minimum.at(part, ties, reach[row])
            moves = signs[row, : len(sizes)] * part
            far = part > SMALL * self.own_eps * sizes
            near = np.where(far, 0, moves)
            moves = near + self._settle(row, np.where(far, moves, 0), ties, allowed)
            found[row] += np.where(x < 0, -1, 1) * moves[ties]
        return found

    def _settle(self, row: int, moves: Array, ties: Array, allowed: float) -> Array:
        """Return moves of groups of elements that change ⟨w, f⟩ by no more than is allowed, or 0.

        Parameters
        ----------
        row : int
            Of the cotangents.
        moves : (g,) float64 array
            Proposed.
        ties : (n,) integer array
            Group of each element.
        """
        kept, signs = np.zeros(len(moves)), np.where(self.x < 0, -1, 1)
        waiting = [(np.flatnonzero(moves), 1.0)]
        for _ in range(TRIES):
            if not waiting or not waiting[0][0].size:
                break
            groups, factor = waiting.pop(0)
            moved = np.zeros(len(moves))
            moved[groups] = factor * moves[groups]
            near = self._evaluate(self.x + signs * (kept + moved)[ties], False)
            if near is not None and abs(self.cotangents[row] @ (near[0] - self._own)) <= allowed:
                kept += moved
            elif len(groups) > 1:
                waiting += [(half, factor) for half in np.array_split(groups, 2)]
            elif factor > self.own_eps:
                waiting.append((groups, factor / 16))
        return kept

    def spread(self, ask: Callable[[Array, bool], Array], gradient: Array | None = None) -> Array:
        """Return the rounding of a claim, by how it varies near the arguments.

        Parameters
        ----------
        ask : callable
            Returns the claim at a vector, or one at each of k vectors, in the dtypes of the
            arguments or, if True, in float64.
        gradient : (k, n) float64 array, optional
            Claims that are gradients, of which each row has vectors of its own.

        Returns
        -------
        array
            Differences of claims near the arguments from that at the arguments, along a first axis.
            In narrower dtypes, of the differences from the claim in float64: a mistake hardly
            varies, a rounding does.
        """
        compares = self.wide and self._attempt(lambda x: ask(x, True), self.x) is not None

        def difference(x: Array) -> Array:
            return ask(x, False) - ask(x, True) if compares else ask(x, False)

        moves = [0.0, max(1 / 512, 16 * self.own_eps)] if compares else [0.0]
        here, spread = difference(self.x), []
        signs = np.zeros((len(self.cotangents), len(self.x)))
        for number in range(len(moves) * PERTURBATIONS):
            move = moves[number % len(moves)]
            if move or gradient is None:
                x = self.nearby(move)
            else:  # once up and once down, of which only one leads out of saturation
                fresh = random_signs(self.rng, signs.size).reshape(signs.shape)
                signs = -signs if number % (2 * len(moves)) else fresh
                x = self.indistinct(gradient, signs)
            near = self._attempt(difference, x)
            with np.errstate(invalid="ignore"):
                moved = np.zeros_like(here) if near is None else near - here
            spread.append(np.where(np.isfinite(moved), moved, 0))
        return np.stack(spread)


def _real(leaf: Leaf) -> np.dtype[np.generic]:
    return np.dtype(f"f{leaf.dtype.itemsize // 2}") if leaf.dtype.kind == "c" else leaf.dtype
