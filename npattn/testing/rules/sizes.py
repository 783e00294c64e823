"""Rule about the sizes that models have [1-11, 13]."""

from __future__ import annotations

from npattn.testing.cases.model_sizes import model_recipes
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules.register import rule
from npattn.testing.trial import Trial


def _recipes(trial: Trial, seed: int, examples: int) -> list[Recipe]:
    return model_recipes(
        trial.space, seed, examples, lambda recipe: trial.skips(recipe, "model-sizes")
    )


@rule("model-sizes", "1-11, 13", recipes=_recipes)
def model_sizes(trial: Trial, recipe: Recipe) -> float:
    """The sizes that models have give right results and gradients, as small ones do.

    Head sizes from 24 to 576, the heads of eighteen models with one query and with five, 9 samples,
    384 heads in all, lengths of whole tiles and one beside them up to 1025 queries and 8192 keys,
    windows narrower and wider than a tile: one problem each, with options drawn from the seed.
    Kernels are compiled for such sizes one by one. Broken by a tile that holds 64 of 96 columns, by
    a tile of heads that crosses a group of 7, by a split of the keys that loses the last part, by
    one without a key that overwrites the lse of the others.
    """
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem)
    return trial.check(trial.against_oracle(problem, cotangents, cheap=True), problem, cotangents)
