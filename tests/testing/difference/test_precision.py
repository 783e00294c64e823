"""Roundings that explain errors: a step that takes most of them away, and no other."""

import numpy as np
import pytest

from npattn.testing.difference.distance import Judged
from npattn.testing.difference.measure import Answer
from npattn.testing.difference.precision import RIGHT, ROUNDINGS, explain_errors, remaining


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        (1 + 2.0**-10, 1 + 2.0**-10),
        (1 + 2.0**-12, 1),
        (-3.0 - 2.0**-8, -3 - 2.0**-8),
        (np.inf,) * 2,
    ],
)
def test_tf32_has_eleven_bits(x, rounded):
    assert ROUNDINGS["tf32"](np.array([x])) == rounded


@pytest.mark.parametrize(("share", "found"), [(0.4, {}), (0.6, {"forward": "step"})])
def test_what_leaves_much_of_the_errors_explains_nothing(share, found):
    exact = np.arange(7.0)
    error = np.sin(exact)
    side = Answer(None, None, {"o": Judged(exact + error, exact, np.ones(7))})
    predictions = {RIGHT: {"o": exact}, "step": {"o": exact + share * error}}
    assert explain_errors(side, predictions) == found
    other = Answer(None, None, {"o": Judged(exact, exact, np.ones(7))})
    left = remaining([side, other], [found, {}], predictions, "forward")
    assert left == pytest.approx((1 - share) ** 2 if found else 1)
