"""double_backward and hvp on tensors: autograd differentiates the hand-written backward."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from numpy.typing import ArrayLike

from npattn.engines.backward_twice import SecondGradients
from npattn.errors import OptionError
from npattn.oracle.directions import with_numbers
from npattn.problem import Forward, Gradients
from npattn.problem.arrays import BiasLike
from npattn.torch.api import check_forward, read_cotangents, read_direction
from npattn.torch.autograd import attend, pull_back
from npattn.torch.bias_terms import bias_gradient
from npattn.torch.tensors import short_name

Tensor = torch.Tensor
INPUTS = ("q", "k", "v", "bias", "sinks")
COTANGENTS = ("dout", "dlse", "dweights")


def double_backward(
    fwd: Forward, dout: Tensor | ArrayLike | None, dlse: Tensor | ArrayLike | None = None,
    dweights: Tensor | ArrayLike | None = None,
    *, ddq: Tensor | ArrayLike | None = None, ddk: Tensor | ArrayLike | None = None,
    ddv: Tensor | ArrayLike | None = None, ddbias: Tensor | ArrayLike | None = None,
    ddsinks: Tensor | ArrayLike | None = None,
) -> SecondGradients:  # fmt: skip
    """Gradients of Σ ddq·dq + Σ ddk·dk + …, where dq, dk, … are what `backward` returns.

    A bias of `npattn.biases` is formed as one tensor.

    Parameters
    ----------
    fwd : Forward
        Result of `forward`, with any options and conventions.
    dout, dlse, dweights : torch.Tensor or float array_like, optional
        The cotangents that `backward` was called with; None is 0.
    ddq, ddk, ddv, ddbias, ddsinks : torch.Tensor or float array_like, optional
        Cotangents of the gradients, each shaped as its input; None is 0.

    Returns
    -------
    SecondGradients
        As from `npattn.double_backward`, in the dtype computed in.

    Raises
    ------
    ShapeError, DtypeError
        As in `backward` and `jvp`.
    OptionError
        If `fwd` is not a result of `forward`, or one of PyTorch's kernels, or has mixed precision
        or a gate; if a cotangent has no input.
    """
    values = {"q": ddq, "k": ddk, "v": ddv, "bias": ddbias, "sinks": ddsinks}
    return _differentiate("double_backward", fwd, (dout, dlse, dweights), values, "dd")


def hvp(
    fwd: Forward, dout: Tensor | ArrayLike | None, dlse: Tensor | ArrayLike | None = None,
    dweights: Tensor | ArrayLike | None = None,
    *, dq: Tensor | ArrayLike | None = None, dk: Tensor | ArrayLike | None = None,
    dv: Tensor | ArrayLike | None = None, dbias: Tensor | ArrayLike | None = None,
    dsinks: Tensor | ArrayLike | None = None,
) -> Gradients:  # fmt: skip
    """Change of the gradients that `backward` returns, along a direction of the inputs.

    Parameters
    ----------
    fwd : Forward
        Result of `forward`, with any options and conventions.
    dout, dlse, dweights : torch.Tensor or float array_like, optional
        The cotangents, as in `backward`; they do not move. None is 0.
    dq, dk, dv, dbias, dsinks : torch.Tensor or float array_like, optional
        The direction, as in `jvp`.

    Returns
    -------
    Gradients
        .q .k .v .bias .sinks, as from `backward`.

    Raises
    ------
    ShapeError, DtypeError, OptionError
        As in `double_backward`.
    """
    values = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks}
    # Second derivatives may be taken in either order.
    second = _differentiate("hvp", fwd, (dout, dlse, dweights), values, "d")
    return Gradients(**{f.name: getattr(second, f.name) for f in fields(Gradients)})


def _differentiate(
    function: str, fwd: Forward, cotangents: tuple[Any, ...], values: dict[str, Any], prefix: str
) -> SecondGradients:
    """Return the gradients of Σ direction · gradient by input and cotangent, by autograd."""
    check_forward(function, fwd)
    problem: Any = fwd.problem
    call = fwd.residuals[0]
    if problem.storage is not None:
        raise OptionError(
            f"{function} does not support mixed precision (dtype {short_name(problem.storage)}); "
            "call forward with float32 or float64"
        )
    if problem.gate is not None:
        raise OptionError(
            f"{function} does not support gate on tensors; call torch.autograd.grad twice on the "
            "result of npattn.torch.forward"
        )
    along = {n: read_direction(problem, n, x, prefix) for n, x in values.items()}
    along["bias"] = problem.as_array(along["bias"])
    leaves = {
        name: problem.to_compute_dtype(problem.as_array(x)).detach().clone().requires_grad_()
        for name in INPUTS
        if (x := getattr(problem, name)) is not None
    }
    pairs = zip(COTANGENTS, read_cotangents(fwd, *cotangents), strict=True)
    leaves |= {n: x.detach().clone().requires_grad_() for n, x in pairs if x is not None}
    if "dout" not in leaves:
        out: Any = fwd.out
        leaves["dout"] = torch.zeros_like(out).requires_grad_()
    call = call._replace(conventions=with_numbers(call.conventions, problem))
    call = call.with_tensors(*(leaves.get(name) for name in INPUTS))
    with torch.enable_grad():
        grads: Any = pull_back(call, attend(call)[2], *(leaves.get(n) for n in COTANGENTS))
        total = sum(
            ((x * getattr(grads, n)).sum() for n, x in along.items() if x is not None),
            0 * leaves["q"].sum(),
        )
        found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    results: dict[str, Any] = dict(zip(leaves, found, strict=True))
    for name in ("q", "bias"):  # what is undefined stays so
        if name in results:
            undefined = getattr(grads, name).isnan()
            results[name] = torch.where(undefined, math.nan, results[name])
    if isinstance(problem.bias, BiasLike):
        results["bias"] = bias_gradient(problem, results["bias"])
    return SecondGradients(**({"bias": None} | results))
