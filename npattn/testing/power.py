"""Power of a comparison: the smallest error of a result that it would have seen.

    x exact value   t tolerance   u unit roundoff and η least number of the dtype of the result
    A result x · (1 + ε) is out of tolerance where ε > (t + η) / |x| + u, its factor there.
    A comparison has a factor for each element that is not 0; its own is their median.

A comparison that would not have seen a result twice as large in at least half of these elements
says nothing: the result is "not judged", and no report may call it passed. Every way to judge takes
powers, words and verdicts from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from npattn.problem.arrays import Array, cast, finfo

Verdict = Literal["passed", "failed", "no verdict"]

EXIT_CODES: dict[Verdict, int] = {"passed": 0, "failed": 1, "no verdict": 2}
LEAST_SHARE = 0.5
"""Share of the elements in which a doubling must be seen, or the result is not judged."""
WEAK = 0.1
"""Factor above which a report says so in its text."""
NOTED = 0.1
"""Share of elements without a tolerance from which a report says so in its text."""


@dataclass(frozen=True)
class Power:
    """Smallest errors of one result that its comparisons would have seen, over some problems."""

    # for each problem the smallest ε such that 1 + ε times the result would have been out of
    # tolerance, its median over the elements that are not 0; inf: none
    factors: tuple[float, ...] = ()
    best: float = math.inf  # the smallest of any element
    # the smallest absolute error that would have been seen where the exact result is 0
    zero: float = math.inf
    elements: int = 0  # number of elements of all problems
    nonzero: int = 0  # number that are not 0 and not infinite; NaN counts
    doubled: int = 0  # number of these in which twice the result would have been seen
    without: int = 0  # number of elements without a tolerance: it is inf, or the exact result NaN

    @classmethod
    def of(cls, exact: Array, tolerance: Array, dtype: Any = np.float64) -> Power:
        """Return the power of one comparison.

        Parameters
        ----------
        exact, tolerance : float64 arrays of the same shape
            The exact result and the allowed error before the result is rounded to `dtype`.
        dtype : dtype
            Dtype of the result.
        """
        size = abs(exact)
        unit, least = _units(np.dtype(dtype))
        with np.errstate(all="ignore"):
            factor = (tolerance + least) / size + unit  # NaN or inf: nothing would have been seen
        counted = (size != 0) & (size != np.inf)  # NaN is among them
        factors = factor[counted]
        zeros = size == 0
        zero = math.inf
        if factors.size < factor.size and zeros.any():
            zero = float(np.fmin.reduce(tolerance[zeros], initial=np.inf)) + least
        without = factor.size - int(np.count_nonzero(tolerance < np.inf))
        finite = int(np.count_nonzero(size < np.inf))
        if finite < factor.size:
            nan = np.isnan(size)  # the tolerance of an infinite result is not read
            without = int(np.count_nonzero(nan | ((size < np.inf) & ~(tolerance < np.inf))))
        if not factors.size:
            return cls((), math.inf, zero, factor.size, 0, 0, without)
        middle = factors.size // 2
        factors = np.partition(factors, middle)  # NaN comes last
        median, best = float(factors[middle]), float(np.fmin.reduce(factors[: middle + 1]))
        doubled = int(np.count_nonzero(factors < 1))
        return cls(
            (math.inf if math.isnan(median) else median,),
            math.inf if math.isnan(best) else best,
            *(zero, factor.size, factors.size, doubled, without),
        )

    @classmethod
    def union(cls, powers: Iterable[Power]) -> Power:
        """Return the power of all these comparisons."""
        powers = tuple(powers)
        return cls(
            tuple(factor for one in powers for factor in one.factors),
            min((one.best for one in powers), default=math.inf),
            min((one.zero for one in powers), default=math.inf),
            sum(one.elements for one in powers),
            sum(one.nonzero for one in powers),
            sum(one.doubled for one in powers),
            sum(one.without for one in powers),
        )

    @property
    def factor(self) -> float:
        """Median of the factors over the problems; inf if there is none."""
        return float(np.median(self.factors)) if self.factors else math.inf

    @property
    def share(self) -> float:
        """Share of the elements that are not 0 in which twice the result would have been seen."""
        return self.doubled / self.nonzero if self.nonzero else float(self.zero < math.inf)

    @property
    def judged(self) -> bool:
        """True if a result twice as large would have been seen in at least half of the elements.

        If the exact result is 0 everywhere: if some error would have been seen. A result that is
        empty, all NaN or all inf is not judged.
        """
        return self.share >= LEAST_SHARE

    @property
    def percent(self) -> str:
        """The factor in words: "2.3 %"; "no error" if a doubling would not be seen."""
        return _percent(self.factor) if self.factor <= 1 else "no error"

    def describe(self, name: str) -> str:
        """Return a sentence: which error would have been seen, in how many of the elements."""
        if not self.elements:
            return f"{name}: empty"
        if not self.nonzero:
            seen = f"{name} is 0: an error of {self.zero:.2g} would have been seen"
            return seen if self.judged else f"{name}: no error would have been seen"
        share = f"{_percent(self.share)} of the elements were judged"
        if not self.judged:
            return f"{name}: twice the result would not have been seen; {share}"
        if self.factor > 1:  # the median of problems, of which most say little
            return f"{name}: twice the result would have been seen; {share}"
        return f"{name}: an error of {_percent(self.factor)} would have been seen; {share}"

    def describe_gaps(self, name: str, reason: str) -> str:
        """Return how many elements have no tolerance, for a reason ("g is NaN there"); "" if none.

        The reason is left out if it is "".
        """
        if not self.without:
            return ""
        share = _percent(self.without / self.elements)
        return f"{name}: {share} of the elements were not judged{reason and f': {reason}'}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for a journal."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Power:
        """Return the power with the fields of `as_dict`."""
        return cls(**{**values, "factors": tuple(values["factors"])})


def union(powers: Iterable[Mapping[str, Power]]) -> dict[str, Power]:
    """Return the power of each result over all problems, from those of each."""
    together: dict[str, list[Power]] = {}
    for one in powers:
        for name, power in one.items():
            together.setdefault(name, []).append(power)
    return {name: Power.union(by_problem) for name, by_problem in together.items()}


def keep_judged(powers: Sequence[Power]) -> Sequence[Power]:
    """Return the powers of the problems that judge a result; all if these are fewer than half."""
    judged = [one for one in powers if one.judged]
    return judged if 2 * len(judged) >= len(powers) else powers


def describe_unjudged(powers: Mapping[str, Sequence[Power]]) -> list[str]:
    """Return a line for each result that only some problems judge."""
    kept = {name: len(keep_judged(by_problem)) for name, by_problem in powers.items()}
    return [
        f"{name} was judged on {kept[name]} of {len(by_problem)} problems"
        for name, by_problem in powers.items()
        if kept[name] < len(by_problem)
    ]


@dataclass
class PlainPowers:
    """Power of each result in problems that passed."""

    # only of problems with plain scores, if there is one: among steep ones, rounding may take every
    # digit
    powers: dict[str, Power] = field(default_factory=dict)
    plain: bool = False  # problems with plain scores are among them

    def note_powers(self, powers: Mapping[str, Power], *, plain: bool) -> None:
        """Add the powers of one problem that passed."""
        if plain > self.plain:
            self.powers, self.plain = {}, True
        if plain or not self.plain:
            self.powers = union([self.powers, powers])


def find_unjudged(powers: Mapping[str, Power]) -> tuple[str, ...]:
    """Return the results that are not judged."""
    return tuple(name for name, power in powers.items() if not power.judged)


def describe(powers: Mapping[str, Power], reason: str = "", *, verbose: bool = False) -> list[str]:
    """Return the lines of a report on its powers: those that are weak, or with `verbose` all.

    `reason` says where elements have no tolerance, as of `Power.describe_gaps`.
    """
    lines = []
    for name, power in powers.items():
        if verbose or not power.judged or (power.factor > WEAK and power.nonzero):
            lines.append(power.describe(name))
        if power.without and (verbose or power.without > NOTED * power.elements):
            lines.append(power.describe_gaps(name, reason))
    return lines


def _percent(share: float) -> str:
    """Format a share: two digits, and an exponent without padding: "0.01 %", "3e-5 %"."""
    digits, e, exponent = f"{100 * share:.2g}".partition("e")
    if e and int(exponent) > 0:
        return f"{100 * share:.0f} %" if share < 1000 else f"{digits}e{int(exponent)} %"
    return f"{digits}e{int(exponent)} %" if e else f"{digits} %"


_KNOWN_UNITS: dict[np.dtype[Any], tuple[float, float]] = {}


def _units(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the unit roundoff and half the least number of a dtype."""
    if dtype not in _KNOWN_UNITS:
        if dtype.kind in "biu":
            dtype = np.dtype(np.float64)
        limits = finfo(dtype)
        least = float(limits.smallest_subnormal) / 2
        _KNOWN_UNITS[dtype] = float(limits.eps) / 2, least
    return _KNOWN_UNITS[dtype]


# --- verdict --------------------------------------------------------------------------------------


class Conclusion(NamedTuple):
    """Verdict of a report, and the reason if it is "no verdict"."""

    verdict: Verdict
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


class Concluded:
    """A report with a `conclusion`, and what users ask of that."""

    @property
    def conclusion(self) -> Conclusion:
        """Verdict and reason."""
        raise NotImplementedError

    @property
    def verdict(self) -> Verdict:
        """Verdict: "passed", "failed" or "no verdict".

        It is failed if something is wrong, and passed if everything was judged that had to be, and
        could have failed.
        """
        return self.conclusion.verdict

    @property
    def reason(self) -> str:
        """Why there is no verdict: "nothing tested", "not judged: dx"; "" if there is one."""
        return self.conclusion.reason

    @property
    def passed(self) -> bool:
        """True if the verdict is "passed"."""
        return self.verdict == "passed"


def conclude(
    *,
    failed: bool,  # something is wrong
    tested: bool = True,  # something was tested
    missing: Sequence[str] = (),  # what had to be tested, and was not
    incomplete: Sequence[str] = (),  # rules that were not asked within the time
    undecided: Sequence[str] = (),  # results for which no measurement was precise enough
    unjudged: Sequence[str] = (),  # results that are not judged
    accept: Collection[str] = (),  # results that need no verdict
    reasons: Sequence[str] = (),  # other reasons to have none
) -> Conclusion:
    """Return the verdict of a report: a failure comes before every reason to have none."""
    if failed:
        return Conclusion("failed")
    if not tested and not incomplete:
        reasons = ("nothing tested", *reasons)
    count = len(incomplete)
    parts = {
        "not tested, and asked for": ", ".join(missing),
        "incomplete": f"{count} rule{'' if count == 1 else 's'}" if count else "",
        "undecided": ", ".join(name for name in undecided if name not in accept),
        "not judged": ", ".join(name for name in unjudged if name not in accept),
    }
    named = (f"{title}: {names}" for title, names in parts.items() if names)
    text = "; ".join((*reasons, *named))
    return Conclusion("no verdict" if text else "passed", text)


# --- self-test ------------------------------------------------------------------------------------


def find_unseen(
    result: Array, exact: Array, tolerance: Array, fails: Callable[[Array], bool]
) -> list[str]:
    """Return the changes of a passed result that its comparison does not find: [] unless broken.

    All arrays have the shape of the result. The result is multiplied by 1 + 2ε, doubled, negated,
    set to 0, shifted by one element, and moved where the exact result is 0. A change that leaves
    every element within its tolerance is left out: nobody must find it.

    Parameters
    ----------
    result : array
        It passed, in the dtype in which it was compared.
    fails : callable
        Takes a changed result, and returns True if it is found to be wrong, by the whole way that
        results take to a verdict.
    """
    unit, least = _units(result.dtype)
    wide = result.astype(np.complex128 if result.dtype.kind == "c" else np.float64)
    unseen = []
    for name, values in _change(wide, exact, Power.of(exact, tolerance, result.dtype)):
        changed = cast(values, result.dtype)
        with np.errstate(all="ignore"):
            after = changed.astype(wide.dtype)
            allowed = (tolerance + unit * abs(after) + least) * (1 + 2**-40)
            out = (abs(after - exact) > allowed) & np.isfinite(after) & np.isfinite(exact)
        if out.any() and not fails(changed):
            unseen.append(name)
    return unseen


def _change(wide: Array, exact: Array, power: Power) -> Iterator[tuple[str, Array]]:
    """Yield mistakes by their names, of a result in float64."""
    with np.errstate(all="ignore"):
        if power.factor < math.inf:
            yield f"the result times 1 + {2 * power.factor:.2g}", wide * (1 + 2 * power.factor)
        if power.zero < math.inf:
            yield f"0 as {2 * power.zero:.2g}", np.where(exact == 0, wide + 2 * power.zero, wide)
        yield "twice the result", 2 * wide
        yield "the negative result", -wide
        yield "0 for the result", np.zeros_like(wide)
        yield "the result shifted by one element", np.roll(wide, 1)
