"""Causal masks and windows: keys between two distances from the query's own."""

from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from npattn.errors import OptionError
from npattn.masks.mask import Mask, check_own, is_empty
from npattn.problem.arrays import Array, Tile, band, diagonal
from npattn.problem.checks import check_alignment, check_integer
from npattn.problem.options import Alignment
from npattn.problem.sizes import KnownSizes, format_call, read_only


def causal(
    T: int | None = None, S: int | None = None, *, alignment: Alignment | None = None
) -> Mask:
    """Mask of a causal model: each query sees the keys up to its own.

    Parameters
    ----------
    T : int, optional
        Queries; default those of the problem.
    S : int, optional
        Keys; default T where that is given, else those of the problem.
    alignment : {"bottom_right", "top_left"}, optional
        Query t sees keys s ≤ t + (S − T), or s ≤ t. Required where T ≠ S.

    Returns
    -------
    Mask
        (T, S)

    Raises
    ------
    OptionError
        If T or S is not an integer ≥ 0; if T ≠ S without `alignment`, here or once both are known.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import masks
    >>> np.asarray(masks.causal(2, 3, alignment="bottom_right"))
    array([[ True,  True, False],
           [ True,  True,  True]])
    """
    T = None if T is None else check_integer("T", T, 0)
    S = T if S is None else check_integer("S", S, 0)
    if alignment is not None:
        alignment = check_alignment(alignment)
    elif T is not None and S is not None:
        _check_unambiguous(T, S)
    return Band(None, 0, alignment, T, S)


def window(
    left: int | None, right: int | None = None, *, alignment: Alignment = "bottom_right"
) -> Mask:
    """Sliding window: each query sees the keys near the one beside it.

    Parameters
    ----------
    left : int ≥ 0 or None
        Number of keys before the one beside the query; None is unlimited.
    right : int ≥ 0, optional
        Number of keys after it; default unlimited.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"
        Beside query t is key t + (S − T), or t.

    Returns
    -------
    Mask
        (T, S)

    Raises
    ------
    OptionError
        If a side is not an integer ≥ 0 or None, or `alignment` is not one of the two.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.window(0, 1, alignment="top_left").to_array(2, 3)
    array([[ True,  True, False],
           [False,  True,  True]])
    """
    sides = (("left", left), ("right", right))
    left, right = (None if n is None else check_integer(name, n, 0) for name, n in sides)
    return Band(left, right, check_alignment(alignment))


@dataclass(frozen=True, eq=False, repr=False)
class Band(Mask):
    """Keys within `left` and `right` of the one beside the query: causal masks and windows."""

    left: int | None
    right: int | None
    alignment: Alignment | None  # None: only where T == S, and both are the same
    T: int | None = None
    S: int | None = None

    def __repr__(self) -> str:
        sizes = (self.T, self.S) if self.S is not None else () if self.T is None else (self.T,)
        if self.left is None and self.right == 0:
            return format_call("masks.causal", *sizes, alignment=self.alignment)
        return format_call("masks.window", self.left, self.right, alignment=self.alignment)

    def _known_sizes(self) -> KnownSizes:
        return KnownSizes((), self.T, self.S)

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        check_own(self, self._known_sizes(), T, S)
        if self.alignment is None:
            _check_unambiguous(T, S)
        return T, S

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        on_diagonal = np.arange(T)[:, None] + diagonal(T, S, self.alignment)
        return band(on_diagonal, np.arange(S), self.left, self.right)

    def hull(self, tile: Tile) -> tuple[int, int]:
        first, last = self._beside(tile)
        lo = 0 if self.left is None else first - self.left
        hi = tile.S if self.right is None else last + self.right + 1
        lo = min(max(lo, 0), tile.S)
        return lo, max(min(hi, tile.S), lo)

    def tile(self, tile: Tile) -> bool | Array:
        visible = self.outright(tile)
        if visible is not None:
            return visible
        sizes = (tile.t1 - tile.t0, tile.s1 - tile.s0)
        return _band_tile(*sizes, self.first(tile), self.left, self.right)

    def outright(self, tile: Tile) -> bool | None:
        """Return True or False if all or none of a tile is visible, without an array; else None."""
        first, last = self._beside(tile)
        # s − beside takes all values from low to high, so that some are visible where these meet
        # −left … right, which holds 0 and is never empty.
        low, high = tile.s0 - last, tile.s1 - 1 - first
        least = -inf if self.left is None else -self.left
        most = inf if self.right is None else self.right
        if is_empty(tile) or (least <= low and high <= most):
            return True
        return False if high < least or most < low else None

    def first(self, tile: Tile) -> int:
        """Index of the key beside the first query of a tile, counted from its first key.

        Tiles of one size with the same index are equal.
        """
        return self._beside(tile)[0] - tile.s0

    def _beside(self, tile: Tile) -> tuple[int, int]:
        """Indices of the keys beside the first and the last query of a tile."""
        offset = diagonal(tile.T, tile.S, self.alignment)
        return tile.t0 + offset, tile.t1 - 1 + offset


@lru_cache(16)  # all tiles on the diagonal are alike
def _band_tile(n: int, m: int, first: int, left: int | None, right: int | None) -> Array:
    """Tile (n, m) of a band in which key `first` is beside query 0."""
    return read_only(band(np.arange(first, first + n)[:, None], np.arange(m), left, right))


def _check_unambiguous(T: int, S: int) -> None:
    if T != S:
        raise OptionError(
            f"a causal mask without alignment is ambiguous for T = {T} queries and S = {S} keys: "
            'pass alignment="bottom_right" (the last query sees the last key) or "top_left"'
        )
