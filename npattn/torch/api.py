"""attention, forward, backward, jvp on tensors: choose the engine, nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._compile import _disable_dynamo

from npattn.checks import check_cotangent, direction_shape
from npattn.conventions import Conventions, check_conventions
from npattn.errors import DtypeError, OptionError
from npattn.options import Alignment, Window
from npattn.problem import Forward, Gradients
from npattn.torch import engine as tiles
from npattn.torch import kernels
from npattn.torch.autograd import Call, attend, pulled
from npattn.torch.flags import exact
from npattn.torch.problem import Problem, moved, stand_in
from npattn.torch.score_mod import check_closes_over_nothing

__all__ = ["attention", "backward", "evaluate", "forward", "jvp"]

Tensor = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    *,
    causal: bool | Alignment = False,
    window: Window | None = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    score_mod: Any = None,
    sinks: Any = None,
    dropout_mask: Any = None,
    dropout_rate: float = 0.0,
    dtype: Any = None,
    engine: str = "auto",
    conventions: Conventions | None = None,
) -> Tensor:
    """Exact multi-head attention on tensors, differentiable by autograd.

    Parameters
    ----------
    q, k, v : torch.Tensor
        (..., H, T, D), (..., K, S, D), (..., K, S, E), on one device, of real floating dtypes.
    mask, causal, window, bias, scale, softcap, sinks, dropout_mask, dropout_rate, conventions
        As in `npattn.attention`; arrays may be tensors on that device or NumPy arrays.
    score_mod : callable, optional
        f(s, b, h, t, s_index) → modified scores, elementwise in s, of tensors.
    dtype : torch.dtype or what NumPy takes for one, optional
        Computed in and returned; float64 unless said, float32 where the device has no other.
        bfloat16 and float16 emulate mixed precision.
    engine : {"auto", "dense", "tiled", "fused"}
        "tiled" never holds T × S numbers, "dense" is one tile; "auto" is "tiled". "fused" asks
        PyTorch's own kernels, in the dtype of q, where they compute just this.

    Returns
    -------
    torch.Tensor (..., H, T, E)
        A row that sees nothing is 0.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        Before any work, in the words of `npattn.attention`.

    Examples
    --------
    >>> import torch, npattn.torch
    >>> q, k = torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)
    >>> v = torch.arange(6.0).reshape(1, 3, 2).requires_grad_()
    >>> npattn.torch.attention(q, k, v, causal="bottom_right").sum().backward()
    >>> v.grad[0, :, 0]
    tensor([0.8333, 0.8333, 0.3333])
    """
    return forward(
        q, k, v, mask, causal=causal, window=window, bias=bias, scale=scale, softcap=softcap,
        score_mod=score_mod, sinks=sinks, dropout_mask=dropout_mask, dropout_rate=dropout_rate,
        dtype=dtype, engine=engine, conventions=conventions,
    ).out  # type: ignore[return-value]  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
        .out (..., H, T, E) and .lse (..., H, T), both followed by autograd, .weights
        (..., H, T, S), which is not, .problem, .engine

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As `attention`.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=NO_GRAPH)
        return _forward(q, k, v, mask, conventions=conventions, **options)
    check_conventions(conventions)
    alignment = None if conventions is None else conventions.causal
    return evaluate(Problem(q, k, v, mask, alignment=alignment, **options), conventions)


NO_GRAPH = (
    "npattn.torch asks numbers whether they stay in range, which no graph can: "
    "call it outside, or compile without fullgraph=True"
)


def evaluate(
    problem: Problem, conventions: Conventions | None = None, engine: str | None = None
) -> Forward:
    """The forward pass of a `Problem` that was made before.

    Parameters
    ----------
    problem : Problem
    conventions : Conventions, optional
        In whose terms the problem and the result are.
    engine : {"dense", "tiled", "fused"}, optional
        What computes it; default what the problem says.

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
    call = Call(problem, conventions, engine == "dense")
    out, lse, saved = attend(call)
    if saved.out.requires_grad:
        saved = tiles.Saved(*(None if x is None else x.detach() for x in saved))  # type: ignore

    def weights() -> Tensor:
        with torch.no_grad(), exact(problem.dtype, problem.device):
            p = tiles.weights(call.canonical(), saved, call.whole)
            p = p[0] if problem.headless else p
            if conventions is None:
                return p
            raw = saved.lse[0] if problem.headless else saved.lse
            translate: Any = conventions.returned_weights
            found: Tensor = translate(problem, p, raw)
            return found

    return Forward(out, lse, problem, engine, (call, saved), weights)  # type: ignore[arg-type]


def backward(fwd: Forward, dout: Any, dlse: Any = None, dweights: Any = None) -> Gradients:
    """Exact gradients of Σ dout·out + Σ dlse·lse + Σ dweights·weights, not followed by autograd.

    Parameters
    ----------
    fwd : Forward
        What `forward` returned.
    dout, dlse, dweights : torch.Tensor or None
        (..., H, T, E), (..., H, T), (..., H, T, S); None = it does not count.

    Returns
    -------
    Gradients
        .q .k .v .bias .sinks, each shaped as its input, in the dtype computed in. Of one of
        `npattn.biases`: shaped as its parameter, a tuple of these where it is a sum.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        If a cotangent is not shaped like what it belongs to, or elsewhere.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=NO_GRAPH)
        return _backward(fwd, dout, dlse, dweights)
    problem: Any = fwd.problem
    call, saved = kernels.not_fused(fwd).residuals
    whole = (*fwd.lse.shape, problem.S)
    do, dl, dw = (
        None if x is None else _checked(problem, name, x, shape)
        for name, x, shape in (
            ("dout", dout, fwd.out.shape), ("dlse", dlse, fwd.lse.shape),
            ("dweights", dweights, whole),
        )
    )  # fmt: skip
    with torch.no_grad():
        grads = pulled(call, saved, do, dl, dw)
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
) -> tuple[Tensor, Tensor]:
    """The change (do, dlse) of (out, lse) when the inputs move along a direction.

    Parameters
    ----------
    fwd : Forward
        What `forward` returned, without conventions.
    dq, dk, dv, dbias, dsinks : torch.Tensor, optional
        The direction, each shaped as its input; None = it stays.

    Returns
    -------
    do (..., H, T, E), dlse (..., H, T)
        Where lse is −inf, dlse is 0.

    Raises
    ------
    ShapeError, DtypeError, OptionError
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=NO_GRAPH)
        return _jvp(fwd, dq, dk, dv, dbias, dsinks)
    problem: Any = fwd.problem
    call, saved = kernels.not_fused(fwd).residuals
    if call.conventions is not None:
        raise OptionError("jvp has conventions, must be asked of a forward without them")
    if problem.storage is not None:
        raise OptionError(
            f"jvp has dtype {str(problem.storage).removeprefix('torch.')}, must have one that is "
            "computed in"
        )
    directions = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
    along = {
        f"d{name}": None
        if x is None
        else _checked(problem, f"d{name}", x, direction_shape(name, getattr(problem, name)))
        for name, x in directions.items()
    }
    with torch.no_grad(), exact(problem.dtype, problem.device):
        do, dlse = tiles.jvp(problem, saved, **along, whole=call.whole)
    return (do[0], dlse[0]) if problem.headless else (do, dlse)


# torch.compiler.disable would say the same, and load dynamo at once, which takes as long as torch.
_forward = _disable_dynamo(forward)
_backward = _disable_dynamo(backward)
_jvp = _disable_dynamo(jvp)


def _checked(problem: Any, name: str, value: Any, shape: Any) -> Tensor:
    """A cotangent in the dtype computed in, after checking that it is shaped as it must be."""
    if not isinstance(value, Tensor):
        array = check_cotangent(name, value, tuple(shape))
        if array.dtype.kind == "c":
            raise DtypeError(f"{name} is {array.dtype}, must be real as the problem is")
        return problem.to_compute_dtype(moved(array, problem.device))  # type: ignore[no-any-return]
    check_cotangent(name, stand_in(name, value), tuple(shape))
    if value.is_complex():
        raise DtypeError(f"{name} is {value.dtype}, must be real as the problem is")
    if value.device != problem.device:
        raise OptionError(f"{name} is on {value.device}, must be on {problem.device} as q")
    return problem.to_compute_dtype(value)  # type: ignore[no-any-return]
