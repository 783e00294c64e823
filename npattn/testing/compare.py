"""An array that was delivered, against the exact one and what is allowed between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from npattn.api import backward, evaluate
from npattn.arrays import Array, finfo
from npattn.conventions import Conventions
from npattn.errors import OptionError, ShapeError
from npattn.problem import Problem
from npattn.testing.bounds.allowed import Rounding, allowed

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
    with np.errstate(all="ignore"):
        wide = got.astype(np.float64)
        return _beyond(got, wide, want, want - wide)


def _beyond(got: Array, wide: Array, want: Array, over: Array) -> Array:
    """`excess`; `over` is want − wide, exact where it is small: midpoints need no rounding."""
    top = _largest(got.dtype)
    rise = np.nextafter(got, top).astype(np.float64) - wide
    fall = wide - np.nextafter(got, -top).astype(np.float64)
    if not (rise.all() and fall.all()):
        # The largest number has no next one: what rounds to it lies as far above as below.
        rise, fall = np.where(rise > 0, rise, fall), np.where(fall > 0, fall, rise)
    gap = np.maximum(np.maximum(over - rise / 2, -over - fall / 2), 0)
    if np.isfinite(over).all():
        return np.asarray(gap)
    gap = np.where(np.isfinite(wide), gap, np.inf)
    return np.where(np.isfinite(want), gap, np.where(np.isfinite(wide), np.inf, 0))


@cache
def _largest(dtype: np.dtype[Any]) -> Array:
    return np.array(finfo(dtype).max, dtype)


def half_ulp(delivered: Array) -> Array:
    """How far a number may be from one that was rounded to it: half the larger gap beside it."""
    delivered = real(delivered)
    with np.errstate(all="ignore"):
        size, top = abs(delivered), _largest(delivered.dtype)
        wide = size.astype(np.float64)
        gap = np.nextafter(size, top).astype(np.float64) - wide  # the larger is away from 0
        if not gap.all():
            gap = np.maximum(gap, wide - np.nextafter(size, -top).astype(np.float64))
    return np.asarray(
        gap / 2 if np.isfinite(wide).all() else np.where(np.isfinite(wide), gap / 2, 0.0)
    )


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
    if got.size == 0:
        return Comparison(name, 0.0, (), 0.0, 0.0, 0.0, 0, 0)
    with np.errstate(all="ignore"):
        wide = got.astype(np.float64)
        over = want - wide
        gap = _beyond(got, wide, want, over)
        ratio = np.divide(gap, allowed, out=np.zeros(gap.shape), where=gap != 0)
        at = int(ratio.argmax())  # of the first NaN, where there is one
        if not np.isfinite(over).all() or math.isnan(ratio.flat[at]):
            ratio = _with_infinite(ratio, wide, want, allowed, got.dtype)
            at = int(ratio.argmax())
    index = tuple(int(i) for i in np.unravel_index(at, ratio.shape))
    return Comparison(
        name,
        float(ratio[index]),
        index,
        float(got[index]),
        float(want[index]),
        float(allowed[index]),
        int((ratio > 1).sum()) if ratio[index] > 1 else 0,
        ratio.size,
    )


def _with_infinite(
    ratio: Array, wide: Array, want: Array, allowed: Array, dtype: np.dtype[Any]
) -> Array:
    """The ratios, where any number is none, or infinite."""
    # Overflow is right where the exact value, give or take what is allowed, is beyond the dtype.
    over = np.isinf(wide) & (np.sign(wide) == np.sign(want))
    if not np.isinf(np.array(np.inf, dtype).astype(np.float64)):
        over = np.isnan(wide)  # a dtype without inf overflows to NaN
    beyond = over & (abs(want) + allowed > float(_largest(dtype)))
    ratio = np.where(beyond | np.isposinf(allowed), 0, ratio)
    return np.where(np.isnan(ratio), np.inf, ratio)  # NaN never passes


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
