"""What a system means, in a line of words."""

from dataclasses import replace

import pytest

from benchmarks.matrix.words import describe_in_words
from npattn import Conventions
from npattn.profiles import PROFILES, Profile

ALL = Profile(name="x", version="1", about="", signature={})


def words(signature=None, **conventions):
    profile = replace(ALL, conventions=Conventions(**conventions), signature=signature or {})
    return describe_in_words(profile).split("; ")


def test_defaults_are_what_npattn_means():
    assert words() == [
        "leaves hidden keys out of the softmax",
        "a query that sees nothing gives 0",
        "causal from the bottom right",
    ]


@pytest.mark.parametrize(
    ("conventions", "part"),
    [
        ({"hidden_add": -1e9}, "adds −1e9 to hidden scores"),
        ({"hidden_add": -1e9}, "a query that sees nothing gives the mean of all values"),
        ({"hidden_add": -1e4}, "a query that sees nothing gives what it gives unmasked"),
        ({"hidden_add": "min"}, "adds the least finite number to hidden scores"),
        ({"hidden_add": "min"}, "a query that sees nothing gives the mean of all values"),
        ({"hidden_fill": -1e300}, "sets hidden scores to −1e300"),
        ({"hidden_fill": "min"}, "one whose scores are all −inf gives 0"),
        ({"hidden_add": -1e300}, "a query that sees nothing gives the mean of all values"),
        ({"empty_row_bias": "nan"}, "one whose scores are all −inf gives NaN"),
        ({"causal": "top_left"}, "causal from the top left"),
        ({"mask_true": "hide"}, "True in a mask hides"),
        ({"window": "inclusive"}, "a window counts the query itself"),
        ({"softcap": "after_bias"}, "the softcap comes after the bias"),
        ({"softcap": "after_mask"}, "and after the mask, so that hidden keys take weight"),
        ({"bias": "before_scale"}, "the bias is multiplied by the scale"),
        ({"kv_head": "tile"}, "query head h uses key/value head h mod K"),
        ({"lse_base": "2"}, "lse in base 2"),
        ({"lse_empty": 0.0}, "lse of a query that sees nothing is 0"),
        ({"weights": "after_dropout"}, "the weights returned are those after dropout"),
        ({"dropout_at_rate_0": "ignore"}, "a dropout mask at rate 0 does nothing"),
    ],
)
def test_each_convention_has_words(conventions, part):
    assert part in words(**conventions)
    assert part not in words()


def test_options_that_it_lacks_are_not_spoken_of():
    parts = words({"scale": "scale"}, causal="top_left", mask_true="hide", lse_base="2")
    assert parts == ["a query that sees nothing gives 0"]


def test_refusals_stand_at_the_end_in_their_order():
    line = describe_in_words(PROFILES["torch.sdpa"])
    assert line.endswith("; does not take mask+causal, bias+causal")


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_has_a_line(name):
    line = describe_in_words(PROFILES[name])
    assert "sees nothing" in line
    assert "\n" not in line
