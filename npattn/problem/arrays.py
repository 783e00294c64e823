"""Arrays, tiles of the scores, masks and biases as protocols, and sums over broadcast axes.

Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import ml_dtypes  # registers bfloat16 and float8 with NumPy, by name too
import numpy as np

Array = np.ndarray[Any, Any]

FAR = 2**62  # further than any key, and small enough to be added to an index


class Tile(NamedTuple):
    """Rectangle of the scores of one head: queries t0 ≤ t < t1 and keys s0 ≤ s < s1.

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
        """Indices b, h, t and s_index for score_mod, with the rank of (*lead, H, T, S)."""
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
    """Protocol of masks that are not arrays; `npattn.masks` makes such objects."""

    def shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """Shape of `to_array` for these sizes. Raises ShapeError if it does not fit them."""

    def __invert__(self) -> MaskLike:
        """Return the mask that is True where this one is False."""

    def hull(self, tile: Tile) -> tuple[int, int]:
        """Return (lo, hi): the rows of the tile see no key outside lo ≤ s < hi."""

    def tile(self, tile: Tile) -> bool | Array:
        """Return True or False if all or none is visible, else a bool array (t1 − t0, s1 − s0)."""

    def to_array(
        self, T: int | None = None, S: int | None = None, *, lead: tuple[int, ...] = (), H: int = 1
    ) -> Array:
        """Return the whole mask as a bool array."""


@runtime_checkable
class BiasLike(Protocol):
    """Protocol of biases that are not arrays; `npattn.biases` makes such objects."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of `to_array`."""

    def shape(self, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[int, ...]:
        """Shape of `to_array` for these sizes. Raises ShapeError if it does not fit them."""

    def tile(self, tile: Tile) -> Array:
        """Bias of a tile; broadcasts to (t1 − t0, s1 − s0)."""

    def to_array(
        self, T: int | None = None, S: int | None = None, *, lead: tuple[int, ...] = (), H: int = 1
    ) -> Array:
        """Return the whole bias as an array."""

    def zeros(self, lead: tuple[int, ...], H: int, T: int, S: int) -> Any:
        """Zeros for `add` to add to: shaped as the parameter, a tuple for a sum."""

    def add(self, total: Any, tile: Tile, ds: Array) -> None:
        """Add to `total` what ds of a tile, (t1 − t0, s1 − s0), gives the parameter; in place."""

    def gradient(self, ds: Array) -> Any:
        """Gradient of the parameter, from ds of the scores (..., H, T, S) or of `to_array`."""


@cache
def finfo(dtype: Any) -> Any:
    """Limits of a floating dtype, including bfloat16 and float8."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def cast(x: Array, dtype: Any) -> Array:
    """Convert x to a dtype, rounded once: to nearest, ties to even, and beyond the range to inf.

    NumPy rounds once. ml_dtypes converts float64 by way of float32, and would round twice.
    """
    dtype = np.dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if x.dtype.char == "d" and dtype.isbuiltin != 1:
            x = round_to_odd(x)
        return x.astype(dtype, copy=False)


def round_to_odd(x: Array) -> Array:
    """Round float64 to float32 toward 0, with a last bit of 1 where that is not exact.

    The result is a tie of a narrower dtype only if x is one, so that it may be rounded once more.
    """
    with np.errstate(over="ignore"):
        near = np.array(x, np.float32)
    odd = np.where(abs(near) > abs(x), np.nextafter(near, np.float32(0)), near)
    odd.view(np.uint32)[...] |= (odd != x) & np.isfinite(odd)
    return odd


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum x over the axes along which an array of `shape` was broadcast to it [13]."""
    if x.shape == shape:
        return x
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and x.shape[extra + i] != 1
    )
    summed: Array = x.sum(axis=axes, keepdims=True)
    return summed.reshape(shape)


def diagonal(T: int, S: int, alignment: str | None) -> int:
    """Index of the key aligned with query 0; query t, with the t-th key from there [6, 7]."""
    return S - T if alignment == "bottom_right" else 0


def band(aligned: Array, s: Array, left_keys: int | None, right_keys: int | None) -> Array:
    """Return True where key s is at most `left_keys` before, `right_keys` after the aligned one.

    `aligned` and s, of shapes such as (T, 1) and (S,), broadcast to the result. `aligned`
    holds the key aligned with each query; None is unlimited.  [6, 7]
    """
    inside = None if right_keys is None else s <= aligned + min(right_keys, FAR)
    if left_keys is not None:
        after = s >= aligned - min(left_keys, FAR)
        inside = after if inside is None else inside & after
    if inside is None:
        return np.ones(np.broadcast_shapes(aligned.shape, s.shape), bool)
    return inside  # an array or a tensor


def plane_of(array: Array, plane: tuple[int, ...], rank: int = 2) -> Array:
    """Index the leading axes of an array, which broadcast against `plane`; keep the last `rank`."""
    axes = array.shape[: array.ndim - rank]
    index = plane[len(plane) - len(axes) :]
    plane_index = tuple(0 if n == 1 else i for n, i in zip(axes, index, strict=True))
    return np.asarray(array[plane_index])


def tile_of(array: Array, tile: Tile) -> Array:
    """Cut a tile out of an array that broadcasts against the scores; axes of 1 stay [14]."""
    plane = plane_of(array, tile.plane)
    m, n = plane.shape
    rows = slice(None) if m == 1 else slice(tile.t0, tile.t1)
    return plane[rows, slice(None) if n == 1 else slice(tile.s0, tile.s1)]


def to_numpy(x: Any) -> Array:
    """Return x as an array; a tensor of torch leaves its graph and device, and keeps its dtype."""
    if not hasattr(x, "detach"):
        return np.asarray(x)
    x = x.detach().cpu()
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype.startswith(("bfloat16", "float8")):  # dtypes that Tensor.numpy does not know
        return np.asarray(x.float()).astype(dtype)
    return np.asarray(x)


def describe_value(value: Any) -> str:
    """Format a value for messages: dtype and shape of an array, else a bounded repr."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
