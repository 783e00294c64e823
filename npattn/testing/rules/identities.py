"""Rules about identities of the forward, whatever the inputs are [4, 8-13].

Each compares the implementation with itself, or with a result that can be read off the inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from npattn.problem import Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.estimates import (
    Estimate,
    U,
    agree,
    agree_all,
    exact,
    forward_only,
    round_to_grid,
)
from npattn.testing.rules.register import (
    first,
    hidden_keys_matter,
    needs,
    rule,
    sampling,
    tied_values,
)
from npattn.testing.rules.relate import identity, settle
from npattn.testing.rules.terms import (
    bias_slope,
    expand_heads,
    keep_rows,
    live,
    lse_per_nat,
    scale,
    translate_mask,
    value_range,
)
from npattn.testing.trial import GRADIENTS, Trial

FINITE = ("full", "matrix", "heads", "keys", "one for all heads", "one a row",
          "one for all samples", "alibi")  # fmt: skip


@rule(
    "bias-shift",
    "4, 11, 13",
    unless=first(needs("bias"), hidden_keys_matter),
    draw=sampling("sinks", few=True, late_softcap=False, bias=FINITE),
)
def bias_shift(trial: Trial, recipe: Recipe) -> float | None:
    """A constant added to the bias of a row changes only lse, by that constant.

    The softmax depends on differences of scores only. Bias and constant are rounded to multiples of
    one power of two, so that their sum is exact. Broken by a softcap or scale that is applied to
    the bias, by a softmax without the maximum, by an lse that forgets it.
    """
    plain = trial.problem(recipe)
    assert plain.bias_array is not None
    rng = np.random.default_rng([recipe.seed, 21])
    rows = 4 * rng.standard_normal((*plain.bias_array.shape[:-1], 1))
    bias, shift, shifted = round_to_grid(plain.bias_array, rows.astype(plain.bias_array.dtype))
    cotangents = trial.cotangents(recipe, plain)
    before, after = (trial.evaluate(plain.replace(bias=b), cotangents) for b in (bias, shifted))
    names = ("o", "weights", *GRADIENTS)
    comparisons = agree_all(before, after, dict.fromkeys(names, identity))
    here, there = Estimate.of(before, "lse"), Estimate.of(after, "lse")
    if here is not None and there is not None:
        visible = ~trial.empty(plain)  # the lse of a fully masked row is a convention
        rise = exact(visible * shift[..., 0].astype(np.float64)).times(bias_slope(trial, plain))
        comparisons.append(agree("lse", there, here.plus(rise.times(lse_per_nat(trial)))))
    return settle(comparisons, before, after, related=True)


def _sample_one_key(trial: Trial) -> dict[str, Any]:
    """Return options of problems whose queries see one key each, by mask, window or S = 1."""
    features, force = trial.space.features, dict[str, Any]()
    forbid = ["sinks", "dropout_mask", "score_mod", "gate"]
    if "mask" in features:
        forbid += ["mask", "causal", "window"]  # the rule makes its own mask
    elif "window" in features:
        force = {"window": ((0, 0),)}  # a pool of one
    elif "causal" in features:
        force = {"causal": True, "square": True}
    else:
        force = dict.fromkeys(_letters_of_one(trial), 1)
    shapes = 1 if "S" in force else None  # no other rule has this one
    return sampling(*forbid, few=True, late_softcap=False, shapes=shapes, **force)(trial)


def _letters_of_one(trial: Trial) -> str:
    """Return the sizes that must be 1 for S to be 1."""
    return "S" if {"T != S", "T > S"} <= trial.space.structure else "ST"


def _never_one_key(trial: Trial) -> str | None:
    space = trial.space
    if space.features & {"mask", "window", "causal"}:
        return None
    excluded = any(1 not in space.sizes.get(letter, (1,)) for letter in _letters_of_one(trial))
    return "nothing leaves a query with one key" if excluded else None


def _scores(trial: Trial, problem: Problem) -> Array:
    """Final scores of a problem without score_mod, hidden ones too."""
    q, k = problem.q.astype(np.float64), expand_heads(trial, problem, problem.k)
    s = q @ k.swapaxes(-1, -2) * scale(problem)
    if problem.softcap is not None:
        s = problem.softcap * np.tanh(s / problem.softcap)
    if problem.bias_array is not None:
        s = s + bias_slope(trial, problem) * problem.bias_array.astype(np.float64)
    return np.asarray(s)


@rule(
    "one-key",
    "8, 10, 11, 13",
    unless=first(hidden_keys_matter, _never_one_key),
    draw=_sample_one_key,
)
def one_key(trial: Trial, recipe: Recipe) -> float | None:
    """A query with one visible key returns its value; lse is its score, and no gradient passes.

    Its weight is 1 whatever the score, so that no gradient reaches q, k or the bias, except through
    lse. Broken by a mask after the softmax or of finite numbers, by weights that are not
    normalised again, by a Jacobian without its rank-1 term, by a delta of another mask.
    """
    problem = trial.problem(recipe)
    if "mask" in trial.space.features:
        rng = np.random.default_rng([recipe.seed, 22])  # a key of its own for each query
        key = rng.integers(recipe.S, size=(*recipe.whole[:-1], 1))
        problem = problem.replace(mask=translate_mask(trial, np.arange(recipe.S) == key))
    if trial.skips_empty_rows and trial.empty(problem).any():
        return None  # the one key may have a bias of −inf
    visible = live(trial, problem)
    alone = visible.sum(-1) == 1
    if not alone.any():
        return None
    quiet = keep_rows(trial.cotangents(recipe, problem), alone, lse=False)
    evaluation = trial.evaluate(problem, quiet)
    value = visible.astype(np.float64) @ expand_heads(trial, problem, problem.v)
    score = np.where(visible, _scores(trial, problem), 0).sum(-1)
    o, lse = Estimate.of(evaluation, "o"), Estimate.of(evaluation, "lse")
    comparisons = [] if o is None else [agree("o", o.where(alone[..., None]), exact(value))]
    if lse is not None:
        comparisons.append(agree("lse", lse.where(alone), exact(score).times(lse_per_nat(trial))))
    names = ("dq", "dbias") if tied_values(trial) else ("dq", "dk", "dbias")
    for name in names:
        gradient = Estimate.of(evaluation, name)
        # At a scale of 0 there is no tolerance for an error of the scale, which agreement finds.
        if gradient is not None and (name == "dbias" or scale(problem)):
            comparisons.append(agree(name, gradient, exact(0)))
    return settle(comparisons, evaluation)


@rule(
    "convex-hull",
    "8, 10",
    unless=hidden_keys_matter,
    draw=sampling("dropout_mask", "gate", few=True, late_softcap=False),
)
def convex_hull(trial: Trial, recipe: Recipe) -> float | None:
    """In each column, o lies between the least and the greatest of the visible values.

    The weights are positive and sum to 1; a sink adds a value of 0. Broken by hidden or padded
    keys that take weight, by a softmax over another axis, by weights that are not normalised, by
    rescaling of an online softmax the wrong way, by memory that is never written.
    """
    problem = trial.problem(recipe)
    evaluation = forward_only(trial).evaluate(problem, trial.cotangents(recipe, problem))
    o, visible = Estimate.of(evaluation, "o"), live(trial, problem)
    if o is None or not visible.any():
        return None
    rows = visible.sum(-1, keepdims=True) > 0
    low, high = (np.where(rows, x, 0) for x in value_range(trial, problem, visible))
    inside = np.where(np.isnan(o.value), low, np.clip(o.value, low, high))
    return settle([agree("o", o.where(rows), exact(inside))], evaluation)


@rule("value-linear", "9, 10", draw=sampling(few=True))
def value_linear(trial: Trial, recipe: Recipe) -> float | None:
    """o is linear in v: o(v₁ + v₂) = o(v₁) + o(v₂), and lse does not change.

    The values are multiples of one power of two, so that their sum is exact; in every third problem
    they are equal, and o doubles. Broken by keys that are read as values, by values that saturate
    or lose their scale in a narrower format, by weights that depend on v.
    """
    problem = trial.problem(recipe)
    twin = recipe if recipe.seed // 2 % 3 == 0 else replace(recipe, seed=recipe.seed + 1)
    cotangents = trial.cotangents(recipe, problem)
    first, second, both = (
        forward_only(trial).evaluate(problem.replace(v=v), cotangents)
        for v in round_to_grid(problem.v, trial.problem(twin).v)
    )
    parts = [Estimate.of(evaluation, "o") for evaluation in (first, second, both)]
    comparisons = agree_all(first, both, {"lse": identity, "weights": identity})
    if parts[0] is not None and parts[1] is not None and parts[2] is not None:
        comparisons.append(agree("o", parts[2], parts[0].plus(parts[1])))
    return settle(comparisons, first, second, both, related=True)


def _takes_no_further_key(trial: Trial) -> str | None:
    space = trial.space
    if "S" in space.sizes or "T != S" not in space.structure:
        return "takes no further key"
    return "conventions scale the bias" if trial.conventions.bias != "after_scale" else None


def _append_key(x: Array, S: int, last: Array | bool) -> Array:
    """Append one more key to an array of (..., T, S)."""
    rows = np.broadcast_shapes(x.shape[:-1], np.shape(last)[:-1])
    one = np.broadcast_to(np.asarray(last, x.dtype), (*rows, 1))
    return np.concatenate([np.broadcast_to(x, (*rows, S)), one], axis=-1)


def _sink_as_key(trial: Trial, problem: Problem) -> Problem:
    """Replace the sinks by one more key: its value is 0, and its score its bias, the sink."""
    assert problem.sinks is not None
    S, changes = problem.S, {}
    column = problem.sinks[:, None] if problem.headless else problem.sinks[:, None, None]
    bias = np.zeros((1, 1), column.dtype) if problem.bias_array is None else problem.bias_array
    changes["bias"] = _append_key(bias, S, column)
    if problem.mask_array is not None:
        changes["mask"] = _append_key(
            problem.mask_array, S, trial.conventions.mask_true == "attend"
        )
    if problem.dropout_mask is not None:
        changes["dropout_mask"] = _append_key(problem.dropout_mask, S, True)
    for name in "kv":
        x = getattr(problem, name)
        changes[name] = np.concatenate([x, np.zeros_like(x[..., :1, :])], axis=-2)
    return problem.replace(sinks=None, **changes)


@rule(
    "sink-key",
    "8, 13",
    unless=first(needs("sinks", "bias"), _takes_no_further_key),
    draw=sampling(
        *("causal", "window", "score_mod"), few=True, late_softcap=False, shapes=2, sinks=True
    ),
)
def sink_key(trial: Trial, recipe: Recipe) -> float | None:
    """A sink acts as one more key, of value 0 and score the sink, in o, lse and gradients.

    The key is 0, so that its score is its bias, which no scale or softcap changes. Broken by a
    sink that is scaled or capped, that lse leaves out, that passes no gradient or none of lse.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    sink = trial.evaluate(problem, cotangents)
    key = trial.evaluate(_sink_as_key(trial, problem), cotangents)
    across = dict.fromkeys(("o", "lse", "dq"), identity)
    across |= dict.fromkeys(("dk", "dv"), lambda x: x[..., :-1, :])
    across["weights"] = lambda x: x[..., :-1]
    if problem.bias_array is not None:
        shape = problem.bias_array.shape
        across["dbias"] = lambda x: sum_to(x[..., :-1], shape)
    comparisons = agree_all(key, sink, across)
    dbias, dsinks = Estimate.of(key, "dbias"), Estimate.of(sink, "dsinks")
    if dbias is not None and dsinks is not None:
        row = (1, 1) if problem.headless else (problem.H, 1, 1)
        column = dbias.over(lambda x: sum_to(x[..., -1:], row).reshape(-1))
        comparisons.append(agree("dsinks", dsinks, column))
    return settle(comparisons, sink, key, related=True)


@rule(
    "equal-scores",
    "8, 10, 11, 12",
    unless=hidden_keys_matter,
    draw=sampling(
        *("bias", "score_mod", "sinks", "dropout_mask", "gate"),
        few=True,
        late_softcap=False,
        nonempty=False,
    ),
)
def equal_scores(trial: Trial, recipe: Recipe) -> float | None:
    """If all scores of a row are equal, o is the mean of the visible values, lse log their number.

    A query of 0 gives every key the score 0, whatever the scale and the softcap. Broken by a mask
    after the softmax, by padding or hidden keys that are counted, by a row sum that is kept in 16
    bits, by an early exit where D = 0 (pytorch/pytorch#184914).
    """
    problem = trial.problem(recipe)
    problem = problem.replace(q=np.zeros_like(problem.q))
    evaluation = forward_only(trial).evaluate(problem, trial.cotangents(recipe, problem))
    visible = live(trial, problem)
    count = visible.sum(-1)
    rows, n = count > 0, np.maximum(count, 1)
    v, weights = expand_heads(trial, problem, problem.v), visible / n[..., None]
    mean = Estimate(weights @ v, (problem.S + 2) * U * (weights @ abs(v)))
    o, lse = Estimate.of(evaluation, "o"), Estimate.of(evaluation, "lse")
    comparisons = [] if o is None else [agree("o", o.where(rows[..., None]), mean)]
    if lse is not None:
        log = Estimate(np.log(n), U * np.log(n))
        comparisons.append(agree("lse", lse.where(rows), log.times(lse_per_nat(trial))))
    return settle(comparisons, evaluation) if rows.any() else None
