"""Rules about memory: inputs, views, and state between calls [15]."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from npattn.problem import Cotangents, Problem
from npattn.problem.arrays import Array
from npattn.testing.adapters.base import ImplementationError, Results
from npattn.testing.cases.recipe import VIEWS, Recipe, repeat_for_view, same_bits
from npattn.testing.comparison import Comparison
from npattn.testing.rules.register import keeps_nothing, rule, sampling
from npattn.testing.rules.relate import (
    Pick,
    compare_results,
    pick_problem,
    pick_queries,
    pick_samples,
    put_back_cotangents,
    relate_part,
)
from npattn.testing.rules.terms import fits_sizes
from npattn.testing.trial import Trial, Violation, WrongAnyway


@rule("inputs-unchanged", "15", level="conduct", unless=keeps_nothing, share=2)
def inputs_unchanged(trial: Trial, recipe: Recipe) -> float:
    """Inputs are never written to, forward or backward.

    But for a cache that new keys come with: it holds them behind those that it had, and nothing
    else has changed. Broken by in-place scaling of q, by masks that are inverted in place, by new
    keys that are written a slot late.
    """
    f = trial.implementation
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    with f.framework.allowing(problem.q.dtype):
        inputs, cotangent_arrays = f.inputs(problem), f.give_cotangents(problem, cotangents)
        passed = inputs | {"dout" if n == "o" else f"d{n}": x for n, x in cotangent_arrays.items()}
        before = {name: f.framework.take(x) for name, x in passed.items()}
        f.forward(problem, inputs=inputs)
        if trial.gradients:
            f.gradients(problem, cotangents, inputs=inputs, given=cotangent_arrays)
        after = {name: f.framework.take(x) for name, x in passed.items()}
    written = f.inputs_after(problem)
    for name, old in before.items():
        if name in written:
            _check_cache(name, written[name], after[name], problem, cotangents)
        elif old.tobytes() != after[name].tobytes():
            raise Violation(f"{name} was written to", problem, cotangents, "change")
    return 0.0


def _check_cache(
    name: str, want: Array, got: Array, problem: Problem, cotangents: Cotangents
) -> None:
    """Raise Violation if a cache, of any shape, does not hold its keys and the new ones alone."""
    zero = want.dtype.type(0)  # turned by a quarter, 0 may have either sign
    wrong = (want + zero).view(np.uint8) != (got + zero).view(np.uint8)
    if wrong.any():
        wide = wrong.reshape(*want.shape, -1).any(-1)
        first = [int(n) for n in np.argwhere(wide)[0]]
        text = (
            f"{name} is not the cache with new keys behind those of each sequence: "
            f"{int(wide.sum())} numbers differ, the first at {first} is {got[tuple(first)]!s}, "
            f"must be {want[tuple(first)]!s}"
        )
        raise Violation(text, problem, cotangents, "change")


def _views(trial: Trial) -> tuple[str, ...]:
    return tuple(view for view in VIEWS if view in trial.space.structure)


def _problem_for_view(trial: Trial, recipe: Recipe) -> tuple[Problem, Cotangents]:
    problem = trial.problem(recipe)
    return repeat_for_view(recipe, problem, trial.cotangents(recipe, problem))


@rule(
    "views",
    "15",
    level="conduct",
    share=2,
    unless=lambda t: None if _views(t) else "refuses every view that is not contiguous",
    draw=lambda t: {"force": {"view": _views(t)}},
    alters=True,
)
def views(trial: Trial, recipe: Recipe) -> float:
    """The memory layout of arrays does not matter: transposed, stepped, expanded, reversed.

    Callers pass slices and transposed arrays, whose numbers are the same. Broken by kernels that
    assume strides, and by plans that are cached by shape alone.
    """
    problem, cotangents = _problem_for_view(trial, recipe)
    # A plan made for contiguous arrays must not be reused; if those are wrong too, other rules
    # report it.
    contiguous = trial.results(problem, cotangents)
    viewed = trial.results(problem, cotangents, recipe.view)
    if not _changes(contiguous, viewed):
        return 0.0
    comparisons = trial.against_oracle(problem, cotangents, recipe.view)
    try:
        return trial.check(comparisons, problem, cotangents)
    except Violation as err:
        err.view = recipe.view
        raise


def _changes(old: Results, new: Results) -> list[str]:
    """Names of the results that have other bits."""
    return [n for (n, x), (_, y) in zip(old.pairs, new.pairs, strict=True) if not same_bits(x, y)]


@rule("repeatable", "15", level="conduct")
def repeatable(trial: Trial, recipe: Recipe) -> float | None:
    """Two calls with the same problem give the same bits, whatever is called between them.

    A result is a function of the arguments alone. Broken by races, by state that is kept between
    calls, by dropout that is not passed.
    """
    problem, twin = trial.problem(recipe), replace(recipe, seed=recipe.seed + 1)
    if trial.skips(twin, "repeatable"):
        return None
    cotangents, other = trial.cotangents(recipe, problem), trial.problem(twin)
    first = trial.results(problem, cotangents)
    call = CallArguments(other, trial.cotangents(twin, other), "contiguous")
    second = trial.results(*call)
    same = {
        name
        for (name, x), (_, y) in zip(first.pairs, second.pairs, strict=True)
        if x.size and np.isfinite(x).all() and same_bits(x, y)
    }
    _check_stale_results(trial, same, CallArguments(problem, cotangents, "contiguous"), call)
    _check_kept_results(trial, problem, cotangents, dict(first), other)
    # A lone forward between them: a mistake of every n-th call must not meet the same call.
    again = trial.implementation.forward(problem)
    # Nor may it depend on the call before: the other problem, after one of other sizes.
    trial.implementation.forward(trial.problem(trial.space.base()))
    for (name, old), (_, new) in [
        *zip(second.pairs, trial.results(*call).pairs, strict=True),
        *zip(first.pairs, again.pairs, strict=False),  # the gradients come later
        *zip(first.pairs, trial.results(problem, cotangents).pairs, strict=True),
    ]:
        if not same_bits(old, new):
            gap = float(np.max(abs(old.astype(float) - new.astype(float)), initial=0))
            text = f"{name} differs by {gap:.3g} between two calls with the same arrays"
            raise Violation(text, problem, cotangents, "bits")
    return 0.0


def _check_stale_results(
    trial: Trial, same: set[str], earlier: CallArguments, call: CallArguments
) -> None:
    """Check that results with the bits of an earlier call are not left over from it.

    They are if those of the earlier call were right, these are wrong, and the same arrays give
    other results in another shape. What is wrong in any shape is left to other rules.
    """
    compared = trial.against_oracle(*earlier) if same else {}
    correct = {name for name, c in compared.items() if c.passed} & same
    if not correct:
        return
    comparisons = trial.against_oracle(*call)
    wrong = {n: c for n, c in comparisons.items() if n in correct and not c.passed}
    if wrong and _differs_in_another_shape(trial, trial.results(*call), call, wrong):
        trial.check(wrong, call.problem, call.cotangents)


def _differs_in_another_shape(
    trial: Trial, results: Results, call: CallArguments, names: Iterable[str]
) -> bool:
    """Return True if the same content in a larger shape has other results, by these names.

    Its first sample comes a second time, or its first query, without cotangents. Plans, buffers and
    results that are kept for one shape are of no use to another. Calls that round differently
    differ by no more than both tolerances together, whether or not they are within them.
    """
    problem, cotangents, _ = call
    picks = _repeat_first(trial, problem)
    if picks is None:
        return False
    repeat, back = picks
    larger = pick_problem(problem, [repeat])
    in_larger = trial.evaluate(larger, put_back_cotangents(cotangents, [back], larger))
    part = trial.evaluate(problem, cotangents)
    pairs = zip(
        results.pairs, trial.results(in_larger.problem, in_larger.cotangents).pairs, strict=True
    )
    try:
        for (name, x), (_, y) in pairs:
            if name in names:
                one, other = replace(in_larger, results={name: y}), replace(part, results={name: x})
                relate_part(trial, one, other, [back])
    except Violation:
        return True
    return False


def _repeat_first(trial: Trial, problem: Problem) -> tuple[Pick, Pick] | None:
    """Pick every sample, or query, and the first once more; and pick back what was there."""
    B, T = (*problem.lead, 0)[0], problem.T
    if B and fits_sizes(trial, B=B + 1):
        repeat = pick_samples(problem, np.append(np.arange(B), 0))
        return repeat, pick_samples(pick_problem(problem, [repeat]), np.arange(B))
    aligned = problem.causal or problem.window is not None or problem.score_mod is not None
    if T and not aligned and fits_sizes(trial, T=T + 1, S=problem.S):
        repeat = pick_queries(problem, np.append(np.arange(T), 0))
        return repeat, pick_queries(pick_problem(problem, [repeat]), np.arange(T))
    return None


def _check_kept_results(
    trial: Trial, problem: Problem, cotangents: Cotangents, first: dict[str, Array], other: Problem
) -> None:
    """Check that later calls change neither a returned result nor arrays saved for a backward."""
    f = trial.implementation
    if keeps_nothing(trial):
        return
    result = f.raw(problem)
    before = f.framework.take(result)
    f.forward(other)
    if not same_bits(before, f.framework.take(result)):
        raise Violation("o was written to by a later call", problem, cotangents, "bits")
    if not trial.gradients:
        return
    late = f.gradients(problem, cotangents, meanwhile=lambda: f.forward(other))
    for name, gradient in late.items():
        if not same_bits(first[name], gradient):
            text = f"{name} changes with a forward between its own forward and its backward"
            raise Violation(text, problem, cotangents, "bits")


# --- plans ----------------------------------------------------------------------------------------

# In no pool of sizes: no other rule calls with them, so that no plan for such a shape exists yet.
FRESH = ((4, 9, 14), (6, 10, 22))
OTHERS = ("float16", "bfloat16", "float32", "float64")


def _sample_fresh(trial: Trial, sizes: tuple[int, ...], **force: Any) -> dict[str, Any]:
    """Force one shape of a length in `sizes`."""
    # Plans know options by their arrays and flags, which compile more operations for this shape.
    options = trial.space.features - set(trial.space.always)
    forbid = options if trial.space.few_shapes else ()
    queries: dict[str, Any] = {} if "T" in trial.space.sizes else {"T": sizes}
    # A change of subnormals may not show.
    return sampling(*forbid, shapes=1, **queries, **force, distribution=("normal",))(trial)


@rule(
    "after-other-strides",
    "15",
    level="conduct",
    unless=lambda t: None if _views(t) else "refuses every view that is not contiguous",
    draw=lambda t: _sample_fresh(t, FRESH[0], view=_views(t)),
)
def after_other_strides(trial: Trial, recipe: Recipe) -> float | None:
    """A call gives the same result after one with the same shapes and other strides.

    The first call with a shape has arrays that are transposed, stepped, expanded or reversed, the
    second has them contiguous; then both again. Results depend on the arrays of their own call
    alone. Rule views has the two the other way round. Broken by plans and graphs that are cached
    without strides (flashinfer-ai/flashinfer#4270).
    """
    problem, cotangents = _problem_for_view(trial, recipe)
    between = CallArguments(problem, cotangents, recipe.view)
    return _check_after(trial, between, CallArguments(problem, cotangents, "contiguous"))


def _refuses_other_dtypes(trial: Trial) -> str | None:
    for dtype in _other_dtypes(trial, 0):
        plain = replace(trial.space.base(), dtype=dtype)
        try:
            trial.implementation.forward(trial.problem(plain))
        except ImplementationError:
            continue
        return None
    return "refuses every other dtype"


def _other_dtypes(trial: Trial, turn: int) -> list[str]:
    others = [dtype for dtype in OTHERS if dtype != trial.space.dtype]
    if trial.space.few_shapes:
        return others  # the first that is accepted: another compiles anew
    return others[turn % len(others) :] + others[: turn % len(others)]


@rule(
    "after-other-dtype",
    "15",
    level="conduct",
    unless=_refuses_other_dtypes,
    draw=lambda t: _sample_fresh(t, FRESH[1]),
)
def after_other_dtype(trial: Trial, recipe: Recipe) -> float | None:
    """A call gives the same result after one with the same shapes and another dtype.

    The first call with a shape is in another accepted dtype, the second in the dtype under test;
    then both again. Broken by plans, graphs and work buffers that are cached without
    the dtype, so that all calls have the precision of the first (flashinfer-ai/flashinfer#4270).
    """
    problem = trial.problem(recipe)
    call = CallArguments(problem, trial.cotangents(recipe, problem), "contiguous")
    for dtype in _other_dtypes(trial, recipe.seed):
        same = replace(recipe, dtype=dtype)
        other = trial.problem(same)
        between = CallArguments(other, trial.cotangents(same, other), "contiguous")
        try:
            trial.results(*between)
        except ImplementationError:
            continue
        return _check_after(trial, between, call)
    return None


class CallArguments(NamedTuple):
    """Arguments of `Trial.results`."""

    problem: Problem
    cotangents: Cotangents
    view: str


def _check_after(trial: Trial, between: CallArguments, call: CallArguments) -> float | None:
    """Return the worst ratio of a call that comes after another.

    Raise Violation if it is wrong, or if either gives other bits when both are repeated;
    WrongAnyway if it is as wrong in another shape, whatever came before.
    """
    other, first = trial.results(*between), trial.results(*call)
    again, second = trial.results(*between), trial.results(*call)
    same = between.problem is call.problem and not _changes(other, first)
    comparisons: list[Comparison] = []  # if the same, both are correct, or both wrong
    if not same:
        comparisons = compare_results(first, *trial.oracle(call.problem, call.cotangents))
    wrong = [c for c in comparisons if not c.passed]
    names = {c.name for c in wrong}
    if wrong and not _differs_in_another_shape(trial, first, call, names):
        raise WrongAnyway(", ".join(sorted(names)))
    messages = [str(c) for c in wrong]
    if not messages:
        changed = [(between, _changes(other, again)), (call, _changes(first, second))]
        changed = [(one, found) for one, found in changed if found]
        # What changes without another call between, rule repeatable reports.
        twice = ((found, [trial.results(*one) for _ in range(2)]) for one, found in changed)
        steady = [found for found, results in twice if not _changes(*results)]
        if changed and not steady:
            return None
        messages = [f"{name} has other bits the second time" for found in steady for name in found]
    if messages:
        err = Violation(
            "\n".join(messages), call.problem, call.cotangents, "after", before=between.problem
        )
        err.view = between.view
        raise err
    return max((c.ratio for c in comparisons), default=0.0)
