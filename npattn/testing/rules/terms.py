"""Quantities of a problem in the terms of the conventions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np

from npattn.conventions import Conventions
from npattn.engines import dense
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.trial import Trial

Size = TypeVar("Size", int, tuple[int, int])


def live(trial: Trial, problem: Problem) -> Array:
    """Keys that take part, (..., H, T, S): they are visible, and their bias is not −inf."""
    visible = trial.visible(problem)
    if problem.bias_array is None:
        return visible
    return visible & ~np.isneginf(problem.bias_array.astype(float))


def keep_rows(cotangents: Cotangents, rows: Array, lse: bool = True) -> Cotangents:
    """Return cotangents that are 0 in other rows; without `lse`, that of lse is 0 in all."""
    dout, dlse = cotangents.dout, cotangents.dlse
    if dlse is not None:
        dlse = np.where(rows & lse, dlse, np.zeros_like(dlse))
    return Cotangents(np.where(rows[..., None], dout, np.zeros_like(dout)), dlse)


def hidden_keys_count(trial: Trial, problem: Problem) -> bool:
    """Return True if hidden keys take part in this problem: as a fill, or in a mean of values."""
    conventions = trial.conventions
    if conventions.fill(problem) is not None or conventions.addend(problem) is not None:
        return True
    return "mean" in conventions.empty_results and bool(trial.empty(problem).any())


def translate_mask(trial: Trial, mask: Array) -> Array:
    """Translate a mask in which True means attend to the conventions, or back."""
    return ~mask if trial.conventions.mask_true == "hide" else mask


def diagonal_shift(trial: Trial, problem: Problem) -> int:
    """Key with which query 0 is aligned."""
    return problem.S - problem.T if trial.conventions.causal == "bottom_right" else 0


def narrow(trial: Trial, sizes: Sequence[Size]) -> Sequence[Size]:
    """Return the sizes, or the middle one where a framework compiles for each."""
    return sizes[len(sizes) // 2 :][:1] if trial.space.few_shapes else sizes


def fits_sizes(trial: Trial, **sizes: int) -> bool:
    """Return True if the implementation takes T queries and S keys, or B samples."""
    space = trial.space
    if any(size not in space.sizes.get(letter, (size,)) for letter, size in sizes.items()):
        return False
    if any(space.refuses(frozenset({f"{letter} = {n}"})) for letter, n in sizes.items()):
        return False
    T, S = sizes.get("T", 0), sizes.get("S", 0)
    return (T == S or "T != S" in space.structure) and (T <= S or "T > S" in space.structure)


# --- factors ---


def lse_unit(conventions: Conventions) -> float:
    """One unit of lse in nats."""
    return math.log(2) if conventions.lse_base == "2" else 1.0


def lse_per_nat(trial: Trial) -> float:
    """Factor from natural logarithms to lse, and from dlse to the gradient of a natural lse."""
    return 1 / lse_unit(trial.conventions)


def scale(problem: Problem) -> float:
    """Scale of a problem: a number, once the problem is made."""
    return cast(float, problem.scale)


def bias_slope(trial: Trial, problem: Problem) -> float:
    """Derivative of a score by its bias."""
    return scale(problem) if trial.conventions.bias == "before_scale" else 1.0


# --- heads ---


def head_of(trial: Trial, problem: Problem) -> Array:
    """Key/value head that each query head uses, (H,)."""
    h, K = np.arange(problem.H), max(problem.K, 1)
    tiles = trial.conventions.kv_head == "tile"
    return h % K if tiles else h // max(problem.H // K, 1)


def expand_heads(trial: Trial, problem: Problem, x: Array) -> Array:
    """k or v for each query head: (..., K, S, n) → (..., H, S, n), float64."""
    wide = x.astype(np.float64)
    return wide if problem.headless else wide[..., head_of(trial, problem), :, :]


def sum_over_group(trial: Trial, problem: Problem, x: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the query heads that share a key/value head: (..., H, n, m) → (..., K, n, m).

    The sum also runs over axes along which `shape` broadcasts.
    """
    if problem.headless:
        return sum_to(x, shape)
    together = np.argsort(head_of(trial, problem), kind="stable")
    return dense.sum_shared(x[..., together, :, :], problem.K, shape)


def value_range(trial: Trial, problem: Problem, keys: Array) -> tuple[Array, Array]:
    """Least and largest value of each column, (..., H, T, E), of these keys, (..., H, T, S)."""
    v = expand_heads(trial, problem, problem.v)
    none = 0.0 if problem.sinks is not None else np.inf  # a sink takes weight, and its value is 0
    low = np.empty((*keys.shape[:-1], problem.E))
    high = np.empty_like(low)
    for e in range(problem.E):  # one by one: (..., H, T, S, E) would be large
        column = v[..., None, :, e]
        low[..., e] = np.where(keys, column, np.inf).min(-1, initial=none)
        high[..., e] = np.where(keys, column, -np.inf).max(-1, initial=-none)
    return low, high
