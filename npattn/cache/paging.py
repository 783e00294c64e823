"""Keys and values in pages of a shared memory, which a table finds: decoding and prefill.

    q (B, T, H, D)    k_pages (N, P, K, D)    v_pages (N, P, K, E)
    block_table (B, M)    seqlens (B,)

Key s of sample b is slot s % P of page block_table[b, s // P], for s < seqlens[b]. Other pages,
later slots and later entries of the table are never read. The last query stands at the last key.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.cache.packed import read_options, sum_parameters
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.oracle.api import backward
from npattn.oracle.signatures import only_out
from npattn.oracle.twins import on_arrays
from npattn.problem import Forward, Gradients
from npattn.problem.arrays import Array, cast
from npattn.problem.checks import check_cotangent, check_result, read_array
from npattn.problem.foreign import reject_unknown_options


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


@on_arrays
def paged_forward(
    xp: Any, /, q: ArrayLike, k_pages: ArrayLike, v_pages: ArrayLike, block_table: ArrayLike,
    seqlens: ArrayLike, **options: Any,
) -> PagedForward:  # fmt: skip
    """Attention of each sample's queries to its keys, which lie in pages, with its lse.

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
    PagedForward
        .out (B, T, H, E), .lse (B, H, T), .parts

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
    arrays, facts = xp.read(q=q, k_pages=k_pages, v_pages=v_pages)
    lengths = check_paged(facts, xp.on_host(seqlens))
    B, (query, *pages) = len(lengths), arrays.values()
    slots = find_slots(xp.on_host(block_table), lengths, facts["k_pages"].shape[:2])
    each = read_options(options, B)
    samples = [
        (query[b], *(x[at] for x in pages))
        for b in range(B)
        for at in [xp.indices(slots[b], like=pages[0])]
    ]
    if not samples:  # sizes and dtypes are those of a sample without tokens
        samples = [tuple(xp.full((0, *x.shape[2:]), 0, like=x) for x in arrays.values())]
    parts = xp.forward_each([tuple(x.swapaxes(0, 1) for x in xs) for xs in samples], each)
    T, (H, _, E) = query.shape[1], parts[0].out.shape
    if B:
        out = xp.stack([part.out.swapaxes(0, 1) for part in parts])
        lse = xp.stack([part.lse for part in parts])
    else:
        out, lse = parts[0].out.reshape(0, T, H, E), parts[0].lse.reshape(0, H, T)
    return PagedForward(out, lse, tuple(parts), slots, tuple(x.shape for x in arrays.values()))


paged = only_out(
    "paged", paged_forward, np.ndarray,
    "Attention of each sample's queries to its keys, which lie in pages.", "ndarray (B, T, H, E)",
)  # fmt: skip


@reject_unknown_options
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
    OptionError
        If `fwd` is not a result of `paged_forward`.
    """
    check_result(fwd, PagedForward, "npattn.cache.paged_forward")
    do = check_cotangent("dout", dout, fwd.out.shape)
    dl = None if dlse is None else check_cotangent("dlse", dlse, fwd.lse.shape)
    B = len(fwd.slots)
    grads = [
        backward(fwd.parts[b], do[b].swapaxes(0, 1), None if dl is None else dl[b])
        for b in range(B)
    ] or [backward(fwd.parts[0], fwd.parts[0].out)]
    dq = np.zeros(fwd.shapes[0], grads[0].q.dtype)
    for b in range(B):
        dq[b] = grads[b].q.swapaxes(0, 1)
    pages = []
    for name, shape in zip("kv", fwd.shapes[1:], strict=True):
        dtype = getattr(grads[0], name).dtype
        total = np.zeros(shape, np.result_type(dtype, np.float64))  # summed, and then rounded
        for (page, slot), grad in zip(fwd.slots, grads, strict=False):
            rows, ends = getattr(grad, name).swapaxes(0, 1), np.flatnonzero(slot == 0)
            for a, b in itertools.pairwise((*ends, len(rows))):  # a table may name a page twice
                total[page[a], : b - a] += rows[a:b]
        pages.append(cast(total, dtype))
    return Gradients(dq, pages[0], pages[1], *sum_parameters(fwd.parts, grads))


def check_paged(arrays: Mapping[str, Array], seqlens: Any) -> Array:
    """Check q and pages against each other, and return the lengths of the samples."""
    q, k_pages, v_pages = arrays.values()
    if q.ndim != 4:
        raise ShapeError(f"q has shape {q.shape}, must be (B, T, H, D)")
    check_pages("k_pages", k_pages, "v_pages", v_pages)
    return read_integers("seqlens", seqlens, (len(q),))


def find_slots(
    block_table: Any, lengths: Array, sizes: tuple[int, ...]
) -> tuple[tuple[Array, Array], ...]:
    """Return pages and slots, two arrays (length,) a sample, of keys in a table (B, pages)."""
    count, P = sizes
    table = read_integers("block_table", block_table, (len(lengths), None))
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


def check_pages(k_name: str, k: Array, v_name: str, v: Array) -> None:
    """Check that keys and values lie in pages, or in a cache, of one shape."""
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ShapeError(
            f"{k_name} and {v_name} have shapes {k.shape} and {v.shape}, must be (N, P, K, D) and "
            "(N, P, K, E)"
        )


def read_integers(name: str, value: Any, shape: tuple[int | None, ...]) -> Array:
    """Return an array of integers of a shape, in which None is any size."""
    array = read_array(name, value)
    if array.dtype.kind not in "iu" and array.size:
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
