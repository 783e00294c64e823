"""Rules about one option stated as another: window, causal, mask, bias, scale [1, 4-7, 13]."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to
from npattn.problem.options import OPTIONS
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.register import first, hidden_keys_matter, needs, no_inf, rule, sampling
from npattn.testing.rules.relate import SAME, generator, relate, relate_restated
from npattn.testing.rules.terms import diagonal_shift, hidden_keys_count, scale, translate_mask
from npattn.testing.trial import Evaluation, Trial


@rule("window-infinite", "6, 7", unless=needs("window"), draw=sampling("window"))
def window_infinite(trial: Trial, recipe: Recipe) -> float:
    """A window as wide as the sequence is no window, and with no keys to the right it is causal.

    The narrowest such window reaches from corner to corner: max(T, S) − 1 keys to either side;
    the widest is the largest int32, to which no position may be added in 32 bits.
    Broken by a window whose left end is exclusive (NVIDIA/TransformerEngine#1212), that overwrites
    the mask (huggingface/transformers#31670), or replaces causal.
    """
    problem, rng = trial.problem(recipe), generator(recipe)
    after = max(problem.T, problem.S) - 1 + int(rng.integers(3))
    before = after + (trial.conventions.window == "inclusive")
    if rng.integers(4) == 0:  # a common way to write infinity
        before = after = 2**31 - 1
    same: list[dict[str, Any]] = [{"window": w} for w in ((before, after), (before, None))]
    same += [{"window": (None, after)}]
    if recipe.causal:
        same += [{"window": (None, 0)}, {"window": (before, 0)}]
        same += [{"causal": False, "window": w} for w in ((None, 0), (before, 0))]
    chosen = same[rng.integers(len(same))]
    return relate_restated(trial, recipe, problem.replace(**chosen))


@rule("causal-as-mask", "5, 6", unless=needs("causal", "mask"), draw=sampling(causal=True))
def causal_as_mask(trial: Trial, recipe: Recipe) -> float:
    """Causal gives the same results as its triangle passed as a mask.

    They go through different code in every kernel. Broken by the other alignment
    (Dao-AILab/flash-attention#282), in backward alone (xlite-dev/ffpa-attn#300), by a triangle
    without its diagonal, by causal that is dropped beside a mask (keras-team/keras#23040).
    """
    problem = trial.problem(recipe)
    triangle = np.tril(np.ones((problem.T, problem.S), bool), diagonal_shift(trial, problem))
    other = problem.replace(causal=False, mask=_narrow_mask(trial, problem, triangle))
    return relate_restated(trial, recipe, other)


@rule(
    "window-as-mask",
    "5, 7",
    unless=needs("window", "mask"),
    draw=sampling(window=OPTIONS["window"].examples),
)
def window_as_mask(trial: Trial, recipe: Recipe) -> float:
    """A window gives the same results as its band passed as a mask.

    A band is the matrix of a window, and both hide the same keys. Broken by a window that is one
    key wider (huggingface/transformers#39408) or narrower (NVIDIA/TransformerEngine#1212), that
    starts at the other corner, that backward ignores (meta-pytorch/MSLK#263), that a single query
    forgets (karpathy/nanochat#452).
    """
    problem = trial.problem(recipe)
    shift = diagonal_shift(trial, problem)
    before, after = recipe.window or (None, None)
    band = np.ones((problem.T, problem.S), bool)
    band = band if before is None else np.triu(band, shift - before)
    band = band if after is None else np.tril(band, shift + after)
    other = problem.replace(window=None, mask=_narrow_mask(trial, problem, band))
    return relate_restated(trial, recipe, other)


def _narrow_mask(trial: Trial, problem: Problem, visible: Array) -> Array:
    """Narrow the mask of the problem to these visible keys."""
    if problem.mask_array is not None:
        visible = translate_mask(trial, problem.mask_array) & visible
    return translate_mask(trial, visible)


def _sample_masked(trial: Trial) -> dict[str, Any]:
    """Force masks that leave most queries a key; forbid options that change a bias of −inf."""
    conventions, forbid = trial.conventions, set()
    if conventions.softcap != "before_bias":  # −inf becomes −softcap
        forbid.add("softcap")
    if conventions.bias == "before_scale":  # −inf becomes NaN or +inf
        forbid.add("scale")
    return sampling(*forbid, mask=("padding", "left padding", "matrix", "full"))(trial)


@rule(
    "mask-as-bias",
    "4, 5",
    level="edges",
    unless=first(needs("mask", "bias"), hidden_keys_matter, no_inf),
    draw=_sample_masked,
)
def mask_as_bias(trial: Trial, recipe: Recipe) -> float | None:
    """A mask hides keys as a bias of −inf does, if every query keeps a key.

    Either way a hidden key has weight 0 and gradient 0. Broken by a mask of the wrong polarity
    (lucidrains/x-transformers#160), by a bias of −inf that is read as a boolean
    (pytorch/pytorch#92554), by a mask added as 1 and 0 (HKUSTDial/flash-sparse-attention#146), by
    a softcap after the bias.
    """
    problem = trial.problem(recipe)
    if problem.mask_array is None or trial.empty(problem).any():
        return None
    if hidden_keys_count(trial, problem):
        return None
    zero = np.zeros((1, 1), problem.q.dtype)
    bias = zero if problem.bias_array is None else problem.bias_array
    hidden = ~translate_mask(trial, problem.mask_array)
    other = problem.replace(mask=None, bias=np.where(hidden, np.array(-np.inf, bias.dtype), bias))
    masked = trial.evaluation(recipe)
    across = dict(SAME)
    if problem.bias_array is not None:
        across["dbias"] = partial(sum_to, shape=problem.bias_array.shape)
    return relate(trial.evaluate(other, masked.cotangents), masked, across, side="second")


def _sample_scaled(trial: Trial) -> dict[str, Any]:
    return sampling(*(["bias"] if trial.conventions.bias == "before_scale" else []))(trial)


@rule("scale-of-query", "1, 13", unless=needs("scale"), draw=_sample_scaled)
def scale_of_query(trial: Trial, recipe: Recipe) -> float:
    """A scale times −2 and a query times −½ give the same results, and dq times −2.

    Powers of two are exact, and so are signs. If the first call leaves the scale to its default,
    the second names it: −2/√D. Broken by a maximum that is taken before the scale, by a scale that
    is ignored (pytorch/pytorch#174049), applied twice (huggingface/transformers#38290), left out
    of dq, put on the bias or the sink; by a default of other sizes
    (karpathy/ng-video-lecture#6, intel/ipex-llm#12619).
    """
    plain, q = trial.problem(recipe), trial.problem(recipe).q
    half = (q / 2).astype(q.dtype)
    cotangents = trial.cotangents(recipe, plain)
    if (2 * half == q).all():
        first = trial.evaluation(recipe)
    else:  # half of the least number of the dtype is none of its numbers
        first = trial.evaluate(plain.replace(q=2 * half), cotangents)
    other = plain.replace(q=-half, scale=-2 * scale(plain))
    across = dict(SAME) | {"dq": lambda x: 2 * x}
    return relate(first, _negate_dq(trial.evaluate(other, cotangents)), across)


def _negate_dq(evaluation: Evaluation) -> Evaluation:
    """Negate dq, since results are carried across by factors that are not negative."""
    if "dq" not in evaluation.results or "dq" not in evaluation.exact:
        return evaluation
    return replace(
        evaluation,
        results={**evaluation.results} | {"dq": -evaluation.results["dq"]},
        exact={**evaluation.exact} | {"dq": -evaluation.exact["dq"]},
    )
