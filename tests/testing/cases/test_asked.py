"""Sizes of the problems that were asked."""

import json

from npattn.testing.cases.asked import MODELS, Asked, name_shape
from npattn.testing.cases.model_sizes import MORE_SHAPES, SHAPES
from npattn.testing.cases.recipe import Recipe

FEW = Recipe(lead=(2,), H=6, K=3, T=5, S=7, D=11, E=13)


def test_ranges_are_those_of_the_recipes():
    many = [FEW, Recipe(lead=None, T=3, S=17, D=19, E=2), Recipe(lead=(5, 3), S=0)]
    ranges = {"B": (1, 2), "H": (1, 6), "K": (1, 3), "G": (1, 2), "T": (3, 5), "S": (7, 17)}
    asked = Asked.of(many)
    assert asked.ranges == ranges | {"D": (11, 19), "E": (2, 13)}
    assert str(Asked.of([FEW])) == "B 2, H 6, K 3, G 2, T 5, S 7, D 11, E 13"
    assert Asked.of(many[2:]) == Asked()


def test_model_size_counts_only_as_a_whole():
    shape = next(x for x in SHAPES if set(x) == {"D", "E"} and len(set(x.values())) == 2)
    sizes = [FEW] + [Recipe(**{**vars(FEW), letter: n}) for letter, n in shape.items()]
    name = name_shape(shape)
    assert name not in Asked.of(sizes).models
    assert name in Asked.of([*sizes, Recipe(**{**vars(FEW), **shape})]).models
    assert len(MODELS) == len(SHAPES + MORE_SHAPES)


def test_model_size_with_a_window_needs_its_left_side():
    shape = {"T": 1, "S": 300, "left": 7}
    sizes = {"T": 1, "S": 300}
    without = Recipe(**{**vars(FEW), **sizes, "window": (8, None)})
    assert name_shape(shape) not in Asked.of([FEW, without]).models
    with_it = Recipe(**{**vars(FEW), **sizes, "window": (7, None)})
    assert name_shape(shape) in Asked.of([FEW, with_it]).models


def test_union_and_json():
    one, other = Asked.of([FEW]), Asked({"S": (2, 9)}, frozenset({"B = 9"}))
    both = Asked.union([Asked(), one, other])
    assert both.ranges["S"] == (2, 9)
    assert both.ranges["D"] == (11, 11)
    assert Asked.from_dict(json.loads(json.dumps(both.as_dict()))) == both
