"""Base class of masks and biases: arrays once all sizes are known.

Documents know their T and S, slopes know H, lengths know their batch axes; the problem says the
rest.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from npattn.errors import OptionError, ShapeError
from npattn.problem.arrays import Array, describe_value
from npattn.problem.checks import check_integer, check_score_shape

LARGE = 1000  # elements, from which on NumPy too shortens the repr of an array
ANY = -1
"""Stands for T or S of an object whose axis there has length 1 and broadcasts."""


class KnownSizes(NamedTuple):
    """Sizes that an object knows without its problem."""

    axes: tuple[int, ...] = ()  # of the batch and the heads; 1 broadcasts
    T: int | None = None  # None: the problem says
    S: int | None = None

    def __and__(self, other: KnownSizes) -> KnownSizes:
        """Combine the sizes of two objects. Raises ShapeError if no problem has both."""
        check_broadcast("batch and head axes", self.axes, other.axes)
        axes = np.broadcast_shapes(self.axes, other.axes)
        return KnownSizes(axes, _combine("T", self.T, other.T), _combine("S", self.S, other.S))


class Sized:
    """A mask or a bias: an array once all sizes are known."""

    kind = ""  # "mask" or "bias", for errors

    __array_priority__ = 1000.0  # array & mask and array + bias are computed here, not by NumPy

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.to_array(), dtype=dtype, copy=copy)

    def shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """Shape of `to_array` for these sizes.

        Parameters
        ----------
        lead : tuple of int
            Batch axes of the problem.
        H, T, S : int
            Query heads, queries and keys of the problem.

        Returns
        -------
        tuple of int
            Of length 2 or more; broadcasts against ``(*lead, H, T, S)``.

        Raises
        ------
        ShapeError
            If the object is for other sizes.
        """
        return check_score_shape(self.kind, self._shape(lead, H, T, S), lead, H, T, S)

    def to_array(
        self, T: int | None = None, S: int | None = None, *, lead: tuple[int, ...] = (), H: int = 1
    ) -> Array:
        """Return the whole as an array.

        Parameters
        ----------
        T, S : int, optional
            Queries and keys; default the sizes that the object knows.
        lead : tuple of int, optional
        H : int, optional
            Batch axes and query heads; default the sizes that the object knows, or none and one.

        Returns
        -------
        array
            Of `shape`; possibly a read-only view of an array of the caller.

        Raises
        ------
        OptionError
            If T or S is neither passed nor known.
        ShapeError
            If the object is for other sizes.

        Examples
        --------
        >>> from npattn import masks
        >>> masks.window(1, 0).to_array(T=2, S=3)
        array([[ True,  True, False],
               [False,  True,  True]])
        """
        known_sizes = self._known_sizes()
        T, S = self._size("T", T, known_sizes.T), self._size("S", S, known_sizes.S)
        if lead == () and H == 1 and known_sizes.axes:
            lead, H = known_sizes.axes[:-1], known_sizes.axes[-1]
        self.shape(lead, H, T, S)
        return self._values(lead, H, T, S)

    def _size(self, name: str, size: int | None, known_size: int | None) -> int:
        if size is not None:
            return check_integer(name, size, 0)
        if known_size is None:
            raise OptionError(
                f"this {self.kind} has no {name} of its own: {describe_value(self)}; "
                "call .to_array(T=..., S=...)"
            )
        return 1 if known_size == ANY else known_size

    def _known_sizes(self) -> KnownSizes:
        return KnownSizes()

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """Shape of `to_array`, checked against T and S, but not yet against lead and H."""
        return (*self._known_sizes().axes, T, S)

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        """Compute `to_array` for sizes that fit."""
        raise NotImplementedError


def sizes_of_array(array: Array) -> KnownSizes:
    """Sizes known to an array that broadcasts against the scores."""
    T, S = (ANY if n == 1 else n for n in (1, 1, *array.shape)[-2:])
    return KnownSizes(array.shape[:-2], T, S)


def read_only(array: Array) -> Array:
    """Return a read-only view."""
    view = array.view()
    view.flags.writeable = False
    return view


def check_broadcast(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Check that two shapes broadcast."""
    try:
        np.broadcast_shapes(one, other)
    except ValueError:
        raise ShapeError(f"{name} {one} and {other} do not broadcast") from None


def _combine(name: str, m: int | None, n: int | None) -> int | None:
    """Return the size that two objects agree on; None or `ANY` if neither knows it."""
    sizes = {m, n} - {None, ANY}
    if len(sizes) > 1:
        raise ShapeError(f"cannot compose objects for {name} = {m} and {name} = {n}")
    if sizes:
        return sizes.pop()
    return m if n == ANY else n


def format_call(name: str, *args: Any, **kwargs: Any) -> str:
    """Format a call as source that evaluates back, without keyword arguments that are None."""
    words = [_format_literal(value) for value in args]
    words += [f"{n}={_format_literal(x)}" for n, x in kwargs.items() if x is not None]
    return f"{name}({', '.join(words)})"


def _format_literal(value: Any) -> str:
    """Format an argument as source; a large array is described in <...>, which is no source."""
    if callable(value):
        return getattr(value, "__name__", repr(value))
    if not isinstance(value, np.ndarray):
        return repr(value)
    if value.size > LARGE:
        return f"<{value.dtype} array of shape {value.shape}>"
    if not value.size:
        return f"np.zeros({value.shape}, {value.dtype.name!r})"
    is_numpy = value.dtype.type.__module__ == "numpy"  # not ml_dtypes, whose numbers have no source
    numbers = (value if is_numpy else value.astype(np.float64)).tolist()
    source = re.sub(r"\b(inf|nan)\b", r"np.\1", repr(numbers))
    if np.asarray(numbers).dtype == value.dtype:
        return source
    return f"np.array({source}, {value.dtype.name!r})"
