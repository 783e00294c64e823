"""Biases of the distance between query and key: ALiBi, and a table of T5."""

from __future__ import annotations

import numbers
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.biases.bias import Bias, widen
from npattn.errors import ShapeError
from npattn.positions import alibi_slopes
from npattn.problem.arrays import Array, Tile, diagonal, plane_of
from npattn.problem.checks import check_alignment, check_flag, check_integer, read_floating
from npattn.problem.options import Alignment
from npattn.problem.sizes import KnownSizes, format_call


def alibi(slopes: ArrayLike, *, alignment: Alignment = "bottom_right") -> Bias:
    """Bias that falls linearly with the distance of a key: −slope · distance for each head.

    Source: Press et al. 2022, "Train short, test long".

    Parameters
    ----------
    slopes : int or float array_like (H,)
        A number of heads stands for the published slopes: 2^(−8/H), 2^(−16/H), … where H is a
        power of two; else those of the power of two below, then every second one of that above.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"
        Query t has distance 0 from key t + (S − T), or t.

    Returns
    -------
    Bias
        (H, T, S); its gradient is (H,).

    Raises
    ------
    OptionError
        If the number of heads is not an integer ≥ 1, or `alignment` is not one of the two.
    DtypeError
        If the slopes are not floating.
    ShapeError
        If the slopes are not of rank 1.

    Examples
    --------
    >>> from npattn import biases
    >>> biases.alibi(2, alignment="top_left").to_array(T=1, S=3)[0, 0]
    array([-0.    , -0.0625, -0.125 ])
    """
    if isinstance(slopes, (numbers.Integral, np.bool_)):
        slopes = alibi_slopes(check_integer("slopes", slopes))
    array = read_floating("slopes", slopes)
    if array.ndim != 1:
        raise ShapeError(f"slopes has shape {array.shape}, must be (H,), or the number of heads")
    return Alibi(array, check_alignment(alignment))


def relative(
    table: ArrayLike,
    *, max_distance: int = 128, bidirectional: bool = True, alignment: Alignment = "bottom_right",
) -> Bias:  # fmt: skip
    """Bias looked up by the distance of a key: a number for each bucket and head (T5).

    Half of the buckets hold one distance each, from 0; the others grow geometrically up to
    `max_distance`, and the last one holds all beyond. Bucket edges are computed in integers: no
    rounding of a logarithm moves a distance. Source: Raffel et al. 2020, section 2.1.

    Parameters
    ----------
    table : float array_like (num_buckets, H)
    max_distance : int, default 128
        In keys.
    bidirectional : bool, default True
        The later half of the table is for keys after the query. If False, those are at
        distance 0.
    alignment : {"bottom_right", "top_left"}, default "bottom_right"
        Query t has distance 0 from key t + (S − T), or t.

    Returns
    -------
    Bias
        (H, T, S); its gradient is (num_buckets, H).

    Raises
    ------
    OptionError
        If `max_distance` is too small for the table, or an option has another illegal value.
    DtypeError
        If the table is not floating.
    ShapeError
        If the table is not of rank 2, or has too few buckets.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import biases
    >>> table = np.arange(8.0)[:, None]
    >>> biases.relative(table, max_distance=8, bidirectional=False).to_array(T=10, S=10)[0, -1]
    array([7., 7., 7., 6., 5., 4., 3., 2., 1., 0.])
    """
    array = read_floating("table", table)
    if array.ndim != 2:
        raise ShapeError(f"table has shape {array.shape}, must be (num_buckets, H)")
    check_flag("bidirectional", bidirectional)
    count = len(array) // 2 if bidirectional else len(array)
    if count < 2:
        raise ShapeError(
            f"table has {len(array)} buckets, must have {4 if bidirectional else 2} or more"
        )
    reach = check_integer("max_distance", max_distance, count // 2 + 1)
    return Relative(array, reach, bool(bidirectional), check_alignment(alignment))


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Bias):
    slopes: Array  # (H,)
    alignment: Alignment
    linear_in = "slopes"

    def __repr__(self) -> str:
        return format_call("biases.alibi", self.slopes, alignment=self.alignment)

    @cached_property
    def _parameter(self) -> Array:
        return widen(self.slopes)[:, None, None]  # (H, 1, 1)

    def _known_sizes(self) -> KnownSizes:
        return KnownSizes(self.slopes.shape)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        on_diagonal = np.arange(T)[:, None] + diagonal(T, S, self.alignment)
        return np.asarray(-self._parameter * abs(on_diagonal - np.arange(S)))

    def tile(self, tile: Tile) -> Array:
        return np.asarray(-plane_of(self._parameter, tile.plane) * self._distance(tile))

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        here = plane_of(total[:, None], tile.plane, 1)
        here -= (ds * self._distance(tile)).sum()

    def _distance(self, tile: Tile) -> Array:
        return np.asarray(abs(tile.t + diagonal(tile.T, tile.S, self.alignment) - tile.s))


@dataclass(frozen=True, eq=False, repr=False)
class Relative(Bias):
    table: Array  # (num_buckets, H)
    max_distance: int
    bidirectional: bool
    alignment: Alignment
    linear_in = "table"

    def __repr__(self) -> str:
        return format_call(
            "biases.relative", self.table, max_distance=self.max_distance,
            bidirectional=self.bidirectional, alignment=self.alignment,
        )  # fmt: skip

    @cached_property
    def _parameter(self) -> Array:
        return widen(self.table).T  # (H, num_buckets)

    @cached_property
    def _edges(self) -> Array:
        """First distance of each bucket but the first, in keys, to one side of the query."""
        # `single` buckets hold one distance each, `grown` ones grow: the k-th of them begins at
        # single · (far / single)^(k / grown), compared here in powers of `grown`.
        count, far = self._count, self.max_distance
        single, grown = count // 2, count - count // 2
        edges = [*range(1, single + 1)]
        for k in range(1, grown):
            least = far**k * single ** (grown - k)
            edges.append(bisect_left(range(far), least, key=lambda n: n**grown))
        return np.array(edges)

    @property
    def _count(self) -> int:
        """Number of buckets to one side of the query."""
        return len(self.table) // 2 if self.bidirectional else len(self.table)

    def _known_sizes(self) -> KnownSizes:
        return KnownSizes(self.table.shape[1:])

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        on_diagonal = np.arange(T)[:, None] + diagonal(T, S, self.alignment)
        return np.asarray(self._parameter[:, self._buckets(np.arange(S) - on_diagonal)])

    def tile(self, tile: Tile) -> Array:
        of_head = plane_of(self._parameter, tile.plane, 1)
        return _spread(of_head[self.diagonals(tile)], tile.t1 - tile.t0, tile.s1 - tile.s0)

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        if ds.size:
            of_head = plane_of(total.T, tile.plane, 1)
            np.add.at(of_head, self.diagonals(tile), _sums_of_diagonals(ds))

    def diagonals(self, tile: Tile) -> Array:
        """Bucket of each diagonal of a tile, from the last query and first key on."""
        offset = diagonal(tile.T, tile.S, self.alignment)
        return self._buckets(np.arange(tile.s0 - tile.t1 + 1, tile.s1 - tile.t0) - offset)

    def _buckets(self, after: Array) -> Array:
        """Row of the table for a key at a distance `after` the key beside the query."""
        if not self.bidirectional:
            return np.asarray(np.searchsorted(self._edges, np.maximum(-after, 0), side="right"))
        later = (after > 0) * self._count
        return np.asarray(later + np.searchsorted(self._edges, abs(after), side="right"))


def _spread(diagonals: Array, m: int, n: int) -> Array:
    """Array (m, n) that is constant along its m + n − 1 diagonals, as a view."""
    if m == 0 or n == 0:
        return np.zeros((m, n), diagonals.dtype)
    return np.lib.stride_tricks.sliding_window_view(diagonals, n)[::-1]


def _sums_of_diagonals(array: Array) -> Array:
    """Sums along the diagonals, the transpose of `_spread`: (m, n) → (m + n − 1)."""
    m, n = array.shape
    # Read in rows of one less than they are long, each row moves one further to the right.
    longer = np.zeros((m, n + m), array.dtype)
    longer[:, :n] = array[::-1]
    return np.asarray(longer.ravel()[: m * (n + m - 1)].reshape(m, n + m - 1).sum(0))
