"""attention, forward, backward, jvp: choose the engine and the conventions, nothing else.

Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from npattn.conventions import (
    Conventions,
    canonical_direction,
    check_conventions,
    translate_changes,
)
from npattn.engines import dense, extended, tiled
from npattn.engines.score_mod import check_elementwise
from npattn.errors import DtypeError, OptionError
from npattn.oracle.directions import read_array, read_directions
from npattn.oracle.signatures import only_out
from npattn.problem import Forward, Gradients, Problem
from npattn.problem.arrays import Array, BiasLike, MaskLike
from npattn.problem.checks import check_cotangent
from npattn.problem.foreign import reject_unknown_options
from npattn.problem.gating import apply_gate, apply_gate_tangent, pull_back
from npattn.problem.options import Alignment, Precision, ScoreMod, Window

ENGINES = {"dense": dense, "tiled": tiled, "extended": extended}


@reject_unknown_options
def forward(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, mask: ArrayLike | MaskLike | None = None,
    *, causal: bool | Alignment = False, window: Window | None = None,
    bias: ArrayLike | BiasLike | None = None, scale: float | None = None,
    softcap: float | None = None, score_mod: ScoreMod | None = None, sinks: ArrayLike | None = None,
    dropout_mask: ArrayLike | None = None, dropout_rate: float = 0.0, gate: ArrayLike | None = None,
    dtype: DTypeLike | None = None, engine: str = "auto", precision: Precision | None = None,
    conventions: Conventions | None = None,
) -> Forward:  # fmt: skip
    """Attention with its lse and weights, and with the intermediates that `backward` needs.

    B batch, H query heads, K key/value heads (K divides H), T queries, S keys, D query/key size,
    E value size. The rules, by number: docs/semantics.md.

    Parameters
    ----------
    q, k, v : array_like
        (..., H, T, D), (..., K, S, D), (..., K, S, E); rank 2 (all three) is one head. Real or
        complex floating dtypes, including bfloat16 and float8 of ml_dtypes. Leading axes broadcast.
    mask : bool array_like or one of `npattn.masks`, optional
        True = may attend; broadcasts against (..., H, T, S), rank ≥ 2.
    causal : bool, "bottom_right" or "top_left", default False
        Query t sees keys s ≤ t + (S − T), or s ≤ t. True is legal where T == S, or with
        `conventions`, which define it.
    window : (left, right), optional
        Keys beside the aligned diagonal, inclusive; None on a side = unlimited.
    bias : float array_like or one of `npattn.biases`, optional
        Added to the scores after scale and softcap; broadcasts as `mask` does.
    scale : float, optional
        Multiplies q·k. Default 1/√D.
    softcap : float, optional
        Scores become softcap·tanh(score/softcap).
    score_mod : callable, optional
        f(s, b, h, t, s_index) → modified scores, elementwise and analytic in s.
    sinks : float array_like (H,), optional
        One more logit per head, which takes weight and has no value.
    dropout_mask : bool array_like, optional
        True = keep; broadcasts as `mask` does.
    dropout_rate : float, default 0.0
        Kept weights are divided by 1 − dropout_rate.
    gate : float array_like, optional
        Multiplies o; broadcasts against (..., H, T, E), rank ≥ 2. A head mask (H,) is
        ``gate=head_mask[:, None, None]``.
    dtype : dtype, optional
        Dtype of the computation and of the result; default float64, complex128 for complex arrays.
        bfloat16 and float16 emulate mixed precision: operands and results are rounded; sums,
        softmax and lse are float32.
    engine : {"auto", "dense", "tiled"}
        "dense" is the textbook; "tiled" never holds T × S numbers and uses all cores, for real
        arrays; "auto" takes the faster one.
    precision : {"extended"}, optional
        "extended" computes in pairs of float64, some 100 times as long. Results and gradients are
        the nearest float64, unless even 100 bits cancel; `npattn.certify.certify` bounds the error
        of each element. It needs dtype float64 and engine "dense" or "auto", and supports neither
        score_mod nor gate.
    conventions : Conventions, optional
        Meaning of the options where systems disagree; default: docs/semantics.md.

    Returns
    -------
    Forward
        .out (..., H, T, E), .lse (..., H, T), .weights (..., H, T, S), .max_score (..., H, T),
        .problem, .engine

    Raises
    ------
    ShapeError
        If an array has a shape that does not fit q, k, v.
    DtypeError
        If an array or `dtype` has a dtype that is not legal here.
    OptionError
        If an option has an illegal value, or does not exist.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> q, k, v = np.zeros((1, 2, 4)), np.zeros((1, 3, 4)), np.arange(6.0).reshape(1, 3, 2)
    >>> npattn.attention(q, k, v, causal="bottom_right")
    array([[[1., 2.],
            [2., 3.]]])
    """
    check_conventions(conventions)
    chosen = _engine_of(precision, engine)
    normalise: Callable[..., Problem] = Problem  # its fields are what it makes of its arguments
    problem = normalise(
        q, k, v, mask, causal=causal, window=window, bias=bias, scale=scale, softcap=softcap,
        score_mod=score_mod, sinks=sinks, dropout_mask=dropout_mask, dropout_rate=dropout_rate,
        gate=gate, dtype=dtype, engine=engine,
        alignment=None if conventions is None else conventions.alignment,
    )  # fmt: skip
    return evaluate(problem, conventions, chosen)


attention = only_out(
    "attention", forward, np.ndarray,
    "Exact multi-head attention: softmax(scale · q kᵀ + bias) v over the visible keys.",
    "array (..., H, T, E)\n        0 in fully masked rows. The arguments are never written to.",
)  # fmt: skip


def _engine_of(precision: str | None, engine: str) -> str | None:
    """Return the engine that a precision needs; None for the engine of the problem."""
    if precision is None:
        return None
    if not isinstance(precision, str) or precision != "extended":
        raise OptionError(f'precision is {precision!r}, must be "extended" or None')
    if engine == "tiled":
        raise OptionError("precision is 'extended' beside engine 'tiled', must be 'dense' there")
    return "extended"


def evaluate(
    problem: Problem, conventions: Conventions | None = None, engine: str | None = None
) -> Forward:
    """Evaluate the forward pass of a `Problem`.

    Parameters
    ----------
    problem : Problem
    conventions : Conventions, optional
        The conventions that the problem and the result follow.
    engine : {"dense", "tiled", "extended"}, optional
        Default: the engine of the problem.

    Returns
    -------
    Forward
    """
    check_elementwise(problem)
    ungated = problem.without_gate
    canonical = ungated if conventions is None else conventions.canonical(ungated)
    engine = engine or (tiled.choice(canonical) if problem.engine == "auto" else problem.engine)
    if engine == "extended" and (obstacle := find_obstacle(problem, conventions)):
        raise OptionError(f"precision is 'extended' beside {obstacle}")
    o, raw_lse, residuals = ENGINES[engine].forward(canonical)
    lse = raw_lse
    if conventions is not None:
        o, lse = conventions.results(problem, o, raw_lse)
    o = problem.to_output_dtype(o)
    undefined = None
    if problem.gate is not None and conventions is not None:
        undefined = conventions.undefined_rows(problem, raw_lse)
    out = o if problem.gate is None else apply_gate(problem, o, undefined)

    def weights() -> Array:
        p: Array = ENGINES[engine].weights(canonical, residuals)
        p = p[0] if problem.headless else p
        return p if conventions is None else conventions.returned_weights(problem, p, raw_lse)

    def max_score() -> Array:
        top: Array = ENGINES[engine].max_score(canonical, residuals)
        return top[0] if problem.headless else top

    saved = (canonical, conventions, raw_lse, (o, undefined), residuals)
    return Forward(out, lse, problem, engine, saved, weights, max_score)


def find_obstacle(problem: Problem, conventions: Conventions | None) -> str | None:
    """Return what keeps a problem from extended precision, in words; None if nothing does."""
    obstacle = extended.find_obstacle(problem)
    if obstacle is not None or conventions is None:
        return obstacle
    if conventions.absorbs_scores(problem):
        return (
            f"hidden_add {conventions.hidden_add!r} and a row that sees no key, of whose scores it "
            "would keep what float64 rounds away: leave one out"
        )
    if conventions.canonical(problem).score_mod is not None:
        return (
            f"conventions that need a score_mod here (softcap {conventions.softcap!r}, hidden_fill "
            f"{conventions.hidden_fill!r}), which computes in float64: leave one out"
        )
    return None


@reject_unknown_options
def backward(
    fwd: Forward, dout: ArrayLike | None, dlse: ArrayLike | None = None,
    dweights: ArrayLike | None = None,
) -> Gradients:  # fmt: skip
    """Exact gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights.

    Parameters
    ----------
    fwd : Forward
        Result of `forward`.
    dout : float array_like (..., H, T, E), or None
        None is 0.
    dlse : float array_like (..., H, T), optional
        Ignored in fully masked rows.
    dweights : float array_like (..., H, T, S), optional

    Returns
    -------
    Gradients
        .q .k .v .bias .sinks .gate, each shaped as its input; None where there is no such input.
        The gradient of a bias object is shaped as its parameter; a sum of biases has a tuple.

    Raises
    ------
    ShapeError
        If a cotangent is not shaped like its result.
    DtypeError
        If a cotangent is not floating, or is complex and the engine is "tiled".
    OptionError
        If `fwd` is not a result of `forward`.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> fwd = npattn.forward(q, k, v)
    >>> npattn.backward(fwd, np.ones_like(fwd.out)).v
    array([[[0.5],
            [0.5]]])
    """
    check_forward("backward", fwd)
    problem = fwd.problem
    canonical, conventions, raw_lse, (o, undefined), residuals = fwd.residuals
    do, dl, dw = read_cotangents(fwd, dout, dlse, dweights)
    dgate = None
    if problem.gate is not None:
        do, dgate = pull_back(problem, o, do, undefined)
    if conventions is not None:
        do, dl, dw = conventions.cotangents(problem, do, dl, dw)
    if problem.headless:
        do = do[None]
        dl, dw = (None if x is None else x[None] for x in (dl, dw))
    grads: Gradients = ENGINES[fwd.engine].backward(canonical, residuals, do, dl, dw)
    if conventions is not None:
        grads = conventions.gradients(problem, grads, do[0] if problem.headless else do, raw_lse)
    grads = grads if dgate is None else replace(grads, gate=dgate)
    if problem.storage is not None:
        grads = replace(
            grads, **{n: problem.to_output_dtype(getattr(grads, n)) for n in ("q", "k", "v")}
        )
    return grads


@reject_unknown_options
def jvp(
    fwd: Forward, dq: ArrayLike | None = None, dk: ArrayLike | None = None,
    dv: ArrayLike | None = None, dbias: ArrayLike | None = None, dsinks: ArrayLike | None = None,
    dgate: ArrayLike | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:  # fmt: skip
    """Directional derivative (do, dlse) of (out, lse).

    Parameters
    ----------
    fwd : Forward
        Result of `forward`.
    dq, dk, dv, dbias, dsinks, dgate : float array_like, optional
        The direction, each shaped as its input; None is 0. The direction of a bias object is shaped
        as its parameter; a sum of biases takes a tuple.

    Returns
    -------
    do (..., H, T, E), dlse (..., H, T)
        In a fully masked row dlse is 0, and do is NaN where `conventions` make the row NaN.

    Raises
    ------
    ShapeError
        If a direction is not shaped like its input.
    DtypeError
        If a direction is not floating, or is complex and the engine is "tiled".
    OptionError
        If `fwd` is not a result of `forward`, or has mixed or extended precision; if a direction
        has no input, or its input is a bias object that is not of `npattn.biases`.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> q, k, v = np.zeros((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> npattn.jvp(npattn.forward(q, k, v), dv=np.array([[[1.0], [0.0]]]))[0]
    array([[[0.5]]])
    """
    check_forward("jvp", fwd)
    problem = fwd.problem
    canonical, conventions, raw_lse, (o, _), residuals = fwd.residuals
    if canonical.storage is not None:
        raise OptionError(
            f"jvp does not support mixed precision (dtype {canonical.storage}); "
            "call forward with float32 or float64"
        )
    directions = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
    directions["gate"] = dgate
    along = read_directions(problem, directions)
    _check_real(fwd, {f"d{name}": x for name, x in along.items()})
    moved_gate, moved_v = along.pop("gate"), along["v"]
    if conventions is not None:
        along = canonical_direction(conventions, problem, along)
    arrays = {
        f"d{name}": x[None] if problem.headless and name in "qkv" and x is not None else x
        for name, x in along.items()
    }
    do, dl = ENGINES[fwd.engine].jvp(canonical, residuals, **arrays)
    if conventions is not None:
        do, dl = translate_changes(conventions, problem, do, dl, raw_lse, moved_v)
    if problem.gate is not None:
        do = apply_gate_tangent(problem, o, do, moved_gate)
    return do, dl


def check_forward(function: str, fwd: Any) -> None:
    """Check that fwd is a result of `forward` on arrays."""
    if not isinstance(fwd, Forward):
        raise OptionError(
            f"fwd is of type {type(fwd).__name__}; pass the result of npattn.forward, "
            f"as in npattn.{function}(npattn.forward(q, k, v), ...)"
        )
    if fwd.problem.xp is not np:
        raise OptionError(
            f"fwd is a result of npattn.torch.forward; pass it to npattn.torch.{function}"
        )


def read_cotangents(
    fwd: Forward, dout: Any, dlse: Any, dweights: Any
) -> tuple[Array, Array | None, Array | None]:
    """Return the cotangents of a forward pass in the dtype of the computation, checked."""
    problem = fwd.problem

    def read(name: str, value: Any, shape: tuple[int, ...]) -> Array:
        if type(value) is type(fwd.out) is not np.ndarray:  # on a device, by NumPy's protocols
            return value.astype(problem.dtype)
        return read_array(name, value, shape, problem.dtype)

    scores_shape = (*fwd.lse.shape, problem.S)
    if problem.storage is not None and dout is not None:
        dout = problem.to_operand(check_cotangent("dout", dout, fwd.out.shape))  # rounded once
    do = np.zeros_like(fwd.out) if dout is None else read("dout", dout, fwd.out.shape)
    dl = None if dlse is None else read("dlse", dlse, fwd.lse.shape)
    dw = None if dweights is None else read("dweights", dweights, scores_shape)
    _check_real(fwd, {"dout": do, "dlse": dl, "dweights": dw})
    return do, dl, dw


def _check_real(fwd: Forward, arrays: dict[str, Any]) -> None:
    """Check that arrays are real unless the engine of the forward pass is "dense"."""
    for name, x in arrays.items():
        if x is not None and x.dtype.kind == "c" and fwd.engine != "dense":
            raise DtypeError(
                f'{name} is {x.dtype}, must be real for engine "{fwd.engine}": call forward with '
                'engine="dense"'
            )
