"""Rules about rows of weights, and about fully masked rows [8, 10, 13]."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.oracle.api import evaluate
from npattn.problem.arrays import finfo
from npattn.testing.bounds.ulp import real
from npattn.testing.cases.classes import classes_of_value
from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import Comparison, compare_arrays
from npattn.testing.rules.register import first, needs, no_inf, rule, sampling
from npattn.testing.rules.terms import keep_rows
from npattn.testing.trial import Trial, Violation

ROWS = ("o", "lse", "weights", "max_score", "dq")
"""Results that have rows."""


@rule("rows-sum-to-one", "8", draw=sampling("sinks", "dropout_mask", "gate"))
def rows_sum_to_one(trial: Trial, recipe: Recipe) -> float:
    """The weights of a row sum to 1, or to 0 in a fully masked row.

    With v = 1 everywhere, o is the sum of the weights: no reference is needed. Broken by a softmax
    over the wrong axis, a mask after the softmax, keys counted twice, padding that gets weight.
    """
    problem = trial.problem(recipe)
    problem = problem.replace(v=np.ones_like(problem.v))
    fwd = evaluate(problem, trial.conventions, engine="dense")
    # A fully masked row follows the conventions; every other row sums to 1 exactly.
    canonical = trial.conventions.canonical(problem)
    rows = np.isneginf(evaluate(canonical, engine="dense").lse)
    ones = np.where(rows[..., None], fwd.out, 1.0)
    allowed = trial.bounds(problem, ones)
    results = trial.implementation.forward(problem)
    cotangents = recipe.cotangents(problem, lse=False)
    o, weights = results["o"], results.get("weights")
    if o.shape != ones.shape:
        raise Violation(f"o has shape {o.shape}, expected {ones.shape}", problem, cotangents)
    comparisons = {"o": compare_arrays("o with v = 1", o, ones, allowed["o"])}
    if weights is not None and weights.shape == fwd.weights.shape:
        total = weights.astype(float).sum(-1)
        tolerance = np.asarray(allowed["weights"].sum(-1) + finfo(weights.dtype).eps / 2)
        sums = np.where(rows, fwd.weights.sum(-1), 1.0)
        comparisons["weights"] = compare_arrays("sum of weights", total, sums, tolerance)
    return trial.check(comparisons, problem, cotangents)


def _sample_empty(trial: Trial) -> dict[str, Any]:
    """Return options of problems with rows that see no key, by mask, causal or bias."""
    force: dict[str, Any] = {}
    if "mask" in trial.space.features:
        of_queries = not trial.space.refuses(classes_of_value("mask", "empty rows"))
        force["mask"] = ("empty rows", "empty head") if of_queries else ("empty padding",)
    elif _causal_empties(trial):
        force |= {"causal": (True,), "T": (5, 7, 17), "S": (3, 2, 5)}
    if not _bias_empties(trial):
        return sampling(**force)(trial)
    for name, off in {"mask": (None,), "causal": (False,)}.items():
        if name in force:
            force[name] += off
    force["bias"] = ("-inf rows", None, None) if force else ("-inf rows",)
    # A bias of −inf times a scale of 0 or less is NaN, or +inf.
    scaled = ["scale"] if trial.conventions.bias == "before_scale" else []
    return sampling(*scaled, **force)(trial)


def _causal_empties(trial: Trial) -> bool:
    """Return True if causal can hide all keys of a query."""
    space = trial.space
    late = trial.conventions.causal == "bottom_right" and "T > S" in space.structure
    return "causal" in space.features and late and not set(space.sizes) & {"T", "S"}


def _bias_empties(trial: Trial) -> bool:
    return "bias" in trial.space.features and no_inf(trial) is None


def _no_empty_rows(trial: Trial) -> str | None:
    empties = "mask" in trial.space.features or _causal_empties(trial) or _bias_empties(trial)
    return None if empties else "nothing empties a row"


@rule("empty-row", "8, 10, 13", level="edges", unless=_no_empty_rows, draw=_sample_empty)
def empty_row(trial: Trial, recipe: Recipe) -> float | None:
    """A fully masked query gives what the conventions say, and passes no gradient.

    By default o = 0 and lse = −inf (with a sink: lse = sink); the cotangent of its lse must be
    ignored, whatever it is. Broken by exp(−inf − −inf), by finite fill values that average all of
    v, by a finite running maximum, by kernels that skip the row and leave its memory unwritten.
    """
    problem = trial.problem(recipe)
    rows = trial.empty(problem)
    if not rows.any():
        return None
    # Only fully masked rows have cotangents: gradients of the others are left to other rules.
    cotangents = keep_rows(recipe.cotangents(problem, lse=trial.takes_dlse), rows)
    exact, allowed = trial.oracle(problem, cotangents)
    comparisons: dict[str, Comparison] = {}
    for name, result in trial.results(problem, cotangents).pairs:
        if name not in exact or result.shape != exact[name].shape:
            continue
        tolerance = allowed[name]
        if name in ROWS and tolerance.shape[: rows.ndim] == rows.shape:  # nothing of other rows
            here = rows[(...,) + (None,) * (tolerance.ndim - rows.ndim)]
            tolerance = np.where(here, tolerance, np.inf)
        comparison = compare_arrays(name, real(result), exact[name], tolerance)
        if name == "lse" and problem.sinks is None and comparison.passed:
            odd = rows & ~np.isfinite(exact["lse"])  # −inf is neither NaN nor +inf here
            lse, expected = real(result)[odd].astype(float), exact["lse"][odd]
            if not np.array_equal(lse, expected, equal_nan=True):
                text = f"lse of a fully masked query is {lse.flat[0]}, expected {expected.flat[0]}"
                raise Violation(text, problem, cotangents)
        if name not in comparisons or comparison.ratio > comparisons[name].ratio:
            comparisons[name] = comparison
    return trial.check(comparisons, problem, cotangents)


def _sample_lone_sinks(trial: Trial) -> dict[str, Any]:
    """Force sinks and, in a third of the problems, rows that see nothing else."""
    masks: dict[str, Any] = (
        {"mask": (None, None, "empty rows")} if "mask" in trial.space.features else {}
    )
    return sampling(sinks=True, **masks)(trial)


@rule(
    "sink-minus-inf",
    "8",
    level="degenerate",
    unless=first(needs("sinks"), no_inf),
    draw=_sample_lone_sinks,
)
def sink_minus_inf(trial: Trial, recipe: Recipe) -> float:
    """A sink of −inf takes no weight: the head is as without a sink, gradients included.

    e^−∞ is 0, in the sum and in its gradient. Broken by exp(−inf − −inf) where a row sees nothing
    else, by a sink that starts the running maximum, by dsinks that is NaN.
    """
    problem = trial.problem(recipe)
    assert problem.sinks is not None
    sinks = problem.sinks.copy()
    sinks[recipe.seed // 2 % problem.H] = -np.inf
    problem = problem.replace(sinks=sinks)
    cotangents = trial.cotangents(recipe, problem)
    return trial.check(trial.against_oracle(problem, cotangents), problem, cotangents)
