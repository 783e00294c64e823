"""New keys and values behind those that a cache, or its pages, hold already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npattn.cache.paging import check_pages, find_slots, read_integers
from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.oracle.twins import on_arrays
from npattn.positions import rope_backward
from npattn.problem.arrays import Array
from npattn.problem.checks import read_floating
from npattn.problem.foreign import reject_unknown_options

ROTARY = ("layout", "base", "size", "frequencies")


@reject_unknown_options
@on_arrays
def append(
    xp: Any, /, k_cache: ArrayLike, v_cache: ArrayLike, k: ArrayLike, v: ArrayLike,
    seqlens: ArrayLike,
    *, block_table: ArrayLike | None = None, rotary: Mapping[str, Any] | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
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
        Pages of each sample, as in `paged`. Samples may share pages that no new key lies in.
    rotary : mapping, optional
        layout, base, size, frequencies of `npattn.positions.rope`, by which the new keys turn: the
        first of a sample stands at the position seqlens[b].

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
        If a length is negative or leaves no room, a page does not exist, a new key would lie where
        another does, or `rotary` has other options.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import cache
    >>> empty, new = np.zeros((1, 4, 1, 2)), np.ones((1, 1, 1, 2))
    >>> k, v, seqlens = cache.append(empty, empty, new, new, [2])
    >>> k[0, :, 0, 0], seqlens
    (array([0., 0., 1., 0.]), array([3]))
    """
    arrays, facts = xp.read(k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    check_pages("k_cache", facts["k_cache"], "v_cache", facts["v_cache"])
    slots = find_new_slots(facts, xp.on_host(seqlens), xp.on_host(block_table))
    old_k, old_v, new_k, new_v = arrays.values()
    if rotary is not None:
        options = read_rotary(rotary)
        turned = xp.rope(new_k.swapaxes(1, 2), positions=slots.positions[:, None], **options)
        new_k = turned.swapaxes(1, 2)
    *at, lengths = xp.indices((slots.page, slots.slot, slots.lengths), like=old_k)
    return xp.put(old_k, tuple(at), new_k), xp.put(old_v, tuple(at), new_v), lengths


class CacheGradients(NamedTuple):
    """Gradients of what `append` was given, each shaped as it."""

    k_cache: Array
    v_cache: Array
    k: Array
    v: Array


@reject_unknown_options
def append_backward(
    dk_cache: ArrayLike, dv_cache: ArrayLike, k: ArrayLike, v: ArrayLike, seqlens: ArrayLike,
    *, block_table: ArrayLike | None = None, rotary: Mapping[str, Any] | None = None,
) -> CacheGradients:  # fmt: skip
    """Return the gradients of `append`, from those of the caches that it returned.

    New keys and values get the gradients of their slots, keys turned back; what a new one was
    written over gets 0. Rounding to the dtype of the cache is passed over.

    Parameters
    ----------
    dk_cache, dv_cache : float array_like
        Gradients of the two caches that `append` returned, shaped as they are.
    k, v, seqlens, block_table, rotary
        As `append` was given them; of k and v only the shapes matter.

    Returns
    -------
    CacheGradients
        .k_cache, .v_cache, .k, .v

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `append`.
    """
    grads = (read_floating("dk_cache", dk_cache), read_floating("dv_cache", dv_cache))
    check_pages("dk_cache", grads[0], "dv_cache", grads[1])
    added = (read_floating("k", k), read_floating("v", v))
    arrays = dict(zip(("k_cache", "v_cache", "k", "v"), (*grads, *added), strict=True))
    slots = find_new_slots(arrays, seqlens, block_table)
    dk, dv = (x[slots.page, slots.slot] for x in grads)
    if rotary is not None:
        options = read_rotary(rotary)
        back = rope_backward(dk.swapaxes(1, 2), positions=slots.positions[:, None], **options)
        dk = back.swapaxes(1, 2)
    old = [x.copy() for x in grads]
    for x in old:
        x[slots.page, slots.slot] = 0
    return CacheGradients(old[0], old[1], dk, dv)


class NewSlots(NamedTuple):
    """Places of the new keys of each sample, and its number of keys with them."""

    page: Array  # (B, T)
    slot: Array  # (B, T)
    positions: Array  # (B, T)
    lengths: Array  # (B,)


def find_new_slots(arrays: Mapping[str, Array], seqlens: Any, block_table: Any) -> NewSlots:
    """Check the arguments of `append`, and return where new keys and values go."""
    k_cache, v_cache, k, v = arrays.values()
    for name, x, old in (("k", k, k_cache), ("v", v, v_cache)):
        if x.ndim != 4 or x.shape[2:] != old.shape[2:] or x.shape[:2] != k.shape[:2]:
            raise ShapeError(
                f"{name} has shape {x.shape}, must be (B, T, {old.shape[2]}, {old.shape[3]})"
            )
        if x.dtype.kind == "c" and old.dtype.kind != "c":
            raise DtypeError(f"{name} is {x.dtype}, must be real, as its cache is")
    B, T = k.shape[:2]
    before = read_integers("seqlens", seqlens, (B,))
    if block_table is None:
        if len(k_cache) != B:
            raise ShapeError(f"k_cache has {len(k_cache)} samples, must have {B}, as k")
        block_table = np.arange(B)[:, None]
    table = read_integers("block_table", block_table, (B, None))
    room = table.shape[1] * k_cache.shape[1]
    if B and not 0 <= before.min() <= before.max() <= room - T:
        raise OptionError(
            f"seqlens is {before.tolist()}, must be 0 to {room - T}: there is room for {room} keys "
            f"of a sample, and {T} come"
        )
    page, slot = _find_free(table, before, T, k_cache.shape[:2])
    positions = before[:, None] + np.arange(T)
    return NewSlots(page.reshape(B, T), slot.reshape(B, T), positions, before + T)


def _find_free(table: Array, before: Array, T: int, sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return page and slot, (n,), of T new keys after `before`, (B,), in `table`, (B, pages)."""
    pairs = [np.stack(slots, -1) for slots in find_slots(table, before + T, sizes)]
    none = np.zeros((0, 2), np.int64)
    kept = np.concatenate([none, *(x[:n] for x, n in zip(pairs, before, strict=True))])
    written = np.concatenate([none, *(x[n:] for x, n in zip(pairs, before, strict=True))])
    both = np.concatenate([np.unique(kept, axis=0), written])
    if len(np.unique(both, axis=0)) < len(both):
        raise OptionError(
            "block_table lets a new key be written where another key lies: copy the page that "
            "samples share, and give each new key a slot of its own"
        )
    return written[:, 0], written[:, 1]


def read_rotary(rotary: Any) -> dict[str, Any]:
    """Return the options of `npattn.positions.rope` in `rotary`, checked."""
    if not isinstance(rotary, Mapping) or not set(rotary) <= set(ROTARY):
        raise OptionError(
            f"rotary is {rotary!r}, must be a mapping with options of npattn.positions.rope: "
            f"{', '.join(ROTARY)}; positions are those behind seqlens"
        )
    return dict(rotary)
