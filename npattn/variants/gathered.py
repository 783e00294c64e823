"""Gathered attention: each query attends to the keys of a list, and to no other.

    k_t, v_t = rows indices[t] of k, v        o_t = attention(q_t, k_t, v_t)
    dk, dv   = the gradients of all lists, each added to the row that it was read from

    q (..., H, T, D)   k (..., K, S, D)   v (..., K, S, E)   indices (..., H | 1, T, n)

Entries of −1 are unused, and mask, causal and window hide keys of a list as they hide them from
`npattn.attention`, which gives the same results with mask=`index_mask(indices, S)`; here memory
grows with T × n. An indexer that chooses such lists (DeepSeek's sparse attention) gets no gradient
here: its choice is piecewise constant.
Source: DeepSeek-AI 2025, "DeepSeek-V3.2-Exp"; FlashAttention-4's gather_kv_indices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.engines.dense import sum_shared
from npattn.errors import DtypeError
from npattn.oracle import api
from npattn.oracle.signatures import only_out
from npattn.oracle.twins import ARRAYS, on_arrays
from npattn.problem import Forward, Gradients, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.problem.checks import check_cotangent, check_result
from npattn.problem.foreign import reject_options, reject_unknown_options
from npattn.variants.indices import check_lists, drop_repeats, index_mask, read_indices, top_k

__all__ = [
    "OPTIONS", "GatheredForward", "attention", "backward", "drop_repeats", "forward", "index_mask",
    "top_k",
]  # fmt: skip

OPTIONS = (
    *("mask", "causal", "window", "bias", "scale", "softcap", "sinks"),
    *("dropout_mask", "dropout_rate", "dtype"),
)


@dataclass(frozen=True, eq=False)
class GatheredForward:
    """Results of `forward`.

    Attributes
    ----------
    out : array (..., H, T, E)
    lse : array (..., H, T)
    weights : array (..., H, T, n)
        Of the entries of each list.
    problem : npattn.Problem
        The same arrays and options without lists.
    """

    out: Array
    lse: Array
    problem: Problem
    attention: Forward = field(repr=False)  # (..., T, H, 1, n): queries are a batch axis
    lists: Array = field(repr=False)  # (..., K or H, T, n), S where an entry is unused

    @property
    def headless(self) -> bool:
        """True if q, k, v have rank 2: one head, without an axis in the results."""
        return self.problem.headless

    @property
    def weights(self) -> Array:
        weights = self.attention.weights[..., 0, :].swapaxes(-3, -2)
        return weights[0] if self.headless else weights


@on_arrays
def forward(
    xp: Any, /, q: ArrayLike, k: ArrayLike, v: ArrayLike, indices: ArrayLike, **options: Any
) -> GatheredForward:
    """Attention in which each query sees the keys of a list, and what `backward` needs.

    Parameters
    ----------
    q, k, v : float array_like
        (..., H, T, D), (..., K, S, D), (..., K, S, E), or all of rank 2, as in `npattn.attention`.
    indices : int array_like (..., H, T, n)
        Keys of each query, in any order; axes of 1 and missing ones share lists, (T, n) is for all
        heads. −1 is an unused entry. No list has a key twice.
    **options
        mask, causal, window, bias, scale, softcap, sinks, dropout_mask, dropout_rate, dtype of
        `npattn.attention`, in the shapes that they have there: beside (..., H, T, S). A key is
        visible if its list has it and no option hides it.

    Returns
    -------
    GatheredForward
        .out (..., H, T, E), .lse (..., H, T), .weights (..., H, T, n), .problem

    Raises
    ------
    ShapeError
        If an array has a shape that does not fit.
    DtypeError
        If q, k, v are not floating, indices not integers, or `dtype` emulates mixed precision.
    OptionError
        If an entry is neither a key nor −1, a list has a key twice, or an option is unknown or has
        an illegal value.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import variants
    >>> q, k, v = np.zeros((1, 2, 4)), np.zeros((1, 3, 4)), np.arange(6.0).reshape(1, 3, 2)
    >>> variants.gathered.attention(q, k, v, [[2, 0], [1, -1]])
    array([[[2., 3.],
            [2., 3.]]])
    """
    reject_options("gathered.attention", options, OPTIONS)
    problem = xp.problem(q, k, v, **options)
    if problem.storage is not None:
        raise DtypeError(f"dtype is {problem.storage}, must be {xp.WIDE}")
    chosen = read_indices(xp.on_host(indices))
    check_lists(chosen, problem.lead, problem.H, problem.T, problem.S)
    heads = chosen.shape[-3] if chosen.ndim > 2 and chosen.shape[-3] > 1 else problem.K
    shape = (*problem.lead, heads, problem.T, chosen.shape[-1])
    # Unused entries read a key of zeros behind the last.
    (lists,) = xp.indices((np.where(chosen < 0, problem.S, chosen),), like=problem.q)
    lists = xp.broadcast_to(lists, shape)
    of_heads = _of_heads(xp, lists, problem)
    keys, values = (
        gather_rows(xp, _by_head(xp, x, problem, heads), lists) for x in (problem.k, problem.v)
    )
    query = problem.q[None] if problem.headless else problem.q
    fills = (("bias", problem.bias_array, 0), ("dropout_mask", problem.dropout_mask, True))
    terms = {
        name: gather_scores(xp, array, of_heads, problem, fill)
        for name, array, fill in fills
        if array is not None
    }
    listed = (of_heads < problem.S).swapaxes(-3, -2)[..., None, :]
    if problem.visible is not None:
        listed = listed & gather_scores(xp, problem.visible, of_heads, problem, False)
    gathered = xp.Problem(
        query.swapaxes(-3, -2)[..., None, :], keys, values, listed, **terms, sinks=problem.sinks,
        scale=problem.scale, softcap=problem.softcap, dropout_rate=problem.dropout_rate,
        dtype=problem.dtype, engine=xp.ENGINE,
    )  # fmt: skip
    attention = xp.evaluate(gathered)
    out, lse = attention.out[..., 0, :].swapaxes(-3, -2), attention.lse[..., 0].swapaxes(-2, -1)
    out, lse = (out[0], lse[0]) if problem.headless else (out, lse)
    return GatheredForward(out, lse, problem, attention, lists)


attention = only_out(
    "attention", forward, np.ndarray, "Attention in which each query sees the keys of a list.",
    "ndarray (..., H, T, E)\n        0 where a query sees no key.",
)  # fmt: skip


@reject_unknown_options
def backward(
    fwd: GatheredForward, dout: ArrayLike, dlse: ArrayLike | None = None,
    dweights: ArrayLike | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights, for fixed lists.

    Parameters
    ----------
    fwd : GatheredForward
        Result of `forward`.
    dout : float array_like (..., H, T, E)
    dlse, dweights : float array_like (..., H, T), (..., H, T, n), optional
        Default 0.

    Returns
    -------
    Gradients
        .q .k .v .bias .sinks, each shaped as its input; keys in no list get 0.

    Raises
    ------
    ShapeError, DtypeError
        If a cotangent has not the shape of its result, or is not floating.
    OptionError
        If `fwd` is not a result of `forward`.
    """
    check_result(fwd, GatheredForward, "npattn.variants.gathered.forward")
    problem, lists = fwd.problem, fwd.lists
    weights_shape = (*fwd.lse.shape, lists.shape[-1])

    def read(name: str, value: Any, shape: tuple[int, ...]) -> Array:
        array = check_cotangent(name, value, shape)
        return array[None] if problem.headless else array

    do = read("dout", dout, fwd.out.shape).swapaxes(-3, -2)[..., None, :]
    dl = None if dlse is None else read("dlse", dlse, fwd.lse.shape).swapaxes(-2, -1)[..., None]
    dw = None
    if dweights is not None:
        dw = read("dweights", dweights, weights_shape).swapaxes(-3, -2)[..., None, :]
    grads = api.backward(fwd.attention, do, dl, dw)
    dq = grads.q[..., 0, :].swapaxes(-3, -2)
    dk, dv = (
        sum_shared(scatter_rows(dx, lists, problem.S), problem.K, x.shape)
        for dx, x in ((grads.k, problem.k), (grads.v, problem.v))
    )
    dbias = None
    if grads.bias is not None:
        ds = scatter_scores(grads.bias, lists, problem)
        dbias = problem.bias_gradient(ds)
    return Gradients(sum_to(dq, problem.q.shape), dk, dv, dbias, grads.sinks)


def _by_head(xp: Any, x: Any, problem: Problem, heads: int) -> Any:
    """Return k or v with leading axes in full, and a head for each list or the K that they have."""
    x = x[None] if problem.headless else x
    x = xp.repeat(x, heads // problem.K, -3) if heads > problem.K else x
    return xp.broadcast_to(x, (*problem.lead, *x.shape[-3:]))


def gather_rows(xp: Any, x: Any, lists: Any) -> Any:
    """Read rows of x (..., heads, S, m) by lists (..., heads, T, n): (..., T, heads, n, m)."""
    extended = xp.concatenate([x, xp.full((*x.shape[:-2], 1, x.shape[-1]), 0, like=x)], axis=-2)
    *heads, T, n = lists.shape
    flat = lists.reshape(*heads, T * n, 1)
    rows = xp.take_along_axis(extended, flat, -2).reshape(*lists.shape, x.shape[-1])
    return rows.swapaxes(-4, -3)


def scatter_rows(dx: Array, lists: Array, S: int) -> Array:
    """Add rows (..., T, heads, n, m) to those that lists name: (..., heads, S, m)."""
    m, lead = dx.shape[-1], lists.shape[:-2]
    rows = dx.swapaxes(-4, -3).reshape(lists.size, m)
    planes = np.arange(int(np.prod(lead))).reshape(*lead, 1, 1)
    total = np.zeros((planes.size, S + 1, m), dx.dtype)
    np.add.at(total, (np.broadcast_to(planes, lists.shape).ravel(), lists.ravel()), rows)
    return total.reshape(*lead, S + 1, m)[..., :S, :]


def gather_scores(xp: Any, array: Any, lists: Any, problem: Problem, fill: Any) -> Any:
    """Read the entries of lists (..., H, T, n) from beside the scores: (..., T, H, 1, n)."""
    full = xp.broadcast_to(array, (*problem.lead, problem.H, problem.T, problem.S))
    unused = xp.full((*full.shape[:-1], 1), fill, like=array)
    entries = xp.take_along_axis(xp.concatenate([full, unused], axis=-1), lists, -1)
    return entries.swapaxes(-3, -2)[..., None, :]


def scatter_scores(ds: Array, lists: Array, problem: Problem) -> Array:
    """Put the entries (..., T, H, 1, n) of lists where they belong beside the scores."""
    total = np.zeros((*problem.lead, problem.H, problem.T, problem.S + 1), ds.dtype)
    entries = ds[..., 0, :].swapaxes(-3, -2)
    np.put_along_axis(
        total, _of_heads(ARRAYS, lists, problem), entries, -1
    )  # no list has a key twice
    return total[..., : problem.S]


def _of_heads(xp: Any, lists: Any, problem: Problem) -> Any:
    """Return lists (..., H or 1, T, n), of each query head or of all."""
    heads = lists.shape[-3]
    return xp.repeat(lists, problem.H // heads, -3) if 0 < heads < problem.H else lists
