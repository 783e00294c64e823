"""λ of differential attention from four vectors: exp(λq1·λk1) − exp(λq2·λk2) + λ_init.

Source: Ye et al. 2024, arXiv 2410.05258, eq. 2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from npattn.errors import ShapeError
from npattn.oracle.twins import ARRAYS, on_arrays
from npattn.problem.arrays import Array
from npattn.problem.checks import check_cotangent, check_integer


class LambdaGradients(NamedTuple):
    """Gradients of the four vectors of λ."""

    q1: Array
    k1: Array
    q2: Array
    k2: Array


def initial_lambda(layer: int) -> float:
    """λ_init of a layer, 0.8 − 0.6·exp(−0.3·layer), of layers that are counted from 0.

    Raises OptionError if layer is no integer ≥ 0. Source: Ye et al. 2024, section 2.1.

    Examples
    --------
    >>> from npattn.variants import differential
    >>> round(differential.initial_lambda(0), 3)
    0.2
    """
    return 0.8 - 0.6 * math.exp(-0.3 * check_integer("layer", layer, 0))


@on_arrays
def reparametrise(
    xp: Any, /, lambda_q1: ArrayLike, lambda_k1: ArrayLike, lambda_q2: ArrayLike,
    lambda_k2: ArrayLike, lambda_init: float,
) -> Array:  # fmt: skip
    """λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init.

    Parameters
    ----------
    lambda_q1, lambda_k1, lambda_q2, lambda_k2 : float array_like (D,) or (H, D)
        All of one shape.
    lambda_init : float

    Returns
    -------
    float64 array () or (H,)

    Raises
    ------
    ShapeError
        If the four differ in shape, or have no axis.
    DtypeError
        If one is not floating.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.variants import differential
    >>> zeros = np.zeros(4)
    >>> float(differential.reparametrise(zeros, zeros, zeros, zeros, 0.8))
    0.8
    """
    q1, k1, q2, k2 = _read_lambdas(xp, lambda_q1, lambda_k1, lambda_q2, lambda_k2)
    first, second = xp.exp((q1 * k1).sum(-1)), xp.exp((q2 * k2).sum(-1))
    return xp.asarray(first - second + lambda_init)  # type: ignore[no-any-return]


def reparametrise_backward(
    dlam: ArrayLike, lambda_q1: ArrayLike, lambda_k1: ArrayLike, lambda_q2: ArrayLike,
    lambda_k2: ArrayLike,
) -> LambdaGradients:  # fmt: skip
    """Gradients of the four vectors of `reparametrise`.

    Parameters
    ----------
    dlam : float array_like () or (H,)
        Gradient of λ.
    lambda_q1, lambda_k1, lambda_q2, lambda_k2
        As in `reparametrise`. Raises as it does, and ShapeError if dlam is not shaped like λ.

    Returns
    -------
    LambdaGradients
        .q1 .k1 .q2 .k2; λ_init has the gradient dlam.
    """
    q1, k1, q2, k2 = _read_lambdas(ARRAYS, lambda_q1, lambda_k1, lambda_q2, lambda_k2)
    d = check_cotangent("dlam", dlam, q1.shape[:-1])
    first = (d * np.exp((q1 * k1).sum(-1)))[..., None]
    second = (-d * np.exp((q2 * k2).sum(-1)))[..., None]
    return LambdaGradients(first * k1, first * q1, second * k2, second * q2)


def _read_lambdas(xp: Any, *values: ArrayLike) -> list[Any]:
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    arrays, facts = xp.read(**dict(zip(names, values, strict=True)))
    shape = facts["lambda_q1"].shape
    for name, x in facts.items():
        if x.ndim == 0 or x.shape != shape:
            raise ShapeError(
                f"{name} has shape {x.shape}, must have shape (D,) or (H, D), that of lambda_q1 "
                f"{shape}"
            )
    return [xp.at_least_float64(x) for x in arrays.values()]
