"""Recipes as columns: nothing is lost, and a recipe does not depend on its neighbours."""

import numpy as np
import pytest

from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.rows import column, recipes_of, rows_of
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools

ODD = [
    Recipe(lead=None, T=3, S=5, seed=2**70, view="reversed"),
    Recipe(lead=(), H=7, K=7, window=(2, None), scale=-0.75),
    Recipe(lead=(13,), H=6, K=3, causal=True, dropout=0.0, dtype="float16"),
    Recipe(lead=(0, 3), H=0, K=0, mask="padding", broadcast=True, sinks=True),
]


def test_recipes_survive_columns():
    assert recipes_of(rows_of(ODD)) == ODD
    assert recipes_of(rows_of(ODD), [2, 0]) == [ODD[2], ODD[0]]
    assert recipes_of(rows_of([])) == []
    assert {type(r.T) for r in recipes_of(rows_of(ODD))} == {int}


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([2, 3], np.int64),
        ([2**63 + 1, -1], object),
        ([True, False], bool),
        ([1, True], object),
        ([(1, 2), None], object),
    ],
)
def test_columns_hold_integers_flags_or_objects(values, dtype):
    assert column(values).dtype == dtype
    assert column(values).tolist() == values


@pytest.mark.parametrize(
    "space",
    [
        Space(),
        Space(few_shapes=True),
        Space(longest=19),
        Space(structure=frozenset({"rank 3", "K < H", "D % 8"})),
        Space(refused=frozenset({frozenset({"mask", "causal"})}), excluded=("causal and T > S",)),
    ],
)
@pytest.mark.parametrize("pools", [{}, {"force": {"causal": True, "T": (5, 7)}, "nonempty": True}])
def test_recipe_of_a_seed_does_not_depend_on_its_neighbours(space, pools):
    sampled, seeds = Pools(space, **pools), [7, 2, 11, 6, 3 * 2**65 + 1, 2**70]
    together = sampled.recipes(seeds)
    assert together == [sampled.recipe(seed) for seed in seeds]
    assert together[::-1] == sampled.recipes(seeds[::-1])
    assert sampled.recipes([]) == []
