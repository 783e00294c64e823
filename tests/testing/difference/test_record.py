"""Differences on several problems, put together."""

import math
from dataclasses import replace

import pytest

from npattn.testing.difference.record import Place, ResultDifference
from npattn.testing.power import Power

PLACE = Place((1,), 1.0, 2.0, 1.5, "first")
FIRST = ResultDifference("o", 7, 5, 0.5, 3.0, PLACE, 0.2, 0.3, 0.0, 0.3, 2)
FIRST = replace(FIRST, power=Power((0.5,), elements=7), defects=("none",))
OTHER = ResultDifference("o", 11, 11, 0.25, 9.0, None, 0.7, 0.1, 0.6, 0.0, 3)
OTHER = replace(OTHER, power=Power((2.0,), elements=11))


def test_union_has_the_worst_element_and_all_counts():
    union = ResultDifference.union([FIRST, OTHER])
    assert (union.ratio, union.ulps, union.place) == (0.5, 3.0, PLACE)
    assert (union.elements, union.same, union.by_convention) == (18, 16, 5)
    assert (union.a_ratio, union.b_ratio) == (0.7, 0.3)
    assert union.a_rms == pytest.approx(0.6 * math.sqrt(11 / 18))
    assert union.b_rms == pytest.approx(0.3 * math.sqrt(7 / 18))
    assert (union.power.factors, union.power.elements) == ((0.5, 2.0), 18)
    assert union.defects == ("none",)


def test_union_of_shapes_that_differ_has_no_place():
    shape = ResultDifference("o", 3, 0, math.inf, math.inf, None, 1.0, 1.0, 0.0, 0.0)
    union = ResultDifference.union([FIRST, shape])
    assert (union.ratio, union.place, union.same) == (math.inf, None, 5)
