"""When a failing problem passes: the contrast between problems that fail and those that do not.

The smallest failing problem is changed one thing at a time: each option off, each size over the
edges of tiles, the heads, the values of the scale. The simplest condition that separates what
fails from what passes is tried on fresh problems, and said only if it holds there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from npattn.options import OPTIONS
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import DISTRIBUTIONS, VIEWS, Recipe
from npattn.testing.cases.space import Space
from npattn.testing.diagnosis.predicates import WITNESSES, Predicate, fit, size_of
from npattn.testing.diagnosis.verdicts import Exhausted, Verdicts
from npattn.testing.report.outcome import Outcome
from npattn.testing.trial import Trial

__all__ = ["contrast", "fresh_recipes"]

FRESH = 6
"""Number of fresh problems on each side of a condition."""
MOST_THAT_FAIL = 2 / 3
"""Share of fresh problems that must fail where the condition holds: luck lets some pass."""
PLAIN = Recipe()

# One key, or one number in it, often leaves nothing that could be wrong: S and D begin at 2.
FIRST = {
    "B": (1, 3),
    "T": (1, 3, 4, 16, 33, 128, 129),
    "S": (3, 4, 16, 33, 128, 129),
    "D": (3, 4, 8, 16, 33, 64, 128),
    "E": (1, 3, 8, 16, 33, 64, 128),
}
"""Sizes that are tried first."""
LENGTHS = (2, 5, 6, 7, 8, 12, 15, 17, 24, 31, 32, 48, 63, 64, 65, 96, 127, 160, 257)
WIDTHS = (2, 5, 6, 7, 12, 15, 17, 24, 31, 32, 40, 48, 63, 65, 72, 80, 96, 127, 129, 160, 256)
MORE = {"B": (2, 4, 5), "T": LENGTHS, "S": LENGTHS, "D": WIDTHS, "E": WIDTHS}
"""Sizes that are tried where the first differ."""
HEADS = ((1, 1), (2, 1), (2, 2), (4, 2))
MORE_HEADS = ((3, 1), (3, 3), (4, 1), (6, 2), (6, 3), (8, 2), (8, 4), (8, 8))
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
"""Sizes of groups that are tried if that of the failing problem is larger than 4."""
FRESH_SIZES = (2, 3, 5, 8, 13, 16, 17, 24, 32, 33, 48, 64)


def contrast(trial: Trial, outcome: Outcome) -> str:
    """Describe what separates problems on which a rule fails from those on which it passes.

    Parameters
    ----------
    trial : Trial
        The one that gave the outcome, with its space narrowed to what is accepted.
    outcome : Outcome
        A failed one, with the recipe of its smallest failing problem.

    Returns
    -------
    str
        "fails only where S is no multiple of 16", "fails only with mask and causal together",
        "fails only at scale = 0"; "" if nothing tells: the rule fails on whatever is tried, on one
        problem only, or for reasons that no single condition describes. Also "" where a framework
        compiles each shape: an answer takes about 70 shapes, and so minutes.
    """
    if outcome.sampled is None or outcome.status not in ("failed", "error"):
        return ""
    if trial.space.few_shapes:
        return ""
    verdicts = Verdicts(trial.fresh(), outcome)
    try:
        return _describe(verdicts, outcome.sampled) if verdicts.fails(outcome.sampled) else ""
    except Exhausted:
        return ""


def _describe(verdicts: Verdicts, recipe: Recipe) -> str:
    base, needed = _reduce(verdicts, recipe)
    scale = _scale_in_words(verdicts, base) if "scale" in needed else ""
    inputs = _inputs_in_words(verdicts, base) if base.distribution != "normal" else ""
    if base.view != "contiguous":
        views = [x for x in VIEWS if verdicts.fails(replace(base, view=x))]
        return f"fails only on views: {', '.join(views)}" if _view_holds(verdicts, base) else ""
    condition = _condition(verdicts, base)
    if condition is None and not (
        needed and _holds(verdicts, _fresh_by_option(verdicts.trial.space, base, needed))
    ):
        return f"fails only on inputs of {inputs}" if inputs and not needed else ""
    return _phrase(needed, scale, inputs, condition)


def _phrase(needed: Sequence[str], scale: str, inputs: str, condition: Predicate | None) -> str:
    """Compose "fails only with causal at scale = 0 where T ≠ S"."""
    options = [n for n in needed if n != "scale" or not scale]
    heads = condition is not None and "K" in condition.letters and "=" not in condition.text[:3]
    with_ = [*options, condition.text] if condition and heads else options
    text = f" with {' and '.join(with_)}" if with_ else ""
    text += " together" if len(options) > 1 and with_ == options else ""
    text += f" at {scale}" if scale else ""
    text += f" on inputs of {inputs}" if inputs else ""
    return f"fails only{text}" + (f" where {condition.text}" if condition and not heads else "")


# --- what the failure needs -----------------------------------------------------------------------


def _reduce(verdicts: Verdicts, recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Turn off whatever the failure does without; return what is left, and options it needs.

    An option without which the rule is not asked is neither.
    """
    plainer: dict[str, Any] = {"view": "contiguous", "broadcast": False, "distribution": "normal"}
    plainer |= {name: getattr(PLAIN, name) for name in options_on(recipe)}
    for name, value in plainer.items():
        changed = replace(recipe, **{name: value})
        recipe = changed if changed != recipe and verdicts.fails(changed) else recipe
    off = {name: replace(recipe, **{name: plainer[name]}) for name in options_on(recipe)}
    return recipe, [name for name, without in off.items() if verdicts.fails(without) is False]


def _scale_in_words(verdicts: Verdicts, base: Recipe) -> str:
    """Return the values of the scale at which it fails, if they are those of one sign or 0."""
    found: dict[int, set[bool | None]] = {-1: set(), 0: set(), 1: set()}
    for x in (*OPTIONS["scale"].examples, -2.0, -0.25, 0.25, 3.0):
        found[int(np.sign(x))].add(verdicts.fails(replace(base, scale=x)))
    failing = tuple(sign for sign, results in found.items() if results == {True})
    if any(len(results) > 1 for results in found.values()):
        return ""
    words = {(0,): "scale = 0", (-1,): "scale < 0", (-1, 0): "scale ≤ 0", (1,): "scale > 0"}
    return words.get(failing, "")


def _inputs_in_words(verdicts: Verdicts, base: Recipe) -> str:
    """Return the distributions on which it fails, three at most by name, if it passes on others."""
    results = {n: verdicts.fails(replace(base, distribution=n)) for n in DISTRIBUTIONS}
    names = [name for name, fails in results.items() if fails]
    passing = sum(fails is False for fails in results.values())
    if results["normal"] is not False or passing < WITNESSES:
        return ""  # on normal inputs the rule is not asked, so that nothing can be said of them
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f'"{name}"' for name in names[:3]) + more


def _view_holds(verdicts: Verdicts, base: Recipe) -> bool:
    """Return True if problems of other sizes fail on the view, and none on contiguous arrays."""
    fresh = fresh_recipes(verdicts.trial.space, base, {})
    pairs = ((r, replace(r, view="contiguous")) for r in fresh)
    return _holds(verdicts, (x for r, plain in pairs for x in ((r, True), (plain, False))))


# --- the sizes that it needs ----------------------------------------------------------------------


def _condition(verdicts: Verdicts, base: Recipe) -> Predicate | None:
    """Return the simplest condition on the sizes that separates failures, on fresh problems too."""
    points = _vary_sizes(verdicts, base)
    if all(points.values()):
        return None
    for predicate in fit(list(points.items())):
        if _holds(verdicts, _fresh_by_size(verdicts.trial.space, base, predicate, points)):
            return predicate
    return None


def _vary_sizes(verdicts: Verdicts, base: Recipe) -> dict[Recipe, bool]:
    """Try each size alone, then T = S and D = E; more of those that make a difference.

    Where it passes at every other size, more of them would tell nothing.
    """
    points: dict[Recipe, bool] = {base: True}
    space = verdicts.trial.space

    def vary(changes: Iterable[dict[str, Any]]) -> set[bool]:
        """Add a point for each change; return the verdicts on those that are asked."""
        recipes = [replace(base, **change) for change in changes]
        asked = {recipe: verdicts.fails(recipe) for recipe in recipes if recipe != base}
        points.update({recipe: fails for recipe, fails in asked.items() if fails is not None})
        return {fails for fails in asked.values() if fails is not None}

    for letter in FIRST:
        first = space.sizes.get(letter, FIRST[letter])
        found = vary(_with_size(base, letter, n) for n in first)
        if False in found:
            if True in found:
                vary(_with_size(base, letter, n) for n in MORE[letter])
            known = 0
            while (n := _between(points, base, letter)) and len(points) > known:
                known = len(points)  # no more at the next turn if the rule is not asked of n
                vary([_with_size(base, letter, n)])
    if base.lead is not None and False in vary({"H": H, "K": K} for H, K in HEADS):
        vary({"H": H, "K": K} for H, K in MORE_HEADS)
        if size_of(base, "G") > 4:
            vary({"H": K * G, "K": K} for K in {2, base.K} for G in GROUPS)
    if False in vary({"T": n, "S": n} for n in (3, 16, 33)):
        vary({"T": n, "S": n} for n in (5, 17, 32, 48))
    if False in vary({"D": n, "E": n} for n in (3, 16, 64)):
        vary({"D": n, "E": n} for n in (8, 24, 33, 40, 80))
    return points


def _with_size(base: Recipe, letter: str, size: int) -> dict[str, Any]:
    if letter != "B":
        return {letter: size}
    return {"lead": (size, *base.lead[1:])} if base.lead else {}


def _between(points: dict[Recipe, bool], base: Recipe, letter: str) -> int:
    """Return a size halfway between those that pass and those that fail; 0 if none is left."""
    alone = {}
    for recipe, fails in points.items():
        size = size_of(recipe, letter)
        if replace(base, **_with_size(base, letter, size)) == recipe:
            alone[size] = fails
    sizes = sorted(alone)
    gaps = [(a, b) for a, b in pairwise(sizes) if alone[a] != alone[b]]
    return sum(gaps[0]) // 2 if len(gaps) == 1 and gaps[0][0] + 1 < gaps[0][1] else 0


# --- fresh problems -------------------------------------------------------------------------------


def _holds(verdicts: Verdicts, fresh: Iterable[tuple[Recipe, bool]]) -> bool:
    """Return True if fresh problems fail about where they should, and nowhere else."""
    outcomes: dict[bool, list[bool]] = {True: [], False: []}
    for recipe, should in fresh:
        fails = verdicts.fails(recipe) if len(outcomes[should]) < FRESH else None
        if fails is not None:
            outcomes[should].append(fails)
    enough = all(len(found) >= FRESH // 2 for found in outcomes.values())
    share = sum(outcomes[True]) / max(len(outcomes[True]), 1)
    return enough and not any(outcomes[False]) and share >= MOST_THAT_FAIL


def _fresh_by_option(
    space: Space, base: Recipe, needed: Sequence[str]
) -> Iterator[tuple[Recipe, bool]]:
    """Yield problems of other sizes, that should fail, and without one option, that should not."""
    for n, recipe in enumerate(fresh_recipes(space, base, {})):
        name = needed[n % len(needed)]
        yield recipe, True
        yield replace(recipe, **{name: getattr(PLAIN, name)}), False


def _fresh_by_size(
    space: Space, base: Recipe, predicate: Predicate, points: Iterable[Recipe]
) -> Iterator[tuple[Recipe, bool]]:
    """Yield problems of other sizes, as many for which the predicate holds as others."""
    tried = {x: tuple({size_of(r, x) for r in points}) for x in predicate.letters}
    left = {True: 2 * FRESH, False: 2 * FRESH}
    for recipe in fresh_recipes(space, base, tried, 40 * FRESH):
        holds = predicate.holds(recipe)
        if left[holds]:
            left[holds] -= 1
            yield recipe, holds


def fresh_recipes(
    space: Space, base: Recipe, tried: dict[str, tuple[int, ...]], count: int = 2 * FRESH
) -> Iterator[Recipe]:
    """Yield recipes that differ from the base in several sizes and in their contents."""
    rng = np.random.default_rng([base.seed, 17])
    for n in range(count):
        changes: dict[str, Any] = {"seed": base.seed + 4 * int(rng.integers(1, 2**16))}
        for letter in "TSDE":
            sizes = space.sizes.get(letter, tried.get(letter, FRESH_SIZES))
            changes[letter] = int(rng.choice(sizes))
        if base.lead is not None and not set("HK") & set(space.sizes):
            K, group = (int(rng.choice(tried.get(n, (1, 2, 3)))) for n in "KG")
            changes |= {"K": K, "H": K * group if "K < H" in space.structure else K}
        if base.lead and "B" not in space.sizes:
            changes["lead"] = (int(rng.integers(1, 4)), *base.lead[1:])
        if n % 3 == 0:  # equal sizes are rare by chance
            changes |= {"S": changes["T"], "E": changes["D"]}
        # Half of them keep what the predicate does not read, so that one thing is changed.
        if n % 2:
            changes |= {x: getattr(base, x) for x in "TSDE" if x not in tried}
        if changes["T"] > changes["S"] and "T > S" not in space.structure:
            changes |= {"T": changes["S"], "S": changes["T"]}
        yield replace(base, **changes)
