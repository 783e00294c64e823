"""Arrays, tiles of the scores, and the sizes that masks and biases know.

Documents know their T and S, slopes know H, lengths know their batch axes; the rest is for the
problem to say. Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

import numbers
import re
from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import ml_dtypes  # registers bfloat16 and float8 with NumPy, by name too
import numpy as np

from npattn.errors import OptionError, ShapeError

__all__ = [
    "ANY",
    "Array",
    "BiasLike",
    "Known",
    "MaskLike",
    "Sized",
    "Tile",
    "band",
    "check_broadcast",
    "check_integer",
    "check_score_shape",
    "describe_value",
    "diagonal",
    "finfo",
    "format_call",
    "known_of",
    "plane_of",
    "read_only",
    "sum_to",
    "tile_of",
]

Array = np.ndarray[Any, Any]

LARGE = 1000  # elements, from which on NumPy too shortens the repr of an array
FAR = 2**62  # further than any key, and what is added to an index without overflow
ANY = -1
"""A T or S for which an object has an axis of 1, which broadcasts."""


class Tile(NamedTuple):
    """A rectangle of the scores of one head: queries t0 ≤ t < t1 and keys s0 ≤ s < s1.

    `lead`, `H`, `T`, `S` are the sizes of the whole problem; `plane` is an index into
    ``(*lead, H)``.
    """

    lead: tuple[int, ...]
    H: int
    T: int
    S: int
    plane: tuple[int, ...]
    t0: int
    t1: int
    s0: int
    s1: int

    @property
    def t(self) -> Array:
        """The queries: (t1 − t0, 1)."""
        return np.arange(self.t0, self.t1)[:, None]

    @property
    def s(self) -> Array:
        """The keys: (1, s1 − s0)."""
        return np.arange(self.s0, self.s1)[None]

    @property
    def indices(self) -> tuple[Array, Array, Array, Array]:
        """b, h, t and s_index as score_mod gets them: with the rank of (*lead, H, T, S)."""
        *lead, h = self.plane
        b = int(np.ravel_multi_index(lead, self.lead)) if lead else 0
        before = (1,) * len(self.lead)  # the axes of lead
        one = (*before, 1, 1, 1)
        return (
            np.full(one, b),
            np.full(one, h),
            self.t.reshape(*before, 1, -1, 1),
            self.s.reshape(*before, 1, 1, -1),
        )


@runtime_checkable
class MaskLike(Protocol):
    """What `Problem` takes as a mask besides arrays; `npattn.masks` makes such objects."""

    def shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """That of `to_array` for these sizes; ShapeError where it does not fit them."""

    def __invert__(self) -> MaskLike:
        """What this one hides."""

    def hull(self, tile: Tile) -> tuple[int, int]:
        """(lo, hi): the rows of the tile see no key outside lo ≤ s < hi."""

    def tile(self, tile: Tile) -> bool | Array:
        """True or False where all or none is visible, else a bool array (t1 − t0, s1 − s0)."""

    def to_array(
        self,
        T: int | None = None,
        S: int | None = None,
        *,
        lead: tuple[int, ...] = (),
        H: int = 1,
    ) -> Array:
        """The whole mask as a bool array."""


@runtime_checkable
class BiasLike(Protocol):
    """What `Problem` takes as a bias besides arrays; `npattn.biases` makes such objects."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of `to_array`."""

    def shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """That of `to_array` for these sizes; ShapeError where it does not fit them."""

    def tile(self, tile: Tile) -> Array:
        """The bias of a tile, which broadcasts to (t1 − t0, s1 − s0)."""

    def to_array(
        self,
        T: int | None = None,
        S: int | None = None,
        *,
        lead: tuple[int, ...] = (),
        H: int = 1,
    ) -> Array:
        """The whole bias as an array."""

    def zeros(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Any:
        """What `add` adds to: an array shaped as the parameter, a tuple for a sum."""

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        """Add the gradient of the parameter, from that of a tile (t1 − t0, s1 − s0), in place."""

    def gradient(self, ds: Array) -> Any:
        """The gradient of the parameter, from that of the scores (..., H, T, S) or of its array."""


class Known(NamedTuple):
    """The sizes that an object knows without its problem."""

    axes: tuple[int, ...] = ()  # of the batch and the heads; 1 broadcasts
    T: int | None = None  # None: for the problem to say
    S: int | None = None

    def __and__(self, other: Known) -> Known:
        """What two objects know that are for the same problem; ShapeError where none is."""
        check_broadcast("batch and head axes", self.axes, other.axes)
        axes = np.broadcast_shapes(self.axes, other.axes)
        return Known(axes, _same("T", self.T, other.T), _same("S", self.S, other.S))


class Sized:
    """A mask or a bias: something that is an array once all sizes are known."""

    kind = ""  # what errors call it

    __array_priority__ = 1000.0  # what an array and this one compose to is for this one to say

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.to_array(), dtype=dtype, copy=copy)

    def shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """The shape of `to_array` for these sizes.

        Parameters
        ----------
        lead : tuple of int
            The batch axes of the problem.
        H, T, S : int
            Its query heads, queries and keys.

        Returns
        -------
        tuple of int
            Of rank 2 or more, broadcasting against ``(*lead, H, T, S)``.

        Raises
        ------
        ShapeError
            If this is for other sizes.
        """
        return check_score_shape(self.kind, self._shape(lead, H, T, S), lead, H, T, S)

    def to_array(
        self,
        T: int | None = None,
        S: int | None = None,
        *,
        lead: tuple[int, ...] = (),
        H: int = 1,
    ) -> Array:
        """The whole as an array.

        Parameters
        ----------
        T, S : int, optional
            Queries and keys; default what is known without a problem.
        lead : tuple of int, optional
        H : int, optional
            Batch axes and query heads; default what is known, or none and one.

        Returns
        -------
        array
            Of `shape`. It may be a read-only view of what this was made of.

        Raises
        ------
        OptionError
            If T or S is neither given nor known.
        ShapeError
            If this is for other sizes.

        Examples
        --------
        >>> from npattn import masks
        >>> masks.window(1, 0).to_array(T=2, S=3)
        array([[ True,  True, False],
               [False,  True,  True]])
        """
        known = self._known()
        T, S = self._size("T", T, known.T), self._size("S", S, known.S)
        if lead == () and H == 1 and known.axes:
            lead, H = known.axes[:-1], known.axes[-1]
        self.shape(lead, H, T, S)
        return self._values(lead, H, T, S)

    def _size(self, name: str, given: int | None, known: int | None) -> int:
        if given is not None:
            return check_integer(name, given, 0)
        if known is None:
            raise OptionError(
                f"{name} is None, must be given to {self!r}, which does not know it: "
                "write .to_array(T=..., S=...)"
            )
        return 1 if known == ANY else known

    def _known(self) -> Known:
        raise NotImplementedError

    def _shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """The shape of `to_array`, held against T and S, but not yet against lead and H."""
        raise NotImplementedError

    def _values(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Array:
        """`to_array` for sizes that fit."""
        raise NotImplementedError


def known_of(array: Array) -> Known:
    """What an array knows that broadcasts against the scores."""
    T, S = (ANY if n == 1 else n for n in (1, 1, *array.shape)[-2:])
    return Known(array.shape[:-2], T, S)


def read_only(array: Array) -> Array:
    """A view through which nothing of the user's is written."""
    view = array.view()
    view.flags.writeable = False
    return view


def check_broadcast(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """ShapeError where two shapes do not broadcast."""
    try:
        np.broadcast_shapes(one, other)
    except ValueError:
        raise ShapeError(f"{name} are {one} and {other}, must broadcast") from None


def _same(name: str, m: int | None, n: int | None) -> int | None:
    """A size that both have, as far as they know it."""
    known = {m, n} - {None, ANY}
    if len(known) > 1:
        raise ShapeError(f"{name} is {m} and {n}, must be the same in all that are composed")
    if known:
        return known.pop()
    return m if n == ANY else n


@cache
def finfo(dtype: Any) -> Any:
    """The limits of a floating dtype, bfloat16 and float8 included."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x over the axes along which an array of `shape` was broadcast to it.  [13]"""
    if x.shape == shape:
        return x
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and x.shape[extra + i] != 1
    )
    summed: Array = x.sum(axis=axes, keepdims=True)
    return summed.reshape(shape)


def diagonal(T: int, S: int, alignment: str | None) -> int:
    """The key beside query 0; query t is beside the t-th key after it.  [6, 7]"""
    return S - T if alignment == "bottom_right" else 0


def band(beside: Array, s: Array, left: int | None, right: int | None) -> Array:
    """Whether key s lies at most `left` before and `right` after the key beside its query.

    None is unlimited.  [6, 7]
    """
    inside = None if right is None else s <= beside + min(right, FAR)
    if left is not None:
        after = s >= beside - min(left, FAR)
        inside = after if inside is None else inside & after
    if inside is None:
        return np.ones(np.broadcast_shapes(beside.shape, s.shape), bool)
    found: Array = inside
    return found


def plane_of(array: Array, plane: tuple[int, ...], rank: int = 2) -> Array:
    """What an array has at an index of its leading axes, to which they broadcast: its last axes."""
    axes = array.shape[: array.ndim - rank]
    at = plane[len(plane) - len(axes) :]
    found: Array = array[tuple(0 if n == 1 else i for n, i in zip(axes, at, strict=True))]
    return found


def tile_of(array: Array, tile: Tile) -> Array:
    """A tile of an array that broadcasts against the scores; its axes of 1 stay.  [14]"""
    plane = plane_of(array, tile.plane)
    m, n = plane.shape
    rows = slice(None) if m == 1 else slice(tile.t0, tile.t1)
    return plane[rows, slice(None) if n == 1 else slice(tile.s0, tile.s1)]


def check_score_shape(
    name: str, shape: tuple[int, ...], lead: tuple[int, ...], H: int, T: int, S: int
) -> tuple[int, ...]:
    """`shape`, if it broadcasts against (*lead, H, T, S) without enlarging it.  [14]"""
    whole = (*lead, H, T, S)
    tail = whole[max(len(whole) - len(shape), 0) :]
    fits = len(shape) == len(tail) and all(n in (1, w) for n, w in zip(shape, tail, strict=True))
    if len(shape) >= 2 and fits:
        return shape
    hint = ""
    if shape == whole[-1:]:
        hint = f": write {name}[None, :] for one row of keys"
    elif len(whole) == 4 and shape == (whole[0], whole[-1]):
        hint = f"; a (B, S) {name} must become {name}[:, None, None, :]"
    elif len(whole) == 4 and shape == (whole[0], *whole[-2:]):
        hint = f"; a (B, T, S) {name} must become {name}[:, None]"
    raise ShapeError(
        f"{name} has shape {shape}, must have rank 2 or more and broadcast against "
        f"(..., H, T, S) = {whole}{hint}"
    )


def describe_value(value: Any) -> str:
    """A value as `Problem` shows it: of an array its dtype and shape."""
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)


def format_call(name: str, *args: Any, **kwargs: Any) -> str:
    """Format a call as source that evaluates back, without keyword arguments that are None."""
    words = [_format_literal(value) for value in args]
    words += [f"{n}={_format_literal(x)}" for n, x in kwargs.items() if x is not None]
    return f"{name}({', '.join(words)})"


def _format_literal(value: Any) -> str:
    """Format an argument as source; a large array is only described: no source in a <...>."""
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


def check_integer(name: str, n: Any, least: int = 1) -> int:
    """`n` as an int; OptionError where it is none, or less than it must be."""
    if isinstance(n, (bool, np.bool_)) or not isinstance(n, numbers.Integral) or n < least:
        raise OptionError(f"{name} is {n!r}, must be an integer ≥ {least}")
    return int(n)
