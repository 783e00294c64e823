"""Judgement of claimed slopes: one argument after the other, along many directions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.gradients.case import Case
from npattn.testing.gradients.claims import Claims
from npattn.testing.gradients.directions import directions, element
from npattn.testing.gradients.function import Leaf
from npattn.testing.gradients.slopes import (
    FIRST,
    ONE_SIDED,
    ORDERS,
    PRECISION,
    Line,
    norm,
    persists,
    remainder_order,
)

KINKS = 8
"""Places of kinks at most that are looked for in an argument."""
ENOUGH = 2
"""Wrong slopes after which an argument is not asked further."""
RESOLVED = 0.5
"""Part of a gradient: an error of that size must have been visible, else nothing was judged."""


@dataclass(frozen=True)
class Verdict:
    """Judgement of the claims along one direction, for each of k cotangents.

    Attributes
    ----------
    wrong : (k,) bool array
    resolution : (k,) float64 array
        The error that would have been seen, as a part of the claim; inf if none.
    kink : bool
        One-sided slopes differ at every small step.
    order : float
        Order of the Taylor remainder where it is wrong, else NaN.
    """

    wrong: Array
    resolution: Array
    kink: bool = False
    order: float = np.nan


@dataclass
class Findings:
    """Verdicts on one argument, or on several together.

    Attributes
    ----------
    wrong : list of (u, row, order)
        Directions in which the claim for a cotangent is wrong.
    resolution : float
        Smallest part of the gradient that would have been seen, in the best direction; 0 if every
        direction that could be judged has a constant result, or a kink.
    kinks : int
        Directions with a kink.
    """

    wrong: list[tuple[Array, int, float]] = field(default_factory=list)
    resolution: float = np.inf
    kinks: int = 0

    def add(self, u: Array, verdict: Verdict) -> None:
        self.wrong += [(u, int(row), verdict.order) for row in np.flatnonzero(verdict.wrong)]
        part = float(verdict.resolution.max())
        if not verdict.wrong.any() and (part > 0 or self.resolution == np.inf):
            self.resolution = min(self.resolution or np.inf, part)


def judge_line(line: Line, claim: Array, rounding: Array, size: Array) -> Verdict:
    """Judge the claimed slopes along a line.

    Parameters
    ----------
    line : Line
    claim, rounding : (k,) float64 arrays
        Claimed slopes, and the rounding that they may have.
    size : (k,) float64 array
        Size of the gradient, of which errors are a part.
    """
    steps = range(line.count)
    with np.errstate(all="ignore"):
        for i in [i for i in steps if FIRST <= i < FIRST + 3]:
            slope, error = line.slope(i), line.error(i, i)
            agrees = abs(claim - slope.value) <= error + rounding
            sharp = error <= np.maximum(PRECISION * size, rounding / 4)
            constant = (claim == 0) & (slope.odd == 0).all(0) & (slope.truncation == 0)
            if (agrees & (sharp | constant)).all():
                part = (error + rounding) / np.where(size > 0, size, np.inf)
                return Verdict(~agrees, np.where(constant, 0, part))
        slopes = [line.slope(i) for i in steps]
        error = np.stack([line.error(i, len(slopes) - 1) for i in steps])
        wide = np.where(np.isfinite(claim), 0, np.inf)  # what is not finite is wrong by any amount
        values = np.stack([s.value for s in slopes])
        gap = np.where(np.isfinite(values), np.where(wide == 0, abs(claim - values), wide), 0)
        orders = np.stack([remainder_order(s, claim) for s in slopes])
        linear = (ORDERS[0] < orders) & (orders < ORDERS[1])
        # The rounding of the claim is the same at every step: it makes no step blind.
        wrong = persists(np.where(linear, gap, 0) - rounding, error)
        bend = np.stack([np.nan_to_num(abs(s.right - s.left)) for s in slopes])
        kink = persists(bend, np.stack([s.side_error for s in slopes])).any()
        # Where the gradient is 0, errors are a share of the results.
        whole = np.where(size > 0, size, norm(line.w * line.value))
        constant = (claim == 0) & (np.nan_to_num(values) == 0).all(0)
        resolution = np.where(constant, 0, (error.min(0) + rounding) / whole)
        seen = (gap > error + rounding) & linear
        order = float(np.median(orders[seen])) if wrong.any() else np.nan
    return Verdict(wrong, np.nan_to_num(resolution, nan=np.inf), bool(kink), order)


def judge_part(case: Case, claims: Claims, parts: list[slice], excluded: Array) -> Findings:
    """Judge the slopes along directions that move the arrays of `parts`, without some elements."""
    findings = Findings()
    for kind, u in directions(case.x, parts, case.rng):
        u[excluded] = 0
        if not np.any(u):
            continue
        verdict = _judge(case, claims, u)
        if verdict.kink and kind == "tied":
            findings.kinks += 1
            verdict = _without_kinks(case, claims, u)
        elif verdict.kink:
            findings.kinks += 1
            judged = kind == "element" and _is_one_sided(case, claims, u)
            verdict = _pass_over(case, 0 if judged else np.inf)
        findings.add(u, verdict)
        if len(findings.wrong) >= ENOUGH:
            break
    return findings


def _judge(case: Case, claims: Claims, u: Array) -> Verdict:
    claim, rounding, size = claims.slopes(u)
    return judge_line(case.line(u, size), claim, rounding, size)


def _without_kinks(case: Case, claims: Claims, u: Array) -> Verdict:
    """Judge a tied direction without the numbers at which f has a kink."""
    u = u.copy()
    values = abs(case.x) * (u != 0)
    groups: list[Array] = [np.unique(values[values > 0])]
    found = 0
    while groups and found <= KINKS:
        group = groups.pop()
        own = np.where(np.isin(values, group), u, 0)
        if not _judge(case, claims, own).kink:
            continue
        if len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        else:
            u[values == group[0]], found = 0, found + 1
    verdict = _judge(case, claims, u) if found <= KINKS and np.any(u) else None
    return _pass_over(case) if verdict is None or verdict.kink else verdict


def _pass_over(case: Case, resolution: float = np.inf) -> Verdict:
    """Return the verdict on a direction with a kink: nothing is wrong."""
    k = len(case.cotangents)
    return Verdict(np.zeros(k, bool), np.full(k, resolution))


def _is_one_sided(case: Case, claims: Claims, u: Array) -> bool:
    """Return True if a claim at a kink is as near to the one-sided slopes as they are apart.

    Any slope between them may be claimed of each result. False does not prove a mistake: of three
    tied numbers, neither one-sided slope includes the middle one.
    """
    claim, rounding, size = claims.slopes(u)
    line = case.line(u, size)
    with np.errstate(all="ignore"):
        errors = np.stack([line.slope(i).side_error.max() for i in range(line.count)])
        i = int(np.argmin(np.nan_to_num(errors, nan=np.inf)))
        h = line.slope(i).h
        f = np.stack([line.at(j * h) for j in range(-4, 5)]) - line.value
        left, right = -ONE_SIDED[0] @ f[4::-1] / h, ONE_SIDED[0] @ f[4:] / h
        middle = line.w @ ((left + right) / 2)
        apart = 1.5 * abs(line.w) @ abs(right - left)
        return bool((abs(claim - middle) <= apart + line.slope(i).side_error + rounding).all())


def is_steep(case: Case, leaf: Leaf, i: int) -> bool:
    """Return True if f is not finite beside element i, or its one-sided slopes grow towards it.

    A slope that grows like a logarithm is 2.3 times as steep 256 times nearer.
    """
    line = case.line(element(case.x, leaf.part, i), np.zeros(len(case.cotangents)))
    far, near = line.slope(FIRST), line.slope(FIRST + 4)
    sizes = [np.fmax(abs(s.left), abs(s.right)) for s in (far, near)]
    with np.errstate(all="ignore"):
        return bool(np.any(~np.isfinite(sizes[1]) | (sizes[1] > 2 * sizes[0] + far.side_error)))


def numeric_gradient(case: Case, leaf: Leaf, row: int) -> tuple[Array, Array]:
    """Return differences of ⟨w, f⟩ for each element of an array, and their errors, at one step."""
    slopes, errors = [], []
    for i in range(leaf.part.start, leaf.part.stop):
        u = element(case.x, leaf.part, i)
        line = case.line(u, np.zeros(len(case.cotangents)))
        slopes.append(line.slope(FIRST).value[row] / u[i])
        errors.append(line.error(FIRST, FIRST)[row] / u[i])
    return np.reshape(slopes, leaf.shape), np.reshape(errors, leaf.shape)
