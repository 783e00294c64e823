"""attention, forward, backward, jvp on tensors: choose the engine and the conventions.

Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from numpy.typing import ArrayLike, DTypeLike
from torch._compile import _disable_dynamo

from npattn.conventions import Conventions, check_conventions
from npattn.errors import DtypeError, OptionError
from npattn.oracle.directions import bias_direction
from npattn.oracle.signatures import only_out
from npattn.problem import Forward, Gradients, gating
from npattn.problem.arrays import BiasLike, MaskLike
from npattn.problem.checks import check_cotangent, direction_shape
from npattn.problem.foreign import reject_unknown_options
from npattn.problem.options import Alignment, Precision, Window
from npattn.torch import kernels
from npattn.torch.autograd import AttentionCall, attend, pull_back, push_forward, weigh
from npattn.torch.biases import TensorBias
from npattn.torch.engine.operations import SavedTensors
from npattn.torch.problem import Problem
from npattn.torch.score_mod import check_closes_over_nothing
from npattn.torch.tensors import refuse_batched, short_name, stand_in, to_tensor

Tensor = torch.Tensor
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@reject_unknown_options
def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | ArrayLike | MaskLike | None = None,
    *, causal: bool | Alignment = False, window: Window | None = None,
    bias: Tensor | ArrayLike | BiasLike | None = None, scale: float | None = None,
    softcap: float | None = None, score_mod: ScoreMod | None = None,
    sinks: Tensor | ArrayLike | None = None, dropout_mask: Tensor | ArrayLike | None = None,
    dropout_rate: float = 0.0, gate: Tensor | ArrayLike | None = None,
    dtype: torch.dtype | DTypeLike | None = None, engine: str = "auto",
    precision: Precision | None = None, conventions: Conventions | None = None,
) -> Forward:  # fmt: skip
    """Attention with its lse and weights, and with the intermediates that `backward` needs.

    Parameters
    ----------
    q, k, v : torch.Tensor
        (..., H, T, D), (..., K, S, D), (..., K, S, E), on one device, of real floating dtypes.
    mask, causal, window, bias, scale, softcap, sinks, dropout_mask, dropout_rate, gate, conventions
        As in `npattn.attention`; arrays may be tensors on that device or NumPy arrays.
    score_mod : callable, optional
        f(s, b, h, t, s_index) → modified scores, elementwise in s, on tensors.
    dtype : torch.dtype or dtype_like, optional
        Computed in and returned. Default float64, or float32 on a device without float64.
        bfloat16 and float16 emulate mixed precision.
    engine : {"auto", "dense", "tiled", "fused"}
        "tiled" never holds T × S numbers, "dense" is one tile; "auto" is "tiled". "fused" calls
        PyTorch's own kernels, in the dtype of q, where they compute exactly this problem.
    precision : None
        "extended" is for NumPy arrays: `npattn.attention`.

    Returns
    -------
    Forward
        .out (..., H, T, E), .lse (..., H, T) and .weights (..., H, T, S), all differentiable by
        autograd, twice; .max_score (..., H, T), which is not; .problem, .engine

    Raises
    ------
    ShapeError
        If a tensor has a shape that does not fit q, k, v.
    DtypeError
        If a tensor or `dtype` has a dtype that is not legal here, or q, k or v is no tensor.
    OptionError
        If an option has an illegal value, or does not exist; if tensors are on different devices;
        if PyTorch's kernels cannot compute the problem exactly ("fused").

    Examples
    --------
    >>> import torch, npattn.torch
    >>> q, k = torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)
    >>> v = torch.arange(6.0).reshape(1, 3, 2).requires_grad_()
    >>> npattn.torch.attention(q, k, v, causal="bottom_right").sum().backward()
    >>> v.grad[0, :, 0]
    tensor([0.8333, 0.8333, 0.3333])
    """
    return _forward(
        q, k, v, mask, conventions, causal=causal, window=window, bias=bias, scale=scale,
        softcap=softcap, score_mod=score_mod, sinks=sinks, dropout_mask=dropout_mask,
        dropout_rate=dropout_rate, gate=gate, dtype=dtype, engine=engine, precision=precision,
    )  # fmt: skip


attention = only_out(
    "attention", forward, Tensor,
    "Exact multi-head attention on tensors, differentiable by autograd.",
    "torch.Tensor (..., H, T, E)\n        A fully masked row is 0.",
)  # fmt: skip


def _forward(
    q: Any, k: Any, v: Any, mask: Any, conventions: Conventions | None, *,
    precision: str | None = None, **options: Any,
) -> Forward:  # fmt: skip
    """Return the forward on tensors, breaking a compiled graph; raise if one is exported."""
    if precision is not None:
        raise OptionError(
            f"precision is {precision!r}, must be None on tensors: pass NumPy arrays to "
            "npattn.forward for 'extended'"
        )
    if torch.compiler.is_exporting():
        raise OptionError(NO_GRAPH)
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=NO_GRAPH)
        return _forward_in_no_graph(q, k, v, mask, conventions, **options)
    refuse_batched(q, k, v, options.get("bias"), options.get("gate"))
    check_conventions(conventions)
    alignment = None if conventions is None else conventions.alignment
    return evaluate(read_problem(q, k, v, mask, alignment=alignment, **options), conventions)


def read_problem(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Problem:
    """Return the problem of a call; a bias on tensors becomes one tensor."""
    bias = options.get("bias")
    if isinstance(bias, TensorBias) and all(isinstance(x, Tensor) and x.ndim > 1 for x in (q, k)):
        options["bias"] = bias.to_tensor(q.shape[-2], k.shape[-2], q.device)
    return Problem(q, k, v, mask, **options)


NO_GRAPH = (
    "npattn.torch reads results to check that they stay in range, which no graph can: "
    "call it outside, or compile without fullgraph=True"
)


def evaluate(
    problem: Problem, conventions: Conventions | None = None, engine: str | None = None
) -> Forward:
    """Evaluate the forward pass of a `Problem`.

    Parameters
    ----------
    problem : Problem
    conventions : Conventions, optional
        The conventions that the problem and the result follow.
    engine : {"dense", "tiled", "fused"}, optional
        Default: the engine of the problem.

    Returns
    -------
    Forward
    """
    engine = engine or problem.engine
    if engine == "fused":
        return kernels.evaluate(problem, conventions)
    if engine == "auto":
        engine = "tiled"
    if problem.score_mod is not None and torch.is_grad_enabled():
        check_closes_over_nothing(problem)
    call = AttentionCall(problem.without_gate, conventions, engine == "dense")  # type: ignore[arg-type]
    o, lse, saved = attend(call)
    if saved.out.requires_grad:
        saved = SavedTensors(*(None if x is None else x.detach() for x in saved))  # type: ignore

    out, undefined = o, None
    if problem.gate is not None:
        undefined = None if conventions is None else call.undefined_rows(saved)
        out = gating.apply_gate(problem, o, undefined)  # type: ignore[arg-type, assignment]
    make_weights: Any = partial(weigh, call, saved)
    make_max_score: Any = call.max_score
    kept: Any = (call, saved, (o.detach(), undefined))
    return Forward(out, lse, problem, engine, kept, make_weights, make_max_score)  # type: ignore[arg-type]


def backward(
    fwd: Forward, dout: Tensor | ArrayLike | None, dlse: Tensor | ArrayLike | None = None,
    dweights: Tensor | ArrayLike | None = None,
) -> Gradients:  # fmt: skip
    """Exact gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights, without autograd.

    Parameters
    ----------
    fwd : Forward
        Result of `forward`.
    dout, dlse, dweights : torch.Tensor or float array_like, or None
        (..., H, T, E), (..., H, T), (..., H, T, S); None is 0.

    Returns
    -------
    Gradients
        .q .k .v .bias .sinks .gate, each shaped as its input, in the dtype computed in. For one of
        `npattn.biases`: shaped as its parameter, a tuple of these for a sum.

    Raises
    ------
    ShapeError
        If a cotangent is not shaped like its result.
    DtypeError
        If a cotangent is not real floating.
    OptionError
        If `fwd` is not a result of `forward`, or one of PyTorch's kernels; if a cotangent is on
        another device; if the derivative of score_mod contradicts its values.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=NO_GRAPH)
        return _backward_in_no_graph(fwd, dout, dlse, dweights)
    check_forward("backward", fwd)
    problem: Any = fwd.problem
    call, saved, (o, undefined) = fwd.residuals
    do, dl, dw = read_cotangents(fwd, dout, dlse, dweights)
    with torch.no_grad():
        dgate = None
        if problem.gate is not None:
            dout_gated: Any = torch.zeros_like(o) if do is None else do
            pulled: Any = gating.pull_back(problem, o, dout_gated, undefined)
            do, dgate = pulled
        grads = replace(pull_back(call, saved, do, dl, dw), gate=dgate)
    if problem.storage is not None:
        grads = replace(
            grads, **{n: problem.to_output_dtype(getattr(grads, n)) for n in ("q", "k", "v")}
        )
    return grads


def jvp(
    fwd: Forward, dq: Tensor | ArrayLike | None = None, dk: Tensor | ArrayLike | None = None,
    dv: Tensor | ArrayLike | None = None, dbias: Tensor | ArrayLike | None = None,
    dsinks: Tensor | ArrayLike | None = None, dgate: Tensor | ArrayLike | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Directional derivative (do, dlse) of (out, lse).

    Parameters
    ----------
    fwd : Forward
        Result of `forward`.
    dq, dk, dv, dbias, dsinks, dgate : torch.Tensor or float array_like, optional
        The direction, each shaped as its input; None is 0. For one of `npattn.biases`: shaped as
        its parameter, a tuple of these for a sum.

    Returns
    -------
    do (..., H, T, E), dlse (..., H, T)
        In a fully masked row dlse is 0, and do is NaN where `conventions` make the row NaN.

    Raises
    ------
    ShapeError
        If a direction is not shaped like its input.
    DtypeError
        If a direction is not real floating.
    OptionError
        If `fwd` is not a result of `forward`, or has mixed precision; if a direction has no input,
        is on another device, or its input is a bias object that is not of `npattn.biases`.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=NO_GRAPH)
        return _jvp_in_no_graph(fwd, dq, dk, dv, dbias, dsinks, dgate)
    check_forward("jvp", fwd)
    problem: Any = fwd.problem
    call, saved, (o, _) = fwd.residuals
    if problem.storage is not None:
        raise OptionError(
            f"jvp does not support mixed precision (dtype {short_name(problem.storage)}); "
            "call forward with float32 or float64"
        )
    directions = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
    directions["gate"] = dgate
    along = {name: read_direction(problem, name, x) for name, x in directions.items()}
    of_gate: Any = along.pop("gate")
    with torch.no_grad():
        do, dlse = push_forward(call, saved, along)[2:]
        if problem.gate is not None:
            do = gating.apply_gate_tangent(problem, o, do, of_gate)  # type: ignore[arg-type, assignment]
    return do, dlse


# Not torch.compiler.disable: it loads dynamo at once, which takes as long as loading torch.
_forward_in_no_graph = _disable_dynamo(_forward)
_backward_in_no_graph = _disable_dynamo(backward)
_jvp_in_no_graph = _disable_dynamo(jvp)


def check_forward(function: str, fwd: Any) -> None:
    """Check that fwd is a result of `forward` on tensors, by an engine with gradients."""
    if not isinstance(fwd, Forward):
        raise OptionError(
            f"fwd is of type {type(fwd).__name__}; pass the result of npattn.torch.forward, "
            f"as in npattn.torch.{function}(npattn.torch.forward(q, k, v), ...)"
        )
    if not isinstance(fwd.problem, Problem):
        raise OptionError(f"fwd is a result of npattn.forward; pass it to npattn.{function}")
    if fwd.engine == "fused":
        raise OptionError(
            f'{function} does not support engine="fused"; ask autograd for the gradients, or call '
            "forward with another engine"
        )


def read_cotangents(
    fwd: Forward, dout: Any, dlse: Any, dweights: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the cotangents of a forward in the dtype computed in, checked."""
    scores_shape = (*fwd.lse.shape, fwd.problem.S)
    do, dl, dw = (
        None if x is None else _read_cotangent(fwd.problem, name, x, shape)
        for name, x, shape in (
            ("dout", dout, fwd.out.shape), ("dlse", dlse, fwd.lse.shape),
            ("dweights", dweights, scores_shape),
        )
    )  # fmt: skip
    return do, dl, dw


def read_direction(problem: Any, name: str, value: Any, prefix: str = "d") -> Any:
    """Return the direction of an input: a tensor, or a bias for one of `npattn.biases`."""
    of = getattr(problem, name)
    if value is None:
        return None
    if not isinstance(of, BiasLike):
        return _read_cotangent(problem, f"{prefix}{name}", value, direction_shape(name, of, prefix))
    several = isinstance(value, (tuple, list))
    parameter = tuple(map(_on_host, value)) if several else _on_host(value)
    bias = bias_direction(of, f"{prefix}bias", parameter)
    if bias.dtype.kind == "c":
        raise DtypeError(f"{prefix}bias is {bias.dtype}, must be real as the problem is")
    return bias


def _on_host(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _read_cotangent(problem: Any, name: str, value: Any, shape: Any) -> Tensor:
    """Return a cotangent in the dtype computed in, after checking its shape, dtype and device."""
    convert = problem.to_operand if name == "dout" else problem.to_compute_dtype
    if not isinstance(value, Tensor):
        array = check_cotangent(name, value, tuple(shape))
        if array.dtype.kind == "c":
            raise DtypeError(f"{name} is {array.dtype}, must be real as the problem is")
        return convert(to_tensor(array, problem.device))  # type: ignore[no-any-return]
    check_cotangent(name, stand_in(name, value), tuple(shape))
    if value.is_complex():
        raise DtypeError(f"{name} is {value.dtype}, must be real as the problem is")
    if value.device != problem.device:
        raise OptionError(f"{name} is on {value.device}, must be on {problem.device} as q")
    return convert(value)  # type: ignore[no-any-return]
