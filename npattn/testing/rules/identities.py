"""Properties: identities that attention keeps, whatever its inputs are.

Each holds the implementation against itself or against a result that can be read off the inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from npattn.arrays import Array, sum_to
from npattn.problem import Cotangents, Problem
from npattn.testing.bounds.rounding import unit_roundoff
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.estimates import (
    Estimate,
    agree,
    as_is,
    exact,
    forward_only,
    live,
    nats,
    needs,
    on_grid,
    per_unit_of_bias,
    related,
    scale,
    settle,
    small,
    spread,
    uncapped,
)
from npattn.testing.rules.register import fills, first, rule
from npattn.testing.trial import GRADIENTS, Trial

FINITE = ("full", "matrix", "heads", "keys", "one for all heads", "one a row",
          "one for all samples", "alibi")  # fmt: skip


@rule(
    "bias-shift",
    "4, 11, 13",
    unless=first(needs("bias"), fills),
    draw=lambda t: {
        "force": small(t, bias=FINITE),
        "forbid": uncapped(t, "sinks"),
        "nonempty": True,
    },
)
def bias_shift(trial: Trial, recipe: Recipe) -> float | None:
    """A constant added to the bias of a row changes nothing but lse, by just that.

    The softmax sees differences of scores only. Bias and constant are rounded to multiples of one
    power of two, so that their sum is exact. Broken by a bias that the softcap or the scale is
    applied to, by a softmax without the maximum, by an lse that forgets it.
    """
    plain = trial.problem(recipe)
    assert plain.bias_array is not None
    rng = np.random.default_rng([recipe.seed, 21])
    rows = 4 * rng.standard_normal((*plain.bias_array.shape[:-1], 1))
    bias, shift, shifted = on_grid(plain.bias_array, rows.astype(plain.bias_array.dtype))
    cotangents = trial.cotangents(recipe, plain)
    before, after = (trial.judge(plain.replace(bias=b), cotangents) for b in (bias, shifted))
    names = ("o", "weights", *GRADIENTS)
    found = related(before, after, dict.fromkeys(names, as_is))
    here, there = Estimate.of(before, "lse"), Estimate.of(after, "lse")
    if here is not None and there is not None:
        seen = ~trial.empty(plain)  # the lse of an empty row is what conventions say
        rise = exact(seen * shift[..., 0].astype(np.float64)).times(per_unit_of_bias(trial, plain))
        found.append(agree("lse", there, here.plus(rise.times(nats(trial)))))
    return settle(found, before, after)


def _one_key_draw(trial: Trial) -> dict[str, Any]:
    features, force = trial.space.features, dict[str, Any]()
    forbid = uncapped(trial, "sinks", "dropout_mask", "score_mod")
    if "mask" in features:
        forbid |= {"mask", "causal", "window"}  # the rule makes its own mask
    elif "window" in features:
        force = {"window": ((0, 0),)}  # a pool of one
    elif "causal" in features:
        force = {"causal": True, "square": True}
    else:
        force = dict.fromkeys(_tied(trial), 1)
    return {"force": small(trial, **force), "forbid": forbid, "nonempty": True}


def _tied(trial: Trial) -> str:
    """The sizes that are 1 where S is."""
    return "S" if {"T != S", "T > S"} <= trial.space.structure else "ST"


def _never_one_key(trial: Trial) -> str | None:
    space = trial.space
    if space.features & {"mask", "window", "causal"}:
        return None
    far = any(1 not in space.sizes.get(letter, (1,)) for letter in _tied(trial))
    return "nothing leaves a query with one key" if far else None


def _one_key_mask(trial: Trial, recipe: Recipe) -> Array:
    """A mask by which each query attends to a key of its own."""
    rng = np.random.default_rng([recipe.seed, 22])
    key = rng.integers(recipe.S, size=(*recipe.whole[:-1], 1))
    mask: Array = np.arange(recipe.S) == key
    return mask if trial.conventions.mask_true == "attend" else ~mask


def _scores(trial: Trial, problem: Problem) -> Array:
    """The final scores of a problem without score_mod, also where they are hidden."""
    q, k = problem.q.astype(np.float64), spread(trial, problem, problem.k)
    s = q @ k.swapaxes(-1, -2) * scale(problem)
    if problem.softcap is not None:
        s = problem.softcap * np.tanh(s / problem.softcap)
    if problem.bias_array is not None:
        s = s + per_unit_of_bias(trial, problem) * problem.bias_array.astype(np.float64)
    return np.asarray(s)


@rule("one-key", "8, 10, 11, 13", unless=first(fills, _never_one_key), draw=_one_key_draw)
def one_key(trial: Trial, recipe: Recipe) -> float | None:
    """A query that sees one key returns its value; lse is its score, and no gradient is passed.

    Its weight is 1 whatever the score, so that nothing flows to q, k or the bias unless through
    lse. Broken by a mask after the softmax or of finite numbers, by weights that are not
    normalised again, by a Jacobian without its rank-1 term, by a delta of another mask.
    """
    problem = trial.problem(recipe)
    if "mask" in trial.space.features:
        problem = problem.replace(mask=_one_key_mask(trial, recipe))
    seen = live(trial, problem)
    alone = seen.sum(-1) == 1
    if not alone.any():
        return None
    dout, dlse = trial.cotangents(recipe, problem)
    quiet = Cotangents(
        np.where(alone[..., None], dout, np.zeros_like(dout)),
        None if dlse is None else np.zeros_like(dlse),
    )
    judged = trial.judge(problem, quiet)
    value = seen.astype(np.float64) @ spread(trial, problem, problem.v)
    score = np.where(seen, _scores(trial, problem), 0).sum(-1)
    o, lse = Estimate.of(judged, "o"), Estimate.of(judged, "lse")
    found = [] if o is None else [agree("o", o.where(alone[..., None]), exact(value))]
    if lse is not None:
        found.append(agree("lse", lse.where(alone), exact(score).times(nats(trial))))
    for name in ("dq", "dk", "dbias"):
        gradient = Estimate.of(judged, name)
        if gradient is not None:
            found.append(agree(name, gradient, exact(0)))
    return settle(found, judged)


@rule(
    "convex-hull",
    "8, 10",
    unless=fills,
    draw=lambda t: {
        "force": small(t),
        "forbid": uncapped(t, "dropout_mask"),
        "nonempty": True,
    },
)
def convex_hull(trial: Trial, recipe: Recipe) -> float | None:
    """o lies between the least and the greatest of the values that the query sees, in each column.

    The weights are positive and sum to 1; a sink adds a value of 0. Broken by hidden or padded
    keys that take weight, by a softmax over another axis, by weights that are not normalised, by
    rescaling of an online softmax the wrong way, by memory that was not written.
    """
    problem = trial.problem(recipe)
    judged = forward_only(trial).judge(problem, trial.cotangents(recipe, problem))
    o, seen = Estimate.of(judged, "o"), live(trial, problem)
    if o is None or not seen.any():
        return None
    v = spread(trial, problem, problem.v)[..., None, :, :]
    low = np.where(seen[..., None], v, np.inf).min(-2)
    high = np.where(seen[..., None], v, -np.inf).max(-2)
    if problem.sinks is not None:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    rows = seen.sum(-1, keepdims=True) > 0
    low, high = np.where(rows, low, 0), np.where(rows, high, 0)
    inside = np.where(np.isnan(o.value), low, np.clip(o.value, low, high))
    return settle([agree("o", o.where(rows), exact(inside))], judged)


@rule("value-linear", "9, 10", draw=lambda t: {"force": small(t), "nonempty": True})
def value_linear(trial: Trial, recipe: Recipe) -> float | None:
    """o is linear in v: that of a sum of values is the sum of their o; lse does not change.

    The values are multiples of one power of two, so that their sum is exact; in every third problem
    they are equal, and o doubles. Broken by keys that are read as values, by values that saturate
    or lose their scale in a narrower format, by anything that looks at v to choose the weights.
    """
    problem = trial.problem(recipe)
    twin = recipe if recipe.seed // 2 % 3 == 0 else replace(recipe, seed=recipe.seed + 1)
    cotangents = trial.cotangents(recipe, problem)
    first, second, both = (
        forward_only(trial).judge(problem.replace(v=v), cotangents)
        for v in on_grid(problem.v, trial.problem(twin).v)
    )
    parts = [Estimate.of(judged, "o") for judged in (first, second, both)]
    found = related(first, both, {"lse": as_is, "weights": as_is})
    if parts[0] is not None and parts[1] is not None and parts[2] is not None:
        found.append(agree("o", parts[2], parts[0].plus(parts[1])))
    return settle(found, first, second, both)


def _no_more_keys(trial: Trial) -> str | None:
    space = trial.space
    if "S" in space.sizes or "T != S" not in space.structure:
        return "takes no further key"
    return "conventions scale the bias" if trial.conventions.bias != "after_scale" else None


def _appended(x: Array, S: int, last: Array | bool) -> Array:
    """An array of (..., T, S) with one more key."""
    rows = np.broadcast_shapes(x.shape[:-1], np.shape(last)[:-1])
    one = np.broadcast_to(np.asarray(last, x.dtype), (*rows, 1))
    return np.concatenate([np.broadcast_to(x, (*rows, S)), one], axis=-1)


def _sink_as_key(trial: Trial, problem: Problem) -> Problem:
    """The problem whose sinks are one more key: its value 0, its score its bias, the sink."""
    assert problem.sinks is not None
    S, changes = problem.S, {}
    column = problem.sinks[:, None] if problem.headless else problem.sinks[:, None, None]
    bias = np.zeros((1, 1), column.dtype) if problem.bias_array is None else problem.bias_array
    changes["bias"] = _appended(bias, S, column)
    if problem.mask_array is not None:
        changes["mask"] = _appended(problem.mask_array, S, trial.conventions.mask_true == "attend")
    if problem.dropout_mask is not None:
        changes["dropout_mask"] = _appended(problem.dropout_mask, S, True)
    for name in "kv":
        x = getattr(problem, name)
        changes[name] = np.concatenate([x, np.zeros_like(x[..., :1, :])], axis=-2)
    return problem.replace(sinks=None, **changes)


@rule(
    "sink-key",
    "8, 13",
    unless=first(needs("sinks", "bias"), _no_more_keys),
    draw=lambda t: {
        "force": small(t, sinks=True),
        "forbid": uncapped(t, "causal", "window", "score_mod"),
        "nonempty": True,
    },
)
def sink_key(trial: Trial, recipe: Recipe) -> float | None:
    """A sink is one more key: its value is 0 and its score the sink, in o, lse and gradients.

    The key is 0, so that its score is its bias, which no scale or softcap touches. Broken by a
    sink that is scaled or capped, that lse leaves out, that passes no gradient or none of lse.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    sink = trial.judge(problem, cotangents)
    key = trial.judge(_sink_as_key(trial, problem), cotangents)
    across = dict.fromkeys(("o", "lse", "dq"), as_is)
    across |= dict.fromkeys(("dk", "dv"), lambda x: x[..., :-1, :])
    across["weights"] = lambda x: x[..., :-1]
    if problem.bias_array is not None:
        shape = problem.bias_array.shape
        across["dbias"] = lambda x: sum_to(x[..., :-1], shape)
    found = related(key, sink, across)
    dbias, dsinks = Estimate.of(key, "dbias"), Estimate.of(sink, "dsinks")
    if dbias is not None and dsinks is not None:
        row = (1, 1) if problem.headless else (problem.H, 1, 1)
        column = dbias.over(lambda x: sum_to(x[..., -1:], row).reshape(-1))
        found.append(agree("dsinks", dsinks, column))
    return settle(found, sink, key)


@rule(
    "equal-scores",
    "8, 10, 11, 12",
    unless=fills,
    draw=lambda t: {
        "force": small(t),
        "forbid": uncapped(t, "bias", "score_mod", "sinks", "dropout_mask"),
    },
)
def equal_scores(trial: Trial, recipe: Recipe) -> float | None:
    """Where all scores of a row are equal, o is the mean of the values seen, lse log their number.

    A query of 0 gives every key the score 0, whatever the scale and the softcap. Broken by a mask
    after the softmax, by padding or hidden keys that are counted, by a row sum that is kept in 16
    bits, by an early exit where D = 0 (pytorch/pytorch#184914).
    """
    problem = trial.problem(recipe)
    problem = problem.replace(q=np.zeros_like(problem.q))
    judged = forward_only(trial).judge(problem, trial.cotangents(recipe, problem))
    seen = live(trial, problem)
    count = seen.sum(-1)
    rows, n = count > 0, np.maximum(count, 1)
    v, each = spread(trial, problem, problem.v), seen / n[..., None]
    mean = Estimate(each @ v, (problem.S + 2) * unit_roundoff(np.float64) * (each @ abs(v)))
    o, lse = Estimate.of(judged, "o"), Estimate.of(judged, "lse")
    found = [] if o is None else [agree("o", o.where(rows[..., None]), mean)]
    if lse is not None:
        log = Estimate(np.log(n), unit_roundoff(np.float64) * np.log(n))
        found.append(agree("lse", lse.where(rows), log.times(nats(trial))))
    return settle(found, judged) if rows.any() else None
