"""Keys and values in pages of a shared memory, which a table finds: decoding and prefill.

    q (B, T, H, D)    k_pages (N, P, K, D)    v_pages (N, P, K, E)
    block_table (B, M)    seqlens (B,)

Key s of sample b is slot s % P of page block_table[b, s // P], for s < seqlens[b]. Other pages,
later slots and later entries of the table are never read. The last query stands at the last key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.api import backward, forward
from npattn.arrays import Array
from npattn.cache.packed import read_options, sum_parameters
from npattn.checks import check_cotangent, read_array, read_floating
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.positions import rope
from npattn.problem import Forward, Gradients

__all__ = [
    "PagedForward",
    "append",
    "check_paged",
    "find_slots",
    "paged",
    "paged_backward",
    "paged_forward",
]


@dataclass(frozen=True, eq=False)
class PagedForward:
    """Results of `paged_forward`.

    Attributes
    ----------
    out : array (B, T, H, E)
    lse : array (B, H, T)
    parts : tuple of Forward
        One a sample, (H, T, ·) each, with its weights.
    """

    out: Array
    lse: Array
    parts: tuple[Forward, ...]
    slots: tuple[tuple[Array, Array], ...] = field(repr=False)  # page and slot of each key
    shapes: tuple[tuple[int, ...], ...] = field(repr=False)


def paged(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_table: ArrayLike,
    seqlens: ArrayLike,
    **options: Any,
) -> Array:
    """Attention of each sample's queries to its keys, which lie in pages.

    Parameters
    ----------
    q : float array_like (B, T, H, D)
    k_pages, v_pages : float array_like (N, P, K, D), (N, P, K, E)
        N pages of P slots. Pages and slots that no table and length reach may hold anything.
    block_table : int array_like (B, M)
        Pages of each sample, in order. Entries behind the last that its length needs may be
        anything. Samples may share pages.
    seqlens : int array_like (B,)
        Number of keys of each sample, those of its queries included; 0 to M · P.
    **options
        As in `npattn.cache.varlen`: ``causal="bottom_right"`` for queries that are the last tokens
        of their sample, as in a chunk of a prefill.

    Returns
    -------
    ndarray (B, T, H, E)

    Raises
    ------
    ShapeError
        If an array has another rank, or sizes that do not fit.
    DtypeError
        If q or pages are not floating, or the table or lengths not integers.
    OptionError
        If a length is negative or longer than the table, or needs a page that does not exist.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import cache
    >>> pages = np.ones((4, 16, 1, 2))
    >>> cache.paged(np.ones((1, 1, 1, 2)), pages, pages, [[3, 0, -1]], [20]).shape
    (1, 1, 1, 2)
    """
    return paged_forward(q, k_pages, v_pages, block_table, seqlens, **options).out


def paged_forward(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    block_table: ArrayLike,
    seqlens: ArrayLike,
    **options: Any,
) -> PagedForward:
    """`paged` with its lse, and with what `paged_backward` needs.

    Parameters
    ----------
    q, k_pages, v_pages, block_table, seqlens, **options
        As in `paged`.

    Returns
    -------
    PagedForward
        .out (B, T, H, E), .lse (B, H, T), .parts

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `paged`.
    """
    query = read_floating("q", q)
    pages = (read_floating("k_pages", k_pages), read_floating("v_pages", v_pages))
    lengths = check_paged(query, *pages, seqlens)
    B = len(lengths)
    slots = find_slots(block_table, lengths, pages[0].shape[:2])
    each = read_options(options, B)
    parts = []
    for b in range(B):
        k, v = (x[slots[b]].swapaxes(0, 1) for x in pages)
        parts.append(forward(query[b].swapaxes(0, 1), k, v, **each[b]))
    shapes = (query.shape, *(x.shape for x in pages))
    if not parts:  # sizes and dtypes are those of a sample without keys
        one = np.zeros(query.shape[1:], query.dtype).swapaxes(0, 1)
        parts = [forward(one, *(x[:0, 0].swapaxes(0, 1) for x in pages), **options)]
    out = np.stack([part.out.swapaxes(0, 1) for part in parts])[:B]
    lse = np.stack([part.lse for part in parts])[:B]
    return PagedForward(out, lse, tuple(parts), slots, shapes)


def paged_backward(fwd: PagedForward, dout: ArrayLike, dlse: ArrayLike | None = None) -> Gradients:
    """Gradients of `paged_forward`.

    Parameters
    ----------
    fwd : PagedForward
    dout : float array_like (B, T, H, E)
    dlse : float array_like (B, H, T), optional
        Default 0.

    Returns
    -------
    Gradients
        .q as q; .k and .v as the pages: 0 where no sample reads, a sum where several do; .bias and
        .sinks as in `npattn.cache.varlen_backward`.

    Raises
    ------
    ShapeError, DtypeError
        If a gradient has not the shape of its result, or is not floating.
    """
    do = check_cotangent("dout", dout, fwd.out.shape)
    dl = None if dlse is None else check_cotangent("dlse", dlse, fwd.lse.shape)
    dq, dk, dv = (np.zeros(shape, fwd.lse.dtype) for shape in fwd.shapes)
    grads = []
    for b, slots in enumerate(fwd.slots):
        grad = backward(fwd.parts[b], do[b].swapaxes(0, 1), None if dl is None else dl[b])
        dq[b] = grad.q.swapaxes(0, 1)
        for total, own in ((dk, grad.k), (dv, grad.v)):
            np.add.at(total, slots, own.swapaxes(0, 1))
        grads.append(grad)
    if not grads:
        grads = [backward(fwd.parts[0], np.zeros_like(fwd.parts[0].out))]
    return Gradients(dq, dk, dv, *sum_parameters(fwd.parts, grads))


def append(
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    seqlens: ArrayLike,
    *,
    block_table: ArrayLike | None = None,
    rotary: Mapping[str, Any] | None = None,
) -> tuple[Array, Array, Array]:
    """Return a cache with new keys and values behind those of each sample.

    Parameters
    ----------
    k_cache, v_cache : array_like (B, S, K, D), (B, S, K, E)
        With a table, pages (N, P, K, D), (N, P, K, E). They are copied, and not written to.
    k, v : array_like (B, T, K, D), (B, T, K, E)
        New keys and values; they are rounded to the dtype of the cache.
    seqlens : int array_like (B,)
        Number of keys that each sample has already.
    block_table : int array_like (B, M), optional
        Pages of each sample, as in `paged`. Two samples must not write to one slot.
    rotary : mapping, optional
        Options of `npattn.positions.rope`, by which the new keys turn: the first of a sample stands
        at the position seqlens[b].

    Returns
    -------
    k_cache, v_cache : ndarray
        Copies with the new keys; every other slot is as it was, to the bit.
    seqlens : ndarray (B,)
        Longer by T.

    Raises
    ------
    ShapeError, DtypeError
        If arrays do not fit, or have dtypes that are not legal here.
    OptionError
        If there is no room, a page does not exist, or two samples write to one slot.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import cache
    >>> empty, new = np.zeros((1, 4, 1, 2)), np.ones((1, 1, 1, 2))
    >>> k, v, seqlens = cache.append(empty, empty, new, new, [2])
    >>> k[0, :, 0, 0], seqlens
    (array([0., 0., 1., 0.]), array([3]))
    """
    caches = (read_floating("k_cache", k_cache), read_floating("v_cache", v_cache))
    _check_pages(*caches)
    new = tuple(read_floating(n, x) for n, x in (("k", k), ("v", v)))
    for name, x, old in zip("kv", new, caches, strict=True):
        if x.ndim != 4 or x.shape[2:] != old.shape[2:] or x.shape[:2] != new[0].shape[:2]:
            raise ShapeError(
                f"{name} has shape {x.shape}, must be (B, T, {old.shape[2]}, {old.shape[3]})"
            )
    B, T = new[0].shape[:2]
    before = _read_integers("seqlens", seqlens, (B,))
    if block_table is None:
        if len(caches[0]) != B:
            raise ShapeError(f"k_cache has {len(caches[0])} samples, must have {B}, as k")
        block_table = np.arange(B)[:, None]
    slots = find_slots(block_table, before + T, caches[0].shape[:2])
    none = np.zeros(0, np.int64)
    page, slot = (
        np.concatenate([none, *(own[axis][n:] for own, n in zip(slots, before, strict=True))])
        for axis in (0, 1)
    )
    if len(np.unique(page * caches[0].shape[1] + slot)) < len(page):
        raise OptionError("block_table lets two new keys be written to one slot: give each its own")
    if rotary is not None:
        places = before[:, None] + np.arange(T)
        turned = rope(new[0].swapaxes(1, 2), positions=places[:, None], **rotary)
        new = (turned.swapaxes(1, 2), new[1])
    out = []
    for old, x in zip(caches, new, strict=True):
        filled = old.copy()
        filled[page, slot] = x.reshape(-1, *x.shape[2:]).astype(old.dtype)
        out.append(filled)
    return out[0], out[1], before + T


def check_paged(q: Array, k_pages: Array, v_pages: Array, seqlens: Any) -> Array:
    """Check q and pages against each other, and return the lengths of the samples."""
    if q.ndim != 4:
        raise ShapeError(f"q has shape {q.shape}, must be (B, T, H, D)")
    _check_pages(k_pages, v_pages)
    return _read_integers("seqlens", seqlens, (len(q),))


def find_slots(
    block_table: Any, lengths: Array, sizes: tuple[int, ...]
) -> tuple[tuple[Array, Array], ...]:
    """Return the page and the slot of each key of each sample."""
    count, P = sizes
    table = _read_integers("block_table", block_table, (len(lengths), None))
    found = []
    for b, length in enumerate(lengths):
        if not 0 <= length <= table.shape[1] * P:
            raise OptionError(
                f"seqlens has {length} keys for sample {b}, must be 0 to {table.shape[1] * P}: "
                f"its {table.shape[1]} pages have {P} slots each"
            )
        s = np.arange(length)
        pages = table[b, s // P] if P else s
        if length and not (pages.min() >= 0 and pages.max() < count):
            raise OptionError(
                f"block_table has page {pages.min() if pages.min() < 0 else pages.max()} for keys "
                f"of sample {b}, must be 0 to {count - 1}"
            )
        found.append((pages, s % P if P else s))
    return tuple(found)


def _check_pages(k: Array, v: Array) -> None:
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ShapeError(
            f"k_pages and v_pages have shapes {k.shape} and {v.shape}, must be (N, P, K, D) and "
            "(N, P, K, E)"
        )


def _read_integers(name: str, value: Any, shape: tuple[int | None, ...]) -> Array:
    array = read_array(name, value)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name} is {array.dtype}, must be integers")
    fits = array.ndim == len(shape) and all(
        m in (None, n) for n, m in zip(array.shape, shape, strict=True)
    )
    if not fits:
        must = ", ".join("M" if n is None else str(n) for n in shape)
        raise ShapeError(
            f"{name} has shape {array.shape}, must be ({must}{',' * (len(shape) == 1)})"
        )
    return array.astype(np.int64)
