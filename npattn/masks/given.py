"""Masks from what the caller gives: a layout of blocks, a tree, a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.masks.mask import Mask, extent, is_empty, of, simplify
from npattn.problem.arrays import Array, Tile, plane_of
from npattn.problem.checks import check_integer, read_array, read_integers
from npattn.problem.sizes import KnownSizes, format_call


def blocks(layout: ArrayLike, size: int | tuple[int, int]) -> Mask:
    """Block-sparse mask: whole blocks of queries and keys are visible or hidden.

    Parameters
    ----------
    layout : bool array_like (..., nT, nS)
        Query t sees key s where ``layout[..., t // size, s // size]``; rank 3 is (H, nT, nS). There
        are exactly as many blocks as T queries and S keys need; the last ones may be partial.
    size : int or (int, int)
        Number of queries and of keys in a block.

    Returns
    -------
    Mask
        (..., T, S)

    Raises
    ------
    DtypeError
        If `layout` is not boolean.
    OptionError
        If `size` is not an integer ≥ 1 or a pair of them.
    ShapeError
        If `layout` has rank below 2; later, if the problem needs another number of blocks.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.blocks([[True, False], [False, True]], 2).to_array(3, 4)
    array([[ True,  True, False, False],
           [ True,  True, False, False],
           [False, False,  True,  True]])
    """
    array = read_array("layout", layout)
    if array.dtype != np.bool_:
        raise DtypeError(f"layout is {array.dtype}, must be bool: True = the block is visible")
    if array.ndim < 2:
        raise ShapeError(f"layout has shape {array.shape}, must have rank 2 or more, (..., nT, nS)")
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2:
        raise OptionError(f"size is {size!r}, must be an integer or a pair (queries, keys)")
    return Blocks(array, check_integer("size", pair[0]), check_integer("size", pair[1]))


def tree(parents: ArrayLike, past: int = 0) -> Mask:
    """Sequence tree: a token sees itself, its ancestors and a past that all share.

    Speculative decoding verifies the continuations of several branches at once so.

    Parameters
    ----------
    parents : int array_like (T,)
        Index of the parent of each token, which comes before it; −1 of a root.
    past : int, default 0
        Number of keys before those of the tokens.

    Returns
    -------
    Mask
        (T, past + T)

    Raises
    ------
    DtypeError
        If `parents` is not an integer array.
    ShapeError
        If it is not of rank 1.
    OptionError
        If a parent does not come before its token, or `past` is not an integer ≥ 0.

    Examples
    --------
    >>> from npattn import masks
    >>> np.asarray(masks.tree([-1, 0, 0, 1])).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 0, 1, 0],
           [1, 1, 0, 1]])
    """
    array, past = read_integers("parents", parents), check_integer("past", past, 0)
    if array.ndim != 1:
        raise ShapeError(f"parents has shape {array.shape}, must be (T,)")
    late = np.flatnonzero((array < -1) | (array >= np.arange(len(array))))
    if late.size:
        raise OptionError(
            f"parents[{late[0]}] is {array[late[0]]}, must be −1 or the index of an earlier token"
        )
    visible = np.eye(len(array), dtype=bool)
    for t, parent in enumerate(array):
        if parent >= 0:
            visible[t] |= visible[parent]
    shared = np.ones((len(array), past), bool)
    return of(np.concatenate([shared, visible], axis=1))


def custom(function: Predicate) -> Mask:
    """Mask computed by a function of each pair of a query and a key.

    Parameters
    ----------
    function : callable
        f(b, h, t, s) → bool array: elementwise, on integer arrays that broadcast with each other. b
        is the flat index of the batch axes, h the query head, t the query, s the key.

    Returns
    -------
    Mask
        (..., H, T, S)

    Raises
    ------
    OptionError
        If it is not callable; later, if its result does not broadcast.
    DtypeError
        Later, if its result is not boolean.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.custom(lambda b, h, t, s: (t + s) % 2 == h).to_array(2, 3, H=2)[1]
    array([[False,  True, False],
           [ True, False,  True]])
    """
    if not callable(function):
        raise OptionError(f"function is {function!r}, must be a callable f(b, h, t, s)")
    return Custom(function)


Predicate = Callable[[Array, Array, Array, Array], Any]


@dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    layout: Array  # (..., nT, nS)
    queries: int  # of a block
    keys: int

    def __repr__(self) -> str:
        return format_call("masks.blocks", self.layout, (self.queries, self.keys))

    def _known_sizes(self) -> KnownSizes:
        return KnownSizes(self.layout.shape[:-2])

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        needed = -(-T // self.queries), -(-S // self.keys)
        if self.layout.shape[-2:] != needed:
            raise ShapeError(
                f"layout has {self.layout.shape[-2:]} blocks of ({self.queries}, {self.keys}), "
                f"but T = {T} queries and S = {S} keys need {needed}"
            )
        return (*self.layout.shape[:-2], T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        rows = np.arange(T)[:, None] // self.queries
        return np.asarray(self.layout[..., rows, np.arange(S) // self.keys])

    def hull(self, tile: Tile) -> tuple[int, int]:
        first, last = extent(self._rows(tile).any(axis=0))
        return first * self.keys, min(last * self.keys, tile.S)

    def tile(self, tile: Tile) -> bool | Array:
        first, last = tile.s0 // self.keys, -(-tile.s1 // self.keys)
        layout = True if is_empty(tile) else simplify(self._rows(tile)[:, first:last])
        if isinstance(layout, bool):
            return layout
        rows = tile.t // self.queries - tile.t0 // self.queries
        return np.asarray(layout[rows, tile.s // self.keys - first])

    def _rows(self, tile: Tile) -> Array:
        """Rows of blocks that intersect a tile."""
        first, last = tile.t0 // self.queries, -(-tile.t1 // self.queries)
        return plane_of(self.layout, tile.plane)[first:last]


@dataclass(frozen=True, eq=False, repr=False)
class Custom(Mask):
    function: Predicate

    def __repr__(self) -> str:
        return format_call("masks.custom", self.function)

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return (*lead, H, T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        b = np.arange(int(np.prod(lead))).reshape(*lead, 1, 1, 1)
        h, t, s = np.ogrid[:H, :T, :S]
        return self._call((*lead, H, T, S), b, h, t, s)

    def tile(self, tile: Tile) -> bool | Array:
        b = np.ravel_multi_index(tile.plane[:-1], tile.lead) if tile.lead else 0
        at = np.array([[b]]), np.array([[tile.plane[-1]]]), tile.t, tile.s
        return simplify(self._call((tile.t1 - tile.t0, tile.s1 - tile.s0), *at))

    def _call(self, shape: tuple[int, ...], b: Array, h: Array, t: Array, s: Array) -> Array:
        visible = np.asarray(self.function(b, h, t, s))
        if visible.dtype != np.bool_:
            raise DtypeError(f"function returned {visible.dtype}, must return bool: True = visible")
        try:
            return np.broadcast_to(visible, shape)
        except ValueError:
            raise OptionError(
                f"function returned shape {visible.shape}, which does not broadcast to {shape}, "
                "as its arguments do"
            ) from None
