"""The register of rules: a function for each, when it applies, and how its problems are sampled.

A condition maps a trial to the reason why a rule does not apply, or to None. A sampling maps it to
arguments of `Pools`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn.testing.cases.recipe import Recipe
from npattn.testing.levels import Level
from npattn.testing.trial import GRADIENTS, Trial, Violation

Check = Callable[[Trial, Recipe], "float | None"]
Condition = Callable[[Trial], "str | None"]
"""Trial → why a rule does not apply, or None."""
Sampling = Callable[[Trial], dict[str, Any]]
"""Trial → arguments of `Pools`: how to sample the recipes of a rule."""
Recipes = Callable[[Trial, int, int], list[Recipe]]
"""(trial, seed, examples) → all recipes of a rule, instead of sampled ones."""


@dataclass(frozen=True)
class Property:
    """A rule, its conditions, and its check.

    Attributes
    ----------
    rule : str
        Its id, for ``--only`` and in reports.
    section : str
        Its numbers in docs/semantics.md.
    check : callable
        Its docstring states the rule, why it holds, and the bugs that break it.
    unless : callable
        Trial → why the rule does not apply, or None.
    draw : callable
        Trial → arguments of `Pools`.
    level : str
        One of `LEVELS`.
    alters : bool
        The check alters a problem and compares with the oracle: a problem that is wrong unaltered
        too is left to other rules.
    recipes : callable, optional
        (trial, seed, examples) → the recipes to check, all of them, instead of sampled ones.
    last : bool
        It is asked when the others have been: it needs many calls before it, or many samples.
    share : int
        It is asked one in so many of the examples of a check, 1 is all: most rules look for one
        kind of mistake, which shows soon if it is there.
    """

    rule: str
    section: str
    check: Check
    unless: Condition = lambda trial: None
    draw: Sampling = lambda trial: {}
    level: Level = "values"
    alters: bool = False
    recipes: Recipes | None = None
    last: bool = False
    share: int = 10

    def leaves(self, trial: Trial, recipe: Recipe, err: Exception) -> bool:
        """Return True if an exception of the check is left to the rules on agreement.

        It is if the plain problem is wrong too, in the same results. A relation between two calls
        says something about right results alone: those of a gradient that is twice too large may
        differ by more than the tolerance of the right one, which may be 0.
        """
        if self.alters:
            return trial.fails_unaltered(recipe)
        related = err.related if isinstance(err, Violation) else frozenset()
        return bool(related) and related <= trial.disagreements(recipe)

    @property
    def about(self) -> str:
        """The rule in one line."""
        return (self.check.__doc__ or "").strip().splitlines()[0]


PROPERTIES: dict[str, Property] = {}
"""Every rule that an imported module has registered, by its id."""
ON_REQUEST: dict[str, Property] = {}
"""The same of rules that a check without `only` does not ask."""


def rule(
    name: str,
    section: str,
    *,
    unless: Condition = lambda trial: None,
    draw: Sampling = lambda trial: {},
    level: Level = "values",
    alters: bool = False,
    recipes: Recipes | None = None,
    last: bool = False,
    share: int = 10,
    on_request: bool = False,
) -> Callable[[Check], Check]:
    """Register the decorated function as the rule `name`; arguments as of `Property`.

    One `on_request` is asked by its name alone.
    """
    table = ON_REQUEST if on_request else PROPERTIES

    def register(check: Check) -> Check:
        more = (level, alters, recipes, last, share)
        table[name] = Property(name, section, check, unless, draw, *more)
        return check

    return register


# --- conditions -----------------------------------------------------------------------------------

HIDES = ("mask", "causal", "window")


def first(*conditions: Condition) -> Condition:
    """Combine conditions: the first reason that one of them gives."""
    return lambda trial: next((r for r in (reason(trial) for reason in conditions) if r), None)


def requires(holds: Callable[[Trial], object], reason: str) -> Condition:
    """Require something of a trial; the rule does not apply for this reason if it is not so."""
    return lambda trial: None if holds(trial) else reason


no_gradients = requires(lambda t: t.gradients, "no backward")
no_lse = requires(lambda t: t.implementation.returns_lse, "returns no lse")
no_max_score = requires(lambda t: t.implementation.returns_max_score, "returns no max_score")
in_bytes = requires(lambda t: t.implementation.output is None, "o is returned in 8 bits")
keeps_nothing = requires(
    lambda t: t.implementation.keeps_arrays, "its worker keeps nothing between calls"
)
tied_values = requires(lambda t: t.implementation.latent is None, "values are a part of the keys")
nothing_hides = requires(
    lambda t: not t.space.features.isdisjoint(HIDES), "has no mask, causal or window"
)


def no_inf(trial: Trial) -> str | None:
    least = np.array(-np.inf, trial.space.dtype).astype(float)
    return None if np.isinf(least) else f"{trial.space.dtype} has no −inf"


def no_nan_in_o(trial: Trial) -> str | None:
    output = trial.implementation.output
    return "o is int8, which has no NaN" if output and output.dtype == "int8" else None


def hidden_keys_matter(trial: Trial) -> str | None:
    """Return why hidden keys take weight under the conventions."""
    if trial.conventions.attends_hidden:
        name = "hidden_add" if trial.conventions.hidden_fill is None else "hidden_fill"
        return f"{name} lets hidden keys matter"
    late = trial.conventions.softcap == "after_mask" and "softcap" in trial.space.features
    return "a softcap after the mask lets hidden keys matter" if late else None


def needs(*names: str) -> Condition:
    """Require options, all that are missing being named, or else gradients."""

    def condition(trial: Trial) -> str | None:
        has = trial.space.features.union(GRADIENTS)
        if missing := [name for name in names if name not in has]:
            return f"has no {' and no '.join(missing)}"
        ungiven = (n for n in names if n in GRADIENTS and n not in trial.gradients)
        return next((f"gives no {n}" for n in ungiven), None)

    return condition


def refuses(*structure: str) -> Condition:
    """Require that one of these structures is accepted."""
    reason = f"refuses {', '.join(structure)}"
    return requires(lambda trial: trial.space.structure & set(structure), reason)


def fixed_size(letter: str) -> Condition:
    """Require that the user's sizes leave a choice."""
    reason = f"sizes allow one {letter} only"
    return requires(lambda trial: len(set(trial.space.sizes.get(letter, (1, 2)))) != 1, reason)


def single(letter: str) -> Condition:
    """Require that the user's sizes reach 2."""

    def condition(trial: Trial) -> str | None:
        most = max(trial.space.sizes.get(letter, (2,)))
        return f"sizes allow no {letter} above {most}" if most < 2 else None

    return condition


# --- samplings ------------------------------------------------------------------------------------


def sampling(
    *forbid: str,
    few: bool = False,
    late_softcap: bool = True,
    nonempty: bool = True,
    shapes: int | None = None,
    **force: Any,
) -> Sampling:
    """Return a sampling that forbids some options, and forces fields of `Recipe`.

    A field has a value, or a tuple of them. `few` is for identities that need several results of a
    problem: it has few queries. Without `late_softcap` a softcap of more than q·k is forbidden,
    which changes bias and mask; `nonempty` excludes sizes of 0. Where a framework compiles for each
    shape, there are at most `shapes`: the rule makes others of them.
    """

    def sample(trial: Trial) -> dict[str, Any]:
        late = not late_softcap and trial.conventions.softcap != "before_bias"
        queries = {"T": (2, 1, 3, 5, 7, 16)} if few and "T" not in trial.space.sizes else {}
        return {
            "force": queries | force,
            "forbid": frozenset({*forbid, *(["softcap"] if late else [])}),
            "nonempty": nonempty,
            "shapes": shapes if trial.space.few_shapes else None,
        }

    return sample


def nonempty(trial: Trial) -> dict[str, Any]:
    """Exclude sizes of 0."""
    return {"nonempty": True}


def without_numbering(trial: Trial, *forbid: str, shapes: int | None = None) -> dict[str, Any]:
    """Exclude every score_mod that reads the numbers of heads, queries or keys."""
    has = "score_mod" in trial.space.features
    mods: dict[str, Any] = {"score_mod": (None, None, "squash")} if has else {}
    return sampling(*forbid, shapes=shapes, **mods)(trial)


def without_positions(trial: Trial, shapes: int | None = None) -> dict[str, Any]:
    """Exclude every option that depends on the positions of queries and keys."""
    return without_numbering(trial, "causal", "window", shapes=shapes)


def force_hiding(trial: Trial) -> dict[str, Any]:
    """Force an option that hides some keys."""
    features = trial.space.features
    if "mask" in features:
        return {"force": {"mask": ("full", "padding", "left padding", "first tile", "matrix")}}
    if "causal" in features:
        return {"force": {"causal": True}}
    return {"force": {"window": ((1, 0), (0, 1), (2, 3))}}
