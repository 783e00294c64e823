"""Packed sequences: the tokens of all behind each other, and where each begins.

    q (total_q, H, D)    k (total_k, K, D)    v (total_k, K, E)
    o (total_q, H, E)    lse (H, total_q)

Sequence i has queries cu_seqlens_q[i] to cu_seqlens_q[i + 1] − 1, and keys likewise. No query sees
a key of another sequence. Each is one problem of `npattn.forward`, with its own causal and window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import OptionError, ShapeError
from npattn.oracle.api import backward
from npattn.oracle.signatures import only_out
from npattn.oracle.twins import ARRAYS, on_arrays
from npattn.problem import Forward, Gradients
from npattn.problem.arrays import Array, BiasLike, MaskLike
from npattn.problem.checks import check_cotangent, check_result, read_integers
from npattn.problem.foreign import reject_options, reject_unknown_options

OPTIONS = (
    *("mask", "causal", "window", "bias", "scale", "softcap", "score_mod", "sinks", "dtype"),
    *("engine", "conventions"),
)


@dataclass(frozen=True, eq=False)
class PackedForward:
    """Results of `varlen_forward`.

    Attributes
    ----------
    out : array (total_q, H, E)
    lse : array (H, total_q)
    parts : tuple of Forward
        One a sequence, (H, T, ·) each, with its weights.
    """

    out: Array
    lse: Array
    parts: tuple[Forward, ...]
    bounds: tuple[Array, Array] = field(repr=False)


@on_arrays
def varlen_forward(
    xp: Any, /, q: ArrayLike, k: ArrayLike, v: ArrayLike, cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None, **options: Any,
) -> PackedForward:  # fmt: skip
    """Attention within each of several packed sequences, with its lse.

    Parameters
    ----------
    q, k, v : float array_like
        (total_q, H, D), (total_k, K, D), (total_k, K, E).
    cu_seqlens_q, cu_seqlens_k : int array_like (N + 1,)
        Where each of the N sequences begins, and the end of the last: 0, …, total. Sequences may
        have no queries, or no keys. Default of the second: the first.
    **options
        mask, causal, window, bias, scale, softcap, score_mod, sinks, dtype, engine, conventions of
        `npattn.attention`, for each sequence alone: ``causal="bottom_right"`` aligns its last query
        with its last key, and score_mod gets a b of 0. mask and bias are objects of `npattn.masks`
        and `npattn.biases` that fit each sequence, or a list of arrays (H, T, S), one a sequence.

    Returns
    -------
    PackedForward
        .out (total_q, H, E), .lse (H, total_q), .parts

    Raises
    ------
    ShapeError
        If an array has another rank, or sizes that do not fit.
    DtypeError
        If q, k, v are not floating, or bounds not integers.
    OptionError
        If bounds do not begin at 0, fall, or do not end at the total; if an option is unknown, or
        an array where a list or an object belongs.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import cache
    >>> q = k = v = np.ones((5, 1, 2))
    >>> cache.varlen(q, k, v, [0, 2, 5], causal="bottom_right").shape
    (5, 1, 2)
    """
    arrays, facts = xp.read(q=q, k=k, v=v)
    of_q, of_k = check_packed(facts, xp.on_host(cu_seqlens_q), xp.on_host(cu_seqlens_k))
    each = read_options(options, len(of_q) - 1)
    ends = list(zip(*(x[i:].tolist() for x in (of_q, of_k) for i in (0, 1)), strict=False))
    heads = [x.swapaxes(0, 1) for x in arrays.values()]
    # Without a sequence, sizes and dtypes are those of one that has no tokens.
    sequences = [
        (heads[0][:, a:b], *(x[:, c:d] for x in heads[1:])) for a, b, c, d in ends or [(0,) * 4]
    ]
    parts = xp.forward_each(sequences, each)
    lse = xp.concatenate([part.lse for part in parts], axis=1)
    return PackedForward(_join(xp, [x.out for x in parts]), lse, tuple(parts), (of_q, of_k))


varlen = only_out(
    "varlen", varlen_forward, np.ndarray, "Attention within each of several packed sequences.",
    "ndarray (total_q, H, E)",
)  # fmt: skip


@reject_unknown_options
def varlen_backward(
    fwd: PackedForward, dout: ArrayLike, dlse: ArrayLike | None = None
) -> Gradients:
    """Gradients of `varlen_forward`.

    Parameters
    ----------
    fwd : PackedForward
    dout : float array_like (total_q, H, E)
    dlse : float array_like (H, total_q), optional
        Default 0.

    Returns
    -------
    Gradients
        .q .k .v as the inputs; .bias as the parameter of a bias object, summed over the sequences,
        or a list for a list; .sinks (H,).

    Raises
    ------
    ShapeError, DtypeError
        If a gradient has not the shape of its result, or is not floating.
    OptionError
        If `fwd` is not a result of `varlen_forward`.
    """
    check_result(fwd, PackedForward, "npattn.cache.varlen_forward")
    do = check_cotangent("dout", dout, fwd.out.shape)
    dl = None if dlse is None else check_cotangent("dlse", dlse, fwd.lse.shape)
    of_q = fwd.bounds[0] if len(fwd.bounds[0]) > 1 else np.zeros(2, np.int64)
    grads = [
        backward(part, do[a:b].swapaxes(0, 1), None if dl is None else dl[:, a:b])
        for part, a, b in zip(fwd.parts, of_q, of_q[1:], strict=False)
    ]
    dq, dk, dv = (_join(ARRAYS, [getattr(grad, name) for grad in grads]) for name in "qkv")
    return Gradients(dq, dk, dv, *sum_parameters(fwd.parts, grads))


def _join(xp: Any, parts: Sequence[Array]) -> Array:
    """Return (total, heads, size) of parts (heads, length, size)."""
    # Whole rows first: turning each of many short parts takes five times as long.
    joined: Array = xp.contiguous(xp.concatenate(parts, axis=1).swapaxes(0, 1))
    return joined


def check_packed(arrays: Mapping[str, Array], of_q: Any, of_k: Any) -> tuple[Array, Array]:
    """Check q, k, v against the bounds of their sequences, and return these."""
    for name, x in arrays.items():
        if x.ndim != 3:
            raise ShapeError(f"{name} has shape {x.shape}, must be (total, heads, size)")
    total_q, total_k, total_v = (len(x) for x in arrays.values())
    if total_k != total_v:
        raise ShapeError(f"k has {total_k} keys and v {total_v}, must be as many")
    queries = _read_bounds("cu_seqlens_q", of_q, total_q)
    keys = _read_bounds("cu_seqlens_k", of_q if of_k is None else of_k, total_k)
    if len(keys) != len(queries):
        raise ShapeError(
            f"cu_seqlens_k has {len(keys) - 1} sequences, must have {len(queries) - 1}, as q"
        )
    return queries, keys


def _read_bounds(name: str, value: Any, total: int) -> Array:
    """Return where sequences begin and the last ends, as integers."""
    bounds = read_integers(name, value)
    if bounds.ndim != 1 or not len(bounds):
        raise ShapeError(f"{name} has shape {bounds.shape}, must be (N + 1,)")
    bounds = bounds.astype(np.int64)
    if bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] != total:
        raise OptionError(
            f"{name} is {bounds.tolist()}, must begin at 0, never fall, and end at the number of "
            f"tokens, {total}: cut off those that belong to no sequence"
        )
    return bounds


def read_options(options: dict[str, Any], N: int) -> list[dict[str, Any]]:
    """Return the options of each of N sequences; of mask and bias, lists have one a sequence.

    Without a sequence they are those of one without tokens.
    """
    reject_options("varlen", options, OPTIONS)
    each = [dict(options) for _ in range(max(N, 1))]
    for name, kind, home in (("mask", MaskLike, "masks"), ("bias", BiasLike, "biases")):
        value = options.get(name)
        if value is None or (isinstance(value, kind) and not isinstance(value, np.ndarray)):
            continue
        if not isinstance(value, (list, tuple)) or len(value) != N:
            raise OptionError(
                f"{name} is {type(value).__name__}, must be an object of npattn.{home}, or a list "
                f"of {N} arrays (H, T, S), one a sequence"
            )
        for i, x in enumerate(value):
            if x is None or isinstance(x, (MaskLike, BiasLike)):
                raise OptionError(f"{name} has {x!r} for sequence {i}, must have an array for each")
            each[i][name] = x
        if not N:
            del each[0][name]
    return each


def sum_parameters(parts: Sequence[Forward], grads: Sequence[Gradients]) -> tuple[Any, Any]:
    """Return the gradients of bias and sinks, which all sequences share unless bias is a list."""
    of_sinks = [one.sinks for one in grads if one.sinks is not None]
    sinks = np.sum(of_sinks, axis=0) if of_sinks else None
    bias, biases = parts[0].problem.bias, [one.bias for one in grads]
    if bias is None:
        return None, sinks
    if not isinstance(bias, BiasLike):
        return biases, sinks
    if isinstance(biases[0], tuple):
        return tuple(np.sum(terms, axis=0) for terms in zip(*biases, strict=True)), sinks
    return np.sum(biases, axis=0), sinks
