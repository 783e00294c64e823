"""Rules about identities of the gradients [1, 4, 5, 8, 10, 11, 13]."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, sum_to
from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import Comparison, compare_arrays
from npattn.testing.rules.estimates import Estimate, agree, exact, forward_only, round_to_grid
from npattn.testing.rules.register import (
    first,
    force_hiding,
    hidden_keys_matter,
    needs,
    no_gradients,
    nothing_hides,
    requires,
    rule,
    sampling,
    tied_values,
)
from npattn.testing.rules.relate import settle
from npattn.testing.rules.terms import bias_slope, live, lse_per_nat, scale, sum_over_group
from npattn.testing.trial import GRADIENTS, Evaluation, Trial

ROWS = ("full", "matrix", "heads", "keys", "one for all heads", "one a row", "one for all samples",
        "alibi", "-inf padding")  # fmt: skip


def _natural_dlse(trial: Trial, evaluation: Evaluation) -> Array:
    """Cotangent of a natural lse, (..., H, T, 1); 0 without one."""
    dlse = evaluation.cotangents.dlse
    if dlse is None:
        return np.zeros((*evaluation.cotangents.dout.shape[:-1], 1))
    return dlse.astype(np.float64)[..., None] * lse_per_nat(trial)


# --- sums of gradients ----------------------------------------------------------------------------


def _compare_bias_rows(trial: Trial, evaluation: Evaluation) -> list[Comparison]:
    """Compare rows of dbias with dlse, both summed over the rows that share a row of the bias."""
    dbias = Estimate.of(evaluation, "dbias")
    if dbias is None or not evaluation.exact["dbias"].any():
        return []  # without a tolerance, agreement says it all
    rows = dbias.over(lambda x: x.sum(-1, keepdims=True))
    dlse = exact(_natural_dlse(trial, evaluation)).times(bias_slope(trial, evaluation.problem))
    expected = dlse.over(lambda x: sum_to(x, rows.value.shape))
    return [agree("dbias summed over keys", rows, expected)]


@rule(
    "dbias-rows",
    "4, 8, 13",
    unless=first(needs("bias", "dbias"), hidden_keys_matter),
    draw=sampling("sinks", few=True, late_softcap=False, bias=ROWS),
)
def dbias_rows(trial: Trial, recipe: Recipe) -> float | None:
    """Each row of dbias sums to the cotangent of its lse, and to 0 without one.

    A constant added to a row changes only its lse. Broken by a Jacobian without its rank-1
    term, by a wrong or stale delta (Dao-AILab/flash-attention#2481), by dlse that is not passed
    on, by a backward with another mask, window or dropout than the forward, by rows of dbias that
    are overwritten where they should be summed (HKUSTDial/flash-sparse-attention#194).
    """
    evaluation = trial.evaluation(recipe)
    return settle(_compare_bias_rows(trial, evaluation), evaluation)


def _sample_unseen(trial: Trial) -> dict[str, Any]:
    masks = ("padding", "left padding", "first tile", "empty rows", "empty head")
    force = force_hiding(trial)["force"]
    force = {"mask": masks} if "mask" in force else force
    return sampling(few=True, late_softcap=False, **force)(trial)


@rule(
    "unseen-keys",
    "5, 8, 13",
    level="edges",
    unless=first(no_gradients, nothing_hides, hidden_keys_matter),
    draw=_sample_unseen,
)
def unseen_keys(trial: Trial, recipe: Recipe) -> float | None:
    """Keys hidden from all queries get dk = dv = 0, fully masked queries dq = 0, both exactly.

    Hidden positions have left the softmax, so that no gradient reaches them. Broken by a backward
    that rebuilds the weights without the mask (Dao-AILab/flash-attention#1947) or without the
    window, by finite hidden scores, by gradients that are never written (ROCm/flash-attention#179).
    """
    problem = trial.problem(recipe)
    empty = trial.empty(problem)
    dout, dlse = trial.cotangents(recipe, problem)
    results = trial.conventions.empty_results
    if "mean" in results:  # such a row takes all values, and no keys
        dout = np.where(empty[..., None], np.zeros_like(dout), dout)
    evaluation = trial.evaluate(problem, Cotangents(dout, dlse))
    queries = live(trial, problem).sum(-2)[..., None]  # (..., H, S, 1) for which a key is visible
    # dq of a row that is NaN is undefined, but such a row adds nothing to dk and dv.
    visible = {} if "nan" in results else {"dq": ~empty[..., None]}
    for name in ("dk", "dv"):
        shape = getattr(problem, name[1:]).shape
        visible[name] = sum_over_group(trial, problem, queries, (*shape[:-1], 1)) > 0
    comparisons = []
    for name, elsewhere in visible.items():
        gradient = Estimate.of(evaluation, name)
        if gradient is not None and not elsewhere.all():
            zero = np.zeros_like(gradient.value)
            tolerance = np.where(elsewhere, np.inf, zero)
            comparisons.append(compare_arrays(name, evaluation.results[name], zero, tolerance))
    return settle(comparisons, evaluation)


@rule(
    "key-gradient-sum",
    "1, 8, 13",
    unless=first(needs("dk"), tied_values, hidden_keys_matter),
    draw=sampling("softcap", "score_mod", "sinks", few=True),
)
def key_gradient_sum(trial: Trial, recipe: Recipe) -> float | None:
    """dk summed over keys is scale · Σ dlse q over the queries of the head, and 0 without dlse.

    A vector added to all keys adds a constant to each row of scores, which changes lse alone.
    Broken by a Jacobian without its rank-1 term, by a wrong delta, by dlse that is not passed on,
    by dk that lacks the scale, or a query head of its group.
    """
    evaluation = trial.evaluation(recipe)
    dk, problem = Estimate.of(evaluation, "dk"), evaluation.problem
    if dk is None or not evaluation.exact["dk"].any():
        return None  # without a tolerance, agreement says it all
    total = dk.over(lambda x: x.sum(-2, keepdims=True))
    each = (
        exact(problem.q.astype(np.float64))
        .times(_natural_dlse(trial, evaluation))
        .times(scale(problem))
    )
    rows = each.over(lambda x: x.sum(-2, keepdims=True))
    expected = rows.over(lambda x: sum_over_group(trial, problem, x, total.value.shape))
    return settle([agree("dk summed over keys", total, expected)], evaluation)


# --- invariance under scaling ---------------------------------------------------------------------


@rule("value-euler", "10, 13", unless=needs("dv"), draw=sampling(few=True))
def value_euler(trial: Trial, recipe: Recipe) -> float | None:
    """Σ v dv over keys is Σ do o over the queries of the head, in each column.

    o is linear in v (Euler's theorem), with the same weights in both sums. Broken by a backward
    with another mask, window, dropout or head split than the forward, by dv that is not summed
    over shared heads, or is of another layout.
    """
    evaluation = trial.evaluation(recipe)
    problem, dout = evaluation.problem, evaluation.cotangents.dout.astype(np.float64)
    dv, o = Estimate.of(evaluation, "dv"), Estimate.of(evaluation, "o")
    if dv is None or o is None:
        return None
    keys = dv.times(problem.v.astype(np.float64)).over(lambda x: x.sum(-2, keepdims=True))
    rows = o.times(dout).over(lambda x: x.sum(-2, keepdims=True))
    expected = rows.over(lambda x: sum_over_group(trial, problem, x, keys.value.shape))
    return settle([agree("v · dv", keys, expected)], evaluation)


@rule(
    "query-key-euler",
    "1, 13",
    unless=first(needs("dq", "dk"), tied_values),
    draw=sampling(few=True),
)
def query_key_euler(trial: Trial, recipe: Recipe) -> float | None:
    """Σ q dq is Σ k dk over each key/value head: only their product counts.

    q times a and k divided by a leave every score as it is, whatever happens to the scores later.
    Broken by a scale, or its log₂ e, that one of dq and dk lacks, by dk that is not summed over
    shared heads or is of another head split, by dq or dk of another mask.
    """
    evaluation = trial.evaluation(recipe)
    problem = evaluation.problem
    dq, dk = Estimate.of(evaluation, "dq"), Estimate.of(evaluation, "dk")
    if dq is None or dk is None:
        return None
    q, k = problem.q.astype(np.float64), problem.k.astype(np.float64)
    rows, keys = (
        x.over(lambda x: x.sum((-2, -1), keepdims=True)) for x in (dq.times(q), dk.times(k))
    )
    expected = rows.over(lambda x: sum_over_group(trial, problem, x, keys.value.shape))
    return settle([agree("k · dk", keys, expected)], evaluation)


# --- cotangents -----------------------------------------------------------------------------------


def _split_cotangents(trial: Trial, recipe: Recipe, problem: Problem) -> tuple[Cotangents, ...]:
    """Return two cotangents and their exact sum: of o and of lse, twice the same, or any two."""
    one, kind = trial.cotangents(recipe, problem), recipe.seed // 2 % 3
    if kind == 0 and one.dlse is not None:
        no_out, no_lse = np.zeros_like(one.dout), np.zeros_like(one.dlse)
        return Cotangents(one.dout, no_lse), Cotangents(no_out, one.dlse), one
    twin = recipe if kind == 1 else replace(recipe, seed=recipe.seed + 1)
    other = trial.cotangents(twin, problem)
    douts = round_to_grid(one.dout, other.dout)
    if one.dlse is None or other.dlse is None:
        return tuple(Cotangents(dout, None) for dout in douts)
    dlses = round_to_grid(one.dlse, other.dlse)
    return tuple(Cotangents(*pair) for pair in zip(douts, dlses, strict=True))


@rule("cotangent-linear", "13", unless=no_gradients, draw=sampling(few=True))
def cotangent_linear(trial: Trial, recipe: Recipe) -> float | None:
    """Gradients are linear in the cotangents: those of a sum are the sum of the gradients.

    The cotangents are multiples of one power of two, so that their sum is exact, or that of o
    and that of lse. Broken by a backward that ignores one of the two if both are passed, by
    gradients that saturate, are clipped or flushed to 0 in a narrow format, by a delta that is
    kept from another call.
    """
    problem = trial.problem(recipe)
    one, two, both = (trial.evaluate(problem, c) for c in _split_cotangents(trial, recipe, problem))
    comparisons = []
    for name in GRADIENTS:
        a, b, c = (Estimate.of(evaluation, name) for evaluation in (one, two, both))
        if a is not None and b is not None and c is not None:
            comparisons.append(agree(name, c, a.plus(b)))
    return settle(comparisons, one, two, both, related=True)


@rule(
    "lse-gradient",
    "11, 13",
    unless=first(
        no_gradients,
        requires(lambda t: t.takes_dlse, "no gradient through lse"),
        hidden_keys_matter,
    ),
    draw=sampling("softcap", "score_mod", "dropout_mask", "gate", few=True),
)
def lse_gradient(trial: Trial, recipe: Recipe) -> float | None:
    """Through lse alone, dv = 0, dbias sums to dlse, and dq is scale · dlse · o with v = k.

    The derivative of lse by a score is its weight, so that dq is a mean of keys, as o is one of
    values. Broken by dlse that is not passed on, or only if o has a cotangent too, by another
    base of the logarithm or another sign, by a delta that takes it twice.
    """
    problem = trial.problem(recipe)
    dout, dlse = trial.cotangents(recipe, problem)
    evaluation = trial.evaluate(problem, Cotangents(np.zeros_like(dout), dlse))
    comparisons = _compare_bias_rows(trial, evaluation) if problem.sinks is None else []
    dv, dq = Estimate.of(evaluation, "dv"), Estimate.of(evaluation, "dq")
    if dv is not None:
        comparisons.append(agree("dv", dv, exact(0)))
    problems = [evaluation]
    if dq is not None and problem.D in trial.space.sizes.get("E", (problem.D,)):
        of_keys = problem.replace(v=problem.k)
        means = forward_only(trial).evaluate(of_keys, trial.cotangents(recipe, of_keys))
        o = Estimate.of(means, "o")
        if o is not None:
            expected = o.times(_natural_dlse(trial, evaluation)).times(scale(problem))
            comparisons.append(agree("dq", dq, expected))
            problems.append(means)
    return settle(comparisons, *problems)
