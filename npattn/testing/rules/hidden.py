"""Rules about hidden positions, which do not matter, and about NaN [5, 8, 10]."""

from __future__ import annotations

from typing import cast

import numpy as np

from npattn.oracle.api import evaluate
from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array, finfo
from npattn.testing.bounds.free_elements import free_elements
from npattn.testing.bounds.ulp import real
from npattn.testing.cases.recipe import Recipe
from npattn.testing.comparison import Comparison, compare_arrays
from npattn.testing.rules.estimates import forward_only
from npattn.testing.rules.register import (
    HIDES,
    Check,
    first,
    force_hiding,
    hidden_keys_matter,
    no_nan_in_o,
    nonempty,
    nothing_hides,
    rule,
    sampling,
)
from npattn.testing.rules.relate import compare_results
from npattn.testing.rules.terms import keep_rows
from npattn.testing.trial import GRADIENTS, Trial, Violation

QUANTIZED = 32.0
"""Size of garbage beside numbers that share a factor with it, and must not vanish."""


def _hidden_keys(trial: Trial, recipe: Recipe, problem: Problem) -> tuple[Array, Array] | None:
    """Choose keys hidden from some queries, (n,); return them and the rows that see one of them."""
    visible = trial.visible(problem)
    if visible.size == 0:
        return None
    rows = tuple(range(visible.ndim - 1))
    never, partly = ~visible.any(axis=rows), ~visible.all(axis=rows)
    rng = np.random.default_rng([recipe.seed, 7])
    if never.any() and rng.random() < 0.5:
        keys = np.flatnonzero(never)
    elif partly.any():
        keys = rng.choice(np.flatnonzero(partly), size=1)
    else:
        return None
    return keys, np.asarray(visible[..., keys].any(-1))


def _poison(problem: Problem, keys: Array, where: str, values: Array) -> Problem:
    """Overwrite k, v or both at these keys."""
    k, v = problem.k.copy(), problem.v.copy()
    if "k" in where:
        k[..., keys, :] = np.resize(values, k.shape[-1]).astype(k.dtype)
    if "v" in where:
        v[..., keys, :] = np.resize(values[::-1], v.shape[-1]).astype(v.dtype)
    return problem.replace(k=k, v=v)


def _without_gates_of_0(problem: Problem) -> Problem:
    """Replace gates of 0 by 1: kernels may skip what they gate, and a NaN in it [16]."""
    if problem.gate is None or (problem.gate != 0).all():
        return problem
    return problem.replace(gate=np.where(problem.gate == 0, 1, problem.gate))


@rule("hidden-finite", "5, 10", unless=first(nothing_hides, hidden_keys_matter), draw=force_hiding)
def hidden_finite(trial: Trial, recipe: Recipe) -> float | None:
    """Finite garbage in hidden keys and values changes no bit of the rows it is hidden from.

    Hidden positions leave the softmax, so that no result reads them; anything multiplied by a
    weight of exactly 0 adds exactly 0. Gradients are compared with cotangents that are 0 on the
    rows to which the garbage is visible. Integers and quantized inputs have a factor for whole
    blocks of keys, hidden ones too: with them results stay within their tolerance. Broken by
    additive masks of −1e4, by a row maximum over hidden scores, by an off-by-one window or causal
    edge.
    """
    problem = trial.problem(recipe)
    choice = _hidden_keys(trial, recipe, problem)
    if choice is None:
        return None
    keys, exposed = choice
    if "mean" in trial.conventions.empty_results:
        exposed = exposed | trial.empty(problem)  # a mean of all values, hidden ones too
    rng = np.random.default_rng([recipe.seed, 8])
    size = min(1e3, float(finfo(recipe.dtype).max) / 64)
    size = size if trial.implementation.quantized is None else QUANTIZED
    # Garbage, at most twice as large, with which no visible score overflows: in float16 one may;
    # the row is NaN then, and so is dq, for 0 · NaN is NaN.
    sums = np.broadcast_to(abs(problem.q).astype(np.float64).sum(-1), exposed.shape)
    scale = max(1.0, abs(cast(float, problem.scale)))
    reach = max(1.0, float(sums[exposed].max(initial=0)) * scale)
    size = min(size, float(finfo(problem.q.dtype).max) / 4 / reach)
    garbage = size * (1 + rng.random(7)) * rng.choice([-1, 1], 7)
    changed = _poison(problem, keys, str(rng.choice(["k", "v", "kv"])), garbage)
    changed = trial.implementation.fit(changed)
    quiet = keep_rows(trial.cotangents(recipe, problem), ~exposed)
    if trial.rounding.integers is not None or trial.implementation.quantized is not None:
        return trial.check(trial.against_oracle(changed, quiet), changed, quiet)
    before = trial.results(problem, quiet)
    after = trial.results(changed, quiet)
    for (name, old), (_, new) in zip(before.pairs, after.pairs, strict=True):
        if (
            name in ("o", "lse", "weights", "max_score")
            and old.shape[: exposed.ndim] == exposed.shape
        ):
            old, new = old[~exposed], new[~exposed]
        change = _describe_change(old, new)
        if change is not None:
            at = ", ".join(map(str, keys[:4]))
            text = f"{name} {change} where finite garbage at key {at} is hidden"
            raise Violation(text, changed, quiet, "moves", before=problem)
    return 0.0


def _describe_change(old: Array, new: Array) -> str | None:
    old, new = real(old).astype(np.float64), real(new).astype(np.float64)  # exact; 0 is −0
    if old.shape == new.shape and np.array_equal(old, new, equal_nan=True):
        return None
    with np.errstate(invalid="ignore"):
        gap = float(np.nanmax(abs(old - new), initial=0))
    return "becomes NaN" if (np.isnan(new) & ~np.isnan(old)).any() else f"moves by {gap:.3g}"


def _negligible(trial: Trial, problem: Problem, keys: Array) -> bool:
    """Return True if a visible one of these keys has a weight that may be stored as 0.

    An implementation may leave out its value, or multiply it.
    """
    weights = evaluate(problem, trial.conventions, engine="dense").weights
    if problem.dropout_mask is not None:
        weights = weights * problem.dropout_mask
    least = max(float(finfo(problem.q.dtype).tiny), float(finfo(np.float32).tiny))
    return bool((trial.visible(problem)[..., keys] & (weights[..., keys] < least)).any())


def _hidden_nan(where: str) -> Check:
    """Return the check that NaN at hidden keys, values or both changes no other result."""
    arrays = {"k": "keys", "v": "values", "kv": "keys and values"}[where]

    def check(trial: Trial, recipe: Recipe) -> float | None:
        """Return the worst ratio with garbage at hidden keys; None if none can be put there."""
        problem = trial.problem(recipe)
        choice = _hidden_keys(trial, recipe, problem)
        if choice is None:
            return None
        rng = np.random.default_rng([recipe.seed, 9])
        keys, exposed = choice
        if hidden_keys_matter(trial) is not None:
            return _check_gradients_behind_fill(trial, recipe, where)
        # Nothing is required of a visible inf, so it is put only where it is hidden from all.
        values = [np.nan] if exposed.any() else [np.nan, np.inf, -np.inf]
        if "v" in where and _negligible(trial, problem, keys):
            return None
        poisoned = _poison(problem, keys, where, np.array([float(rng.choice(values))]))
        poisoned = _without_gates_of_0(poisoned)
        cotangents = trial.cotangents(recipe, poisoned)
        return trial.check(trial.against_oracle(poisoned, cotangents), poisoned, cotangents)

    check.__doc__ = f"""NaN and inf at hidden {arrays} change nothing, in o, lse and gradients.

    Hidden positions leave the softmax: they are not multiplied by 0, which would make NaN of
    them. A row to which the NaN is visible is non-finite, and so are its gradients; no other is.
    Where hidden scores become a number, only the gradients of a forward without NaN are asked.
    Broken by weights of 0 times v, by additive masks, by gradients masked after the product.
    """
    return check


def _check_gradients_behind_fill(trial: Trial, recipe: Recipe, where: str) -> float | None:
    """Compare gradients with a NaN at keys that no query sees, if the forward is as without it.

    A convention gives hidden keys a number for a score. If that leaves them no weight, and the
    implementation's forward replaces what is there, its backward has to do so too.
    """
    problem = trial.problem(recipe)
    weights = evaluate(problem, trial.conventions, engine="dense").weights
    rows = tuple(range(weights.ndim - 1))
    keys = np.flatnonzero(~(trial.visible(problem).any(rows) | (weights != 0).any(rows)))
    if not keys.size:
        return None
    cotangents = trial.cotangents(recipe, problem)
    exact, allowed = trial.oracle(problem, cotangents)
    poisoned = _poison(problem, keys, where, np.array([np.nan]))

    # The forward pass alone first: a framework would compile the gradients too.
    forward = trial.implementation.forward(poisoned)
    if not all(c.passed for c in compare_results(forward, exact, allowed)):
        return None  # as the convention lets it be
    comparisons = compare_results(trial.results(poisoned, cotangents), exact, allowed)
    if not all(c.passed for c in comparisons if c.name not in GRADIENTS):
        return None
    gradients = [c for c in comparisons if c.name in GRADIENTS]
    wrong = "\n".join(str(c) for c in gradients if not c.passed)
    worst = max((c.ratio for c in gradients), default=0.0)
    if wrong:
        raise Violation(wrong, poisoned, cotangents, "moves", worst, before=problem)
    return worst


for _where in ("k", "v", "kv"):
    rule(
        f"hidden-nan-{_where}",
        "10",
        level="non-finite",
        # Where hidden keys matter, gradients may still not be reached.
        unless=first(nothing_hides, lambda t: None if t.gradients else hidden_keys_matter(t)),
        draw=force_hiding,
        alters=True,
    )(_hidden_nan(_where))


def _nan_query(trial: Trial, recipe: Recipe) -> tuple[Problem, Cotangents, Array]:
    """Put a NaN into one query; return the problem, cotangents and its rows, (..., H, T)."""
    problem = trial.problem(recipe)
    rng = np.random.default_rng([recipe.seed, 10])
    q = problem.q.copy()
    at = tuple(int(rng.integers(n)) for n in q.shape[:-1])
    q[(*at, int(rng.integers(q.shape[-1])))] = np.nan
    poisoned = _without_gates_of_0(problem.replace(q=q))
    return poisoned, trial.cotangents(recipe, poisoned), np.asarray(np.isnan(q).any(-1))


FORWARD: tuple[str, ...] = ("o", "lse")


def _no_late_keys(trial: Trial) -> str | None:
    if "mask" not in trial.space.features or "S" in trial.space.sizes:
        return "has no mask, or sizes of its own"
    return None if "T != S" in trial.space.structure else "needs T ≠ S"


@rule(
    "late-keys",
    "5, 8",
    unless=first(_no_late_keys, hidden_keys_matter),
    draw=sampling(
        *("softcap", "score_mod", "scale", "bias"),
        mask=("first tile",),
        distribution=("low",),
        S=(65, 129, 257),
    ),
)
def late_keys(trial: Trial, recipe: Recipe) -> float:
    """Scores far below 0 are right after whole tiles of hidden keys.

    The running maximum of such a row is still −inf, and not 0. Broken by an online softmax that
    stores the 0 which guards −inf − −inf (Dao-AILab/flash-attention#2082).
    """
    problem = trial.problem(recipe)
    comparisons = trial.agreement(recipe)
    return trial.check(comparisons, problem, trial.cotangents(recipe, problem, weights=True))


@rule(
    "nan-value",
    "10",
    level="non-finite",
    unless=hidden_keys_matter,
    draw=sampling(*HIDES, "bias"),
    alters=True,
)
def nan_value(trial: Trial, recipe: Recipe) -> float | None:
    """A NaN in one column of a visible value makes NaN of that column of o, and of no other.

    o is a sum of values, column by column. Broken by a guard that clears whole values, or that
    spreads a NaN over them, and by a check of v that skips non-finite values.
    """
    problem = trial.problem(recipe)
    if problem.v.size == 0:
        return None
    rng = np.random.default_rng([recipe.seed, 12])
    key = rng.integers(problem.S, size=1)
    if _negligible(trial, problem, key):
        return None
    v = problem.v.copy()
    v[..., key, int(rng.integers(problem.E))] = np.nan
    poisoned = _without_gates_of_0(problem.replace(v=v))
    cotangents = trial.cotangents(recipe, poisoned)
    exact, allowed = forward_only(trial).oracle(poisoned, cotangents)
    results = trial.implementation.forward(poisoned)
    compared = compare_results(results, {n: exact[n] for n in FORWARD}, allowed)
    return trial.check({c.name: c for c in compared}, poisoned, cotangents)


@rule("nan-query", "10", level="non-finite", unless=no_nan_in_o, draw=nonempty)
def nan_query(trial: Trial, recipe: Recipe) -> float:
    """A NaN query stays NaN: its o and lse are non-finite if it has a visible key.

    A NaN says that something went wrong before; turning it into a number hides that.
    Broken by nan_to_num after the softmax, by a maximum that skips NaN and finds an empty row.
    """
    poisoned, cotangents, rows = _nan_query(trial, recipe)
    exact = trial.exact(poisoned, cotangents)
    free = free_elements(poisoned, trial.conventions)
    comparisons: dict[str, Comparison] = {}
    for name, result in trial.results(poisoned, cotangents).pairs:
        if name in FORWARD and result.shape == exact[name].shape:
            query = rows[..., None] if name == "o" else rows
            stays = query & ~np.isfinite(exact[name]) & ~free.get(name, np.False_)
            tolerance = np.where(stays, 0.0, np.inf)  # none makes a number of a NaN
            comparison = compare_arrays(name, result, exact[name], tolerance)
            comparisons[f"{name}{len(comparisons)}"] = comparison
    return trial.check(comparisons, poisoned, cotangents)


@rule("nan-query-alone", "10", level="non-finite", draw=nonempty, alters=True)
def nan_query_alone(trial: Trial, recipe: Recipe) -> float:
    """A NaN query reaches no other row, and no gradient of a key that is hidden from it.

    Nor does it reach its own row if that is fully masked. Broken by weights of 0 times NaN: in
    the gradient of k, which multiplies dS by the query, and in that of v.
    """
    poisoned, cotangents, _ = _nan_query(trial, recipe)
    exact, allowed = trial.oracle(poisoned, cotangents)
    tolerances = {
        n: np.where(np.isfinite(exact[n]), x, np.inf) for n, x in allowed.items() if n in exact
    }
    compared = compare_results(trial.results(poisoned, cotangents), exact, tolerances)
    return trial.check({str(i): c for i, c in enumerate(compared)}, poisoned, cotangents)
