"""When a failing problem passes: the contrast between problems that fail and those that do not.

The smallest failing problem is changed one thing at a time: each option off, each size over the
edges of tiles, the heads, the values of the scale. The simplest condition that separates what
fails from what passes is tried on fresh problems, and said only if it holds there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from npattn.problem.options import OPTIONS
from npattn.testing.cases.distributions import DISTRIBUTIONS
from npattn.testing.cases.options import GATES
from npattn.testing.cases.pairwise import options_on
from npattn.testing.cases.recipe import VIEWS, Recipe
from npattn.testing.cases.space import Space
from npattn.testing.diagnosis.predicates import WITNESSES, Predicate, fit, size_of
from npattn.testing.diagnosis.statement import NOTHING, SIGNS, Contrast, state, state_views
from npattn.testing.diagnosis.verdicts import Exhausted, Verdicts
from npattn.testing.report.outcome import Outcome
from npattn.testing.trial import Trial

__all__ = ["Contrast", "contrast", "describe_contrast", "fresh_recipes"]

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
TIED = {"T != S": ("T", "S"), "E != D": ("D", "E")}
"""Sizes that are varied together where a space has them equal."""
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
"""Sizes of groups to try if the failing problem has groups of more than 4 heads."""
FRESH_SIZES = (2, 3, 5, 8, 13, 16, 17, 24, 32, 33, 48, 64)
VALUES: dict[str, tuple[Any, ...]] = {
    "mask": ("matrix", "first tile", "padding"),
    "causal": (True,),
    "window": ((1, 0), (0, 1), (3, None)),
    "bias": ("matrix", "-inf padding"),
    "scale": (0.5, -0.75, 0.0),
    "softcap": (2.0,),
    "score_mod": ("distance",),
    "sinks": (True,),
    "dropout": (0.5,),
    "gate": tuple(GATES)[:1],
}
"""Values of each option that are tried in place of another."""


def contrast(trial: Trial, outcome: Outcome) -> Contrast:
    """Describe what separates problems on which a rule fails from those on which it passes.

    Parameters
    ----------
    trial : Trial
        The one that gave the outcome, with its space narrowed to what is accepted.
    outcome : Outcome
        A failed one, with the recipe of its smallest failing problem.

    Returns
    -------
    Contrast
        "fails only where S is no multiple of 16", "fails only with a mask and causal together",
        "fails only with a mask or a bias", "fails only at scale = 0"; without a text if nothing
        tells: the rule fails on whatever is tried, on one problem only, or for reasons that no
        single condition describes. Also where a framework compiles each shape: an answer takes
        about 70 shapes, and so minutes.
    """
    if outcome.sampled is None or outcome.status not in ("failed", "error"):
        return NOTHING
    if trial.space.few_shapes:
        return NOTHING
    return describe_contrast(Verdicts(trial.fresh(), outcome), outcome.sampled)


def describe_contrast(verdicts: Verdicts, recipe: Recipe) -> Contrast:
    """Describe what separates problems that fail, as this recipe does, from those that pass."""
    try:
        return _describe(verdicts, recipe) if verdicts.fails(recipe) else NOTHING
    except Exhausted:
        return NOTHING


def _describe(verdicts: Verdicts, recipe: Recipe) -> Contrast:
    base, needed = _reduce(verdicts, recipe)
    if base.view != "contiguous":
        views = [x for x in VIEWS if verdicts.fails(replace(base, view=x))]
        return state_views(views) if _view_holds(verdicts, base) else NOTHING
    signs = _signs(verdicts, base) if "scale" in needed else ()
    inputs = _inputs(verdicts, base) if base.distribution != "normal" else []
    forms = {tuple(needed): base, **(_in_place(verdicts, base, needed) if needed else {})}
    condition = _condition(verdicts, list(forms.values()))
    if condition is None and not (needed and _needs_options(verdicts, forms)):
        return state([()], inputs=inputs) if inputs and not needed else NOTHING
    return state([*forms], signs if len(forms) == 1 else (), inputs, condition)


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


def _in_place(
    verdicts: Verdicts, base: Recipe, needed: Sequence[str]
) -> dict[tuple[str, ...], Recipe]:
    """Return what fails with another option in place of those needed, by the options.

    Each other option is tried alone, and then in place of each that is needed.
    """
    forms: dict[tuple[str, ...], Recipe] = {}
    plain = replace(base, **{name: getattr(PLAIN, name) for name in needed})
    for name in (n for n in VALUES if n not in needed):
        alone = _first_failing(verdicts, plain, name)
        if alone is not None:
            forms[(name,)] = alone
            continue
        for own in needed if len(needed) > 1 else ():
            changed = _first_failing(verdicts, replace(base, **{own: getattr(PLAIN, own)}), name)
            if changed is not None:
                forms[tuple(name if n == own else n for n in needed)] = changed
    return forms


def _first_failing(verdicts: Verdicts, recipe: Recipe, option: str) -> Recipe | None:
    """Return the recipe with the first value of an option with which it fails."""
    values = (replace(recipe, **{option: value}) for value in VALUES[option])
    return next((changed for changed in values if verdicts.fails(changed)), None)


def _needs_options(verdicts: Verdicts, forms: Mapping[tuple[str, ...], Recipe]) -> bool:
    """Return True if fresh problems fail with the options of each form, and not without one."""
    space = verdicts.trial.space
    return all(_holds(verdicts, _fresh_by_option(space, *form[::-1])) for form in forms.items())


def _signs(verdicts: Verdicts, base: Recipe) -> tuple[int, ...]:
    """Return the signs of the scale at which it fails; () if they are no reason."""
    found: dict[int, set[bool | None]] = {-1: set(), 0: set(), 1: set()}
    for x in (*OPTIONS["scale"].examples, -2.0, -0.25, 0.25, 3.0):
        found[int(np.sign(x))].add(verdicts.fails(replace(base, scale=x)))
    failing = tuple(sign for sign, results in found.items() if results == {True})
    mixed = any(len(results) > 1 for results in found.values())
    return () if mixed or failing not in SIGNS else failing


def _inputs(verdicts: Verdicts, base: Recipe) -> list[str]:
    """Return the distributions on which it fails, if it passes on others."""
    results = {n: verdicts.fails(replace(base, distribution=n)) for n in DISTRIBUTIONS}
    passing = sum(fails is False for fails in results.values())
    if results["normal"] is not False or passing < WITNESSES:
        return []  # on normal inputs the rule is not asked, so that nothing can be said of them
    return [name for name, fails in results.items() if fails]


def _view_holds(verdicts: Verdicts, base: Recipe) -> bool:
    """Return True if problems of other sizes fail on the view, and none on contiguous arrays."""
    fresh = fresh_recipes(verdicts.trial.space, base, {})
    pairs = ((r, replace(r, view="contiguous")) for r in fresh)
    return _holds(verdicts, (x for r, plain in pairs for x in ((r, True), (plain, False))))


# --- the sizes that it needs ----------------------------------------------------------------------


def _condition(verdicts: Verdicts, forms: Sequence[Recipe]) -> Predicate | None:
    """Return the simplest condition on the sizes that separates failures, on fresh problems too.

    The first form is varied; of the others, which have other options, fresh problems must agree.
    """
    points = _vary_sizes(verdicts, forms[0])
    if all(points.values()):
        return None
    space = verdicts.trial.space
    for predicate in fit(list(points.items())):
        if all(_holds(verdicts, _fresh_by_size(space, x, predicate, points)) for x in forms):
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

    tied = {b: a + b for name, (a, b) in TIED.items() if name not in space.structure}
    for letter in (x for x in FIRST if x not in "".join(v[0] for v in tied.values())):
        together = tied.get(letter, letter)
        first = space.sizes.get(letter, FIRST[letter])
        found = vary(_with_size(base, together, n) for n in first)
        if False in found:
            if True in found or together != letter:
                vary(_with_size(base, together, n) for n in MORE[letter])
            known = 0
            while (n := _between(points, base, together)) and len(points) > known:
                known = len(points)  # no more at the next turn if the rule is not asked of n
                vary([_with_size(base, together, n)])
    if base.lead is not None and False in vary({"H": H, "K": K} for H, K in HEADS):
        vary({"H": H, "K": K} for H, K in MORE_HEADS)
        if size_of(base, "G") > 4:
            vary({"H": K * G, "K": K} for K in {2, base.K} for G in GROUPS)
    if False in vary({"T": n, "S": n} for n in (3, 16, 33)):
        vary({"T": n, "S": n} for n in (5, 17, 32, 48))
    if False in vary({"D": n, "E": n} for n in (3, 16, 64)):
        vary({"D": n, "E": n} for n in (8, 24, 33, 40, 80))
    return points


def _with_size(base: Recipe, letters: str, size: int) -> dict[str, Any]:
    """Return the change that gives sizes which are equal, or one alone, another value."""
    if letters != "B":
        return dict.fromkeys(letters, size)
    return {"lead": (size, *base.lead[1:])} if base.lead else {}


def _between(points: dict[Recipe, bool], base: Recipe, letters: str) -> int:
    """Return a size halfway between those that pass and those that fail; 0 if none is left."""
    alone = {}
    for recipe, fails in points.items():
        size = size_of(recipe, letters[-1])
        if replace(base, **_with_size(base, letters, size)) == recipe:
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
        for a, b in (pair for name, pair in TIED.items() if name not in space.structure):
            own, other = (b, a) if b in tried else (a, b)
            changes[other] = changes[own]
        if changes["T"] > changes["S"] and "T > S" not in space.structure:
            changes |= {"T": changes["S"], "S": changes["T"]}
        yield replace(base, **changes)
