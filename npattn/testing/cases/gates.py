"""Gates of the output, by name: functions of a generator and of the structure of a problem."""

from __future__ import annotations

import numpy as np

from npattn.arrays import Array
from npattn.testing.cases.distributions import Structure
from npattn.testing.cases.options import SampleArray


def _shape(recipe: Structure, rank: int, *singletons: int) -> tuple[int, ...]:
    """Return the last axes of o, some of size 1."""
    shape = [*recipe.whole[:-1], recipe.E][-rank:]
    for axis in singletons:
        if len(shape) >= -axis:
            shape[axis] = 1
    return tuple(shape)


def _sigmoid(rank: int, *singletons: int) -> SampleArray:
    """A sigmoid of normal numbers, as layers with a gate compute it."""

    def sample(rng: np.random.Generator, recipe: Structure) -> Array:
        return np.asarray(1 / (1 + np.exp(-rng.standard_normal(_shape(recipe, rank, *singletons)))))

    return sample


def _head_mask(rng: np.random.Generator, recipe: Structure) -> Array:
    """1 or 0 for each head, about one in three of them 0."""
    return (rng.random(_shape(recipe, 3, -1, -2)) < 2 / 3).astype(float)


def _normal(rng: np.random.Generator, recipe: Structure) -> Array:
    return 2 * rng.standard_normal(_shape(recipe, 5))


GATES: dict[str, SampleArray] = {
    "full": _sigmoid(5),
    "heads": _sigmoid(3, -1, -2),
    "head mask": _head_mask,
    "one a row": _sigmoid(5, -1),
    "matrix": _sigmoid(2),
    "signed": _normal,
    "one for all heads": _sigmoid(5, -3),
    "one for all samples": _sigmoid(3),
    "columns": _sigmoid(5, -2),
    "one number": _sigmoid(2, -1, -2),
}
"""Gates, by name."""
ZEROS = ("head mask",)
"""Gates that may be 0, beside which nothing is required of a NaN [16]."""
