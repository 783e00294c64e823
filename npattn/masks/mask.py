"""The protocol of masks, arrays as masks, and their composition by ``& | ~``."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, ShapeError
from npattn.problem.arrays import Array, MaskLike, Tile, describe_value, tile_of
from npattn.problem.checks import read_mask
from npattn.problem.sizes import KnownSizes, Sized, format_call, read_only, sizes_of_array


class Mask(Sized):
    """Visible keys of each query: made by the functions of `npattn.masks`, composed by ``& | ~``.

    Frozen. Accepted as ``mask=`` wherever a boolean array is; ``np.asarray(mask)`` is the array of
    a mask that knows its T and S. The other side of ``&`` and ``|`` may be a boolean array.
    """

    kind = "mask"

    def __and__(self, other: Mask | ArrayLike) -> Mask:
        return And(self, of(other))

    def __rand__(self, other: ArrayLike) -> Mask:
        return And(of(other), self)

    def __or__(self, other: Mask | ArrayLike) -> Mask:
        return Or(self, of(other))

    def __ror__(self, other: ArrayLike) -> Mask:
        return Or(of(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    def hull(self, tile: Tile) -> tuple[int, int]:
        """Return a range of keys outside which the rows of a tile see nothing.

        Parameters
        ----------
        tile : Tile
            Only its head (`plane`) and its queries count.

        Returns
        -------
        (lo, hi) : int
            0 ≤ lo ≤ hi ≤ S. None of these queries sees a key outside lo ≤ s < hi; inside, some
            keys may be hidden from all of them.
        """
        return 0, tile.S

    def tile(self, tile: Tile) -> bool | Array:
        """Visible pairs in a rectangle of one head's scores.

        Parameters
        ----------
        tile : Tile

        Returns
        -------
        bool, or bool array (t1 − t0, s1 − s0)
            True if all pairs are visible (or there are none), False if all are hidden, else an
            array with both.
        """
        raise NotImplementedError


def of(mask: MaskLike | ArrayLike) -> Mask:
    """Convert a boolean array to a `Mask`; return a `Mask` unchanged.

    Parameters
    ----------
    mask : Mask or bool array_like
        Of rank 2 or more, as for ``mask=``.

    Returns
    -------
    Mask
        In the shape of the array.

    Raises
    ------
    DtypeError
        If it is neither a `Mask` nor boolean.
    """
    if isinstance(mask, Mask):
        return mask
    array = read_mask(mask)
    if isinstance(array, np.ndarray):
        return ArrayMask(array)
    raise DtypeError(f"mask is {describe_value(mask)}, must be bool or one of npattn.masks")


@dataclass(frozen=True, eq=False, repr=False)
class ArrayMask(Mask):
    """A boolean array."""

    array: Array

    def __repr__(self) -> str:
        return format_call("masks.of", self.array)

    def _known_sizes(self) -> KnownSizes:
        return sizes_of_array(self.array)

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        return read_only(self.array)

    def hull(self, tile: Tile) -> tuple[int, int]:
        rows = tile_of(self.array, tile._replace(s0=0, s1=tile.S))
        return extent(np.broadcast_to(rows.any(0), tile.S))

    def tile(self, tile: Tile) -> bool | Array:
        visible = tile_of(self.array, tile)
        return simplify(np.broadcast_to(visible, (tile.t1 - tile.t0, tile.s1 - tile.s0)))


@dataclass(frozen=True, eq=False, repr=False)
class Composition(Mask):
    """Base of the compositions of two masks."""

    one: Mask
    other: Mask
    symbol: ClassVar[str]
    combine: ClassVar[Any]
    decides: ClassVar[bool]
    """Visibility that one of the two masks decides, whatever the other says."""

    def __post_init__(self) -> None:
        self._known_sizes()  # raises if the two are for different sizes

    def _known_sizes(self) -> KnownSizes:
        return self.one._known_sizes() & self.other._known_sizes()

    def __repr__(self) -> str:
        return f"({self.one!r} {self.symbol} {self.other!r})"

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        one, other = (mask.shape(lead, H, T, S) for mask in (self.one, self.other))
        return np.broadcast_shapes(one, other)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        one, other = (mask._values(lead, H, T, S) for mask in (self.one, self.other))
        return np.asarray(self.combine(one, other))

    def tile(self, tile: Tile) -> bool | Array:
        one = self.one.tile(tile)
        if one is self.decides:
            return one
        other = self.other.tile(tile)
        if isinstance(one, bool) or other is self.decides:
            return other
        return one if isinstance(other, bool) else simplify(self.combine(one, other))


class And(Composition):
    symbol, combine, decides = "&", staticmethod(operator.and_), False

    def hull(self, tile: Tile) -> tuple[int, int]:
        one, other = self.one.hull(tile), self.other.hull(tile)
        lo = max(one[0], other[0])
        return lo, max(lo, min(one[1], other[1]))


class Or(Composition):
    symbol, combine, decides = "|", staticmethod(operator.or_), True

    def hull(self, tile: Tile) -> tuple[int, int]:
        hulls = [h for h in (self.one.hull(tile), self.other.hull(tile)) if h[0] < h[1]]
        return min((lo for lo, _ in hulls), default=0), max((hi for _, hi in hulls), default=0)


@dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    mask: Mask

    def __repr__(self) -> str:
        return f"~{self.mask!r}"

    def _known_sizes(self) -> KnownSizes:
        return self.mask._known_sizes()

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return self.mask.shape(lead, H, T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        return np.asarray(~self.mask._values(lead, H, T, S))

    def tile(self, tile: Tile) -> bool | Array:
        if is_empty(tile):
            return True
        visible = self.mask.tile(tile)
        return not visible if isinstance(visible, bool) else np.asarray(~visible)


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


def check_own(mask: Sized, sizes: KnownSizes, T: int, S: int) -> None:
    """Check that T and S are those that a mask was made for; a size of 1 is no exception."""
    if sizes.T not in (None, T) or sizes.S not in (None, S):
        raise ShapeError(
            f"mask is {describe_value(mask)}, which does not fit T = {T} queries and S = {S} keys"
        )
