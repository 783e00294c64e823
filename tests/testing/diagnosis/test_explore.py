"""Problems around a failing one: what is attention_with, and what a space forbids."""

from dataclasses import replace

import pytest

import npattn
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.borders import Neighbours
from npattn.testing.diagnosis.explore import (
    EXTREME,
    enlarge,
    sample_of,
    shape_of,
    try_recipe,
)
from tests.testing.diagnosis.failures import attention_with, trial_of

SHRUNK = Recipe(lead=(2,), H=1, K=1, T=2, S=3, D=1, E=2)
BASE = Recipe(lead=(2,), H=2, K=2, T=3, S=5, D=7, E=11, mask="matrix", distribution="saturated")


def trial(structure=None, sizes=None, **changes):
    own = trial_of(
        lambda q, k, v, mask=None, causal=False: npattn.attention(q, k, v, mask, causal=causal)
    )
    space = replace(
        own.space, structure=own.space.structure - set(structure or ()), sizes=sizes or {}
    )
    return replace(own, space=replace(space, **changes))


@pytest.mark.parametrize(
    ("structure", "sizes", "wanted"),
    [
        ((), {}, (5, 7)),
        (("E != D",), {}, (7, 7)),
        (("D % 8",), {}, (8, 8)),
        ((), {"D": (1,), "E": (2,)}, (1, 2)),
    ],
)
def test_rows_of_one_number_are_enlarged_as_the_space_allows(structure, sizes, wanted):
    larger = enlarge(trial(structure, sizes), SHRUNK)
    assert wanted == (larger.D, larger.E)
    assert replace(larger, D=SHRUNK.D, E=SHRUNK.E) == SHRUNK


def test_several_tiles_are_among_the_first_problems():
    """Short sequences do not tell "t % 16 ≠ 0" from "t ≥ 1"."""
    first = [*Neighbours(trial(), BASE).around()][:12]
    assert {(r.T, r.S) for r in first} >= {(61, 5), (3, 61), (109, 5)}


def test_few_shapes_are_kept():
    recipes = [*Neighbours(trial(few_shapes=True), BASE).around()]
    assert len(recipes) > 5
    assert {(r.T, r.S, r.D, r.E, r.H) for r in recipes} == {(3, 5, 7, 11, 2)}
    assert {r.distribution for r in recipes} == {"normal", "saturated"}


def test_rank_2_keeps_one_head():
    recipes = [*Neighbours(trial(), Recipe(lead=None, T=3, S=5)).around()]
    assert {(r.H, r.K, r.lead) for r in recipes} == {(1, 1, None)}
    assert len({(r.T, r.S) for r in recipes}) > 10


def test_heads_that_a_space_restricts_are_not_sampled():
    several = [*Neighbours(trial(sizes={"H": (2,)}), BASE).around()]
    assert len({r.T for r in several}) > 5
    assert try_recipe(trial(sizes={"H": (2,)}), replace(BASE, H=3, K=3)) is None


def test_rows_that_see_nothing_are_left_out_where_they_are_known_to_be_wrong():
    skips = replace(trial(), skips_empty_rows=True)
    empty = replace(BASE, mask="empty rows", distribution="normal")
    assert try_recipe(skips, empty) is None
    assert try_recipe(trial(), empty).fault is None


def test_a_problem_of_much_work_is_not_asked():
    """It takes longer than all other questions, unless the failing one does as well."""
    several = {"S": 1031, "T": 521, "mask": None, "distribution": "normal"}
    long = replace(BASE, **several)
    near = Neighbours(trial(), BASE, frozenset({"o"}), ask=None)
    assert near.fails(near.sample(long)) is None
    near = Neighbours(trial(), replace(long, T=263), frozenset({"o"}))
    assert near.fails(near.sample(long)) is False


def test_a_problem_that_is_right_has_no_wrong_element():
    wrong = attention_with(dk=lambda up, *args: 2 * up(*args))
    own = trial_of(wrong.forward, wrong.backward)
    base = replace(BASE, mask=None, distribution="normal")
    points = Neighbours(own, base).points()
    (like,) = [p.fault for p in points if p.fault][:1]
    assert like.step == "dk"
    right = try_recipe(trial(), replace(base, H=4))
    sample = sample_of(right, like)
    assert not sample.wrong.any()
    assert sample.sizes["G"] == 2
    dk = replace(like, quantity=replace(like.quantity, name="dk"))
    heads = [shape_of(fault, right.evidence.problem)[1] for fault in (like, dk)]
    assert heads == [4, 2]


def test_a_bias_of_normal_numbers_gets_no_special_ones():
    """A bias of 0 and −∞ alone is right whatever it is multiplied by."""
    biases = {r.bias for r in Neighbours(trial(), replace(BASE, bias="heads")).around()}
    assert {"heads", "full", "matrix", None} <= biases
    assert not biases & {*EXTREME}
