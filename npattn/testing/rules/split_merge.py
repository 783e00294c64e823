"""Rule about two parts of the keys, which merge by their lse [8, 11]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from npattn.conventions import Conventions
from npattn.oracle.api import evaluate
from npattn.problem.arrays import Array
from npattn.testing.bounds.ulp import half_ulp
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.register import (
    first,
    fixed_size,
    no_lse,
    refuses,
    rule,
    without_positions,
)
from npattn.testing.rules.relate import (
    generator,
    identity,
    is_wrong,
    pick_cotangents,
    pick_keys,
    pick_problem,
    relate,
)
from npattn.testing.rules.terms import fits_sizes, lse_unit, narrow
from npattn.testing.trial import Evaluation, Trial


@rule(
    "split-merge",
    "8, 11",
    unless=first(no_lse, refuses("T != S"), fixed_size("S")),
    draw=partial(without_positions, shapes=1),
)
def split_merge(trial: Trial, recipe: Recipe) -> float | None:
    """Two parts of the keys, each with its lse, merge to the whole.

    So do split-KV decoding, ring attention and paged caches: o = Σ exp(lseᵢ − lse) oᵢ and
    lse = log Σ exp(lseᵢ), in which a part that is hidden from a query has weight 0. Only the first
    part has the sink. Broken by an lse to base 2 (vllm-project/vllm#43919), by an lse without the
    row maximum, by an lse of fully masked rows that is not −inf (flashinfer-ai/flashinfer#4484).
    """
    problem = trial.problem(recipe)
    T, S = problem.T, problem.S
    cuts = [
        n for n in range(1, S) if fits_sizes(trial, T=T, S=n) and fits_sizes(trial, T=T, S=S - n)
    ]
    if not cuts or ("mean" in trial.conventions.empty_results and trial.empty(problem).any()):
        return None
    cut = int(generator(recipe).choice(narrow(trial, cuts)))
    picks = [[pick_keys(problem, keys)] for keys in np.split(np.arange(S), [cut])]
    problems = [pick_problem(problem, pick) for pick in picks]
    problems[1] = problems[1].replace(sinks=None)
    if trial.skips_empty_rows and any(trial.empty(part).any() for part in problems):
        return None
    together, forward = trial.evaluation(recipe), replace(trial, gradients=frozenset())
    parts = [
        forward.evaluate(part, pick_cotangents(together.cotangents, pick))
        for part, pick in zip(problems, picks, strict=True)
    ]
    for part in parts:
        if any(
            getattr(part.results.get(n), "shape", None) != part.exact[n].shape for n in ("o", "lse")
        ):
            return None  # left to rule shape-dtype
    # If the whole is right, a part is wrong: the script must show that part.
    shown = next((part for part in parts if is_wrong(part)), parts[1])
    canonical = map(trial.conventions.canonical, problems)
    empty = [evaluate(part, engine="dense").lse == -np.inf for part in canonical]
    merged, tolerance = merge(trial.conventions, parts, np.stack(empty))
    both = replace(shown, results=merged, exact=together.exact, bound=lambda: tolerance)
    return relate(both, together, {"o": identity, "lse": identity}, side="second")


U = 2.0**-53  # unit roundoff of float64, in which the parts are merged


@np.errstate(all="ignore")  # −inf if a part is hidden from a query
def merge(
    conventions: Conventions, parts: Sequence[Evaluation], empty: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Merge two parts; return o and lse, and how far each may be from the exact result.

    `empty` are the fully masked rows of each part. Let lseᵢ be off by at most βᵢ and oᵢ by αᵢ,
    x = lse₁ − lse₂, σ the logistic function. The weights w₁ = σ(x) and w₂ = σ(−x) = 1 − w₁ depend
    on the difference alone. It is off by at most b = β₁ + β₂ + u (|x| + 2), the subtraction and the
    exponential in float64 included, so that a weight is off by at most m, the larger of
    σ(±x + b) − σ(±x), where σ(a) − σ(c) = σ(a) σ(−c) (1 − exp(c − a)). With W, O, LSE for the exact
    values,

        o − O     = Σ Wᵢ (oᵢ − Oᵢ) + (w₁ − W₁)(o₁ − o₂)   is at most  Σ (wᵢ + m) αᵢ + m |o₁ − o₂|
        LSE − lse = log Σ wᵢ exp(LSEᵢ − lseᵢ)              is at most  log(1 + Σ wᵢ (exp βᵢ − 1))

    To this float64 adds 4u of each term wᵢ oᵢ (two for wᵢ, product, sum); and to lse 4u for the
    logarithm, of a number from 1 to 2, and u |lse| for the sum. Another base costs 2u |lse| on the
    way in and on the way out.
    """
    base = lse_unit(conventions)
    base_error = 0.0 if base == 1 else 2 * U
    lse = base * np.stack([x.results["lse"].astype(np.float64) for x in parts])
    if conventions.lse_empty != -np.inf:  # callers that merge know the lse of a fully masked row
        lse = np.where(empty, -np.inf, lse)
    beta = base * np.stack([x.tolerance["lse"] + half_ulp(x.results["lse"]) for x in parts])
    size = np.where(np.isfinite(lse), abs(lse), 0)  # a wrong lse may be −inf: 0 · inf is NaN
    beta = np.where(empty, 0, beta + base_error * size)
    o = np.stack([x.results["o"].astype(np.float64) for x in parts])
    alpha = np.stack([x.tolerance["o"] + half_ulp(x.results["o"]) for x in parts])

    x = _differences(lse)
    w = _logistic(x)
    o = np.where(w[..., None] == 0, 0, o)  # a hidden part adds nothing, not even NaN
    b = np.where(np.isfinite(x), beta.sum(0) + U * (abs(x) + 2), 0)
    m = (_logistic(x + b) * w[::-1] * -np.expm1(-b)).max(0)
    terms = w[..., None] * o
    o_error = ((w + m)[..., None] * alpha + 4 * U * abs(terms)).sum(0)
    o_error = o_error + m[..., None] * abs(o[0] - o[1])

    total = np.logaddexp(lse[0], lse[1])
    lse_error = np.log1p(np.where(w == 0, 0, w * np.expm1(beta)).sum(0))
    size = np.where(np.isfinite(total), abs(total), 0)
    lse_error = (lse_error + 4 * U + (U + base_error) * size) / base
    total = np.where(empty.all(0), conventions.lse_empty, total / base)
    return {"o": terms.sum(0), "lse": total}, {"o": o_error, "lse": lse_error}


def _logistic(x: Array) -> Array:
    """Return σ(x) = 1 / (1 + exp(−x)), to two units of roundoff."""
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def _differences(lse: Array) -> Array:
    """lse₁ − lse₂ and lse₂ − lse₁; 0 for a row that is fully masked in both parts."""
    other = lse[::-1]
    return np.where((lse == -np.inf) & (other == -np.inf), 0, lse - other)
