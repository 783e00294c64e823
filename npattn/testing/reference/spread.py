"""Exact results of a reference, and how far another right function may be from them.

docs/tolerance.md, "A reference of your own", has the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

import ml_dtypes
import numpy as np

from npattn.problem.arrays import Array, finfo
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.comparison import Comparison, compare_result
from npattn.testing.power import find_unseen
from npattn.testing.reference.decisions import Decisions, Mode
from npattn.testing.reference.intermediates import Watched
from npattn.testing.reference.noise import Noise

ALARM = 1e-4
"""Probability that a report on a right function has a false alarm, at most."""
DRAWS = (6, 32)
"""Random roundings before a first look, and before a verdict against a result."""
STEPS = 8
"""Operations of f to one of the reference: a softmax, or a layer norm, has as many."""
FLOAT64 = 2.0**-40
"""Unit roundoff that is imitated in place of 2⁻⁵³, which float64 does not show; errors scale."""

LEFT_OUT = 0.1
"""Share of elements whose path crosses a kink within its error, above which none is judged."""
CLEAR = 64.0
"""Error / tolerance at the first look beyond which a search asks no further."""
MEDIAN = 0.455
"""Median of the square of a normal number, whose mean is 1."""

Ask = Callable[[Mapping[str, Array]], Mapping[str, Array]]


@dataclass(frozen=True)
class Call:
    """One problem: its arrays and cotangents, and two functions of them."""

    arrays: dict[str, Array]  # float arrays in the dtype tested, cotangents too
    f: Ask  # results and gradients, by name, for arrays of these names
    reference: Ask
    watched: Watched  # the function behind `reference`
    terms: int  # number of terms of the longest sum


@dataclass
class Spread:
    """Exact results of a reference, and the mean squares of its errors under random rounding."""

    call: Call
    dtype: str
    seed: int
    exact: dict[str, Array] = field(init=False)
    coarse: dict[str, float] = field(default_factory=dict)
    draws: int = 0
    moved: dict[str, Array] | None = None

    def __post_init__(self) -> None:
        self.wide = {name: x.astype(np.float64) for name, x in self.call.arrays.items()}
        self.narrow = False
        self.decisions = Decisions()
        try:
            self.exact = self._run("record")
        except ImplementationError:  # it takes no float64: its own precision is the highest
            self.narrow = True
            self.decisions = Decisions()
            self.exact = self._run("record")
        self.lengths = sorted(self.call.watched.lengths)
        self.squares = {name: np.zeros(x.shape) for name, x in self.exact.items()}
        self.rng = np.random.default_rng([self.seed, 44])
        info = finfo(np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)))
        self.u = float(info.eps) / 2
        self.smallest = float(info.smallest_subnormal) / 2
        self.largest = float(info.max) / STEPS**2  # f may form a product in another order
        self.detached = None if self.narrow else self._detach()

    def _detach(self) -> Decisions | None:
        """Return the decisions of a run with maxima as constants; None if that changes results."""
        if not self.call.watched.takes_maxima:
            return None
        self.detached = Decisions()
        results = self._run("record", detached=True)
        with np.errstate(all="ignore"):
            same = all(
                x.shape == results[n].shape
                and np.allclose(results[n], x, 0, 1e-12 * np.max(abs(x), initial=0), equal_nan=True)
                for n, x in self.exact.items()
            )
        return self.detached if same else None

    def _run(
        self, mode: Mode, arrays: Mapping[str, Array] | None = None, *, detached: bool = False
    ) -> dict[str, Array]:
        """Evaluate the reference once more, rounding at random where `arrays` are given."""
        noise = None
        if arrays is not None:
            noise = Noise(self.u / self.scale, self.smallest, self.rng, self.largest)
            arrays = {name: noise.round(x) for name, x in arrays.items()}
        decisions = self.detached if detached and self.detached is not None else self.decisions
        decisions.start(mode)
        with self.call.watched.running(noise, decisions, detached=detached):
            return self._ask(self.wide if arrays is None else arrays)

    def _ask(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        if self.narrow:
            arrays = {name: x.astype(self.call.arrays[name].dtype) for name, x in arrays.items()}
        results = self.call.reference(arrays).items()
        return {name: np.asarray(x, np.float64) for name, x in results}

    @property
    def scale(self) -> float:
        """Errors in the dtype, in units of those that are imitated."""
        return self.u / FLOAT64 if self.dtype == "float64" else 1.0

    def draw(self, count: int) -> None:
        """Add random roundings until there are `count`."""
        while self.draws < count:
            detached = self.detached is not None and self.draws % 2 == 1
            results = self._run("repeat", self.wide, detached=detached)
            with np.errstate(all="ignore"):
                for name, exact in self.exact.items():
                    self.squares[name] += (self.scale * (results[name] - exact)) ** 2
            self.draws += 1
        casts = self.dtype != "float64" or self.call.watched.narrowed
        if not self.coarse and casts and not self.narrow:
            self._measure_own()

    def _measure_own(self) -> None:
        """Note where the reference, run in the dtype as it is, errs more than its roundings tell.

        Of most elements: at a jump or a kink it may have taken the other side.
        """
        try:
            results = self._ask(self.call.arrays)
        except ImplementationError:
            results = {}  # it takes float64 alone
        for name, exact in self.exact.items():
            result = results.get(name)
            with np.errstate(all="ignore"):
                error = np.full(exact.shape, np.nan) if result is None else (result - exact) ** 2
                ratios = error * self.draws / self.squares[name]
            finite = ratios[np.isfinite(ratios)]
            self.coarse[name] = max(1.0, float(np.median(finite)) / MEDIAN) if finite.size else 1.0

    def turn(self, alarm: float) -> dict[str, Array]:
        """Return how far other decisions, within their error, move each element."""
        if self.moved is not None:
            return self.moved
        self.decisions.width = lambda square, size: (
            quantile(alarm / max(size, 1), self.draws) * self.scale * np.sqrt(self.more * square)
        )
        moved = {name: np.zeros(x.shape) for name, x in self.exact.items()}
        for self.decisions.parity in (0, 1):
            results = self._run("turn")
            with np.errstate(all="ignore"):
                for name, exact in self.exact.items():
                    gap = abs(results[name] - exact)
                    # a turn that ends in NaN, where the exact value is none, moves it anywhere
                    gap = np.where(np.isnan(gap) & np.isfinite(exact), np.inf, gap)
                    moved[name] = np.fmax(moved[name], gap)
        self.moved = moved
        return moved

    @property
    def more(self) -> float:
        """Variance of an element of another right function, in units of that of the reference."""
        # What g sums in two steps, f may sum in one.
        longest = math.prod(self.lengths[-2:]) if self.lengths else self.call.terms
        return STEPS + 1 + min(self.call.terms, longest) / 3

    def tolerance(self, name: str, alarm: float, last: bool) -> Array:
        """Return the tolerance of each element, for a probability of a false alarm in all.

        Before the last draws it takes the measured spread for exact, and is smaller.
        """
        square = self.squares[name] / self.draws * self.more * self.coarse.get(name, 1.0)
        # Where terms of the reference cancel exactly, those of another right function may not. The
        # median, for a pole or a kink in a few elements must not widen the others.
        positive = square[np.isfinite(square) & (square > 0)]
        square = np.maximum(square, np.median(positive) if positive.size else 0.0)
        t = quantile(alarm / max(square.size, 1), self.draws if last else None)
        with np.errstate(all="ignore"):
            allowed = t * np.sqrt(square) + self.smallest
        return np.where(np.isnan(allowed), np.inf, allowed)


def quantile(alarm: float, draws: int | None) -> float:
    """Return x such that |error| > x · spread has at most this probability.

    Of a normal error: with `draws`, its standard deviation was estimated from so many, and x is a
    quantile of Student's t, by Wallace's approximation.
    """
    z = -NormalDist().inv_cdf(max(alarm, 1e-300) / 2)
    if draws is None:
        return z
    z *= (8 * draws + 3) / (8 * draws + 1)
    return math.sqrt(draws * math.expm1(z * z / draws))


@dataclass
class Judgement:
    """Results of a function on one problem, compared with those of its reference."""

    spread: Spread
    results: Mapping[str, Array]  # of the function
    alarm: float  # probability of a false alarm, at most
    # believe a large difference at the first look: for a search, whose end is judged again
    quick: bool = False
    comparisons: tuple[Comparison, ...] = field(init=False)
    # number of elements that are left out, for their path crosses a kink within its error
    crossed: dict[str, int] = field(default_factory=dict)
    allowed: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [name for name in self.spread.exact if name in self.results]
        found: dict[str, Comparison] = {}
        for draws in DRAWS:
            self.spread.draw(draws)
            for name in names:
                if name not in found or not found[name].passed:
                    found[name] = self._compare(name, draws == DRAWS[-1])
            self.comparisons = tuple(found.values())
            if self.passed:
                return
            if self.quick and max(c.ratio for c in self.comparisons) > CLEAR:
                return
        for name in names:
            if not found[name].passed:
                found[name] = self._compare(name, True, turned=True)
        self.comparisons = tuple(found.values())

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.comparisons)

    def _compare(self, name: str, last: bool, *, turned: bool = False) -> Comparison:
        """Compare one result; `turned` leaves out what other decisions would move."""
        share = self.alarm / max(len(self.results), 1)
        allowed = self.spread.tolerance(name, share, last)
        if turned:
            crosses = np.asarray(self.spread.turn(share)[name] > allowed / 8)
            if crosses.size and crosses.mean() > LEFT_OUT:
                crosses = np.ones(crosses.shape, bool)
            allowed = np.where(crosses, np.inf, allowed)
            self.crossed[name] = int(crosses.sum())
        self.allowed[name] = allowed
        return compare_result(name, self.results[name], self.spread.exact[name], allowed)

    def find_unseen(self) -> list[str]:
        """Return changes of results that passed which would pass too: none, or npattn is broken."""
        lines = []
        for c in self.comparisons:
            if not c.passed or c.power is None or not c.power.judged:
                continue
            self.spread.draw(DRAWS[-1])
            self._compare(c.name, True, turned=True)

            def fails(changed: Array, name: str = c.name) -> bool:
                results = {**self.results, name: changed}
                return not Judgement(self.spread, results, self.alarm).passed

            exact, allowed = self.spread.exact[c.name], self.allowed[c.name]
            unseen = find_unseen(self.results[c.name], exact, allowed, fails)
            lines += [f"{c.name}: {x}" for x in unseen]
        return lines


def judge(call: Call, dtype: str, seed: int, alarm: float, *, quick: bool = False) -> Judgement:
    """Compare the results that both give, each with its measured tolerance.

    What a few draws allow passes; what they do not is judged by more.
    """
    results = call.f(call.arrays)
    return Judgement(Spread(call, dtype, seed), results, alarm, quick)
