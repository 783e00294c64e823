"""Frequencies of rotary positions: as published, and stretched for longer sequences.

    plain        f_i = base^(−2i/R)
    linear       f_i / factor: positions are interpolated
    ntk          base · factor^(R/(R−2)): the slowest pair is interpolated, the fastest is not
    dynamic_ntk  ntk with a factor that grows with the sequence
    yarn         a ramp over the pairs: linear where one turns rarely, plain where it turns often
    llama3       the same, by wavelength
    longrope     f_i / factor_i, one set for short sequences and one for long ones

R features turn, the pairs i = 0 … R/2 − 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import OptionError, ShapeError
from npattn.problem.arrays import Array
from npattn.problem.checks import check_flag, check_integer
from npattn.problem.descales import read_real

__all__ = [
    "Frequencies", "dynamic_ntk", "linear", "llama3", "longrope", "ntk", "plain", "read_number",
    "yarn",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Frequencies:
    """How fast each pair of features turns.

    Parameters
    ----------
    values : float array_like (R/2,)
        Angle of each pair at position 1, in radians.
    amplitude : float, default 1.0
        Factor on the turned features. Scores of queries and keys are multiplied by its square.

    Raises
    ------
    DtypeError
        If the values are not floating, or complex.
    ShapeError
        If they are not of rank 1.
    OptionError
        If one of them, or the amplitude, is not finite.
    """

    values: Array
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        values = read_real("values", self.values).astype(np.float64)
        if values.ndim != 1:
            raise ShapeError(f"values has shape {values.shape}, must be (R/2,): one for each pair")
        if not np.isfinite(values).all():
            raise OptionError("values has NaN or inf, must be finite")
        values.flags.writeable = False
        object.__setattr__(self, "values", values)
        amplitude = read_number("amplitude", self.amplitude, -math.inf)
        object.__setattr__(self, "amplitude", amplitude)


def plain(R: int, *, base: float = 10000.0) -> Frequencies:
    """Frequencies base^(−2i/R). Source: Su et al. 2021, "RoFormer", section 3.2.2.

    Parameters
    ----------
    R : int
        Number of features that turn, even.
    base : float, default 10000.0

    Raises
    ------
    OptionError
        If R is not even and ≥ 0, or `base` not positive and finite.

    Examples
    --------
    >>> from npattn import positions
    >>> positions.plain(4).values
    array([1.  , 0.01])
    """
    return Frequencies(_powers(R, base))


def linear(R: int, factor: float, *, base: float = 10000.0) -> Frequencies:
    """Plain frequencies divided by the factor, as if positions were. Source: Chen et al. 2023.

    Parameters
    ----------
    R : int
        Number of features that turn, even.
    factor : float
        How much longer sequences may be than in training.
    base : float, default 10000.0

    Raises
    ------
    OptionError
        If R is not even and ≥ 0, or a number is not positive and finite.
    """
    return Frequencies(_powers(R, base) / read_number("factor", factor))


def ntk(R: int, factor: float, *, base: float = 10000.0) -> Frequencies:
    """Plain frequencies of the base · factor^(R/(R−2)). Source: Peng et al. 2023, section 3.1.

    The slowest pair turns `factor` times as slowly, the fastest as fast as before.

    Parameters
    ----------
    R : int
        Number of features that turn, even and > 2.
    factor : float
        How much longer sequences may be than in training.
    base : float, default 10000.0

    Raises
    ------
    OptionError
        If R is not even and > 2, or a number is not positive and finite.
    """
    size = check_integer("R", R, 4)
    with np.errstate(over="ignore"):
        stretch = np.float64(read_number("factor", factor)) ** (size / (size - 2))
        return Frequencies(_powers(R, float(read_number("base", base) * stretch)))


def dynamic_ntk(
    R: int, factor: float, *, length: int, trained_length: int, base: float = 10000.0
) -> Frequencies:
    """Frequencies of `ntk` with a factor that grows with the sequence.

    The factor is ``factor · length / trained_length − (factor − 1)``, and 1 up to the trained
    length. Keys that were cached turned by other frequencies than these.

    Parameters
    ----------
    R : int
        Number of features that turn, even and > 2.
    factor : float
    length : int
        Of this sequence, in positions.
    trained_length : int
        Of the sequences in training.
    base : float, default 10000.0

    Raises
    ------
    OptionError
        If R is not even and > 2, or a number is not positive and finite.
    """
    before = check_integer("trained_length", trained_length)
    length = max(check_integer("length", length, 0), before)
    factor = read_number("factor", factor)
    return ntk(R, factor * length / before - (factor - 1), base=base)


def yarn(
    R: int, factor: float,
    *, trained_length: int, base: float = 10000.0, fast: float = 32.0, slow: float = 1.0,
    truncate: bool = True, amplitude: float | None = None,
) -> Frequencies:  # fmt: skip
    """A ramp from plain to divided frequencies. Source: Peng et al. 2023, "YaRN", section 3.2.

    Pairs that turn more than `fast` times within the trained length stay, those that turn less than
    `slow` times are divided by the factor, and between them a ramp over the number of the pair
    mixes both. Pair 0 always stays.

    Where every pair turns more than `fast` times they all stay by that definition, and where every
    pair turns less than `slow` times all are divided. The code of the paper, and of transformers,
    does the reverse, since its ramp falls there: it divides all, or leaves all. So both are
    refused; `plain` and `linear` are what either means.

    Parameters
    ----------
    R : int
        Number of features that turn, even.
    factor : float
        How much longer sequences may be than in training.
    trained_length : int
        Of the sequences in training, in positions.
    base : float, default 10000.0
    fast, slow : float, default 32.0 and 1.0
        In turns; β and α of the paper.
    truncate : bool, default True
        The ramp begins and ends at a whole pair, as in the code of the paper.
    amplitude : float, optional
        By default ``0.1 · log(factor) + 1``, and 1 for a factor of at most 1.

    Raises
    ------
    OptionError
        If R is not even and ≥ 0, `base` is 1, `slow` is not below `fast`, `truncate` is no bool,
        a number is not positive and finite, or all pairs turn more than `fast` or less than `slow`
        times.
    """
    values, factor = _powers(R, base), read_number("factor", factor)
    length = check_integer("trained_length", trained_length)
    fast, slow = read_number("fast", fast), read_number("slow", slow)
    if slow >= fast:
        raise OptionError(f"slow is {slow}, must be below fast, which is {fast}")
    check_flag("truncate", truncate)
    if base == 1:
        raise OptionError("base is 1, must be another: all pairs turn equally fast")

    def pair_of(turns: float) -> float:
        """Return the number of the pair that turns so often within the trained length."""
        logs = math.log(length) - math.log(turns) - math.log(2 * math.pi)
        return R * logs / (2 * math.log(base))

    first, last = pair_of(fast), pair_of(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, R - 1)
    if first > last and R:  # by the code (low − pair) / (low − high), a ramp that falls
        less = last < 0
        turns = f"less than slow = {slow:g}" if less else f"more than fast = {fast:g}"
        paper = "divides" if less else "leaves"
        raise OptionError(
            f"every pair turns {turns} times in {length} positions: YaRN's paper {paper} all "
            "frequencies there, its code the reverse; pass positions.plain(R, base=...) or "
            "positions.linear(R, factor, base=...)"
        )
    last = max(last, first + 0.001)
    ramp = np.clip((np.arange(R // 2) - first) / (last - first), 0, 1)
    if amplitude is None:
        amplitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return Frequencies(values / factor * ramp + values * (1 - ramp), amplitude)


def llama3(
    R: int, factor: float = 8.0,
    *, trained_length: int = 8192, low: float = 1.0, high: float = 4.0, base: float = 500000.0,
) -> Frequencies:  # fmt: skip
    """A ramp by wavelength, as in Llama 3.1. Source: its published code.

    A pair that turns more than `high` times within the trained length stays, one that turns less
    than `low` times is divided by the factor, and between them both are mixed.

    Parameters
    ----------
    R : int
        Number of features that turn, even.
    factor : float, default 8.0
        How much longer sequences may be than in training.
    trained_length : int, default 8192
        Of the sequences in training, in positions.
    low, high : float, default 1.0 and 4.0
        In turns.
    base : float, default 500000.0

    Raises
    ------
    OptionError
        If R is not even and ≥ 0, a number is not positive and finite, or `high` is not above `low`.
    """
    values, factor = _powers(R, base), read_number("factor", factor)
    low, high = read_number("low", low), read_number("high", high)
    if high <= low:
        raise OptionError(f"high is {high}, must be above low, which is {low}")
    turns = check_integer("trained_length", trained_length) * values / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return Frequencies(values / factor * (1 - kept) + values * kept)


def longrope(
    R: int,
    *, short: ArrayLike, long: ArrayLike, length: int, trained_length: int, factor: float,
    base: float = 10000.0, amplitude: float | None = None,
) -> Frequencies:  # fmt: skip
    """Plain frequencies divided by a factor for each pair. Source: Ding et al. 2024, "LongRoPE".

    Parameters
    ----------
    R : int
        Number of features that turn, even.
    short, long : float array_like (R/2,)
        Divisors up to the trained length, and beyond it.
    length : int
        Of this sequence, in positions.
    trained_length : int
        Of the sequences in training, before they were stretched.
    factor : float
        How much longer sequences may be than in training; it makes the amplitude.
    base : float, default 10000.0
    amplitude : float, optional
        By default ``sqrt(1 + log(factor) / log(trained_length))``, and 1 for a factor of at most 1.

    Raises
    ------
    DtypeError
        If the divisors are not floating.
    ShapeError
        If they are not (R/2,).
    OptionError
        If R is not even and ≥ 0, or a number is not positive and finite.
    """
    values, factor = _powers(R, base), read_number("factor", factor)
    before = check_integer("trained_length", trained_length, 2)
    inputs = {"short": short, "long": long}
    divisors = {name: read_real(name, x).astype(np.float64) for name, x in inputs.items()}
    for name, x in divisors.items():
        if x.shape != values.shape:
            raise ShapeError(f"{name} has shape {x.shape}, must be {values.shape}: (R/2,)")
        if not (np.isfinite(x) & (x > 0)).all():
            raise OptionError(f"{name} has {x.tolist()}, must be positive and finite")
    chosen = divisors["long" if check_integer("length", length, 0) > before else "short"]
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(before)) if factor > 1 else 1.0
    return Frequencies(values / chosen, amplitude)


def read_number(name: str, value: Any, above: float = 0.0) -> float:
    """Return a finite number > `above` as a float. Raises OptionError if it is none."""
    legal = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        number = float(value) if legal else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not number > above:
        positive = "positive and " if above == 0 else ""
        raise OptionError(f"{name} is {value!r}, must be a {positive}finite number")
    return number


def _powers(R: int, base: float) -> Array:
    size = check_integer("R", R, 0)
    if size % 2:
        raise OptionError(f"R is {R}, must be even: features turn in pairs")
    return read_number("base", base) ** (-np.arange(0, size, 2) / max(size, 1))
