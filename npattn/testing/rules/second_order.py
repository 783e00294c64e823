"""The rule on second derivatives [13], which is asked by name alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.engines import dense
from npattn.engines.backward_twice import backward_twice
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, finfo
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.bounds.second_order import second_order_bounds
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.comparison import Comparison
from npattn.testing.rules.register import first, hidden_keys_matter, no_gradients, rule, sampling
from npattn.testing.trial import Trial, worst_by_name

SECOND = "second "
"""How the names of second derivatives begin."""

SMOOTH = ("normal", "large logits", "value offset", "integers", "duplicate keys", "flat")
SAMPLE = sampling("score_mod", "gate", few=True, late_softcap=False, distribution=SMOOTH)
TRIES = 16
"""Problems that must all be refused before the rule does not apply."""
LEAST = 2.0**-24
"""Largest unit roundoff for which a bound of so many roundings is below the numbers themselves."""


def _not_twice(trial: Trial) -> str | None:
    """Return why its gradients are not differentiated again."""
    f = trial.implementation
    if f.backward is not None:
        return "its backward is not recorded by a framework"
    if f.storage is not None or f.quantized is not None:
        return "takes sequences as they are stored, or quantized inputs"
    if float(finfo(trial.space.dtype).eps) / 2 > LEAST:
        return f"a bound of second derivatives in {trial.space.dtype} is no smaller than they are"
    conventions = trial.conventions
    if conventions.kv_head != "repeat" or conventions.bias != "after_scale":
        return "conventions that move heads or bias are not translated"
    refusal = None
    for recipe in trial.cases(Pools(trial.space, **SAMPLE(trial)), 0, TRIES):
        problem = trial.problem(recipe)
        try:
            cotangents = trial.cotangents(recipe, problem)
            f.gradients_twice(problem, cotangents, _directions(trial, recipe, problem))
        except ImplementationError as err:
            if err.is_refusal:
                refusal = f"its gradients cannot be differentiated: {err}"
                continue
        return None
    return refusal


@rule(
    "double-backward",
    "13",
    unless=first(no_gradients, hidden_keys_matter, _not_twice),
    draw=SAMPLE,
    on_request=True,
)
def double_backward(trial: Trial, recipe: Recipe) -> float | None:
    """The gradients of a loss of its gradients are right: autograd differentiates them once more.

    With random cotangents of dq, dk, dv, dbias and dsinks, in q, k, v, bias, sinks and dout. Broken
    by a backward that takes the weights, the output or lse for constants, as one does that saves a
    detached tensor: its first derivatives are right, and so are all other rules.
    """
    problem = trial.problem(recipe).materialise()
    if trial.empty(problem).any():
        return None  # rule empty-row has them
    cotangents, directions = trial.cotangents(recipe, problem), _directions(trial, recipe, problem)
    try:
        results = trial.implementation.gradients_twice(problem, cotangents, directions)
    except ImplementationError as err:
        if err.is_refusal:
            return None  # a kernel for these options that autograd cannot differentiate twice
        raise
    comparisons = _compare(trial, problem, cotangents, directions, results)
    ratio = trial.check(comparisons, problem, cotangents)
    return ratio if comparisons else None


def _directions(trial: Trial, recipe: Recipe, problem: Problem) -> dict[str, Array]:
    """Return random cotangents of the gradients that it gives, in the dtype of each input."""
    rng = np.random.default_rng([recipe.seed, 29])
    directions = {}
    for name in ("q", "k", "v", "bias", "sinks"):
        x = getattr(problem, name)
        if isinstance(x, np.ndarray) and f"d{name}" in trial.gradients:
            directions[name] = np.asarray(rng.standard_normal(x.shape)).astype(x.dtype)
    return directions


def _compare(
    trial: Trial,
    problem: Problem,
    cotangents: Cotangents,
    directions: dict[str, Array],
    results: Results,
) -> dict[str, Comparison]:
    """Compare with the gradients by hand, of the problem in npattn's own terms."""
    canonical = trial.conventions.canonical(problem)
    dlse = None if cotangents.dlse is None else cotangents.dlse.astype(np.float64)
    dout = cotangents.dout.astype(np.float64)
    do, dl, _ = trial.conventions.cotangents(problem, dout, dlse, None)
    head = (None,) if problem.headless else (...,)
    do, dl = do[head], None if dl is None else dl[head]
    along: dict[str, Array | None] = {}
    for name in ("q", "k", "v", "bias", "sinks"):
        direction = directions.get(name)
        x = None if direction is None else direction.astype(np.float64)
        along[name] = x[head] if x is not None and name in "qkv" else x
    by_name: Any = {f"dd{name}": x for name, x in along.items()}
    grads = backward_twice(canonical, dense.forward(canonical)[2], do, dl, **by_name)
    model = trial.rounding
    bounds = second_order_bounds(canonical, problem.q.dtype, model, do, dl, along)
    out = bounds.pop("o")
    allowed = {f"{SECOND}d{name}": x for name, x in bounds.items()}
    allowed[f"{SECOND}dout"] = out[0] if problem.headless else out
    exact: dict[str, Any] = {f"{SECOND}d{n}": getattr(grads, n) for n in directions}
    exact[f"{SECOND}dout"] = grads.dout
    most = float(finfo(problem.q.dtype).max)  # what may overflow says nothing
    tolerance = {
        name: np.where(abs(x) + allowed[name] > most, np.inf, allowed[name])
        for name, x in exact.items()
    }
    return worst_by_name(results, exact, tolerance)
