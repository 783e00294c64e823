"""Masks by a rule of the distance: sliding, strided, dilated, chunked, and global tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from npattn.masks.bands import window
from npattn.masks.mask import Mask, simplify
from npattn.problem.arrays import Array, Tile, diagonal
from npattn.problem.checks import check_alignment, check_integer
from npattn.problem.options import Alignment
from npattn.problem.sizes import format_call


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


@dataclass(frozen=True, eq=False, repr=False)
class Pattern(Mask):
    """A rule of the key and of the key beside the query, one of `PATTERNS`."""

    name: str
    numbers: tuple[int, ...]
    alignment: Alignment

    def __repr__(self) -> str:
        return format_call(f"masks.{self.name}", *self.numbers, alignment=self.alignment)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        return self._rule(np.arange(T)[:, None] + diagonal(T, S, self.alignment), np.arange(S))

    def tile(self, tile: Tile) -> bool | Array:
        return simplify(self._rule(tile.t + diagonal(tile.T, tile.S, self.alignment), tile.s))

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
