"""double_backward and hvp: second derivatives of attention, by hand and by complex step.

docs/second_order.md shows what each is for. Numbers in brackets are the rules of docs/semantics.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from npattn.biases import Bias
from npattn.engines import dense
from npattn.engines.backward_twice import SecondGradients, backward_twice
from npattn.errors import DtypeError, OptionError
from npattn.oracle.api import backward, check_forward, evaluate, read_cotangents
from npattn.oracle.directions import read_directions, with_numbers
from npattn.problem import Forward, Gradients
from npattn.problem.foreign import reject_unknown_options


@reject_unknown_options
def double_backward(
    fwd: Forward, dout: ArrayLike | None, dlse: ArrayLike | None = None,
    dweights: ArrayLike | None = None,
    *, ddq: ArrayLike | None = None, ddk: ArrayLike | None = None, ddv: ArrayLike | None = None,
    ddbias: ArrayLike | None = None, ddsinks: ArrayLike | None = None,
) -> SecondGradients:  # fmt: skip
    """Gradients of Σ ddq·dq + Σ ddk·dk + …, where dq, dk, … are what `backward` returns.

    Compare the backward of your own backward with it; the page to read is
    `npattn.engines.backward_twice`. It holds T × S numbers, whatever the engine.

    Parameters
    ----------
    fwd : Forward
        Result of `forward`.
    dout, dlse, dweights : float array_like, optional
        The cotangents that `backward` was called with; None is 0.
    ddq, ddk, ddv, ddbias, ddsinks : float array_like, optional
        Cotangents of the gradients, each shaped as its input; None is 0. The cotangent of a bias
        object is shaped as its parameter; a sum of biases takes a tuple.

    Returns
    -------
    SecondGradients
        .q .k .v .bias .sinks, each shaped as its input, and .dout .dlse .dweights, the gradients in
        the cotangents. None where there is no such input or cotangent; .dout is always there.

    Raises
    ------
    ShapeError, DtypeError
        As in `backward` and `jvp`.
    OptionError
        If `fwd` is not a result of `forward`, or has conventions, a score_mod, a gate, or mixed or
        extended precision; if a cotangent has no input.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> fwd, dout = npattn.forward(q, k, v), np.ones((1, 1, 1))
    >>> npattn.double_backward(fwd, dout, ddv=np.array([[[1.0], [0.0]]])).k
    array([[[ 0.25],
            [-0.25]]])
    """
    check_forward("double_backward", fwd)
    problem = fwd.problem
    _check_precision("double_backward", fwd)
    _, conventions, *_, residuals = fwd.residuals
    refused = {"conventions": conventions, "score_mod": problem.score_mod, "gate": problem.gate}
    for name, value in refused.items():
        if value is not None:
            raise OptionError(
                f"double_backward does not support {name}; call npattn.hvp for the gradients in "
                "the inputs, and npattn.jvp for those in dout and dlse"
            )
    do, dl, dw = read_cotangents(fwd, dout, dlse, dweights)
    values = {"q": ddq, "k": ddk, "v": ddv, "bias": ddbias, "sinks": ddsinks}
    along = read_directions(problem, values, "dd")
    for name in "qkv":
        if along[name] is None:
            along[name] = np.zeros(getattr(problem, name).shape, problem.dtype)
    if problem.headless:
        do, along = do[None], along | {name: along[name][None] for name in "qkv"}
        dl, dw = (None if x is None else x[None] for x in (dl, dw))
    along["bias"] = problem.as_array(along["bias"])
    if fwd.engine != "dense":
        residuals = dense.forward(problem)[2]
    of_gradients = {f"dd{name}": x for name, x in along.items()}
    return backward_twice(problem, residuals, do, dl, dw, **of_gradients)


@reject_unknown_options
def hvp(
    fwd: Forward, dout: ArrayLike | None, dlse: ArrayLike | None = None,
    dweights: ArrayLike | None = None,
    *, dq: ArrayLike | None = None, dk: ArrayLike | None = None, dv: ArrayLike | None = None,
    dbias: ArrayLike | None = None, dsinks: ArrayLike | None = None, dgate: ArrayLike | None = None,
) -> Gradients:  # fmt: skip
    """Change of the gradients that `backward` returns, along a direction of the inputs.

    The product of that direction and the Hessian of Σ dout·out + Σ dlse·lse + Σ dweights·weights,
    by complex step through engine "dense": exact to rounding, for every option.

    Parameters
    ----------
    fwd : Forward
        Result of `forward`; its conventions hold.
    dout, dlse, dweights : float array_like, optional
        The cotangents, as in `backward`; they do not move. None is 0.
    dq, dk, dv, dbias, dsinks, dgate : float array_like, optional
        The direction, as in `jvp`.

    Returns
    -------
    Gradients
        .q .k .v .bias .sinks .gate, as from `backward`.

    Raises
    ------
    ShapeError
        If an array does not have the shape of its input or result.
    DtypeError
        If an array is not real floating, or the problem is complex or in longdouble.
    OptionError
        If `fwd` is not a result of `forward`, or has mixed or extended precision; if a direction
        has no input; if score_mod is no formula of NumPy's elementary functions.

    Examples
    --------
    >>> import numpy as np, npattn
    >>> q, k, v = np.ones((1, 1, 1)), np.zeros((1, 2, 1)), np.array([[[1.0], [3.0]]])
    >>> fwd = npattn.forward(q, k, v)
    >>> npattn.hvp(fwd, np.ones_like(fwd.out), dq=np.ones((1, 1, 1))).k
    array([[[-0.5],
            [ 0.5]]])
    """
    check_forward("hvp", fwd)
    problem = fwd.problem
    _check_precision("hvp", fwd)
    if problem.dtype.kind == "c":
        raise DtypeError(
            f"hvp does not support dtype {problem.dtype}: it is a complex step itself; pass real "
            "arrays, or call double_backward"
        )
    if problem.dtype not in (np.float32, np.float64):
        raise DtypeError("hvp does not support dtype longdouble: call double_backward")
    values = {"q": dq, "k": dk, "v": dv, "bias": dbias, "sinks": dsinks, "gate": dgate}
    along = read_directions(problem, values)
    cotangents = read_cotangents(fwd, dout, dlse, dweights)
    arrays = {f"d{name}": x for name, x in along.items()}
    arrays |= dict(zip(("dout", "dlse", "dweights"), cotangents, strict=True))
    for name, x in arrays.items():
        if x is not None and x.dtype.kind == "c":
            raise DtypeError(f"{name} is {x.dtype}, must be real for hvp, a complex step itself")
    step = _step(along, problem.dtype)
    dtype = problem.dtype
    inputs = {name: _move(getattr(problem, name), x, step, dtype) for name, x in along.items()}
    wide = np.result_type(dtype, np.complex64)
    moved = problem.replace(**inputs, dtype=wide, engine="dense")
    grads = backward(evaluate(moved, with_numbers(fwd.residuals[1], problem)), *cotangents)
    changes = {name: _imaginary(getattr(grads, name), step) for name in values}
    return replace(grads, **changes)


# --- the complex step -----------------------------------------------------------------------------


def _step(along: dict[str, Any], dtype: np.dtype[Any]) -> float:
    """Return the step, a power of two: its product with the direction is then exact.

    The square of the step must vanish when added to 1, and its product with a small weight must not
    underflow. The largest number of the direction scales the step.
    """
    largest = 0.0
    for x in along.values():
        parameters = x.parameter if isinstance(x, Bias) else x
        for array in parameters if isinstance(parameters, tuple) else (parameters,):
            if array is not None:
                largest = max(largest, float(np.nanmax(abs(array), initial=0)))
    exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
    return 2.0 ** (round(0.4 * np.finfo(dtype).minexp) - exponent)


def _move(value: Any, direction: Any, step: float, dtype: np.dtype[Any]) -> Any:
    """Move an input along its direction by an imaginary step."""
    if isinstance(value, Bias):
        if direction is None:
            return value
        return value.with_parameter(_move_parameter(value.parameter, direction.parameter, step))
    if not isinstance(value, np.ndarray):  # a bias object of somebody else
        return value
    wide = value.astype(dtype, copy=False)
    return wide if direction is None else wide + 1j * (step * direction)


def _move_parameter(parameter: Any, direction: Any, step: float) -> Any:
    if isinstance(parameter, tuple):
        pairs = zip(parameter, direction, strict=True)
        return tuple(_move_parameter(x, d, step) for x, d in pairs)
    return parameter.astype(np.float64, copy=False) + 1j * (step * direction)


def _imaginary(x: Any, step: float) -> Any:
    """Return the change of a gradient; the change is NaN where the gradient is NaN."""
    if isinstance(x, tuple):
        return tuple(_imaginary(term, step) for term in x)
    if x is None:
        return None
    return np.asarray(np.where(np.isnan(x.real), np.nan, x.imag / step))


def _check_precision(function: str, fwd: Forward) -> None:
    if fwd.engine == "extended":
        raise OptionError(f"{function} has no precision='extended': call forward without it")
    if fwd.problem.storage is not None:
        raise OptionError(
            f"{function} does not support mixed precision (dtype {fwd.problem.storage}); "
            "call forward with float32 or float64"
        )
