"""attention, forward, backward, jvp: choose the engine and the conventions, nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from npattn import dense, tiled
from npattn.arrays import Array
from npattn.checks import check_cotangent, direction_shape
from npattn.conventions import Conventions, checked_conventions
from npattn.errors import OptionError
from npattn.options import Alignment, ScoreMod, Window
from npattn.problem import Forward, Gradients, Problem

__all__ = ["attention", "backward", "evaluate", "forward", "jvp"]

ENGINES = {"dense": dense, "tiled": tiled}


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    causal: bool | Alignment = False,
    window: Window | None = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: ScoreMod | None = None,
    sinks: Any = None,
    dropout_mask: Any = None,
    dropout_rate: float = 0.0,
    dtype: Any = None,
    engine: str = "auto",
    conventions: Conventions | None = None,
) -> Array:
    """Exact multi-head attention: softmax(scale · q kᵀ + bias) v over the keys that are visible.

    B batch, H query heads, K key/value heads (K divides H), T queries, S keys, D query/key size,
    E value size. The rules, by number: docs/semantics.md.

    Parameters
    ----------
    q, k, v : array
        (..., H, T, D), (..., K, S, D), (..., K, S, E); rank 2 (all three) is one head. Real or
        complex floating dtypes, bfloat16 and float8 of ml_dtypes too. Leading axes broadcast.
    mask : bool array or one of `npattn.masks`, optional
        True = may attend; broadcasts against (..., H, T, S), rank ≥ 2.
    causal : bool, "bottom_right" or "top_left", default False
        Query t sees keys s ≤ t + (S − T), or s ≤ t. True is legal where T == S or with
        `conventions`, which say what it means.
    window : (left, right), optional
        Keys beside the aligned diagonal, inclusive; None on a side = unlimited.
    bias : float array or one of `npattn.biases`, optional
        Added to the scores after scale and softcap; broadcasts as `mask` does.
    scale : float, optional
        Multiplies q·k. Default 1/√D.
    softcap : float, optional
        Scores become softcap·tanh(score/softcap).
    score_mod : callable, optional
        f(s, b, h, t, s_index) → modified scores, elementwise and analytic in s.
    sinks : float array (H,), optional
        One more logit a head, which takes weight and gives no value.
    dropout_mask : bool array, optional
        True = keep; broadcasts as `mask` does.
    dropout_rate : float, default 0.0
        Kept weights are divided by 1 − dropout_rate.
    dtype : dtype, optional
        Computed in and returned; float64 unless said, complex128 for complex arrays. bfloat16 and
        float16 emulate mixed precision: operands and results are rounded, sums, softmax and lse
        are float32.
    engine : {"auto", "dense", "tiled"}
        What computes it: "dense" is the textbook, "tiled" never holds T × S numbers and uses all
        cores, for real arrays; "auto" takes the faster one.
    conventions : Conventions, optional
        What the words mean where systems disagree; default: docs/semantics.md.

    Returns
    -------
    array (..., H, T, E)
        A row that sees nothing is 0.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        Before any work. Nothing that was passed is written to.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> q, k, v = np.zeros((1, 2, 4)), np.zeros((1, 3, 4)), np.arange(6.0).reshape(1, 3, 2)
    >>> npattn.attention(q, k, v, causal="bottom_right")
    array([[[1., 2.],
            [2., 3.]]])
    """
    return forward(
        q,
        k,
        v,
        mask,
        causal=causal,
        window=window,
        bias=bias,
        scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        sinks=sinks,
        dropout_mask=dropout_mask,
        dropout_rate=dropout_rate,
        dtype=dtype,
        engine=engine,
        conventions=conventions,
    ).out


def forward(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    *,
    conventions: Conventions | None = None,
    **options: Any,
) -> Forward:
    """The same as `attention`, with lse and weights, and with what `backward` needs.

    Parameters
    ----------
    q, k, v, mask, conventions, **options
        As in `attention`.

    Returns
    -------
    Forward
        .out (..., H, T, E), .lse (..., H, T), .weights (..., H, T, S), .problem, .engine

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `attention`.
    """
    checked_conventions(conventions)
    alignment = None if conventions is None else conventions.causal
    return evaluate(Problem(q, k, v, mask, alignment=alignment, **options), conventions)


def evaluate(
    problem: Problem, conventions: Conventions | None = None, engine: str | None = None
) -> Forward:
    """The forward pass of a `Problem` that was made before.

    Parameters
    ----------
    problem : Problem
    conventions : Conventions, optional
        In whose terms the problem and the result are.
    engine : {"dense", "tiled"}, optional
        What computes it; default what the problem says.

    Returns
    -------
    Forward
    """
    canonical = problem if conventions is None else conventions.canonical(problem)
    engine = engine or (tiled.choice(canonical) if problem.engine == "auto" else problem.engine)
    out, raw_lse, residuals = ENGINES[engine].forward(canonical)
    lse = raw_lse
    if conventions is not None:
        out, lse = conventions.results(problem, out, raw_lse)

    def weights() -> Array:
        p: Array = ENGINES[engine].weights(canonical, residuals)
        p = p[0] if problem.headless else p
        return p if conventions is None else conventions.returned_weights(problem, p, raw_lse)

    kept = (canonical, conventions, raw_lse, residuals)
    return Forward(problem.to_output_dtype(out), lse, problem, engine, kept, weights)


def backward(fwd: Forward, dout: Any, dlse: Any = None, dweights: Any = None) -> Gradients:
    """Exact gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights.

    Parameters
    ----------
    fwd : Forward
        What `forward` returned.
    dout : float array (..., H, T, E)
    dlse : float array (..., H, T), optional
        On rows that see nothing it is ignored.
    dweights : float array (..., H, T, S), optional

    Returns
    -------
    Gradients
        .q .k .v .bias .sinks, each shaped as its input; None where there is no such input. Of one
        of `npattn.biases`: shaped as its parameter, a tuple of these where it is a sum.

    Raises
    ------
    ShapeError, DtypeError
        If a cotangent is not shaped like what it belongs to.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> fwd = npattn.forward(q, k, v)
    >>> npattn.backward(fwd, np.ones_like(fwd.out)).v
    array([[[0.5],
            [0.5]]])
    """
    problem = fwd.problem
    canonical, conventions, raw_lse, residuals = _of_arrays(fwd).residuals
    do, dl, dw = _cotangents(fwd, dout, dlse, dweights)
    if conventions is not None:
        do, dl, dw = conventions.cotangents(problem, do, dl, dw)
    if problem.headless:
        do = do[None]
        dl, dw = (None if x is None else x[None] for x in (dl, dw))
    grads: Gradients = ENGINES[fwd.engine].backward(canonical, residuals, do, dl, dw)
    if conventions is not None:
        grads = conventions.gradients(problem, grads, do[0] if problem.headless else do, raw_lse)
    if problem.storage is not None:
        grads = replace(
            grads, **{n: problem.to_output_dtype(getattr(grads, n)) for n in ("q", "k", "v")}
        )
    return grads


def jvp(
    fwd: Forward,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dbias: Any = None,
    dsinks: Any = None,
) -> tuple[Array, Array]:
    """The change (do, dlse) of (out, lse) when the inputs move along a direction.

    Parameters
    ----------
    fwd : Forward
        What `forward` returned, without conventions.
    dq, dk, dv, dbias, dsinks : float array, optional
        The direction, each shaped as its input; None = it stays.

    Returns
    -------
    do (..., H, T, E), dlse (..., H, T)
        Where lse is −inf, dlse is 0.

    Raises
    ------
    ShapeError, DtypeError, OptionError
    """
    canonical, conventions, _, residuals = _of_arrays(fwd).residuals
    if conventions is not None:
        raise OptionError("jvp has conventions, must be asked of a forward without them")
    if canonical.storage is not None:
        raise OptionError(f"jvp has dtype {canonical.storage}, must have one that is computed in")
    directions = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
    arrays: dict[str, Array | None] = {}
    for name, direction in directions.items():
        if direction is None:
            arrays[f"d{name}"] = None
            continue
        shape = direction_shape(name, getattr(canonical, name))
        array = _computed(check_cotangent(f"d{name}", direction, shape), canonical.dtype)
        arrays[f"d{name}"] = array[None] if canonical.headless and name in "qkv" else array
    moved: tuple[Array, Array] = ENGINES[fwd.engine].jvp(canonical, residuals, **arrays)
    return moved


def _of_arrays(fwd: Forward) -> Forward:
    if fwd.problem.xp is not np:
        raise OptionError(
            "fwd is of npattn.torch, must be of npattn: pass it to the one in npattn.torch"
        )
    return fwd


def _computed(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in the dtype computed in, or its complex sister."""
    if array.dtype.kind == "c":
        dtype = np.result_type(dtype, np.complex64)
    return array.astype(dtype, copy=False)


def _cotangents(
    fwd: Forward, dout: Any, dlse: Any, dweights: Any
) -> tuple[Array, Array | None, Array | None]:
    def checked(name: str, value: Any, shape: tuple[int, ...]) -> Array:
        return _computed(check_cotangent(name, value, shape), fwd.problem.dtype)

    whole = (*fwd.lse.shape, fwd.problem.S)
    return (
        np.zeros_like(fwd.out) if dout is None else checked("dout", dout, fwd.out.shape),
        None if dlse is None else checked("dlse", dlse, fwd.lse.shape),
        None if dweights is None else checked("dweights", dweights, whole),
    )
