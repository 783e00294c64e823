"""Two results of one implementation, related within the tolerance of one or both."""

import warnings

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.testing import Implementation, Recipe, Rounding
from npattn.testing.cases.space import Space
from npattn.testing.rules.relate import is_wrong, relate
from npattn.testing.targets.numpy import flash
from npattn.testing.trial import Evaluation, Trial, Violation

RECIPE = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13, seed=17)


def evaluate():
    f = Implementation(flash)
    space = Space(features=f.features)
    return Trial(f, Conventions(), Rounding.undeclared("float32"), space).evaluation(RECIPE)


def same(x):
    return x


@pytest.fixture
def needed():
    """The sides whose tolerance was needed."""
    return []


@pytest.fixture
def first(needed):
    evaluation = evaluate()
    return with_results(evaluation, needed, "first")


def with_results(evaluation, needed, side, **results):
    """The same evaluation with other results, which notes when its tolerance is needed."""

    def bound():
        needed.append(side)
        return evaluate().tolerance

    arrays = {**evaluation.results} | results
    return Evaluation(evaluation.problem, evaluation.cotangents, arrays, evaluation.exact, bound)


def move_o(first, needed, ratio):
    """The same evaluation with an o that is off by a share of its tolerance."""
    o = first.results["o"]
    other = (o + ratio * evaluate().tolerance["o"]).astype(o.dtype)
    return with_results(first, needed, "second", o=other)


def test_equal_results_need_no_tolerance(first, needed):
    assert relate(first, with_results(first, needed, "second"), {"o": same}) == 0
    assert needed == []


@pytest.mark.parametrize("side", ["first", "second"])
def test_near_results_need_the_tolerance_of_one_side(first, needed, side):
    second = move_o(first, needed, 0.5)
    assert 0 < relate(first, second, {"o": same}, side=side) < 1
    assert needed == [side]


def test_results_further_apart_need_both_tolerances(first, needed):
    second = move_o(first, needed, 1.5)
    assert 0 < relate(first, second, {"o": same}) <= 1
    assert needed == ["first", "second"]


def test_results_beyond_both_tolerances_are_a_violation(first, needed):
    second = move_o(first, needed, 5)
    with pytest.raises(Violation, match=r"o\[") as caught:
        relate(first, second, {"o": same})
    assert caught.value.ratio > 1
    assert is_wrong(second)
    assert not is_wrong(first)


def test_an_overflow_of_the_first_says_nothing_about_the_second(first, needed):
    o, exact = first.results["o"].copy(), first.exact["o"].copy()
    o[1, 2, 3, 4], exact[1, 2, 3, 4] = np.inf, 2.0**129
    tolerance = first.tolerance
    may = Evaluation(first.problem, first.cotangents, {"o": o}, {"o": exact}, lambda: tolerance)
    second = with_results(first, needed, "second")
    assert relate(may, second, {"o": same}) <= 1
    with pytest.raises(Violation, match=r"o\[1, 2, 3, 4\]"):
        relate(with_results(first, needed, "first", o=o), second, {"o": same})


def test_infinities_that_meet_are_a_violation_and_no_warning(first, needed):
    o = first.results["o"].copy()
    o[1, 2, 3, 4] = np.inf
    broken = with_results(first, needed, "first", o=o)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Violation, match=r"o\["):
            relate(broken, first, {"o": lambda x: x - x}, side="second")


def test_results_missing_or_of_another_shape_are_left_out(first, needed):
    for wrong in ({"o": None}, {"o": first.results["o"][:1]}):
        second = with_results(first, needed, "second", **wrong)
        assert relate(first, second, {"o": same, "dq": same}) == 0
        assert relate(second, first, {"o": same}) == 0
