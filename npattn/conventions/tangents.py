"""Directional derivatives under conventions: a direction in, the change of out and lse back.

Each function is the derivative of a translation in `npattn.conventions.fields`.
docs/derivations/conventions.md derives them.
"""

import math
from typing import Any

from npattn.conventions.cap import scale_of, through_cap
from npattn.conventions.fields import Conventions
from npattn.problem import Problem
from npattn.problem.arrays import Array, BiasLike


def canonical_direction(
    conventions: Conventions, problem: Problem, direction: dict[str, Any]
) -> dict[str, Any]:
    """Translate a direction: of the problem's inputs in, of the canonical problem's out."""
    xp, along = problem.xp, dict(direction)
    if conventions.kv_head == "tile":
        for name in "kv":
            if along[name] is not None:
                along[name] = conventions.share_heads(along[name], problem)
    if along["bias"] is not None:
        along["bias"] = _canonical_dbias(conventions, problem, along["bias"])
    if conventions.fill(problem) is not None:  # every key has a twin, whose key and bias are fixed
        k, v = along["k"], along["v"]
        along["k"] = None if k is None else xp.concatenate([k, xp.zeros_like(k)], axis=-2)
        along["v"] = None if v is None else xp.concatenate([v, v], axis=-2)
    return along


def _canonical_dbias(conventions: Conventions, problem: Problem, dbias: Any) -> Any:
    """Translate a direction of the bias, as `Conventions.gradients` does its gradient."""
    xp = problem.xp
    if conventions.keeps_bias(problem):
        return dbias
    if isinstance(dbias, BiasLike):
        array: Any = problem.as_array(dbias)
        is_real = getattr(array.dtype, "kind", "f") != "c"  # tensors are real
        dbias = problem.to_compute_dtype(array) if is_real else array
    if conventions.bias == "before_scale":
        dbias = dbias * scale_of(problem)
    if conventions.caps_late(problem):
        dbias = xp.broadcast_to(dbias, (*problem.lead, problem.H, problem.T, problem.S))
        dbias = through_cap(conventions.before_cap(problem), dbias)
    if conventions.fill(problem) is not None:
        dbias = xp.broadcast_to(dbias, (*dbias.shape[:-1], problem.S))
        dbias = xp.concatenate([dbias, xp.zeros_like(dbias)], axis=-1)
    return dbias


def translate_changes(
    conventions: Conventions, problem: Problem, do: Array, dlse: Array, lse: Array, dv: Array | None
) -> tuple[Array, Array]:
    """Translate the changes of the canonical problem's out and lse back.

    do is (..., H, T, E), dlse and lse are (..., H, T), dv is (..., K, S, E). `lse` is the canonical
    one. An empty row keeps its `lse_empty`, moves with the mean of the values, or is NaN as it is.
    """
    xp = problem.xp
    if conventions.lse_base == "2":
        dlse = dlse / math.log(2)
    empty: Any = lse.real == -math.inf
    if empty.any():
        undefined, mean = conventions.empty_rows(problem, empty)
        if undefined is not None:
            do = xp.where(undefined[..., None], math.nan, do)
        if mean is not None and dv is not None:
            do = xp.where(mean[..., None], conventions.mean_of_values(problem, dv), do)
    return do, dlse
