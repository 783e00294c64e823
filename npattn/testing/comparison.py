"""Compare results with the exact ones, element by element, within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npattn.conventions import Conventions
from npattn.errors import DtypeError, InternalError, OptionError, ShapeError
from npattn.oracle.api import backward, evaluate
from npattn.problem import Problem
from npattn.problem.arrays import Array, cast, to_numpy
from npattn.problem.checks import is_floating
from npattn.testing.bounds.allowed import tolerance
from npattn.testing.bounds.free_elements import free_elements
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.bounds.ulp import excess_of, half_ulp, largest, real
from npattn.testing.excerpt import Excerpt
from npattn.testing.power import Power

NARROW = ("bfloat16", "float16")
LEAST_SIZE = 8
"""Elements from which numbers of a narrower dtype are no chance."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of one array with its exact value: the worst element.

    Attributes
    ----------
    name : str
        "o", "lse", "dq", ...
    ratio : float
        Largest error / tolerance; above 1 fails. inf for NaN where a number belongs.
    index : tuple of int
        Index of the worst element.
    got, want, allowed : float
        Its value, the exact value and the tolerance. The error is counted from the nearest number
        that rounds to `got`.
    wrong, size : int
        Number of elements out of tolerance, and of all elements.
    note : str
        What is wrong, if it is no element.
    excerpt : Excerpt or None
        Elements around the worst one, if it is out of tolerance.
    hint : str
        What may be wrong with the comparison, if it failed.
    power : Power or None
        Errors that this comparison would have seen; None of a result of a wrong shape.
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
    excerpt: Excerpt | None = field(default=None, repr=False, compare=False)
    hint: str = ""
    power: Power | None = field(default=None, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        return self.ratio <= 1

    def __str__(self) -> str:
        """Return the worst element, its exact value and tolerance; the note if there is one."""
        if self.note:
            return self.note
        if not self.index and self.size == 0:
            return f"{self.name} is empty"
        where = f"{self.name}[{', '.join(map(str, self.index))}]"
        count = "" if self.passed else f"; {self.wrong} of {self.size} elements out of tolerance"
        if not np.isfinite(self.want):
            return f"{where}: got {self.got:.9g}, want NaN or inf{count}"
        return (
            f"{where}: got {self.got:.9g}, want {self.want:.9g}, allowed ±{self.allowed:.3g} "
            f"({self._error}{count})" + (self.hint and f"; {self.hint}")
        )

    @property
    def _error(self) -> str:
        """The error in units of the tolerance, or the value that is not a number."""
        if np.isfinite(self.got):
            return f"{short(self.ratio)} × tolerance"
        return "NaN" if np.isnan(self.got) else f"{self.got:g}"


def short(x: float) -> str:
    """Format a ratio: three digits, and an exponent without padding (4.24e5)."""
    digits, e, exponent = f"{x:.3g}".partition("e")
    return f"{digits}e{int(exponent)}" if e else digits


def compare_arrays(name: str, got: Array, exact: Array, tolerance: Array) -> Comparison:
    """Compare two arrays element by element.

    Raises InternalError if a finite `exact` has a tolerance of NaN, or the shapes differ: npattn
    is wrong, not the result.

    Parameters
    ----------
    got : array
        The result, in the dtype in which the implementation returned it.
    exact, tolerance : float64 arrays of the same shape
        The exact value and the allowed error. Where `tolerance` is inf, everything passes; it is
        not read where `exact` is not finite.
    """
    got = real(got)
    if got.shape != np.shape(exact):
        raise InternalError(f"{name} {got.shape} is compared with {np.shape(exact)}")
    if got.size == 0:
        return Comparison(name, 0.0, (), 0.0, 0.0, 0.0, 0, 0, power=Power())
    check_tolerance(name, tolerance, exact)
    with np.errstate(all="ignore"):
        wide = got.astype(np.float64)
        over = exact - wide
        gap = excess_of(got, wide, exact, over)
        ratio = np.divide(gap, tolerance, out=np.zeros(gap.shape), where=gap != 0)
        at = int(ratio.argmax())  # the first NaN, if there is one
        if not np.isfinite(over).all() or math.isnan(ratio.flat[at]):
            ratio = _fix_non_finite(ratio, wide, exact, tolerance, got.dtype)
            at = int(ratio.argmax())
    index = tuple(int(i) for i in np.unravel_index(at, ratio.shape))
    return Comparison(
        name,
        float(ratio[index]),
        index,
        float(got[index]),
        float(exact[index]),
        float(tolerance[index]),
        int((ratio > 1).sum()) if ratio[index] > 1 else 0,
        ratio.size,
        excerpt=Excerpt.around(index, wide, exact, tolerance) if ratio[index] > 1 else None,
        power=Power.of(exact, tolerance, got.dtype),
    )


def compare_result(name: str, got: Array, exact: Array, tolerance: Array) -> Comparison:
    """Compare two arrays as `compare_arrays`; another shape is out of any tolerance."""
    return compare_shape(name, got, exact.shape) or compare_arrays(name, got, exact, tolerance)


def compare_shape(name: str, got: Array, shape: tuple[int, ...]) -> Comparison | None:
    """Return the failure of a result that has another shape; None if it has this one."""
    if got.shape == shape:
        return None
    note = f"{name} has shape {got.shape}, want {shape}"
    return Comparison(name, math.inf, (), 0.0, 0.0, 0.0, got.size, got.size, note)


def check_tolerance(name: str, tolerance: Array, exact: Array) -> None:
    """Raise InternalError if a finite exact value has a tolerance of NaN."""
    unknown = np.isnan(tolerance)
    if unknown.any() and (unknown & np.isfinite(exact)).any():
        raise InternalError(
            f"the tolerance of {name} is NaN where its exact value is a number: that is a defect "
            "of npattn, not of the implementation; please report it with the problem"
        )


def _fix_non_finite(
    ratio: Array, wide: Array, exact: Array, tolerance: Array, dtype: np.dtype[Any]
) -> Array:
    """Fix up ratios where a value is NaN or infinite."""
    # Overflow is right where the exact value, give or take the tolerance, is beyond the dtype, on
    # the side of the infinity.
    over, size = np.isinf(wide), np.sign(wide) * exact
    if not np.isinf(np.array(np.inf, dtype).astype(np.float64)):
        over, size = np.isnan(wide), abs(exact)  # a dtype without inf overflows to NaN
    beyond = over & (size + tolerance > float(largest(dtype)))
    ratio = np.where(beyond | np.isposinf(tolerance), 0, ratio)
    return np.where(np.isnan(ratio), np.inf, ratio)  # NaN never passes


def compare(
    got: ArrayLike | Mapping[str, ArrayLike],
    problem: Problem,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
    rounding: Rounding | str | None = None,
    dtype: str | None = None,
) -> tuple[Comparison, ...]:
    """Compare the results of an implementation, from a crash dump say, with the oracle.

    Parameters
    ----------
    got : array, (o, lse), or mapping
        o, or a mapping with keys among o, lse, weights, max_score, dq, dk, dv, dbias, dsinks,
        dgate.
    problem : npattn.Problem
        The arrays as the implementation had them, in their dtype. A bias of `npattn.biases`
        stands for its array: dbias is the gradient of ``problem.bias_array``.
    dout, dlse, dweights : array, optional
        Cotangents of out (..., H, T, E), lse (..., H, T) and weights (..., H, T, S); gradients in
        `got` need `dout`.
    conventions : Conventions, optional
    rounding : Rounding or str, optional
        What the implementation rounds, or "upcast", "fused", "eager", "fp8", "int8". Default:
        ``Rounding.undeclared`` for the dtype of q.
    dtype : {"bfloat16", "float16"}, optional
        What uint16 arrays hold, bit by bit, and wider arrays number by number: those of a file that
        has no such dtype. q, k and v must hold such numbers alone.

    Returns
    -------
    tuple of Comparison
        One for each result, in the order of `got`; ``all(c.passed for c in ...)``.

    Raises
    ------
    OptionError
        If `problem` is no `npattn.Problem` of arrays, `got` is a tuple that is not (o, lse), a name
        in it is not a result of this problem, gradients come without `dout`, `rounding` is an
        unknown name, or q, k and v hold other numbers than those of `dtype`.
    ShapeError
        If an array in `got`, or a cotangent, has the wrong shape.
    DtypeError
        If a cotangent or a result is not floating.
    """
    problem = _check_problem(problem)
    if dtype is not None:
        problem = _narrow_problem(problem, dtype)
        dout, dlse, dweights = (
            None if x is None else _narrow(x, dtype) for x in (dout, dlse, dweights)
        )
    if isinstance(got, tuple):
        if len(got) != 2:
            raise OptionError(f"got is a tuple of {len(got)}: pass (o, lse), or a mapping by name")
        got = dict(zip(("o", "lse"), got, strict=True))
    results: dict[str, Any] = dict(got) if isinstance(got, Mapping) else {"o": got}
    more = tuple(name for name in ("weights", "max_score") if name in results)
    cotangents: dict[str, Any] = {"dout": dout, "dlse": dlse, "dweights": dweights}
    exact, tolerances = _evaluate(problem, conventions, rounding, more, cotangents)
    comparisons = []
    for name, value in results.items():
        array = _check_result(name, _narrow(value, dtype), exact)
        one = compare_arrays(name, array, exact[name], tolerances[name])
        comparisons.append(one if one.passed else replace(one, hint=_propose(problem, array)))
    return tuple(comparisons)


def _narrow_problem(problem: Problem, dtype: str) -> Problem:
    """Return the problem in a dtype that its arrays hold the numbers of."""
    if dtype not in NARROW:
        raise OptionError(f"dtype is {dtype!r}, must be {' or '.join(map(repr, NARROW))}, or None")
    arrays = {name: _narrow(getattr(problem, name), dtype) for name in ("q", "k", "v")}
    for name, array in arrays.items():
        if array.dtype != np.dtype(dtype):
            raise OptionError(
                f"{name} is {array.dtype} and holds numbers that are not {dtype}: results cut to "
                f"{dtype} are a mistake there. Leave out dtype={dtype!r}, or pass the arrays as "
                "the implementation had them"
            )
    return problem.replace(**arrays)


def _narrow(value: Any, dtype: str | None) -> Array:
    """Return an array in a narrower dtype if it holds its bits, or its numbers alone."""
    array = to_numpy(value)
    if dtype is None:
        return array
    narrow = np.dtype(dtype)
    if array.dtype == np.uint16:
        return array.view(narrow)
    return cast(array, narrow) if array.dtype.kind == "f" and _holds(array, narrow) else array


def _holds(array: Array, dtype: np.dtype[Any]) -> bool:
    """Return True if every number is one of a narrower dtype."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(cast(array, dtype).astype(array.dtype), array, equal_nan=True))


def _propose(problem: Problem, result: Array) -> str:
    """Propose a dtype that q, k, v and a result out of tolerance hold the numbers of."""
    arrays = [problem.q, problem.k, problem.v, result]
    if any(x.dtype not in (np.float32, np.float64) for x in arrays) or result.size < LEAST_SIZE:
        return ""
    for dtype in NARROW:
        if all(_holds(x, np.dtype(dtype)) for x in arrays):
            return f"q, k, v and it hold {dtype} numbers alone: was that its dtype? dtype={dtype!r}"
    return ""


class Exact(NamedTuple):
    """Exact value of a result, and how far a right one may be from it, in every element."""

    value: Array
    tolerance: Array


def exact(
    problem: Problem,
    *,
    dout: Array | None = None,
    dlse: Array | None = None,
    dweights: Array | None = None,
    conventions: Conventions | None = None,
    rounding: Rounding | str | None = None,
) -> dict[str, Exact]:
    """Return the exact results of a problem with their tolerances, for tests of your own.

    Parameters
    ----------
    problem, dout, dlse, dweights, conventions, rounding
        As of `compare`.

    Returns
    -------
    dict of str to Exact
        o, lse and, with `dout`, the gradients, each ``(value, tolerance)``, float64, of the shape
        of the result: ``abs(got - value) <= tolerance`` holds for every right result in the dtype
        of q or a wider one. The tolerance has the last rounding in it, of which `compare` need
        not know; inf where the result may overflow. Where the value itself is not finite, as
        the lse of a row that sees nothing, no difference tells: `compare` does.

    Raises
    ------
    OptionError, ShapeError, DtypeError
        As of `compare`.

    Examples
    --------
    >>> import numpy as np
    >>> import npattn
    >>> from npattn.testing import exact
    >>> q = k = v = np.eye(3, dtype=np.float32)[None]
    >>> value, tolerance = exact(npattn.Problem(q, k, v, causal=True))["o"]
    >>> bool((abs(npattn.attention(q, k, v, causal=True) - value) <= tolerance).all())
    True
    """
    cotangents: dict[str, Any] = {"dout": dout, "dlse": dlse, "dweights": dweights}
    problem = _check_problem(problem)
    values, tolerances = _evaluate(problem, conventions, rounding, (), cotangents)
    dtype = problem.q.dtype
    found = {}
    for name, value in values.items():
        with np.errstate(over="ignore"):
            size = abs(value) + tolerances[name]  # of the number that is rounded, at most
            last = np.where(size > float(largest(dtype)), np.inf, half_ulp(size.astype(dtype)))
        found[name] = Exact(value, tolerances[name] + last)
    return found


def _evaluate(
    problem: Problem,
    conventions: Conventions | None,
    rounding: Rounding | str | None,
    more: tuple[str, ...],
    cotangents: dict[str, Any],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return exact values and tolerances by name, inf where a result is free."""
    problem = problem.materialise()
    if isinstance(rounding, str):
        rounding = Rounding.from_name(rounding)
    values = _exact(problem, conventions, more, **cotangents)
    dtype = problem.q.dtype
    tolerances = tolerance(problem, dtype, rounding, conventions=conventions, **cotangents)
    for name, free in free_elements(problem, conventions).items():
        if name in tolerances:
            tolerances[name] = np.where(free, np.inf, tolerances[name])
    return values, tolerances


def _check_problem(problem: Any) -> Problem:
    """Return the problem. Raises OptionError if it is something else, or has tensors."""
    if isinstance(problem, Problem) and isinstance(problem.q, np.ndarray):
        return problem
    name = "None" if problem is None else f"of type {type(problem).__name__}"
    cure = ""
    if isinstance(problem, Problem):
        name, cure = "a Problem of tensors", ", with NumPy arrays"
    elif isinstance(getattr(problem, "problem", None), Problem):
        cure = ": pass its .problem"
    elif callable(problem):
        cure = "; to judge a function or a module, pass it to npattn.testing.check"
    raise OptionError(
        f"problem is {name}, must be npattn.Problem(q, k, v, causal=..., ...), the arrays and "
        f"options of the call{cure}"
    )


def _exact(
    problem: Problem,
    conventions: Conventions | None,
    more: tuple[str, ...],
    dout: Array | None,
    dlse: Array | None,
    dweights: Array | None,
) -> dict[str, Array]:
    """Evaluate the oracle: the results that the problem has, by name.

    dout is (..., H, T, E), dlse (..., H, T), dweights (..., H, T, S).
    """
    fwd = evaluate(problem, conventions, engine="dense")
    exact = {"o": fwd.out, "lse": fwd.lse}
    exact |= {name: getattr(fwd, name) for name in more}
    if dout is not None:
        grads = backward(fwd, dout, dlse, dweights)
        exact |= {f"d{n}": getattr(grads, n) for n in ("q", "k", "v", "bias", "sinks", "gate")}
    return {name: x for name, x in exact.items() if x is not None}


def _check_result(name: str, value: ArrayLike, exact: dict[str, Array]) -> Array:
    """Return a result as an array, after checking its name and shape."""
    if name not in exact:
        more = "" if "dq" in exact else "; gradients need dout="
        raise OptionError(
            f"{name} is not a result of this problem: pass one of {', '.join(exact)}{more}"
        )
    array = to_numpy(value)
    if array.dtype.kind not in "fc" and not is_floating(array.dtype):
        cure = ": pass dtype='bfloat16' if these are its bits" if array.dtype == np.uint16 else ""
        raise DtypeError(f"{name} is {array.dtype}, must be floating{cure}")
    if array.shape != exact[name].shape:
        raise ShapeError(f"{name} has shape {array.shape}, must have {exact[name].shape}")
    return array
