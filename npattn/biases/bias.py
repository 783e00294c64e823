"""The protocol of biases, arrays as biases, and sums of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import add, and_
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, ShapeError
from npattn.problem.arrays import Array, BiasLike, Tile, describe_value, sum_to, tile_of
from npattn.problem.checks import read_bias, read_floating
from npattn.problem.sizes import KnownSizes, Sized, format_call, read_only, sizes_of_array


class Bias(Sized):
    """Term added to the scores: made by the functions of `npattn.biases`, composed by ``+``.

    Frozen. Accepted as ``bias=`` wherever a float array is; its gradient is then that of its
    parameter. The other side of ``+`` may be a float array.
    """

    kind = "bias"
    linear_in = ""
    """Name of the array that the bias is linear in."""

    def __add__(self, other: Bias | ArrayLike) -> Bias:
        return Sum((*self.parts, *of(other).parts))

    def __radd__(self, other: ArrayLike) -> Bias:
        return Sum((*of(other).parts, *self.parts))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of `to_array`: float64, or complex128 where the parameter is complex."""
        return dtype_of(widen(np.empty(0, self.parameter.dtype)))

    @property
    def parts(self) -> tuple[Bias, ...]:
        """Terms of a sum; otherwise the bias itself."""
        return (self,)

    @property
    def parameter(self) -> Any:
        """Array that the bias is linear in; for a sum a tuple of those of its terms."""
        return getattr(self, self.linear_in)

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
        value, bias = read_parameter(name, parameter, self.parameter.shape), cast(Any, self)
        changed: Bias = replace(bias, **{self.linear_in: value})
        return changed

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
        return np.zeros(self.parameter.shape, dtype)

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
    return ArrayBias(values)


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


@dataclass(frozen=True, eq=False, repr=False)
class ArrayBias(Bias):
    """A float array."""

    array: Array
    linear_in = "array"

    def __repr__(self) -> str:
        return format_call("biases.dense", self.array)

    @property
    def dtype(self) -> np.dtype[Any]:
        return dtype_of(self.array)

    def _known_sizes(self) -> KnownSizes:
        return sizes_of_array(self.array)

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        return read_only(self.array)

    def tile(self, tile: Tile) -> Array:
        return read_only(widen(tile_of(self.array, tile)))

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        here = tile_of(total, tile)
        here += sum_to(ds, here.shape)


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
        return dtype_of(*(widen(np.empty(0, term.dtype)) for term in self.terms))

    def _known_sizes(self) -> KnownSizes:
        return reduce(and_, (term._known_sizes() for term in self.terms))

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        return np.broadcast_shapes(*(term.shape(lead, H, T, S) for term in self.terms))

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        return reduce(add, (widen(term._values(lead, H, T, S)) for term in self.terms))

    def tile(self, tile: Tile) -> Array:
        return reduce(add, (term.tile(tile) for term in self.terms))

    def zeros(
        self, lead: tuple[int, ...], H: int, T: int, S: int, *, dtype: Any = np.float64
    ) -> tuple[Any, ...]:
        return tuple(term.zeros(lead, H, T, S, dtype=dtype) for term in self.terms)

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        for term, of_term in zip(self.terms, total, strict=True):
            term.add(of_term, tile, ds)


def read_parameter(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    array = read_floating(name, value)
    if array.shape != shape:
        raise ShapeError(f"{name} has shape {array.shape}, but the parameter has shape {shape}")
    return array


def widen(array: Array) -> Array:
    """Convert to float64, or to complex128."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64, copy=False)


def dtype_of(*arrays: Array) -> np.dtype[Any]:
    return np.result_type(*arrays)
