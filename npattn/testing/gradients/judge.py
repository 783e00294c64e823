"""Judgement of claimed slopes: one argument after the other, along many directions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from npattn.problem.arrays import Array
from npattn.testing.gradients.case import Case
from npattn.testing.gradients.claims import Claims
from npattn.testing.gradients.directions import directions, element, random_signs, scale_of
from npattn.testing.gradients.function import Leaf
from npattn.testing.gradients.slopes import (
    AMPLIFIED,
    DEVIATIONS,
    FIRST,
    ONE_SIDED,
    ORDERS,
    PRECISION,
    STEPS,
    Line,
    Slope,
    norm,
    persists,
    remainder_order,
)
from npattn.testing.power import Power

KINKS = 8
"""Places of kinks at most that are looked for in an argument."""
ENOUGH = 2
"""Wrong slopes after which an argument is not asked further."""
DISPLACED = 24
"""Points beside a kink at which it is asked for a choice among several arguments."""
APART = 2.0**-8
"""Their distance, as a part of the arguments."""


@dataclass(frozen=True)
class Verdict:
    """Judgement of the claims along one direction, for each of k cotangents."""

    wrong: Array  # (k,)
    allowed: Array  # (k,): the error that would not have been seen; inf if none would
    # (k,): size of the claim, of which that is a part; 0 where the results are constant
    size: Array
    kink: bool = False  # one-sided slopes differ at every small step
    order: float = np.nan  # order of the Taylor remainder where it is wrong, else NaN

    @property
    def parts(self) -> Array:
        """Error that would not have been seen as a part of the claim, (k,); inf if it has none."""
        with np.errstate(all="ignore"):
            parts = np.where(self.size > 0, self.allowed / self.size, np.inf)
        return np.nan_to_num(parts, nan=np.inf)


@dataclass
class Findings:
    """Verdicts on one argument, or on several together."""

    # (u, row, order): directions in which the claim for a cotangent is wrong
    wrong: list[tuple[Array, int, float]] = field(default_factory=list)
    # (size, allowed): for each direction the size of the claim, and the error that would not have
    # been seen
    seen: list[tuple[float, float]] = field(default_factory=list)
    kinks: int = 0  # directions with a kink
    # (element, claim, left, right): a claim at a kink that is beyond the slopes on both sides
    outside: tuple[int, float, float, float] | None = None
    # (line, claim, rounding, size): the direction in which the smallest part of a claim would have
    # been seen
    best: tuple[Line, Array, Array, Array] | None = None
    _least: float = np.inf

    def add(self, u: Array, verdict: Verdict, judged: tuple[Line, Array, Array, Array]) -> None:
        """Add the verdict on a direction, and what was judged."""
        self.wrong += [(u, int(row), verdict.order) for row in np.flatnonzero(verdict.wrong)]
        line, parts = judged[0], verdict.parts
        # What changes the results by less than their rounding is 0.
        size = np.where(verdict.size > line.eps * norm(line.w * line.value), verdict.size, 0)
        row = int(parts.argmin()) if size.any() else int(verdict.allowed.argmin())
        if verdict.allowed[row] < np.inf or verdict.size[row] > 0:  # else a kink was passed over
            self.seen.append((float(size[row]), float(verdict.allowed[row])))
        if parts[row] < self._least:
            self._least, self.best = float(parts[row]), judged

    @property
    def power(self) -> Power:
        """Power of the claims along these directions."""
        sizes, allowed = np.reshape(self.seen or np.zeros((0, 2)), (-1, 2)).T
        return Power.of(sizes, allowed)

    def find_unseen(self) -> list[str]:
        """Return mistakes that are not found where these claims passed: none, unless broken."""
        if self.best is None:
            return []
        line, claim, rounding, size = self.best
        parts = _judge_steps(line, claim, rounding, size).parts
        part = float(np.where(claim == 0, np.inf, parts).min())
        if part >= 0.5:
            return []
        changes = {
            f"the gradient times 1 + {2 * part:.2g}": 1 + 2 * part,
            "twice the gradient": 2.0,
            "the negative gradient": -1.0,
            "0 for the gradient": 0.0,
        }
        judged = {
            name: judge_line(line, factor * claim, abs(factor) * rounding, abs(factor) * size)
            for name, factor in changes.items()
        }
        return [name for name, verdict in judged.items() if not verdict.wrong.any()]


def judge_line(line: Line, claim: Array, rounding: Array, size: Array) -> Verdict:
    """Judge the claimed slopes along a line.

    Parameters
    ----------
    claim, rounding : (k,) float64 arrays
        Claimed slopes, and the rounding that they may have.
    size : (k,) float64 array
        Size of the gradient, of which errors are a part.
    """
    least = PRECISION * size + 1.25 * rounding  # what the first steps let through
    with np.errstate(all="ignore"):
        for i in [i for i in range(line.count) if FIRST <= i < FIRST + 3]:
            slope, error = line.slope(i), line.error(i, i)
            agrees = abs(claim - slope.value) <= error + rounding
            sharp = error <= np.maximum(PRECISION * size, rounding / 4)
            constant = (claim == 0) & (slope.odd == 0).all(0) & (slope.truncation == 0)
            if (agrees & (sharp | constant)).all():
                error_of_line = np.maximum(_extrapolate(line, i, claim) + rounding, least)
                told = np.where(constant, 0, abs(claim))
                return Verdict(~agrees, np.where(constant, error, error_of_line), told)
    return _judge_steps(line, claim, rounding, size)


def _judge_steps(line: Line, claim: Array, rounding: Array, size: Array) -> Verdict:
    """Judge the claimed slopes at every step, all arrays (k,): see `judge_line`."""
    least = PRECISION * size + 1.25 * rounding
    with np.errstate(all="ignore"):
        slopes = [line.slope(i) for i in range(line.count)]
        error = np.stack([line.error(i, len(slopes) - 1) for i in range(len(slopes))])
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
        magnitude = np.where(size > 0, abs(claim), norm(line.w * line.value))
        constant = (claim == 0) & (np.nan_to_num(values) == 0).all(0)
        bent = np.stack([_bend(s, s.value) for s in slopes])
        # Of steps that the claim agrees with: larger ones may fold what bends at a smaller scale.
        error_of_step = np.where(gap <= error + rounding, np.maximum(error, bent), np.inf)
        allowed = np.maximum(_least_pair(error_of_step) + rounding, least)
        seen = (gap > error + rounding) & linear
        order = float(np.median(orders[seen])) if wrong.any() else np.nan
    allowed = np.nan_to_num(allowed, nan=np.inf)
    return Verdict(wrong, allowed, np.where(constant, 0, magnitude), bool(kink), order)


def _bend(slope: Slope, value: Array) -> Array:
    """Return the gap that makes the Taylor remainder of a wrong slope linear at a step."""
    near, _, far = abs(slope.odd - np.array([[1.0], [2.0], [4.0]]) * slope.h * value)
    return np.asarray(np.maximum(far, 4 * near) / slope.h)


def _least_pair(gaps: Array) -> Array:
    """Return the least gap (k,) that is seen at two steps that follow each other, of (steps, k)."""
    return np.asarray(np.maximum(gaps[:-1], gaps[1:]).min(0))


def _extrapolate(line: Line, i: int, claim: Array) -> Array:
    """Return the least gap that smaller steps would show: noise grows, and the bend falls."""
    slope, h = line.slope(i), STEPS[i : max(line.count, i + 2), None] / STEPS[i]
    noise = DEVIATIONS * AMPLIFIED * line.noise[i] / slope.h
    return _least_pair(np.maximum(noise / h, _bend(slope, claim) * h**2))


def judge_part(case: Case, claims: Claims, parts: list[slice], excluded: Array) -> Findings:
    """Judge slopes along directions of the arrays of `parts`, 0 where excluded, (n,), is True."""
    findings = Findings()
    for kind, u in directions(case.x, parts, case.rng):
        u[excluded] = 0
        if not np.any(u):
            continue
        line, *asked = judged = ask_line(case, claims, u)
        verdict = judge_line(*judged)
        if verdict.kink and kind == "tied":
            findings.kinks += 1
            u = _leave_out_kinks(case, claims, u)
            judged = ask_line(case, claims, u)
            verdict = judge_line(*judged) if np.any(u) else _pass_over(case)
            verdict = _pass_over(case) if verdict.kink else verdict
        elif verdict.kink:
            findings.kinks += 1
            verdict = _pass_over(case)
            if kind == "element":
                verdict, findings.outside = judge_kink(case, line, *asked[:2])
        findings.add(u, verdict, judged)
        if len(findings.wrong) >= ENOUGH:
            break
    return findings


def ask_line(case: Case, claims: Claims, u: Array) -> tuple[Line, Array, Array, Array]:
    """Return the line along u, and the slopes that are claimed: see `judge_line`."""
    claim, rounding, size = claims.slopes(u)
    return case.line(u, size), claim, rounding, size


def _leave_out_kinks(case: Case, claims: Claims, u: Array) -> Array:
    """Return a tied direction, (n,), without the numbers at kinks of f; 0 if there are many."""
    u = u.copy()
    values = abs(case.x) * (u != 0)
    groups: list[Array] = [np.unique(values[values > 0])]
    found = 0
    while groups and found <= KINKS:
        group = groups.pop()
        direction = np.where(np.isin(values, group), u, 0)
        if not judge_line(*ask_line(case, claims, direction)).kink:
            continue
        if len(group) > 1:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        else:
            u[values == group[0]], found = 0, found + 1
    return u if found <= KINKS else np.zeros_like(u)


def _pass_over(case: Case) -> Verdict:
    """Return the verdict on a direction with a kink: nothing is wrong, and nothing was seen."""
    k = len(case.cotangents)
    return Verdict(np.zeros(k, bool), np.full(k, np.inf), np.zeros(k))


def judge_kink(
    case: Case, line: Line, claim: Array, rounding: Array
) -> tuple[Verdict, tuple[int, float, float, float] | None]:
    """Judge the claims, (k,), for one element at which the results have a kink.

    Of each result, any slope between those on both sides may be claimed. Where the slopes beside
    the arguments are still others, results are chosen among several arguments, as in the middle of
    three that are tied: the claim may be any of these, and only their sum is judged.

    Returns
    -------
    Verdict
    tuple or None
        Element, claim, and slopes of ⟨w, f⟩ on both sides, if the claim is beyond.
    """
    before, after, error = _side_slopes(line)
    w, k = line.w, len(line.w)
    middle, apart = w @ (before + after) / 2, abs(w) @ abs(after - before) / 2
    gap = abs(claim - middle) - apart
    allowed = error + rounding
    sides = np.stack([before, after])
    beyond = gap > allowed
    verdict = Verdict(np.zeros(k, bool), allowed, np.zeros(k))
    if not beyond.any():
        return verdict, None
    for _ in range(DISPLACED):
        step = random_signs(case.rng, len(line.x)) * (scale_of(line.x) * APART)
        near = case.evaluate(line.x + step)
        if near is None:
            return _pass_over(case), None
        displaced = Line(case.evaluate, line.x + step, line.u, near[0], w, line.eps, line.moved)
        slopes = np.stack(_side_slopes(displaced)[:2])
        more = abs(w) @ np.maximum(slopes.max(0) - sides.max(0), sides.min(0) - slopes.min(0)).clip(
            0
        )
        if (more > np.maximum(allowed, apart / 8)).any():
            return _pass_over(case), None
    # A cotangent of one result, if there is such, whose slopes are those of f.
    row = int(np.where(beyond, (w != 0).sum(1), len(w[0]) + 1).argmin())
    unit = w[row, w[row] != 0]
    unit = unit[0] if len(unit) == 1 else 1.0
    [i] = np.flatnonzero(line.u)
    numbers = np.array([claim[row], w[row] @ before, w[row] @ after]) / line.u[i] / unit
    told, low, high = (float(x) + 0.0 for x in numbers)
    return Verdict(beyond, allowed, abs(claim), order=1.0), (int(i), told, low, high)


@np.errstate(all="ignore")
def _side_slopes(line: Line) -> tuple[Array, Array, Array]:
    """Return the slopes of each result on both sides (m,), and their error in each ⟨w, f⟩ (k,)."""
    errors = np.stack([line.slope(i).side_error for i in range(line.count)])
    i = int(np.argmin(np.nan_to_num(errors.max(1), nan=np.inf)))
    h = line.slope(i).h
    f = np.stack([line.at(j * h) for j in range(-4, 5)]) - line.value
    return -ONE_SIDED[0] @ f[4::-1] / h, ONE_SIDED[0] @ f[4:] / h, errors[i]


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
