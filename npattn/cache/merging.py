"""Results of parts of the keys, merged into that of all: split keys, rings, cascades.

    lse = log Σ exp(lse_i)        w_i = exp(lse_i − lse)        o = Σ w_i o_i
    do_i = w_i do                 dlse_i = w_i (do · (o_i − o) + dlse)

A part i of the keys without a visible one has lse_i = −inf, and is left out, whatever its o_i.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.oracle.twins import ARRAYS, on_arrays
from npattn.problem.arrays import Array
from npattn.problem.checks import check_choice, check_cotangent
from npattn.problem.foreign import reject_unknown_options

Base = Literal["e", "2"]


@reject_unknown_options
@on_arrays
def merge(
    xp: Any, /, outs: Iterable[ArrayLike], lses: Iterable[ArrayLike], *, base: Base = "e"
) -> tuple[Array, Array]:
    """Merge the results of attention over parts of the keys.

    Parameters
    ----------
    outs : sequence of float array_like (..., E)
        One a part, at least one.
    lses : sequence of float array_like (...)
        Logarithm of the sum of exp(scores) of each part; −inf where it has no visible key. A sink
        belongs to one part alone.
    base : {"e", "2"}, default "e"
        Of the logarithm, also of the result.

    Returns
    -------
    o : ndarray (..., E) of float64
    lse : ndarray (...) of float64
        Where all parts are −inf, o is 0 and lse −inf.

    Raises
    ------
    ShapeError
        If there is no part, or their shapes differ.
    DtypeError
        If an array is not floating, or complex.
    OptionError
        If `base` is neither, or an lse is +inf.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import cache
    >>> o, lse = cache.merge([np.array([[1.0]]), np.array([[4.0]])], [np.zeros(1), np.log([2.0])])
    >>> o.round(6), lse.round(3)
    (array([[3.]]), array([1.099]))
    """
    return _merge(xp, *_read_parts(xp, outs, lses), base)[:2]


@reject_unknown_options
def merge_backward(
    outs: Sequence[ArrayLike], lses: Sequence[ArrayLike], dout: ArrayLike,
    dlse: ArrayLike | None = None,
    *, base: Base = "e",
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:  # fmt: skip
    """Return the gradients of the parts from those of the merged result.

    Parameters
    ----------
    outs, lses, base
        As in `merge`.
    dout : float array_like (..., E)
    dlse : float array_like (...), optional
        Default 0.

    Returns
    -------
    douts : tuple of ndarray (..., E)
    dlses : tuple of ndarray (...)
        0 for parts that are left out.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `merge`, and if a gradient has another shape than its result.
    """
    parts, logs = _read_parts(ARRAYS, outs, lses)
    o, lse, weights = _merge(ARRAYS, parts, logs, base)
    do = check_cotangent("dout", dout, o.shape).astype(np.float64)
    flow = 0.0 if dlse is None else check_cotangent("dlse", dlse, lse.shape).astype(np.float64)
    unit = math.log(2) if base == "2" else 1.0  # d log₂ x = dx / (x log 2), and back again
    douts, dlses = [], []
    for part, w in zip(parts, weights, strict=True):
        apart = np.where((w > 0)[..., None], part, o) - o
        douts.append(w[..., None] * do)
        dlses.append(np.asarray(w * (unit * (do * apart).sum(-1) + flow)))
    return tuple(douts), tuple(dlses)


def _merge(
    xp: Any, parts: Sequence[Array], logs: Sequence[Array], base: Any
) -> tuple[Array, Array, Array]:
    """Return o, (..., E), lse, (...), and the weights, (parts, ...), of parts (..., E)."""
    check_choice("base", base, get_args(Base))
    exp, log = (xp.exp2, xp.log2) if base == "2" else (xp.exp, xp.log)
    # A dead part has −inf: what it would compute is replaced first, so that no gradient is NaN.
    every = xp.stack(logs)
    live = ~xp.isneginf(every)
    top = xp.amax(every, 0)
    top = xp.where(xp.isneginf(top), 0, top)
    sizes = xp.where(live, exp(xp.where(live, every - top, 0)), 0)
    some = live.any(0)
    total = xp.where(some, sizes.sum(0), 1)
    lse = xp.where(some, log(total) + top, -math.inf)
    weights = sizes / total
    o = xp.add_parts(weights[..., None] * xp.where(live[..., None], xp.stack(parts), 0))
    return o, lse, weights


def _check_parts(parts: Sequence[Array], logs: Sequence[Array]) -> None:
    """Check the number and the shapes of parts and of their lse."""
    for name, xs in (("outs", parts), ("lses", logs)):
        for x in xs:
            if x.dtype.kind == "c":
                raise DtypeError(f"{name} is {x.dtype}, must be real")
    if not parts or len(parts) != len(logs):
        raise ShapeError(f"outs has {len(parts)} parts and lses {len(logs)}, must be as many, ≥ 1")
    shape = parts[0].shape
    alike = all(x.shape == shape for x in parts) and all(x.shape == shape[:-1] for x in logs)
    if not shape or not alike:
        shown = ", ".join(f"{a.shape} {b.shape}" for a, b in zip(parts, logs, strict=True))
        raise ShapeError(
            f"outs and lses have shapes {shown}, must be (..., E) and (...), all alike"
        )


def _read_parts(xp: Any, outs: Any, lses: Any) -> tuple[list[Any], list[Any]]:
    """Return the arrays of outs, (..., E), and of lses, (...), each list in its widest dtype."""
    arrays, facts = [], []
    for name, value in (("outs", outs), ("lses", lses)):
        if not isinstance(value, Iterable) or getattr(value, "ndim", 1) < 1:
            raise OptionError(
                f"{name} is of type {type(value).__name__}, must be a sequence: an array a part"
            )
        read = [xp.read(**{name: x}) for x in value]
        arrays.append([x[name] for x, _ in read])
        facts.append([x[name] for _, x in read])
    _check_parts(*facts)
    parts, logs = ([xp.widest(x) for x in xs] for xs in arrays)
    if xp.reads_numbers and any(np.isposinf(x).any() for x in logs):
        raise OptionError(
            "lses has +inf, must be −inf where a part has no visible key: "
            "pass np.where(np.isposinf(lse), -np.inf, lse)"
        )
    return parts, logs
