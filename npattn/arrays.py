"""Arrays, tiles of the scores, masks and biases as protocols, and sums over broadcast axes.

Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import ml_dtypes  # registers bfloat16 and float8 with NumPy, by name too
import numpy as np

__all__ = [
    "Array",
    "BiasLike",
    "MaskLike",
    "Tile",
    "band",
    "describe_value",
    "diagonal",
    "finfo",
    "plane_of",
    "sum_to",
    "tile_of",
]

Array = np.ndarray[Any, Any]

FAR = 2**62  # further than any key, and what is added to an index without overflow


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


def describe_value(value: Any) -> str:
    """A value as `Problem` shows it: of an array its dtype and shape."""
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else repr(value)
