"""Directions in which a function is differentiated: random ones, and single elements.

Kinks lie where elements are tied (a maximum) or 0 (an absolute value).  A *tied* direction moves
equal numbers alike and keeps zeros, so that along it the function is smooth, and its slope is what
any choice of subgradients must add up to.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from npattn.problem.arrays import Array

ELEMENTS = 32
"""Elements of an array up to which each is a direction; a quarter as many of a larger array."""

LEAST = 2.0**-1000
"""Numbers below move like 0: parts of them are rounded to subnormal numbers."""


def scale_of(x: Array) -> float:
    """Return the root mean square of the finite elements that are not 0; 1 if there are none."""
    kept = np.abs(x[np.isfinite(x) & (abs(x) >= LEAST)])
    if not kept.size:
        return 1.0
    return float(kept.max() * np.sqrt(((kept / kept.max()) ** 2).mean()))


def random_signs(rng: np.random.Generator, size: int) -> Array:
    """Return numbers of random sign, between a half and 1."""
    result: Array = rng.uniform(0.5, 1, size) * rng.choice([-1.0, 1.0], size)
    return result


def tied_direction(x: Array, rng: np.random.Generator) -> Array:
    """Return a direction that moves numbers of one absolute value by the same part of it."""
    values, place = np.unique(abs(x), return_inverse=True)
    moved: Array = np.nan_to_num(x) * random_signs(rng, len(values))[place]
    moved[abs(x) < LEAST] = 0
    return moved


def directions(
    x: Array, parts: list[slice], rng: np.random.Generator
) -> Iterator[tuple[str, Array]]:
    """Yield directions, (n,), that move the elements of `parts` of x, (n,), each with its kind.

    Kinds: "tied", "random" (every element by about the root mean square of its array) and "element"
    (by its own size). Several parts are moved together, and not element by element.
    """
    for kind in ("tied", "tied", "random", "random"):
        u = np.zeros_like(x)
        if kind == "tied":
            values = np.concatenate([x[part] for part in parts])
            moved = tied_direction(values, rng)
        else:
            moved = np.concatenate(
                [scale_of(x[p]) * random_signs(rng, p.stop - p.start) for p in parts]
            )
        u[np.r_[tuple(parts)]] = moved
        if np.any(u):
            yield kind, u
    if len(parts) > 1:
        return
    [part] = parts
    size = part.stop - part.start
    chosen = np.arange(size) if size <= ELEMENTS else rng.choice(size, ELEMENTS // 4, replace=False)
    for i in np.sort(chosen) + part.start:
        yield "element", element(x, part, int(i))


def element(x: Array, part: slice, i: int) -> Array:
    """Return the direction of one element, by its own size."""
    u = np.zeros_like(x)
    u[i] = abs(x[i]) if abs(x[i]) >= LEAST and np.isfinite(x[i]) else scale_of(x[part])
    return u
