"""Lists of keys: one for each query, of key numbers in any order, with −1 in unused entries.

    indices (..., H | 1, T, n)      index_mask(indices, S) (..., H | 1, T, S): True where listed

A key that a list repeats is an error: the reference of FlashAttention-4 (gather_kv_indices) makes a
mask of a list, so that it counts once; that of FlashMLA (flash_mla_sparse_fwd) reads key after key,
so that it counts twice.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import DtypeError, OptionError, ShapeError
from npattn.oracle.twins import on_arrays
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer, read_integers


def index_mask(indices: ArrayLike, S: int) -> Array:
    """Return the mask of lists of keys: dense attention with it is `gathered.attention`.

    Parameters
    ----------
    indices : int array_like (..., T, n)
        Keys of each query in any order; −1 is an unused entry. A repeated key counts once.
    S : int
        Number of keys.

    Returns
    -------
    bool ndarray (..., T, S)

    Raises
    ------
    ShapeError
        If indices have no axis T.
    DtypeError
        If indices are not integers.
    OptionError
        If an entry is neither −1 nor in 0 … S − 1.

    Examples
    --------
    >>> from npattn import variants
    >>> variants.gathered.index_mask([[2, 0], [1, -1]], 3)
    array([[ True, False,  True],
           [False,  True, False]])
    """
    lists = read_indices(indices)
    S = check_integer("S", S, 0)
    check_values(lists, S)
    listed = np.zeros((*lists.shape[:-1], S + 1), bool)  # unused entries mark a key behind the last
    np.put_along_axis(listed, np.where(lists < 0, S, lists), True, -1)
    return listed[..., :S]


def drop_repeats(indices: ArrayLike) -> Array:
    """Return lists of keys in which every later entry of the same key is −1, an unused entry.

    Parameters
    ----------
    indices : int array_like (..., T, n)

    Returns
    -------
    int64 ndarray (..., T, n)

    Raises
    ------
    ShapeError, DtypeError
        As `index_mask`.

    Examples
    --------
    >>> from npattn import variants
    >>> variants.gathered.drop_repeats([[3, 1, 3]])
    array([[ 3,  1, -1]])
    """
    lists = read_indices(indices)
    return np.where(find_repeats(lists), -1, lists)


def find_repeats(lists: Array) -> Array:
    """Return True where a list has the key in an earlier entry too."""
    order = np.argsort(lists, axis=-1, kind="stable")
    ordered = np.take_along_axis(lists, order, -1)
    again = np.zeros(lists.shape, bool)
    again[..., 1:] = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    repeats = np.zeros(lists.shape, bool)
    np.put_along_axis(repeats, order, again, -1)
    return repeats


def read_indices(indices: Any) -> Array:
    """Return lists of keys as int64, after checking their rank and dtype."""
    lists = read_integers("indices", indices, ": pass a bool array as mask=")
    if lists.ndim < 2:
        raise ShapeError(f"indices has shape {lists.shape}, must be (..., T, n): a list a query")
    return lists.astype(np.int64)


def check_values(lists: Array, S: int) -> None:
    """Check that every entry is a key or −1."""
    wrong = (lists < -1) | (lists >= S)
    if wrong.any():
        raise OptionError(
            f"indices contains {lists[wrong][0]}, must be a key, 0 to {S - 1}, or −1 where an "
            f"entry is unused: pass np.where((indices >= 0) & (indices < {S}), indices, -1)"
        )


def check_lists(lists: Array, lead: tuple[int, ...], H: int, T: int, S: int) -> None:
    """Check lists of keys, (..., H, T, n), against the sizes, and that no key is twice in one."""
    rows = (*lead, H, T)
    axes = lists.shape[:-1]
    tail = rows[max(len(rows) - len(axes), 0) :]
    fits = len(axes) == len(tail) and axes[-1] == T
    if not fits or any(n not in (1, m) for n, m in zip(axes, tail, strict=True)):
        hint = ""
        if len(rows) == 3 and axes == (rows[0], T):
            hint = ": for lists (B, T, n) that heads share pass indices[:, None]"
        raise ShapeError(
            f"indices has shape {lists.shape}, must be (..., H, T, n) with 1 for axes that share "
            f"lists, (..., H, T) = {rows}{hint}"
        )
    check_values(lists, S)
    repeats = find_repeats(lists)
    if repeats.any():
        *where, _ = np.argwhere(repeats)[0].tolist()
        raise OptionError(
            f"indices contains key {lists[repeats][0]} twice in list {tuple(where)}, which systems "
            "count once or twice: pass npattn.variants.gathered.drop_repeats(indices) to count it "
            "once; to count a key m times, add log(m) to its bias as well"
        )


@on_arrays
def top_k(xp: Any, /, scores: ArrayLike, n: int, mask: ArrayLike | None = None) -> Array:
    """Return the n keys of the largest visible scores of each query, largest first.

    Of equal scores the lower key comes first. The choice is piecewise constant in the scores, so
    that the gradient of attention behind it is that of `gathered.attention` with fixed lists; where
    two scores tie at the border there is none.

    Parameters
    ----------
    scores : real float array_like (..., T, S)
        Of an indexer, or scale · q kᵀ itself.
    n : int
        Length of a list, ≥ 0.
    mask : bool array_like, optional
        True = may be chosen; broadcasts against scores. A score of −inf is never chosen.

    Returns
    -------
    int64 ndarray (..., T, n)
        −1 behind the last visible key, and where n exceeds S.

    Raises
    ------
    ShapeError
        If scores have no axis T, or mask does not broadcast against them.
    DtypeError
        If scores are not real and floating, or mask is not bool.
    OptionError
        If n is no integer ≥ 0, or a visible score is NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import variants
    >>> variants.gathered.top_k(np.array([[1.0, 3.0, 3.0, 2.0]]), 3)
    array([[1, 2, 3]])
    """
    arrays, facts = xp.read(scores=scores)
    visible = None if mask is None else xp.read_boolean("mask", mask)
    n = check_ranking(facts["scores"], n, None if visible is None else tuple(visible.shape))
    ranked = xp.to_rank(arrays["scores"])
    ranked = ranked if visible is None else xp.where(visible, ranked, -math.inf)
    if xp.isnan(ranked).any():
        raise OptionError(NAN_SCORE)
    values, order = xp.largest(ranked, n)
    chosen = xp.where(xp.isneginf(values), -1, order)
    missing = xp.full((*chosen.shape[:-1], n - chosen.shape[-1]), -1, like=order)
    return xp.concatenate([chosen, missing], axis=-1)  # type: ignore[no-any-return]


NAN_SCORE = "scores has NaN, which has no rank: hide it with mask=, or replace it by −inf"


def check_ranking(scores: Array, n: Any, mask: tuple[int, ...] | None) -> int:
    """Return n as an int, after checking scores and the shape of a mask."""
    if scores.dtype.kind == "c":
        raise DtypeError(f"scores is {scores.dtype}, must be real")
    if scores.ndim < 2:
        raise ShapeError(f"scores has shape {scores.shape}, must be (..., T, S)")
    if mask is not None:
        tail = scores.shape[max(scores.ndim - len(mask), 0) :]
        fits = len(mask) == len(tail) and all(a in (1, b) for a, b in zip(mask, tail, strict=True))
        if not fits:
            raise ShapeError(f"mask has shape {mask}, must broadcast against scores {scores.shape}")
    return check_integer("n", n, 0)
