"""Rules about the ends of the number range, near rounding and overflow [1, 4, 8, 11, 13].

There the bounds are wide, since a score of −1e9 has lost all that distinguishes its key in float32.
Three properties remain: no NaN, weights that sum to 1, and o among the visible values.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.oracle.api import evaluate
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.cases.options import OFFSETS
from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import compare_arrays
from npattn.testing.rules.register import hidden_keys_matter, needs, rule, sampling
from npattn.testing.rules.terms import keep_rows, value_range
from npattn.testing.trial import Trial, Violation


def _sample_offsets(trial: Trial) -> dict[str, Any]:
    """Forbid dropout and gates, which scale values beyond the visible ones, and a scaled bias."""
    scaled = ["scale"] if trial.conventions.bias == "before_scale" else []
    return sampling("dropout_mask", "gate", *scaled, bias=OFFSETS)(trial)


@rule("offset-bias", "4, 8, 13", level="edges", unless=needs("bias"), draw=_sample_offsets)
def offset_bias(trial: Trial, recipe: Recipe) -> float:
    """A large finite bias, of some keys or of a whole row, makes no NaN and no weight of its own.

    −1e4, −1e9 and half of the least number are numbers: the maximum that a softmax subtracts may
    not be limited by any of them. A row that they shift as a whole keeps its weights, as far as its
    scores still differ. Gradients are computed with that of the bias and without it. Broken by a
    running maximum that starts at a finite number (flashinfer-ai/flashinfer#4401), by hidden
    scores that become −1e4 or −1e9 and are the largest of such a row
    (microsoft/onnxruntime#8549), by a factor log₂e that makes −∞ of the least number, by weights
    rebuilt from an lse of −1e9.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem, weights=True)
    ratio = trial.check(trial.agreement(recipe), problem, cotangents)
    return max(ratio, _check_hull(trial, problem, cotangents))


@rule(
    "saturated",
    "8, 11, 13",
    level="edges",
    draw=sampling("bias", "softcap", "score_mod", "dropout_mask", distribution="saturated"),
)
def saturated_rows(trial: Trial, recipe: Recipe) -> float | None:
    """If one score is far above the rest, o is its value, lse the score; no gradient is left.

    A weight of 1 stays 1 under small changes of q and k, so that dq and dk are 0, and dv is dout at
    that key. The score is 1e4 in some rows; the same key is at −1e4 in others, in which it may be
    hidden (in float16 both are as large as it can hold before they are scaled). Broken by exp
    without the maximum subtracted (pytorch/executorch#18407), by a maximum that starts at 0 or at
    a finite number, by a Jacobian whose two terms do not cancel.
    """
    problem = trial.problem(recipe)
    weights = evaluate(problem, trial.conventions, engine="dense").weights
    sure = (weights == 1).any(-1) & ~trial.empty(problem)  # to float64: a gap of 37 or more
    if not sure.any():
        return None
    quiet = keep_rows(trial.cotangents(recipe, problem), sure, lse=False)
    return trial.check(trial.against_oracle(problem, quiet), problem, quiet)


PRODUCT = 2.0**17
"""Size of q·k before it is scaled: twice the largest number of float16."""


def _only_float16(trial: Trial) -> str | None:
    if trial.space.dtype != "float16":
        return f"{trial.space.dtype} holds what float32 does"
    if "scale" not in trial.space.features and max(trial.space.pool("D")) < 17:
        return "has no scale, and D is too small for the default to bring scores into range"
    return None


def _sample_large(trial: Trial) -> dict[str, Any]:
    deep = tuple(n for n in trial.space.pool("D") if n > 16)
    force: dict[str, Any] = {} if "scale" in trial.space.features else {"D": deep}
    forbid = ("scale", "bias", "score_mod", "sinks", "dropout_mask", "gate")
    return sampling(*forbid, **force, distribution="normal")(trial)


@rule("large-products", "1, 8", level="edges", unless=_only_float16, draw=_sample_large)
def large_products(trial: Trial, recipe: Recipe) -> float:
    """Products q·k beyond 65504, the largest number of float16, do no harm if their scores fit.

    float16 cannot hold q·k here, but it can hold scale · q·k, and float32, in which every matrix
    product of float16 accumulates, holds both. So either the scale comes first, or the product is
    not stored before it is scaled. Other dtypes have no such rule: bfloat16 reaches as far as
    float32, and if q·k leaves the range of float32 there is no wider format in which kernels
    could accumulate, nor a model whose products are of 1e38. Broken by a product in float16 that is
    scaled afterwards: all scores of a row are +∞, which gives NaN, or −∞, which empties it.
    """
    problem = _enlarge(trial, recipe)
    cotangents = trial.cotangents(recipe, problem)
    ratio = trial.check(trial.against_oracle(problem, cotangents), problem, cotangents)
    return max(ratio, _check_hull(trial, problem, cotangents))


def _enlarge(trial: Trial, recipe: Recipe) -> Problem:
    """Replace keys by ones near to one direction, and queries by ones along or against it.

    q·k is then about ±`PRODUCT`, and scores differ by about 2.
    """
    problem = trial.problem(recipe)
    rng = np.random.default_rng([recipe.seed, 14])
    by_scale = "scale" in trial.space.features
    scale = 2.0**-12 if by_scale else 1 / math.sqrt(recipe.D)
    along = math.sqrt(PRODUCT / recipe.D)
    spread = 2 / (scale * math.sqrt(PRODUCT))
    sign = rng.choice([1, -1], (*problem.q.shape[:-1], 1))
    q = np.asarray(sign * (along + rng.standard_normal(problem.q.shape)))
    k = np.asarray(along + spread * rng.standard_normal(problem.k.shape))
    dtype = problem.q.dtype
    large = problem.replace(q=q.astype(dtype), k=k.astype(dtype))
    return trial.implementation.fit(large.replace(scale=scale) if by_scale else large)


# --- o is among the visible values ----------------------------------------------------------------


def _check_hull(trial: Trial, problem: Problem, cotangents: Cotangents) -> float:
    """Return the worst ratio of o to its limits; raise Violation if it is beyond.

    Two calls: with all values the largest, which then o must be, for without a sink the weights
    sum to 1; and as they are. An error of the weights cancels in the first, so that its tolerance
    covers sums and storage only, and o may leave the hull by no more in the second.
    """
    largest = abs(problem.v).max(-2, keepdims=True, initial=0)
    even = problem.replace(v=np.broadcast_to(largest, problem.v.shape).copy())
    exact = evaluate(even, trial.conventions, engine="dense").out
    slack = trial.bounds(even, exact)["o"]
    slack = np.where(trial.empty(problem)[..., None], np.inf, slack)  # left to conventions
    visible, worst = trial.visible(problem), 0.0
    keys = visible if hidden_keys_matter(trial) is None else np.ones_like(visible)
    for one in (even, problem):
        low, high = value_range(trial, one, keys)
        for name, result in trial.implementation.forward(one).pairs:
            if name == "o":
                worst = max(worst, _compare_limits(result, low, high, slack, one, cotangents))
    return worst


def _compare_limits(
    result: Array, low: Array, high: Array, slack: Array, problem: Problem, cotangents: Cotangents
) -> float:
    """Return the ratio of o to its limits, all (..., H, T, E); raise Violation if it is beyond."""
    if result.shape != slack.shape:
        text = f"o has shape {result.shape}, expected {slack.shape}"
        raise Violation(text, problem, cotangents)
    o = result.astype(np.float64)
    near = np.where(np.isnan(o), 0, np.clip(o, low, high))  # NaN is not near anything
    comparison = compare_arrays("o beside the visible values", result, near, slack)
    if not comparison.passed:
        limits = np.where(slack == np.inf, -np.inf, low - slack), high + slack
        raise Violation(
            str(comparison), problem, cotangents, "range", comparison.ratio, limits=limits
        )
    return comparison.ratio
