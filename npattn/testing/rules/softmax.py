"""Properties: rows of weights, and rows that see nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.api import evaluate
from npattn.arrays import finfo
from npattn.problem import Cotangents
from npattn.testing.bounds.allowed import bounds
from npattn.testing.bounds.ulp import real
from npattn.testing.cases.recipe import Recipe
from npattn.testing.compare import Comparison, compare_arrays
from npattn.testing.rules.register import rule
from npattn.testing.trial import Trial, Violation


@rule(
    "rows-sum-to-one",
    "8",
    draw=lambda t: {"forbid": frozenset({"sinks", "dropout_mask"}), "nonempty": True},
)
def rows_sum_to_one(trial: Trial, recipe: Recipe) -> float:
    """The weights of a row sum to 1, or to 0 where the query sees nothing.

    With v = 1 everywhere, o is the sum of the weights: no reference is needed. Broken by a softmax
    over the wrong axis, a mask after the softmax, keys counted twice, padding that gets weight.
    """
    problem = trial.problem(recipe)
    problem = problem.replace(v=np.ones_like(problem.v))
    fwd = evaluate(problem, trial.conventions, engine="dense")
    # What an empty row gives is a convention; every other row sums to 1 exactly.
    rows = (
        trial.empty(problem)
        if trial.conventions.fill(problem) is None
        else np.zeros(fwd.lse.shape, bool)
    )
    want = np.where(rows[..., None], fwd.out, 1.0)
    allowed = bounds(problem, problem.q.dtype, trial.rounding, conventions=trial.conventions)
    got = trial.implementation.forward(problem)
    cotangents = recipe.cotangents(problem, lse=False)
    if got["o"].shape != want.shape:
        raise Violation(f"o has shape {got['o'].shape}, want {want.shape}", problem, cotangents)
    found = {"o": compare_arrays("o with v = 1", got["o"], want, allowed["o"])}
    if "weights" in got and got["weights"].shape == fwd.weights.shape:
        total = got["weights"].astype(float).sum(-1)
        room = allowed["weights"].sum(-1) + finfo(got["weights"].dtype).eps / 2
        sums = np.where(rows, fwd.weights.sum(-1), 1.0)
        found["weights"] = compare_arrays("sum of weights", total, sums, np.asarray(room))
    return trial.check(found, problem, cotangents)


def _draw_empty(trial: Trial) -> dict[str, Any]:
    if "mask" in trial.space.features:
        return {"force": {"mask": ("empty rows", "empty head")}, "nonempty": True}
    return {"force": {"causal": True, "T": (5, 7, 17), "S": (3, 2, 5)}, "nonempty": True}


def _no_empty_rows(trial: Trial) -> str | None:
    space = trial.space
    if "mask" in space.features:
        return None
    late = trial.conventions.causal == "bottom_right" and "T > S" in space.structure
    if "causal" in space.features and late and not set(space.sizes) & {"T", "S"}:
        return None
    return "nothing empties a row"


@rule("empty-row", "8, 10, 13", unless=_no_empty_rows, draw=_draw_empty)
def empty_row(trial: Trial, recipe: Recipe) -> float | None:
    """A query that sees nothing gives what the conventions say, and passes no gradient.

    By default o = 0 and lse = −inf (with a sink: lse = sink); the cotangent of its lse must be
    ignored, whatever it is. Broken by exp(−inf − −inf), by finite fill values that average all of
    v, by a finite running maximum, by kernels that skip the row and leave memory as it was.
    """
    problem = trial.problem(recipe)
    rows = trial.empty(problem)
    if not rows.any():
        return None
    # Not 0 on empty rows, and on them alone: what other rows pass is another rule's business.
    dout, dlse = recipe.cotangents(problem, lse=trial.takes_dlse)
    dout = np.where(rows[..., None], dout, np.zeros_like(dout))
    cotangents = Cotangents(dout, None if dlse is None else np.where(rows, dlse, 0 * dlse))
    want, allowed = trial.oracle(problem, cotangents)
    found: dict[str, Comparison] = {}
    for name, got in trial.results(problem, cotangents):
        if name not in want or got.shape != want[name].shape:
            continue
        limit = allowed[name]
        if name in ("o", "lse", "weights", "dq") and want[name].shape[: rows.ndim] == rows.shape:
            # This rule is about the empty rows; the others have their own.
            axes = (...,) + (None,) * (want[name].ndim - rows.ndim)
            limit = np.where(rows[axes], limit, np.inf)
        got = real(got)
        seen = compare_arrays(name, got, want[name], limit)
        if name == "lse" and problem.sinks is None:
            odd = rows & ~np.isfinite(want["lse"])  # −inf is not NaN here, nor +inf
            exact, kind = want["lse"][odd], got[odd].astype(float)
            if seen.passed and not np.array_equal(kind, exact, equal_nan=True):
                text = f"lse of a query that sees nothing is {kind.flat[0]}, want {exact.flat[0]}"
                raise Violation(text, problem, cotangents)
        if name not in found or seen.ratio > found[name].ratio:
            found[name] = seen
    return trial.check(found, problem, cotangents)
