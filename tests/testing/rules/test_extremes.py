"""Rules about the ends of the number range."""

import numpy as np
import pytest

from benchmarks.zoo.mutants import MUTANTS
from npattn.mistakes import Attention
from npattn.testing import check
from npattn.testing.targets.numpy import flash

pytestmark = pytest.mark.unmeasured  # other tests run these lines

FEW = 13
RULES = ("offset-bias", "saturated", "large-products")


def outcomes_of(f, rules, *, dtype="float32", examples=FEW, **kwargs):
    kwargs |= {"dtypes": (dtype,), "examples": examples, "shrink": False, "diagnosis": False}
    return {o.rule: o for o in check(f, only=rules, **kwargs).outcomes}


def outcome_of(f, rule, **kwargs):
    return outcomes_of(f, [rule], **kwargs)[rule]


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("offset-bias", "maximum-starts-finite"),
        ("offset-bias", "hidden-score-finite"),
        ("saturated", "no-max-subtracted"),
        ("saturated", "scores-clipped"),
        ("large-products", "product-in-float16"),
    ],
)
@pytest.mark.broad
def test_a_mutant_fails(rule, name):
    mutant = MUTANTS[name]
    outcome = outcome_of(
        mutant.forward, rule, backward=mutant.backward, dtype=mutant.dtypes[0], examples=20
    )
    assert outcome.status == "failed"


class HiddenOfLowRows(Attention):
    """If a whole row is below −1e8 the keys hidden from it take part: weights sum to 1."""

    def hide(self, s, visible):
        low = np.where(visible, s, -np.inf).max(-1, keepdims=True, initial=-np.inf) < -1e8
        return np.where(visible, s, np.where(low, s, -np.inf))


def test_o_outside_visible_values_fails_despite_wide_bound():
    wrong = HiddenOfLowRows()
    outcome = outcome_of(wrong.forward, "offset-bias", backward=wrong.backward, examples=20)
    assert outcome.status == "failed"


@pytest.mark.parametrize(
    ("rule", "reason"),
    [("offset-bias", "has no bias"), ("large-products", "float32 holds what float32 does")],
)
def test_not_applicable_gives_reason(rule, reason):
    outcome = outcome_of(lambda q, k, v: flash(q, k, v), rule, framework="numpy")
    assert (outcome.status, outcome.message) == ("not applicable", reason)


def test_large_products_need_scale_or_large_d():
    f = lambda q, k, v: flash(q, k, v)  # noqa: E731  a function in a line
    kwargs = {"dtype": "float16", "framework": "numpy"}
    small = outcome_of(f, "large-products", sizes={"D": (8, 16)}, **kwargs)
    assert "D is too small" in small.message
    assert outcome_of(f, "large-products", **kwargs).status == "passed"
