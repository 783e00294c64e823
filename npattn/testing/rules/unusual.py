"""Rules about contents and cotangents by which a problem may be recognised [1, 13]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from npattn.arrays import Array, finfo
from npattn.problem import Cotangents
from npattn.testing.cases.distributions import UNUSUAL
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules.register import rule
from npattn.testing.rules.requirements import no_gradients
from npattn.testing.trial import Trial, Violation, WrongAnyway

SIZES = {"T": (16, 19), "S": (16, 19), "D": (8, 13, 16, 32)}
"""Small, but large enough that contents are not by chance what they look like."""


def _pools(trial: Trial, distribution: str, plain: bool) -> Pools:
    """Return pools of small problems: plain ones are square, without options, with K = H."""
    space = trial.space
    heads = [pair for pair in space.heads if pair[0] <= 4] or space.heads[:1]
    force: dict[str, Any] = {"broadcast": False, "distribution": distribution}
    force |= {n: x for n, x in SIZES.items() if n not in space.sizes and not (plain and n == "S")}
    if "D" in force and "D % 8" not in space.structure:
        force["D"] = tuple(D for D in SIZES["D"] if D % 8 == 0)
    if plain:
        force |= {"square": True, "same size": True}
        heads = [(H, K) for H, K in heads if H == K] or heads
    force["heads"] = tuple(heads)
    forbid = space.features - set(space.always) if plain else frozenset[str]()
    return Pools(space, force=force, forbid=forbid, nonempty=True, shapes=1)


def _recipes(name: str, distributions: Sequence[str]) -> Callable[[Trial, int, int], list[Recipe]]:
    """Return a sampling of two problems of each distribution: a plain one, and any."""

    def sample(trial: Trial, seed: int, examples: int) -> list[Recipe]:
        pools = [_pools(trial, x, plain) for plain in (True, False) for x in distributions]
        seeds = np.random.default_rng([seed, 37]).integers(2**31, size=len(pools)).tolist()
        turns = zip(pools, seeds, strict=True)
        recipes = [own.recipe(2 * n + 1) for own, n in turns if all(own.lists.values())]
        return [recipe for recipe in recipes if not trial.skips(recipe, name)]

    return sample


@rule("unusual-contents", "1", recipes=_recipes("unusual-contents", tuple(UNUSUAL)))
def unusual_contents(trial: Trial, recipe: Recipe) -> float:
    """Contents by which inputs may be recognised give results as right as others.

    Small numbers, none below 0, half of them 0, large values, equal queries, rows of norm 1, rows
    with a single 1, keys that are 0, q equal to k and v, numbers that float16 has. What is wrong
    with normal numbers too is left to other rules. Broken by shortcuts that are taken by contents:
    a mean where weights look equal, fewer bits where none seem to be needed, a skipped row.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    try:
        return trial.check(trial.against_oracle(problem, cotangents), problem, cotangents)
    except Violation:
        if trial.fails_unaltered(replace(recipe, distribution="normal")):
            raise WrongAnyway from None
        raise


def _scale_by(factor: float) -> Callable[[Array], Array]:
    def scale(dout: Array) -> Array:
        most = max(1.0, float(finfo(dout.dtype).max) / 2**12)
        scaled: Array = dout * dout.dtype.type(min(factor, most))
        return scaled

    return scale


def _last_query(dout: Array) -> Array:
    alone = np.zeros_like(dout)
    alone[..., -1:, :] = dout[..., -1:, :]
    return alone


COTANGENTS: dict[str, Callable[[Array], Array]] = {
    "of the sum of o": np.ones_like,
    "of a loss that is scaled up": _scale_by(2.0**16),
    "of a loss that is scaled down": _scale_by(2.0**-16),
    "of the last query alone": _last_query,
    "of a constant": np.zeros_like,
}
"""Cotangents by the loss that they are of."""


@rule(
    "unusual-cotangents",
    "13",
    unless=no_gradients,
    recipes=_recipes("unusual-cotangents", ("normal",)),
)
def unusual_cotangents(trial: Trial, recipe: Recipe) -> float:
    """Gradients are right for the cotangents that losses have: constant, sparse, large, small.

    Those of the sum of o, of a loss that is scaled up or down for mixed precision, of the last
    query alone, and 0. What is wrong for random ones too is left to other rules. Broken by
    shortcuts for a constant dout, by a threshold below which it is taken as 0, by queries that are
    skipped.
    """
    problem = trial.problem(recipe)
    random, ratios = trial.cotangents(recipe, problem), [0.0]
    for loss, change in COTANGENTS.items():
        cotangents = Cotangents(change(random.dout), random.dlse)
        found = trial.against_oracle(problem, cotangents)
        try:
            ratios.append(trial.check(found, problem, cotangents))
        except Violation as err:
            if trial.fails_unaltered(recipe):
                raise WrongAnyway from None
            text = f"with the cotangent {loss}:\n{err}"
            raise Violation(
                text, problem, cotangents, ratio=err.ratio, comparisons=err.comparisons
            ) from None
    return max(ratios)
