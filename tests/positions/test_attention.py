"""Rotary positions of one attention: those of queries beside those of keys."""

import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.positions import Rotary, plain, rope

PLACES = np.array([2.0, 3.0, 5.0])


@pytest.mark.parametrize(
    ("options", "T", "S", "queries", "keys"),
    [
        ({}, 3, 5, [2, 3, 4], [0, 1, 2, 3, 4]),
        ({}, 5, 3, [-2, -1, 0, 1, 2], [0, 1, 2]),
        ({"alignment": "top_left"}, 3, 5, [0, 1, 2], [0, 1, 2, 3, 4]),
        ({"positions": PLACES}, 3, 3, PLACES, PLACES),
        ({"positions": PLACES, "key_positions": [7, 11]}, 3, 2, PLACES, [7, 11]),
    ],
)
@pytest.mark.parametrize("how", [{"base": 7.0}, {"frequencies": plain(4)}, {"size": 2}])
def test_queries_and_keys_turn_by_their_positions(options, T, S, queries, keys, how):
    rng = np.random.default_rng(0)
    rotary = Rotary(layout="interleaved", **how, **options)
    arguments = rotary.arguments(T, S)
    for own, places, length in zip(arguments, (queries, keys), (T, S), strict=True):
        x = rng.standard_normal((length, 4))
        expected = rope(x, layout="interleaved", positions=np.array(places), **how)
        np.testing.assert_array_equal(rope(x, **own), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment": "left"}, "alignment is 'left', must be one of"),
        ({"key_positions": PLACES}, "got key_positions without positions; pass those of the quer"),
    ],
)
def test_illegal_options_raise(options, message):
    with pytest.raises(OptionError, match=message):
        Rotary(**options)


def test_positions_of_other_keys_are_required():
    with pytest.raises(OptionError, match="got positions of 3 queries for 5 keys; pass key_pos"):
        Rotary(positions=PLACES).arguments(3, 5)
