"""Arrays of visible keys for a tile: their extent, their simplest form, and checks of integers."""

from typing import Any

import numpy as np

from npattn.errors import DtypeError, ShapeError
from npattn.problem.arrays import Array, Tile, describe_value
from npattn.problem.checks import read_array
from npattn.problem.sizes import KnownSizes, Sized


def is_empty(tile: Tile) -> bool:
    return tile.t0 == tile.t1 or tile.s0 == tile.s1


def simplify(visible: Array) -> bool | Array:
    """Simplify an array of equal values to True or False."""
    if visible.all():
        return True
    return visible if visible.any() else False


def extent(visible: Any) -> tuple[int, int]:
    """Range from the first True to after the last; (0, 0) if there is none."""
    indices = np.flatnonzero(visible)
    return (int(indices[0]), int(indices[-1]) + 1) if indices.size else (0, 0)


def head_axis(batch: tuple[int, ...]) -> tuple[int, ...]:
    """Append an axis for the heads to batch axes, if there are any."""
    return (*batch, 1) if batch else ()


def read_integers(name: str, value: Any) -> Array:
    array = read_array(name, value)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name} is {array.dtype}, must be an integer array")
    return array


def check_own(mask: Sized, known: KnownSizes, T: int, S: int) -> None:
    """Check that T and S are those that a mask was made for; a size of 1 is no exception."""
    if known.T not in (None, T) or known.S not in (None, S):
        raise ShapeError(
            f"mask is {describe_value(mask)}, which does not fit T = {T} queries and S = {S} keys"
        )
