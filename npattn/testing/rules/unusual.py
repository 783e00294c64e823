"""Rules about masks, contents and cotangents by which a problem may be recognised [1, 5, 6, 13]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from npattn.problem import Cotangents
from npattn.problem.arrays import Array, finfo
from npattn.testing.cases.distributions import UNUSUAL
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.shapes import PLAIN_SHAPE, SHAPES
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules.register import needs, no_gradients, rule
from npattn.testing.trial import Trial, Violation, WrongAnyway

LOOK_ALIKES = ("causal corners", "causal counts", "all visible", "one hidden pair")
LENGTHS = ((5, 5), (16, 16), (33, 33), (64, 64), (7, 19), (1, 13))
"""T and S: square and round, for which kernels have fast paths, and others."""


def _look_alike_recipes(trial: Trial, seed: int, examples: int) -> list[Recipe]:
    """Return a recipe for every mask and length, and another with causal where there is such."""
    recipes = [
        Pools(trial.space, **_sample_mask(trial, T, S, name)).recipe(2 * (2 * seed + turn) + 1)
        for turn in (0, 1)
        for T, S in _allowed_lengths(trial.space)
        for name in LOOK_ALIKES
    ]
    ambiguous, each = _ambiguous_shapes(trial, seed), len(LOOK_ALIKES)
    recipes = [*recipes[:each], *ambiguous, *recipes[each:]]
    shown = [recipe for recipe in recipes if not trial.skips(recipe, "look-alike-masks")]
    return shown[: max(each + len(ambiguous), examples // 6)]


def _ambiguous_shapes(trial: Trial, seed: int) -> list[Recipe]:
    """Return recipes of masks (H, T, S) where B = H, and (T, S) where B = T."""
    space = trial.space
    if "rank 4" not in space.structure or not space.sizes.keys().isdisjoint("BHKT"):
        return []
    plain = PLAIN_SHAPE  # has B = H
    H, T, S = (plain.B, plain.T, plain.S) if space.few_shapes else (3, 5, 16)
    recipes = []
    for name, lengths, changes in (
        ("heads", (T, S), {"lead": (H,), "H": H, "K": H}),
        ("matrix", (5, 16), {"lead": (5,)}),
    ):
        recipe = Pools(space, **_sample_mask(trial, *lengths, name)).recipe(2 * seed + 1)
        recipes.append(replace(recipe, broadcast=False, **changes))
    return [r for r in recipes if "T != S" in space.structure and not trial.refuses_recipe(r)]


def _allowed_lengths(space: Space) -> list[tuple[int, int]]:
    """Return the lengths that the user's sizes allow."""
    sizes = space.sizes
    lengths = [(s.T, s.S) for s in SHAPES[1::-1]] if space.few_shapes else LENGTHS
    allowed = [
        (T, S) for T, S in lengths if T in sizes.get("T", (T,)) and S in sizes.get("S", (S,))
    ]
    return allowed or [(sizes.get("T", (16,))[0], sizes.get("S", sizes.get("T", (16,)))[0])]


def _sample_mask(trial: Trial, T: int, S: int, name: str) -> dict[str, Any]:
    """Return arguments of `Pools`: mask and lengths, and nothing else that could hide them."""
    heads = [pair for pair in trial.space.heads if pair[0] <= 4] or trial.space.heads[:1]
    return {
        "force": {"mask": name, "T": T, "S": S, "heads": tuple(heads), "distribution": "normal"},
        "forbid": trial.space.features - {"mask", "causal"},
        "nonempty": True,
    }


@rule("look-alike-masks", "5, 6", unless=needs("mask"), recipes=_look_alike_recipes)
def look_alike_masks(trial: Trial, recipe: Recipe) -> float:
    """A mask is read element by element, whatever it looks like from afar.

    The four corners of a causal mask without its triangle; as many visible keys a row as causal
    has, elsewhere; all True; all True but one; (H, T, S) where B = H, and (T, S) where B = T.
    Broken by kernels that take a mask for causal by its corners or its counts, by those that skip a
    mask when a sample or the sum of it says that nothing is hidden, and by those that take its
    first axis for the batch's.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    return trial.check(trial.against_oracle(problem, cotangents), problem, cotangents)


# --- contents and cotangents --------------------------------------------------------------------

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
        recipes = [pool.recipe(2 * n + 1) for pool, n in turns if all(pool.lists.values())]
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
