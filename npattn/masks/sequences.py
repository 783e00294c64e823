"""Masks of packed and padded sequences: lengths, documents, and a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import OptionError, ShapeError
from npattn.masks.bands import causal
from npattn.masks.mask import Mask, check_own, extent, head_axis, is_empty, simplify
from npattn.problem.arrays import Array, Tile, plane_of
from npattn.problem.checks import read_integers
from npattn.problem.options import Alignment
from npattn.problem.sizes import ANY, KnownSizes, check_broadcast, format_call


def lengths(keys: ArrayLike, queries: ArrayLike | None = None) -> Mask:
    """Mask of right padding: the first queries of each sample see its first keys.

    Parameters
    ----------
    keys : int array_like (...)
        Number of keys of each sample. The axes are batch axes; a scalar holds for all samples.
    queries : int array_like (...), optional
        Number of queries of each sample; the queries after them see nothing. Default all.

    Returns
    -------
    Mask
        (..., 1, 1, S), with `queries` (..., 1, T, S); without batch axes (1, S) or (T, S)

    Raises
    ------
    DtypeError
        If a length is not an integer.
    OptionError
        If a length is negative.
    ShapeError
        If the two do not broadcast; later, if a length exceeds the size of the problem.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.lengths([1, 3]).to_array(S=3)[:, 0, 0]
    array([[ True, False, False],
           [ True,  True,  True]])
    """
    keys = _lengths("keys", keys)
    if queries is not None:
        queries = _lengths("queries", queries)
        check_broadcast("lengths", keys.shape, queries.shape)
    return Lengths(keys, queries)


def documents(queries: ArrayLike, keys: ArrayLike | None = None) -> Mask:
    """Mask of packed sequences: a query sees the keys of its own document.

    Parameters
    ----------
    queries : int array_like (..., T)
        Number of the document that each query belongs to. The axes before T are batch axes.
    keys : int array_like (..., S), optional
        Number of the document that each key belongs to; default `queries`.

    Returns
    -------
    Mask
        (..., 1, T, S), without batch axes (T, S)

    Raises
    ------
    DtypeError
        If a document number is not an integer.
    ShapeError
        If an array has rank 0, or the batch axes do not broadcast.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import masks
    >>> np.asarray(masks.documents([0, 0, 1]))
    array([[ True,  True, False],
           [ True,  True, False],
           [False, False,  True]])
    """
    queries = _documents("queries", queries)
    keys = queries if keys is None else _documents("keys", keys)
    check_broadcast("batch axes", queries.shape[:-1], keys.shape[:-1])
    return Documents(queries, keys)


def prefix(length: ArrayLike, *, alignment: Alignment | None = None) -> Mask:
    """Causal mask with a prefix that every query sees.

    Parameters
    ----------
    length : int array_like (...)
        Number of keys in the prefix, of each sample or (a scalar) of all.
    alignment : {"bottom_right", "top_left"}, optional
        As in `causal`.

    Returns
    -------
    Mask
        (..., 1, T, S), without batch axes (T, S)

    Raises
    ------
    DtypeError
        If a length is not an integer.
    OptionError
        If a length is negative, or `alignment` is not one of the two.
    ShapeError
        Later, if a length exceeds S.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.prefix(2).to_array(3, 3)
    array([[ True,  True, False],
           [ True,  True, False],
           [ True,  True,  True]])
    """
    return causal(alignment=alignment) | lengths(length)


@dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    keys: Array  # (...) batch axes
    queries: Array | None  # (...)

    def __repr__(self) -> str:
        return format_call("masks.lengths", self.keys, queries=self.queries)

    def _known_sizes(self) -> KnownSizes:
        queries = () if self.queries is None else self.queries.shape
        T = ANY if self.queries is None else None
        return KnownSizes(head_axis(np.broadcast_shapes(self.keys.shape, queries)), T, None)

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        _check_lengths("keys", self.keys, "S", S)
        if self.queries is not None:
            _check_lengths("queries", self.queries, "T", T)
        return (*self._known_sizes().axes, 1 if self.queries is None else T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        visible = np.arange(S) < self.keys[..., None, None, None]  # (..., 1, 1, S)
        if self.queries is not None:
            visible = visible & (np.arange(T)[:, None] < self.queries[..., None, None, None])
        return visible.reshape(self._shape(lead, H, T, S))

    def hull(self, tile: Tile) -> tuple[int, int]:
        T, S = self._of_sample(tile)
        return 0, S if tile.t0 < T else 0

    def tile(self, tile: Tile) -> bool | Array:
        T, S = self._of_sample(tile)
        if is_empty(tile) or (tile.t1 <= T and tile.s1 <= S):
            return True
        if tile.t0 >= T or tile.s0 >= S:
            return False
        return np.asarray((tile.t < T) & (tile.s < S))

    def _of_sample(self, tile: Tile) -> tuple[int, int]:
        """Number of queries and keys of a tile's sample."""
        S, queries = int(plane_of(self.keys, tile.plane[:-1], 0)), self.queries
        return tile.T if queries is None else int(plane_of(queries, tile.plane[:-1], 0)), S


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    queries: Array  # (..., T)
    keys: Array  # (..., S)

    def __repr__(self) -> str:
        keys = None if self.keys is self.queries else self.keys
        return format_call("masks.documents", self.queries, keys=keys)

    def _known_sizes(self) -> KnownSizes:
        batch = np.broadcast_shapes(self.queries.shape[:-1], self.keys.shape[:-1])
        return KnownSizes(head_axis(batch), self.queries.shape[-1], self.keys.shape[-1])

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        check_own(self, self._known_sizes(), T, S)
        return (*self._known_sizes().axes, T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        same = self.queries[..., None, :, None] == self.keys[..., None, None, :]
        return np.asarray(same).reshape(self._shape(lead, H, T, S))

    def hull(self, tile: Tile) -> tuple[int, int]:
        queries, keys = self._of_sample(tile)
        return extent(np.isin(keys, queries))

    def tile(self, tile: Tile) -> bool | Array:
        queries, keys = self._of_sample(tile)
        return simplify(queries[:, None] == keys[tile.s0 : tile.s1])

    def _of_sample(self, tile: Tile) -> tuple[Array, Array]:
        """Documents of a tile's queries, and of all keys of its sample."""
        sample = tile.plane[:-1]
        queries = plane_of(self.queries, sample, 1)[tile.t0 : tile.t1]
        return queries, plane_of(self.keys, sample, 1)


def _lengths(name: str, value: Any) -> Array:
    array = read_integers(name, value)
    if array.size and array.min() < 0:
        raise OptionError(f"{name} contains length {array.min()}, must be 0 or more")
    return array


def _check_lengths(name: str, array: Array, size: str, n: int) -> None:
    if array.size and array.max() > n:
        raise ShapeError(f"{name} contains length {array.max()}, which exceeds {size} = {n}")


def _documents(name: str, value: Any) -> Array:
    array = read_integers(name, value)
    if array.ndim == 0:
        raise ShapeError(f"{name} has shape (), must have rank 1 or more: a document for each")
    return array
