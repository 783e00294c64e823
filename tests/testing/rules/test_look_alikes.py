"""Kernels that take a mask for what it looks like fail, and sizes of the user are kept."""

from dataclasses import replace

import numpy as np
import pytest

from npattn.mistakes import Attention
from npattn.testing.cases.options import MASKS
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE, Space
from npattn.testing.rules import PROPERTIES
from npattn.testing.rules.unusual import LOOK_ALIKES
from npattn.testing.trial import Violation
from tests.testing.rules.relations import trial_of

RULE = PROPERTIES["look-alike-masks"]


class TakenFor(Attention):
    """A mask of which a condition holds is not read; causal takes its place on request."""

    def __init__(self, looks, causal=False):
        self.looks, self.causal = looks, causal

    def visible(self, c):
        if c.mask is not None and c.mask.size and self.looks(c.mask):
            c = c._replace(mask=None, causal=c.causal or self.causal)
        return super().visible(c)


def has_corners_of_causal(mask):
    ends = mask[..., [0, -1], :][..., [0, -1]]
    return mask.shape[-2] > 1 and (ends == [[True, False], [True, True]]).all()


def has_counts_of_causal(mask):
    T, S = mask.shape[-2:]
    return T > 1 and np.array_equal(
        mask.sum(-1), np.broadcast_to(np.arange(T) + 1 + S - T, mask.shape[:-1])
    )


WRONG = {
    "by its corners": TakenFor(has_corners_of_causal, causal=True),
    "by its counts": TakenFor(has_counts_of_causal, causal=True),
    "by its mean": TakenFor(lambda mask: mask.mean() > 0.99),
    "by a sample": TakenFor(lambda mask: mask.size > 100 and mask[..., ::3, ::3].all()),
    "by its first row": TakenFor(lambda mask: mask[..., 0, :].all()),
}


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", WRONG)
def test_mask_taken_for_another_option_fails(name, seed):
    trial = trial_of(WRONG[name])
    assert any(fails(trial, recipe) for recipe in RULE.recipes(trial, seed, 100))


def fails(trial, recipe):
    try:
        RULE.check(trial, recipe)
    except Violation:
        return True
    return False


@pytest.mark.parametrize("few_shapes", [False, True])
def test_masks_of_ambiguous_shape_come_with_equal_sizes(few_shapes):
    trial = trial_of(WRONG["by a sample"])
    trial.space = replace(trial.space, few_shapes=few_shapes)
    by_mask = {recipe.mask: recipe for recipe in RULE.recipes(trial, 0, 9)}
    by_head, matrix = by_mask["heads"].problem(), by_mask["matrix"].problem()
    assert by_head.mask_array.shape[0] == by_head.H == by_head.lead[0] > 1
    assert matrix.mask_array.shape[0] == matrix.T == matrix.lead[0] > 1


@pytest.mark.every
@pytest.mark.parametrize(("T", "S"), [(5, 5), (3, 7), (1, 4), (6, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_masks_are_what_their_names_say(T, S, seed):
    recipe = Recipe(lead=(2,), H=3, T=T, S=S, seed=seed)
    masks = {name: MASKS[name](np.random.default_rng(seed), recipe) for name in LOOK_ALIKES}
    causal = np.arange(S) <= np.arange(T)[:, None] + S - T
    ends = np.ix_([0, -1], [0, -1])
    assert (masks["causal corners"][(..., *ends)] == causal[ends]).all()
    assert (masks["causal counts"].sum(-1) == causal.sum(-1)).all()
    assert masks["all visible"].all()
    assert (~masks["one hidden pair"]).sum() == 1
    assert {mask.ndim for mask in masks.values()} <= {2, 4}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_masks_of_no_queries_or_keys(name):
    for sizes in ({"T": 0}, {"S": 0}, {"lead": (0,)}):
        assert MASKS[name](np.random.default_rng(0), Recipe(**sizes)).dtype == bool


@pytest.mark.parametrize(
    "space",
    [
        Space(sizes={"T": (64,), "S": (128, 64)}),
        Space(sizes={"T": (9,)}),
        Space(sizes={"S": (64,), "H": (32,)}),
        Space(structure=frozenset(STRUCTURE) - {"T != S"}),
        Space(structure=frozenset({"rank 2"})),
        Space(features=frozenset({"mask"})),
    ],
    ids=["T and S", "T", "S and H", "squares", "rank 2", "mask alone"],
)
def test_sizes_and_structure_are_kept(space):
    trial = trial_of(sizes=space.sizes, structure=space.structure, features=space.features)
    recipes = RULE.recipes(trial, 0, 100)
    assert {r.mask for r in recipes} - {"heads", "matrix"} == set(LOOK_ALIKES)
    for r in recipes:
        assert all(getattr(r, letter) in legal for letter, legal in space.sizes.items())
        assert "T != S" in space.structure or r.T == r.S
        assert r.window is r.bias is r.scale is None
