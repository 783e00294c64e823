"""Masks: visible keys of each query, as small objects for ``mask=`` (True = may attend).

    causal  window  sliding  dilated  strided  chunked  global_tokens  lengths  documents
    prefix  tree  blocks  custom      & | ~ compose them

An object is no (T, S) array: it holds the arguments it was made from, and answers for a rectangle
of the scores (`Mask.tile`), for the range of keys that some rows see (`Mask.hull`), or for the
whole (`Mask.to_array`). Arrays that it holds are neither copied nor written to.

A mask knows some of its sizes: documents their T and S, lengths their batch axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.arrays import Array, MaskLike, Tile, band, describe_value, diagonal, plane_of, tile_of
from npattn.checks import check_alignment, check_integer, read_array, read_mask
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.options import Alignment
from npattn.sizes import (
    ANY,
    KnownSizes,
    Sized,
    check_broadcast,
    format_call,
    read_only,
    sizes_of_array,
)

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "chunked",
    "custom",
    "dilated",
    "documents",
    "global_tokens",
    "lengths",
    "of",
    "prefix",
    "sliding",
    "strided",
    "tree",
    "window",
]

Predicate = Callable[[Array, Array, Array, Array], Any]


def __dir__() -> list[str]:
    return __all__


class Mask(Sized):
    """Visible keys of each query: made by the functions of this module, composed by ``& | ~``.

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


def sliding(left: int, sinks: int, *, alignment: Alignment = "bottom_right") -> Mask:
    """Causal window beside which every query sees the first keys too: attention sinks.

    Source: Xiao et al. 2024, "Efficient streaming language models with attention sinks".

    Parameters
    ----------
    left : int
        Keys before the one beside the query.
    sinks : int
        Number of first keys that every query sees from there on.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"

    Returns
    -------
    Mask
        (T, S)

    Raises
    ------
    OptionError
        If `left` or `sinks` is not an integer ≥ 0, or `alignment` is not one of the two.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.sliding(1, sinks=1).to_array(4, 4).astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 0, 1, 1]])
    """
    numbers = check_integer("left", left, 0), check_integer("sinks", sinks, 0)
    return Pattern("sliding", numbers, check_alignment(alignment))


def strided(step: int, *, alignment: Alignment = "bottom_right") -> Mask:
    """Every `step`-th key, counted from the one beside the query in both directions.

    Source: Child et al. 2019, "Generating long sequences with sparse transformers".

    Parameters
    ----------
    step : int
        1 or more.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"

    Returns
    -------
    Mask
        (T, S)

    Raises
    ------
    OptionError
        If `step` is not an integer ≥ 1, or `alignment` is not one of the two.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.strided(2).to_array(2, 4).astype(int)
    array([[1, 0, 1, 0],
           [0, 1, 0, 1]])
    """
    return Pattern("strided", (check_integer("step", step),), check_alignment(alignment))


def dilated(
    left: int | None, right: int | None, step: int, *, alignment: Alignment = "bottom_right"
) -> Mask:
    """Window with gaps: `left` and `right` keys beside the query, each `step` from the next.

    Source: Beltagy et al. 2020, "Longformer", section 3.1.

    Parameters
    ----------
    left, right : int or None
        Numbers of keys before and after the one beside the query; None = unlimited.
    step : int
        1 or more; 1 is a window.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"

    Returns
    -------
    Mask
        (T, S)

    Raises
    ------
    OptionError
        If a number is no such integer, or `alignment` is not one of the two.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.dilated(1, 1, 2).to_array(2, 5).astype(int)
    array([[0, 1, 0, 1, 0],
           [0, 0, 1, 0, 1]])
    """
    sides = [
        None if n is None else check_integer(name, n, 0) * check_integer("step", step)
        for name, n in (("left", left), ("right", right))
    ]
    return window(*sides, alignment=alignment) & strided(step, alignment=alignment)


def chunked(size: int, *, alignment: Alignment = "bottom_right") -> Mask:
    """Keys of the query's own chunk: those of `size` keys that the one beside it is among.

    Llama 4's layers attend to ``masks.causal() & masks.chunked(8192)``.

    Parameters
    ----------
    size : int
        Keys in a chunk, 1 or more.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"

    Returns
    -------
    Mask
        (T, S)

    Raises
    ------
    OptionError
        If `size` is not an integer ≥ 1, or `alignment` is not one of the two.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.chunked(2).to_array(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """
    return Pattern("chunked", (check_integer("size", size),), check_alignment(alignment))


def global_tokens(count: int, *, alignment: Alignment = "bottom_right") -> Mask:
    """Rows and columns of the first tokens: they see every key, and every query sees them.

    Beside others, as in ``masks.window(256, 256) | masks.global_tokens(1)``.
    Source: Beltagy et al. 2020, "Longformer", section 3.1.

    Parameters
    ----------
    count : int
        Number of such tokens.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"
        Of the queries, which are tokens by the key beside them.

    Returns
    -------
    Mask
        (T, S)

    Raises
    ------
    OptionError
        If `count` is not an integer ≥ 0, or `alignment` is not one of the two.

    Examples
    --------
    >>> from npattn import masks
    >>> masks.global_tokens(1).to_array(3, 3).astype(int)
    array([[1, 1, 1],
           [1, 0, 0],
           [1, 0, 0]])
    """
    checked = (check_integer("count", count, 0),)
    return Pattern("global_tokens", checked, check_alignment(alignment))


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
    array, past = _integers("parents", parents), check_integer("past", past, 0)
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
        return Dense(array)
    raise DtypeError(f"mask is {describe_value(mask)}, must be bool or one of npattn.masks")


# --- what these functions return ------------------------------------------------------------------


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
        _check_own(self, self._known_sizes(), T, S)
        if self.alignment is None:
            _check_unambiguous(T, S)
        return T, S

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        beside = np.arange(T)[:, None] + diagonal(T, S, self.alignment)
        return band(beside, np.arange(S), self.left, self.right)

    def hull(self, tile: Tile) -> tuple[int, int]:
        first, last = self._beside(tile)
        lo = 0 if self.left is None else first - self.left
        hi = tile.S if self.right is None else last + self.right + 1
        lo = min(max(lo, 0), tile.S)
        return lo, max(min(hi, tile.S), lo)

    def tile(self, tile: Tile) -> bool | Array:
        known = self.outright(tile)
        if known is not None:
            return known
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
        if _is_empty(tile) or (least <= low and high <= most):
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


@dataclass(frozen=True, eq=False, repr=False)
class Pattern(Mask):
    """A rule of the key and of the key beside the query, one of `PATTERNS`."""

    name: str
    numbers: tuple[int, ...]
    alignment: Alignment

    def __repr__(self) -> str:
        return format_call(f"masks.{self.name}", *self.numbers, alignment=self.alignment)

    def _known_sizes(self) -> KnownSizes:
        return KnownSizes()

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return T, S

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        return self._rule(np.arange(T)[:, None] + diagonal(T, S, self.alignment), np.arange(S))

    def tile(self, tile: Tile) -> bool | Array:
        return _simplify(self._rule(tile.t + diagonal(tile.T, tile.S, self.alignment), tile.s))

    def _rule(self, beside: Array, s: Array) -> Array:
        shape = np.broadcast_shapes(beside.shape, s.shape)
        return np.broadcast_to(PATTERNS[self.name](beside, s, *self.numbers), shape)


PATTERNS: dict[str, Callable[..., Array]] = {
    "sliding": lambda beside, s, left, sinks: (s <= beside) & ((s >= beside - left) | (s < sinks)),
    "strided": lambda beside, s, step: (beside - s) % step == 0,
    "chunked": lambda beside, s, size: beside // size == s // size,
    "global_tokens": lambda beside, s, count: (s < count) | ((beside >= 0) & (beside < count)),
}
"""Names of patterns → functions of the key beside a query and of key s, True if it is seen."""


@lru_cache(16)  # all tiles on the diagonal are alike
def _band_tile(n: int, m: int, first: int, left: int | None, right: int | None) -> Array:
    """Tile (n, m) of a band in which key `first` is beside query 0."""
    return read_only(band(np.arange(first, first + n)[:, None], np.arange(m), left, right))


@dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    keys: Array  # (...) batch axes
    queries: Array | None  # (...)

    def __repr__(self) -> str:
        return format_call("masks.lengths", self.keys, queries=self.queries)

    def _known_sizes(self) -> KnownSizes:
        queries = () if self.queries is None else self.queries.shape
        T = ANY if self.queries is None else None
        return KnownSizes(_axes(np.broadcast_shapes(self.keys.shape, queries)), T, None)

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
        if _is_empty(tile) or (tile.t1 <= T and tile.s1 <= S):
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
        return KnownSizes(_axes(batch), self.queries.shape[-1], self.keys.shape[-1])

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        _check_own(self, self._known_sizes(), T, S)
        return (*self._known_sizes().axes, T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        same = self.queries[..., None, :, None] == self.keys[..., None, None, :]
        return np.asarray(same).reshape(self._shape(lead, H, T, S))

    def hull(self, tile: Tile) -> tuple[int, int]:
        queries, keys = self._of_sample(tile)
        return _extent(np.isin(keys, queries))

    def tile(self, tile: Tile) -> bool | Array:
        queries, keys = self._of_sample(tile)
        return _simplify(queries[:, None] == keys[tile.s0 : tile.s1])

    def _of_sample(self, tile: Tile) -> tuple[Array, Array]:
        """Documents of a tile's queries, and of all keys of its sample."""
        sample = tile.plane[:-1]
        queries = plane_of(self.queries, sample, 1)[tile.t0 : tile.t1]
        return queries, plane_of(self.keys, sample, 1)


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
        visible: Array = self.layout[..., rows, np.arange(S) // self.keys]
        return visible

    def hull(self, tile: Tile) -> tuple[int, int]:
        first, last = _extent(self._rows(tile).any(axis=0))
        return first * self.keys, min(last * self.keys, tile.S)

    def tile(self, tile: Tile) -> bool | Array:
        first, last = tile.s0 // self.keys, -(-tile.s1 // self.keys)
        layout = True if _is_empty(tile) else _simplify(self._rows(tile)[:, first:last])
        if isinstance(layout, bool):
            return layout
        rows = tile.t // self.queries - tile.t0 // self.queries
        visible: Array = layout[rows, tile.s // self.keys - first]
        return visible

    def _rows(self, tile: Tile) -> Array:
        """Rows of blocks that intersect a tile."""
        first, last = tile.t0 // self.queries, -(-tile.t1 // self.queries)
        return plane_of(self.layout, tile.plane)[first:last]


@dataclass(frozen=True, eq=False, repr=False)
class Custom(Mask):
    function: Predicate

    def __repr__(self) -> str:
        return format_call("masks.custom", self.function)

    def _known_sizes(self) -> KnownSizes:
        return KnownSizes()

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return (*lead, H, T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        b = np.arange(int(np.prod(lead))).reshape(*lead, 1, 1, 1)
        h, t, s = np.ogrid[:H, :T, :S]
        return self._call((*lead, H, T, S), b, h, t, s)

    def tile(self, tile: Tile) -> bool | Array:
        b = np.ravel_multi_index(tile.plane[:-1], tile.lead) if tile.lead else 0
        at = np.array([[b]]), np.array([[tile.plane[-1]]]), tile.t, tile.s
        return _simplify(self._call((tile.t1 - tile.t0, tile.s1 - tile.s0), *at))

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


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean array."""

    array: Array

    def __repr__(self) -> str:
        return format_call("masks.of", self.array)

    def _known_sizes(self) -> KnownSizes:
        return sizes_of_array(self.array)

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.array.shape
        return shape

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        return read_only(self.array)

    def hull(self, tile: Tile) -> tuple[int, int]:
        rows = tile_of(self.array, tile._replace(s0=0, s1=tile.S))
        return _extent(np.broadcast_to(rows.any(0), tile.S))

    def tile(self, tile: Tile) -> bool | Array:
        visible = tile_of(self.array, tile)
        return _simplify(np.broadcast_to(visible, (tile.t1 - tile.t0, tile.s1 - tile.s0)))


@dataclass(frozen=True, eq=False, repr=False)
class Pair(Mask):
    """Base of the compositions of two masks."""

    one: Mask
    other: Mask

    def __post_init__(self) -> None:
        self._known_sizes()  # raises if the two are for different sizes

    def _known_sizes(self) -> KnownSizes:
        return self.one._known_sizes() & self.other._known_sizes()

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        one, other = (mask.shape(lead, H, T, S) for mask in (self.one, self.other))
        return np.broadcast_shapes(one, other)


@dataclass(frozen=True, eq=False, repr=False)
class And(Pair):
    def __repr__(self) -> str:
        return f"({self.one!r} & {self.other!r})"

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        one, other = (mask._values(lead, H, T, S) for mask in (self.one, self.other))
        return np.asarray(one & other)

    def hull(self, tile: Tile) -> tuple[int, int]:
        one, other = self.one.hull(tile), self.other.hull(tile)
        lo = max(one[0], other[0])
        return lo, max(lo, min(one[1], other[1]))

    def tile(self, tile: Tile) -> bool | Array:
        one = self.one.tile(tile)
        if isinstance(one, bool):
            return one and self.other.tile(tile)
        other = self.other.tile(tile)
        if isinstance(other, bool):
            return other and one
        return _simplify(one & other)


@dataclass(frozen=True, eq=False, repr=False)
class Or(Pair):
    def __repr__(self) -> str:
        return f"({self.one!r} | {self.other!r})"

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        one, other = (mask._values(lead, H, T, S) for mask in (self.one, self.other))
        return np.asarray(one | other)

    def hull(self, tile: Tile) -> tuple[int, int]:
        hulls = [h for h in (self.one.hull(tile), self.other.hull(tile)) if h[0] < h[1]]
        return min((lo for lo, _ in hulls), default=0), max((hi for _, hi in hulls), default=0)

    def tile(self, tile: Tile) -> bool | Array:
        one = self.one.tile(tile)
        if isinstance(one, bool):
            return one or self.other.tile(tile)
        other = self.other.tile(tile)
        if isinstance(other, bool):
            return other or one
        return _simplify(one | other)


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
        if _is_empty(tile):
            return True
        visible = self.mask.tile(tile)
        return not visible if isinstance(visible, bool) else np.asarray(~visible)


# --- the parts ------------------------------------------------------------------------------------


def _is_empty(tile: Tile) -> bool:
    return tile.t0 == tile.t1 or tile.s0 == tile.s1


def _simplify(visible: Array) -> bool | Array:
    """Simplify an array of equal values to True or False."""
    if visible.all():
        return True
    return visible if visible.any() else False


def _extent(visible: Any) -> tuple[int, int]:
    """Range from the first True to after the last; (0, 0) if there is none."""
    indices = np.flatnonzero(visible)
    return (int(indices[0]), int(indices[-1]) + 1) if indices.size else (0, 0)


def _axes(batch: tuple[int, ...]) -> tuple[int, ...]:
    """Append an axis for the heads to batch axes, if there are any."""
    return (*batch, 1) if batch else ()


def _integers(name: str, value: Any) -> Array:
    array = read_array(name, value)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name} is {array.dtype}, must be an integer array")
    return array


def _lengths(name: str, value: Any) -> Array:
    array = _integers(name, value)
    if array.size and array.min() < 0:
        raise OptionError(f"{name} contains length {array.min()}, must be 0 or more")
    return array


def _check_lengths(name: str, array: Array, size: str, n: int) -> None:
    if array.size and array.max() > n:
        raise ShapeError(f"{name} contains length {array.max()}, which exceeds {size} = {n}")


def _documents(name: str, value: Any) -> Array:
    array = _integers(name, value)
    if array.ndim == 0:
        raise ShapeError(f"{name} has shape (), must have rank 1 or more: a document for each")
    return array


def _check_own(mask: Mask, known: KnownSizes, T: int, S: int) -> None:
    """Check that T and S are those that a mask was made for; a size of 1 is no exception."""
    if known.T not in (None, T) or known.S not in (None, S):
        raise ShapeError(
            f"mask is {describe_value(mask)}, which does not fit T = {T} queries and S = {S} keys"
        )


def _check_unambiguous(T: int, S: int) -> None:
    if T != S:
        raise OptionError(
            f"a causal mask without alignment is ambiguous for T = {T} queries and S = {S} keys: "
            'pass alignment="bottom_right" (the last query sees the last key) or "top_left"'
        )
