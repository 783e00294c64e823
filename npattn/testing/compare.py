"""An array that was delivered, against the exact one and what is allowed between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.api import backward, evaluate
from npattn.conventions import Conventions
from npattn.errors import OptionError, ShapeError
from npattn.problem import Array, Problem, finfo
from npattn.testing.tolerance import Rounding, allowed

__all__ = ["Comparison", "compare", "compare_arrays", "excess", "half_ulp", "real"]


@dataclass(frozen=True)
class Comparison:
    """One array against its exact value.

    Attributes
    ----------
    name : str
        "o", "lse", "dq", ...
    ratio : float
        Largest error / allowed error; above 1 is wrong, inf for NaN where a number belongs.
    index : tuple of int
        Where.
    got, want, allowed : float
        There. The error is counted from the nearest number that rounds to `got`.
    wrong, size : int
        How many elements are wrong, of how many.
    """

    name: str
    ratio: float
    index: tuple[int, ...]
    got: complex | float
    want: float
    allowed: float
    wrong: int
    size: int
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.ratio <= 1

    def __str__(self) -> str:
        if self.note:
            return self.note
        if not self.index and self.size == 0:
            return f"{self.name} is empty"
        where = f"{self.name}[{', '.join(map(str, self.index))}]"
        state = "" if self.passed else f"; {self.wrong} of {self.size} elements are wrong"
        if not np.isfinite(self.want):
            return f"{where}: got {self.got:.9g}, want NaN or inf{state}"
        return (
            f"{where}: got {self.got:.9g}, want {self.want:.9g}, allowed ±{self.allowed:.3g} "
            f"(error {self.ratio:.3g} of the allowed{state})"
        )


def excess(got: Array, want: Array) -> Array:
    """The distance from `want` to the interval of reals that round to `got`, in got's dtype.

    Rounding is monotone, so an implementation that computed some x within t of `want`, and then
    delivered x rounded, has an excess of at most t. 0 where both are non-finite; inf where only
    one is.
    """
    got = real(got)
    wide = got.astype(np.float64)
    with np.errstate(all="ignore"):
        top = np.array(finfo(got.dtype).max, got.dtype)
        rise = np.nextafter(got, top).astype(np.float64) - wide
        fall = wide - np.nextafter(got, -top).astype(np.float64)
        # The largest number has no next one: what rounds to it lies as far above as below.
        above, below = np.where(rise > 0, rise, fall) / 2, np.where(fall > 0, fall, rise) / 2
        over = want - wide  # exact where it is small, so that midpoints need no rounding
        gap = np.maximum(np.maximum(over - above, -over - below), 0)
    gap = np.where(np.isfinite(wide), gap, np.inf)
    gap = np.where(np.isfinite(want), gap, np.where(np.isfinite(wide), np.inf, 0))
    return np.asarray(gap)


def half_ulp(delivered: Array) -> Array:
    """How far a number may be from one that was rounded to it: half the larger gap beside it."""
    delivered = real(delivered)
    with np.errstate(all="ignore"):
        top = np.array(finfo(delivered.dtype).max, delivered.dtype)
        wide = delivered.astype(np.float64)
        rise = np.nextafter(delivered, top).astype(np.float64) - wide
        fall = wide - np.nextafter(delivered, -top).astype(np.float64)
    return np.asarray(np.where(np.isfinite(wide), np.maximum(rise, fall) / 2, 0.0))


def real(got: Array) -> Array:
    """What was delivered as a floating array; a number that is not real is NaN."""
    if np.iscomplexobj(got):
        return np.where(got.imag == 0, got.real, np.nan)
    kind = got.dtype.kind
    return got.astype(np.float64) if kind in "biu" else got


def compare_arrays(name: str, got: Array, want: Array, allowed: Array) -> Comparison:
    """Compare element by element.

    Parameters
    ----------
    name : str
    got : array
        As delivered, in the dtype delivered.
    want, allowed : float64 arrays of the same shape
        The exact value and the allowed error. Where `allowed` is inf nothing is required.

    Returns
    -------
    Comparison
        Of the worst element.
    """
    got = real(got)
    gap = excess(got, want)
    # Overflow is right where the exact value, give or take what is allowed, is beyond the dtype.
    top = float(finfo(got.dtype).max)
    with np.errstate(all="ignore"):
        wide = got.astype(np.float64)
        over = np.isinf(wide) & (np.sign(wide) == np.sign(want))
        if not np.isinf(np.array(np.inf, got.dtype).astype(np.float64)):
            over = np.isnan(wide)  # a dtype without inf overflows to NaN
        beyond = over & (abs(want) + allowed > top)
        ratio = np.where(gap == 0, 0, gap / allowed)
    ratio = np.where(beyond | np.isposinf(allowed), 0, ratio)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)  # NaN never passes
    if ratio.size == 0:
        return Comparison(name, 0.0, (), 0.0, 0.0, 0.0, 0, 0)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    return Comparison(
        name,
        float(ratio[index]),
        index,
        float(got[index]),
        float(want[index]),
        float(allowed[index]),
        int((ratio > 1).sum()),
        ratio.size,
    )


def compare(
    got: Any,
    problem: Problem,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
    rounding: Rounding | str | None = None,
) -> tuple[Comparison, ...]:
    """Results of some implementation, from a crash dump say, against the oracle.

    Parameters
    ----------
    got : array, (o, lse), or mapping
        o, or a mapping with keys among o, lse, weights, dq, dk, dv, dbias, dsinks.
    problem : Problem
        With the arrays as the implementation had them, in their dtype. A bias of `npattn.biases`
        stands for its array: dbias is the gradient of ``problem.bias_array``.
    dout, dlse, dweights : array, optional
        The cotangents of gradients in `got`.
    conventions : Conventions, optional
    rounding : Rounding or str, optional
        Default: what is allowed to whoever declares nothing, for the dtype of q.

    Returns
    -------
    tuple of Comparison
        One for each result, in the order given; ``all(c.passed for c in ...)``.

    Raises
    ------
    OptionError
        If a name is unknown, or gradients come without `dout`.
    ShapeError, DtypeError
        If an array cannot be what it is named.
    """
    if isinstance(got, tuple):
        if len(got) != 2:
            raise OptionError(
                f"got is a tuple of {len(got)}, must be (o, lse), or a mapping by name"
            )
        got = dict(zip(("o", "lse"), got, strict=True))
    if isinstance(rounding, str):
        rounding = Rounding.named(rounding)
    results = dict(got) if isinstance(got, Mapping) else {"o": got}
    problem = problem.materialised()
    fwd = evaluate(problem, conventions, engine="dense")
    want: dict[str, Any] = {"o": fwd.out, "lse": fwd.lse}
    if "weights" in results:
        want["weights"] = fwd.weights
    if dout is not None:
        grads = backward(fwd, dout, dlse, dweights)
        for name in ("q", "k", "v", "bias", "sinks"):
            want[f"d{name}"] = getattr(grads, name)
    room = allowed(
        problem,
        problem.q.dtype,
        rounding,
        dout=dout,
        dlse=dlse,
        dweights=dweights,
        conventions=conventions,
    )
    found = []
    for name, value in results.items():
        if want.get(name) is None:
            raise OptionError(
                f"{name} is not a result of this problem, must be one of "
                f"{', '.join(n for n, w in want.items() if w is not None)}"
                + ("" if dout is not None else " (gradients need dout=)")
            )
        array = np.asarray(value)
        if array.shape != want[name].shape:
            raise ShapeError(f"{name} has shape {array.shape}, must have {want[name].shape}")
        free = name[0] == "d" and conventions is not None and conventions.empty_row == "nan"
        limit = np.where(free & np.isnan(want[name]), np.inf, room[name])
        found.append(compare_arrays(name, array, want[name], limit))
    return tuple(found)
