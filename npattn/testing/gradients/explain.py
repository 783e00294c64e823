"""Names of mistakes in a gradient: a factor, a missing mean, a transposed or unsummed array."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import combinations
from math import ceil, floor, isqrt, log10, prod, sqrt

import numpy as np

from npattn.problem.arrays import Array

MOST = 12
"""Largest denominator of a factor that is named."""


def explain_shape(name: str, got: tuple[int, ...], want: tuple[int, ...]) -> str:
    """Explain a gradient of another shape than its argument."""
    text = f"{name} has shape {got}, must be {want}"
    lead = len(got) - len(want)
    if lead >= 0 and all(w in (1, g) for g, w in zip(got[lead:], want, strict=True)):
        axes = [*range(lead), *(lead + i for i, w in enumerate(want) if w != got[lead + i])]
        return f"{text}: it is not summed over {_name_axes(axes)}, along which f broadcasts"
    if sorted(got) == sorted(want):
        return f"{text}: its axes are in another order"
    return text


def explain_values(
    name: str,
    got: Array,  # the claimed gradient, differences, and the errors of these
    want: Array,
    error: Array,
    others: Mapping[str, Array],  # name → right gradients of other arguments of that shape
    rounding: Array | float = 0.0,  # of the claimed gradient
) -> str:
    """Explain a gradient by the right one, of the same shape, or return ""."""
    error = error + 1e-9 * np.abs(want).max(initial=0)
    tolerance = error + rounding

    def agree(a: Array, b: Array, factor: float = 1.0) -> bool:
        return bool((abs(a - b) <= max(abs(factor), 1) * error + rounding).all())

    differ = abs(got - want) > tolerance
    if not differ.any():  # it is wrong by less than the errors here
        return ""
    if agree(got, np.zeros_like(got)):
        return f"{name} is 0 everywhere"
    if agree(want, np.zeros_like(want)):
        return f"{name} is not 0, but the results do not depend on it"
    sizes = (want**2).sum()
    factor = float((got * want).sum() / sizes)
    if agree(got, factor * want, factor):
        precision = float(np.sqrt(((abs(factor) * error + rounding) ** 2).sum() / sizes))
        if abs(factor - 1) <= 8 * precision:
            return ""
        return f"{name} is {name_factor(factor, precision, want.shape)} what it should be"
    for other, array in others.items():
        if agree(got, array):
            return f"{name} is the gradient of {other}"
    for i, j in combinations(range(want.ndim), 2):
        if want.shape[i] == want.shape[j] and agree(got, want.swapaxes(i, j)):
            return f"{name} is transposed: axes {i} and {j} are swapped"
    gap = got - want
    for axes in (*range(-1, -want.ndim - 1, -1), tuple(range(want.ndim))):
        mean = gap.mean(axes, keepdims=True)
        if want.size > 1 and want.shape and agree(gap, np.broadcast_to(mean, gap.shape)):
            place = _name_axes([axes] if isinstance(axes, int) else list(axes))
            if agree(np.broadcast_to(got.mean(axes, keepdims=True), gap.shape), gap):
                return f"{name} lacks a term: its mean over {place} is not subtracted"
            if agree(np.broadcast_to(want.mean(axes, keepdims=True), gap.shape), -gap):
                return f"{name} has its mean over {place} subtracted, which it should keep"
            return f"{name} is off by a term that is constant along {place}"
    if agree(abs(got), abs(want)):
        return f"{name} has the wrong sign at {_places(differ)}"
    if differ.sum() <= differ.size / 2:
        zero = " and is 0 there" if agree(np.where(differ, got, 0), np.zeros_like(got)) else ""
        return f"{name} is wrong at {_places(differ)} alone{zero}"
    return ""


def name_factor(factor: float, precision: float, shape: tuple[int, ...]) -> str:
    """Name a factor by sizes of the array and small numbers, to the precision it is known to.

    It has a name only if no other factor that has one is as near.
    """
    near = max(8 * precision, 1e-12 * max(abs(factor), 1))
    sizes = sorted({n for n in (*shape, prod(shape)) if n > 1})
    roots = [n for n in sizes if isqrt(n) ** 2 != n]
    named = {f"√{n}": sqrt(n) for n in roots} | {f"1/√{n}": 1 / sqrt(n) for n in roots}
    named |= {f"1/{n}": 1 / n for n in sizes}
    near_by = [(round(factor * q) + n, q) for q in range(1, MOST + 1) for n in (-1, 0, 1)]
    fractions = {Fraction(*pair) for pair in near_by}
    named |= {str(x): float(x) for x in fractions if x}
    found = [text for text, value in named.items() if abs(factor - value) <= near]
    if len(found) == 1:
        return f"{found[0]} of" if "/" in found[0] else f"{found[0]} times"
    digits = floor(log10(abs(factor))) - ceil(log10(near)) + 1
    about = "about " if digits < 3 else ""
    return f"{about}{float(f'{factor:.{min(max(digits, 1), 9)}g}'):.9g} times"


def _name_axes(axes: list[int]) -> str:
    return f"axis {axes[0]}" if len(axes) == 1 else f"axes {', '.join(map(str, axes))}"


def _places(differ: Array) -> str:
    """Name the elements that differ, or the one index of an axis that they share."""
    places = np.argwhere(differ)
    count = f"{len(places)} of {differ.size} elements"
    for axis in range(differ.ndim):
        index = set(places[:, axis].tolist())
        if len(index) == 1 and differ.shape[axis] > 1 and len(places) > 1:
            return f"{count}, all at index {index.pop()} of axis {axis}"
    first = ", ".join(str(place.tolist()) for place in places[:3])
    return f"{count} ({first}{', …' if len(places) > 3 else ''})"
