"""Say what wrong results are: a factor of the right ones, other rows, or where they stand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from npattn.problem.arrays import Array

SHIFTS = (1, -1, 2, -2)
"""Distances of other rows that are tried."""
LEAST = 4
"""Elements that are wrong, from which a sentence on them is no coincidence."""
FACTORS = (2.0, 0.5, -1.0, 3.0, 4.0, 0.25, 1 / 3, -2.0)
"""Factors that are said as they are, if they fit; others in three digits."""


def describe_amount(name: str, got: Array, exact: Array, allowed: Array) -> str:
    """Return a sentence on a wrong result; "" if nothing simple fits.

    The right result and its tolerance are float64, of the shape of the result (any); the tolerance
    is inf where it is not judged.
    """
    if got.shape != exact.shape:
        return ""
    wide = got.astype(np.float64)
    with np.errstate(all="ignore"):
        judged = np.isfinite(wide) & np.isfinite(exact) & np.isfinite(allowed)
        wrong = judged & (abs(wide - exact) > allowed)
        if wrong.sum() < LEAST:
            return ""
        where = _where(wrong, judged)
        some = where or ("" if (wrong == judged).all() else _count(wrong, judged))
        if not wide[wrong].any():
            return f"{name} is 0{some}"
        for text, other in (*_describe_factor(wide, exact, wrong), *_describe_shift(exact)):
            fits = abs(wide - other[0]) <= other[1] * allowed
            if fits[wrong].all() and (abs(other[0] - exact) > 2 * allowed)[wrong].all():
                return f"{name} is {text}{some}"
    return f"{name} is wrong{where}" if where else ""


def _describe_factor(
    wide: Array, exact: Array, wrong: Array
) -> Iterator[tuple[str, tuple[Array, float]]]:
    """Yield multiples of the right result, with a factor for its tolerance; all of one shape."""
    ratio = wide[wrong] / exact[wrong]
    median = float(np.median(ratio[np.isfinite(ratio)])) if np.isfinite(ratio).any() else 0.0
    near = [x for x in FACTORS if abs(x - median) < 0.01 * abs(median)]
    for factor in (*near, median):
        if factor:
            words = {-1.0: "negated"}
            yield words.get(factor, f"{factor:.3g} times as large"), (
                factor * exact, max(1.0, abs(factor)),
            )  # fmt: skip


def _describe_shift(exact: Array) -> Iterator[tuple[str, tuple[Array, float]]]:
    """Yield the right result with other rows in place of its own."""
    for axis in range(exact.ndim):
        for shift in SHIFTS:
            if exact.shape[axis] > abs(shift):
                at = "later" if shift > 0 else "earlier"
                words = f"that of the index {abs(shift)} {at}, along axis {axis}"
                yield words, (np.roll(exact, -shift, axis), 1.0)


def _count(wrong: Array, judged: Array) -> str:
    return f" in {np.count_nonzero(wrong)} of {np.count_nonzero(judged)} elements"


def _where(wrong: Array, judged: Array) -> str:
    """Return " where …" if the wrong elements are all those of some indices of one axis.

    wrong and judged are of one shape, which is any.
    """
    for axis in range(wrong.ndim - 1, -1, -1):
        others = tuple(n for n in range(wrong.ndim) if n != axis)
        bad, seen = np.asarray(wrong.any(others)), np.asarray(judged.any(others))
        at = np.flatnonzero(bad)
        n, first, last, gaps = len(bad), int(at[0]), int(at[-1]), np.unique(np.diff(at))
        if not (seen & ~bad).any() or len(gaps) > 1:
            continue
        step = int(gaps[0]) if len(at) > 2 else 1
        if len(at) == 2 and last - first > 1:
            continue
        if first == last:
            return f" at index {first} of axis {axis} (of {n})"
        if step > 1:
            return f" at index {first}, {first + step}, … of axis {axis} (of {n})"
        if last == n - 1:
            return f" at index ≥ {first} of axis {axis} (of {n})"
        if first == 0:
            return f" at index ≤ {last} of axis {axis} (of {n})"
    return ""
