"""Factors (descales) of arrays of 8 bits: which part of an array each of them belongs to."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer, read_floating


def check_descale(descale: ArrayLike, name: str = "descale") -> Array:
    """Return factors as an array. Raises OptionError if one is not a finite number above 0."""
    array = read_real(name, descale)
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise OptionError(f"{name} must be finite numbers above 0")
    return array


def read_real(name: str, x: ArrayLike) -> Array:
    """Return an array of real floating numbers."""
    array = read_floating(name, x)
    if array.dtype.kind == "c":
        raise DtypeError(f"{name} is {array.dtype}, must be real")
    return array


def spread(descale: Array, shape: tuple[int, ...], rows: int | None = None, xp: Any = np) -> Array:
    """Return descales in a shape that broadcasts against an array (..., H, T, D) of a shape."""
    blocks, heads = repeats(tuple(descale.shape), shape, rows)
    if descale.ndim == 0:
        return descale
    if blocks:
        descale = xp.repeat(descale, blocks, -1)[..., : shape[-2], None]
    else:
        descale = descale[..., None, None]
    if heads > 1:
        descale = xp.repeat(descale, heads, -3)
    return descale


def repeats(descale: tuple[int, ...], shape: tuple[int, ...], rows: int | None) -> tuple[int, int]:
    """Return for how many rows (0: a whole head) and heads of `shape` each descale stands."""
    of_blocks = bool(descale) and len(descale) == len(shape) - 1
    if rows is not None and not of_blocks:
        raise OptionError(f"rows is {rows}, must be left out: descale {descale} has no blocks")
    if not descale:
        return 0, 1
    lead = descale[:-1] if of_blocks else descale
    fits = len(lead) == len(shape) - 2
    if of_blocks:
        if rows is None and descale[-1] == shape[-2]:
            rows = 1
        if rows is None:
            raise OptionError(f"descale {descale} is of blocks of rows: say how many with rows=")
        fits = fits and descale[-1] == -(-shape[-2] // check_integer("rows", rows, least=1))
    heads = 1
    if fits and lead:
        factors, all_heads = lead[-1], shape[-3]
        heads = all_heads // factors if factors > 1 and all_heads % factors == 0 else 1
        fits = factors in (1, all_heads) or heads > 1
        fits = fits and all(n in (1, m) for n, m in zip(lead[:-1], shape[:-3], strict=True))
    if not fits:
        raise ShapeError(
            f"descale has shape {descale}, must be (), {shape[:-2]}, {shape[:-1]} or, for blocks "
            f"of rows, {shape[:-2]} and their number: the array has shape {shape}"
        )
    return rows or 0, heads


def gather(terms: Array, descale: Array, rows: int | None) -> Array:
    """Return the sum of the terms (..., H, T, D) that belong to each descale."""
    blocks, _ = repeats(descale.shape, terms.shape, rows)
    if descale.ndim == 0:
        return np.asarray(terms.sum())
    sums = terms.sum(-1)
    if not blocks:
        sums = sums.sum(-1)
    elif terms.shape[-2]:
        sums = np.add.reduceat(sums, np.arange(0, terms.shape[-2], blocks), axis=-1)
    head = -2 if blocks else -1
    if sums.ndim + head >= 0 and descale.shape[head] not in (1, sums.shape[head]):
        split = [*sums.shape]
        split[head : head + 1 or None] = [descale.shape[head], -1]
        sums = sums.reshape(split).sum(head if head == -1 else -2)
    axes = tuple(n for n, size in enumerate(descale.shape) if size == 1 and sums.shape[n] != 1)
    return np.asarray(sums.sum(axes, keepdims=True))
