"""Biases: terms added to the scores, as small objects for ``bias=``.

    dense  alibi  relative      + composes them

An object is no (T, S) array: it holds its parameter (slopes, a table, an array), answers for a
rectangle of the scores (`Bias.tile`) or for the whole (`Bias.to_array`), and takes the gradient of
the scores back to its parameter (`Bias.gradient`). Arrays that it holds are neither copied nor
written to.
"""

from __future__ import annotations

import numbers
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add, and_
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.arrays import Array, BiasLike, Tile, describe_value, diagonal, plane_of, sum_to, tile_of
from npattn.checks import check_alignment, check_integer, read_bias, read_floating
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.options import Alignment
from npattn.positions import alibi_slopes
from npattn.sizes import KnownSizes, Sized, format_call, read_only, sizes_of_array

__all__ = ["Bias", "alibi", "dense", "of", "relative"]


def __dir__() -> list[str]:
    return __all__


class Bias(Sized):
    """Term added to the scores: made by the functions of this module, composed by ``+``.

    Frozen. Accepted as ``bias=`` wherever a float array is; its gradient is then that of its
    parameter. The other side of ``+`` may be a float array.
    """

    kind = "bias"

    def __add__(self, other: Bias | ArrayLike) -> Bias:
        return Sum((*self.parts, *of(other).parts))

    def __radd__(self, other: ArrayLike) -> Bias:
        return Sum((*of(other).parts, *self.parts))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of `to_array`: float64, or complex128 where the parameter is complex."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Bias, ...]:
        """Terms of a sum; otherwise the bias itself."""
        return (self,)

    @property
    def parameter(self) -> Any:
        """Array that the bias is linear in; for a sum a tuple of those of its terms."""
        raise NotImplementedError

    def with_parameter(self, parameter: Any, name: str = "parameter") -> Bias:
        """Return the bias of the same kind with another parameter.

        A bias is linear in its parameter: along a change of it, it changes by the bias that has the
        change for its parameter.

        Parameters
        ----------
        parameter : float array_like or tuple
            Shaped as `parameter`. Of a tuple, None stands for zeros.
        name : str
            Name in errors.

        Returns
        -------
        Bias

        Raises
        ------
        DtypeError
            If the parameter is not floating.
        ShapeError
            If it is not shaped as that of this bias.

        Examples
        --------
        >>> import numpy as np
        >>> from npattn import biases
        >>> biases.alibi(2).with_parameter(np.array([1.0, -1.0])).parameter
        array([ 1., -1.])
        """
        return self._with(_read_parameter(name, parameter, self.parameter.shape))

    def _with(self, parameter: Array) -> Bias:
        raise NotImplementedError

    def tile(self, tile: Tile) -> Array:
        """Bias of a rectangle of one head's scores.

        Parameters
        ----------
        tile : Tile

        Returns
        -------
        float64 array
            Broadcasts to (t1 − t0, s1 − s0); complex128 where the parameter is complex.
        """
        raise NotImplementedError

    def zeros(
        self, lead: tuple[int, ...], H: int, T: int, S: int, *, dtype: Any = np.float64
    ) -> Any:
        """Zeros to accumulate a gradient in.

        Parameters
        ----------
        lead : tuple of int
        H, T, S : int
            Sizes of the problem.
        dtype : dtype, default float64

        Returns
        -------
        array or tuple of array
            Shaped as the parameter; for a sum one array for each of its terms.
        """
        raise NotImplementedError

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        """Add the gradient of one tile in place.

        Parameters
        ----------
        total : array or tuple of array
            Result of `zeros`, changed in place.
        tile : Tile
        ds : array (t1 − t0, s1 − s0)
            Gradient of the scores of the tile.
        """
        raise NotImplementedError

    def gradient(self, ds: Array) -> Any:
        """Gradient of the parameter, from that of the scores or of `to_array`.

        Parameters
        ----------
        ds : float array_like (..., H, T, S), or shaped as `to_array`

        Returns
        -------
        array or tuple of array
            Shaped as the parameter, in the dtype of `ds`; for a sum one for each of its terms.

        Raises
        ------
        DtypeError
            If `ds` is not floating.
        ShapeError
            If `ds` does not have the shape of the scores or of `to_array`.

        Examples
        --------
        >>> import numpy as np
        >>> from npattn import biases
        >>> biases.alibi(np.array([0.5]), alignment="top_left").gradient(np.ones((1, 1, 3)))
        array([-3.])
        """
        ds = read_floating("ds", ds)
        ds = ds[(None,) * (3 - ds.ndim)]
        lead, (H, T, S) = ds.shape[:-3], ds.shape[-3:]
        self.shape(lead, H, T, S)
        total = self.zeros(lead, H, T, S, dtype=ds.dtype)
        for plane in np.ndindex(*lead, H):
            self.add(total, Tile(lead, H, T, S, plane, 0, T, 0, S), ds[plane])
        return total


def dense(array: BiasLike | ArrayLike) -> Bias:
    """Bias given as an array.

    Parameters
    ----------
    array : float array_like
        Of rank 2 or more; broadcasts against (..., H, T, S), as for ``bias=``.

    Returns
    -------
    Bias
        Its gradient has the shape of the array.

    Raises
    ------
    DtypeError
        If the array is not floating.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import biases
    >>> np.asarray(biases.dense(np.eye(2)) + np.ones((2, 2)))
    array([[2., 1.],
           [1., 2.]])
    """
    values = read_bias(array)
    if not isinstance(values, np.ndarray):
        raise DtypeError(f"array is {describe_value(array)}, must be a float array")
    return Dense(values)


def of(bias: BiasLike | ArrayLike) -> Bias:
    """Convert a float array to a `Bias`; return a `Bias` unchanged.

    Parameters
    ----------
    bias : Bias or float array_like

    Returns
    -------
    Bias

    Raises
    ------
    DtypeError
        If it is neither a `Bias` nor floating.
    """
    return bias if isinstance(bias, Bias) else dense(bias)


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
    *,
    max_distance: int = 128,
    bidirectional: bool = True,
    alignment: Alignment = "bottom_right",
) -> Bias:
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
    if not isinstance(bidirectional, (bool, np.bool_)):
        raise OptionError(f"bidirectional is {bidirectional!r}, must be True or False")
    count = len(array) // 2 if bidirectional else len(array)
    if count < 2:
        raise ShapeError(
            f"table has {len(array)} buckets, must have {4 if bidirectional else 2} or more"
        )
    reach = check_integer("max_distance", max_distance, count // 2 + 1)
    return Relative(array, reach, bool(bidirectional), check_alignment(alignment))


# --- what these functions return ------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Bias):
    """A float array."""

    array: Array

    def __repr__(self) -> str:
        return format_call("biases.dense", self.array)

    @property
    def dtype(self) -> np.dtype[Any]:
        return _dtype(self.array)

    @property
    def parameter(self) -> Array:
        return self.array

    def _with(self, parameter: Array) -> Bias:
        return replace(self, array=parameter)

    def _known_sizes(self) -> KnownSizes:
        return sizes_of_array(self.array)

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.array.shape
        return shape

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        return read_only(self.array)

    def tile(self, tile: Tile) -> Array:
        return read_only(_wide(tile_of(self.array, tile)))

    def zeros(
        self, lead: tuple[int, ...], H: int, T: int, S: int, *, dtype: Any = np.float64
    ) -> Array:
        return np.zeros(self.array.shape, dtype)

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        here = tile_of(total, tile)
        here += sum_to(ds, here.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Bias):
    slopes: Array  # (H,)
    alignment: Alignment

    def __repr__(self) -> str:
        return format_call("biases.alibi", self.slopes, alignment=self.alignment)

    @property
    def dtype(self) -> np.dtype[Any]:
        return _dtype(self._parameter)

    @property
    def parameter(self) -> Array:
        return self.slopes

    def _with(self, parameter: Array) -> Bias:
        return replace(self, slopes=parameter)

    @cached_property
    def _parameter(self) -> Array:
        return _wide(self.slopes)[:, None, None]  # (H, 1, 1)

    def _known_sizes(self) -> KnownSizes:
        return KnownSizes(self.slopes.shape)

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return (len(self.slopes), T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        beside = np.arange(T)[:, None] + diagonal(T, S, self.alignment)
        return np.asarray(-self._parameter * abs(beside - np.arange(S)))

    def tile(self, tile: Tile) -> Array:
        return np.asarray(-plane_of(self._parameter, tile.plane) * self._distance(tile))

    def zeros(
        self, lead: tuple[int, ...], H: int, T: int, S: int, *, dtype: Any = np.float64
    ) -> Array:
        return np.zeros(self.slopes.shape, dtype)

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

    def __repr__(self) -> str:
        return format_call(
            "biases.relative",
            self.table,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
            alignment=self.alignment,
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        return _dtype(self._parameter)

    @property
    def parameter(self) -> Array:
        return self.table

    def _with(self, parameter: Array) -> Bias:
        return replace(self, table=parameter)

    @cached_property
    def _parameter(self) -> Array:
        return _wide(self.table).T  # (H, num_buckets)

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

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return (self.table.shape[1], T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        beside = np.arange(T)[:, None] + diagonal(T, S, self.alignment)
        return np.asarray(self._parameter[:, self._buckets(np.arange(S) - beside)])

    def tile(self, tile: Tile) -> Array:
        of_head = plane_of(self._parameter, tile.plane, 1)
        return _spread(of_head[self.diagonals(tile)], tile.t1 - tile.t0, tile.s1 - tile.s0)

    def zeros(
        self, lead: tuple[int, ...], H: int, T: int, S: int, *, dtype: Any = np.float64
    ) -> Array:
        return np.zeros(self.table.shape, dtype)

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


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Bias):
    terms: tuple[Bias, ...]

    def __post_init__(self) -> None:
        self._known_sizes()  # raises if they are for different sizes

    def __repr__(self) -> str:
        return f"({' + '.join(map(repr, self.terms))})"

    @property
    def parts(self) -> tuple[Bias, ...]:
        return self.terms

    @property
    def parameter(self) -> tuple[Any, ...]:
        return tuple(term.parameter for term in self.terms)

    def with_parameter(self, parameter: Any, name: str = "parameter") -> Bias:
        if not isinstance(parameter, (tuple, list)) or len(parameter) != len(self.terms):
            raise ShapeError(
                f"{name} is {describe_value(parameter)}, must be a tuple of {len(self.terms)} "
                "arrays or None, one for each term of the bias"
            )
        return Sum(tuple(
            term.with_parameter(np.zeros(term.parameter.shape) if x is None else x, name)
            for term, x in zip(self.terms, parameter, strict=True)
        ))  # fmt: skip

    @property
    def dtype(self) -> np.dtype[Any]:
        return _dtype(*(_wide(np.empty(0, term.dtype)) for term in self.terms))

    def _known_sizes(self) -> KnownSizes:
        return reduce(and_, (term._known_sizes() for term in self.terms))

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return np.broadcast_shapes(*(term.shape(lead, H, T, S) for term in self.terms))

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        return reduce(add, (_wide(term._values(lead, H, T, S)) for term in self.terms))

    def tile(self, tile: Tile) -> Array:
        return reduce(add, (term.tile(tile) for term in self.terms))

    def zeros(
        self, lead: tuple[int, ...], H: int, T: int, S: int, *, dtype: Any = np.float64
    ) -> tuple[Any, ...]:
        return tuple(term.zeros(lead, H, T, S, dtype=dtype) for term in self.terms)

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        for term, of_term in zip(self.terms, total, strict=True):
            term.add(of_term, tile, ds)


# --- the parts ------------------------------------------------------------------------------------


def _read_parameter(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    array = read_floating(name, value)
    if array.shape != shape:
        raise ShapeError(f"{name} has shape {array.shape}, but the parameter has shape {shape}")
    return array


def _wide(array: Array) -> Array:
    """Convert to float64, or to complex128."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64, copy=False)


def _dtype(*arrays: Array) -> np.dtype[Any]:
    return np.result_type(*arrays)


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
    sums: Array = longer.ravel()[: m * (n + m - 1)].reshape(m, n + m - 1).sum(0)
    return sums
