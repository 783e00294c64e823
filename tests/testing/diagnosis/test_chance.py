"""No name that fits by chance, and none for the place where an earlier call shows."""

from __future__ import annotations

import numpy as np
import pytest

from npattn.mistakes import MISTAKES, Attention
from npattn.testing import check
from npattn.testing.diagnosis import causes as search
from npattn.testing.diagnosis.leaks import TEXT
from tests.testing.diagnosis.failures import RECIPES, fail, trial_of


class UnknownButOnce(Attention):
    """The scale is 1/√(H·D) on one problem; on the others o is moved by a wave."""

    def results(self, c):
        lone = c.k.shape[-2] == RECIPES["plain"].S
        o, lse, p = super().results(c._replace(scale=c.scale / 2**0.5) if lone else c)
        return o if lone else o + np.sin(np.arange(o.size).reshape(o.shape) + o.size), lse, p


def test_name_that_fits_one_of_many_problems_is_chance():
    wrong = UnknownButOnce()
    trial = trial_of(wrong.forward, features=())
    _, (alone,) = search.diagnose([(trial, fail(trial, ["plain"]))], contrasts=0)
    assert (alone.kind, alone.text) == ("step", "the scale is 1/√(H·D)")
    _, (cause,) = search.diagnose(
        [(trial, fail(trial, ["plain", "wide", "longer", "longest"]))], contrasts=0
    )
    assert (cause.kind, len(cause.rules)) == ("unexplained", 4)


def causes_of(name, rule, **options):
    mistake = MISTAKES[name]
    report = check(
        mistake.forward, backward=mistake.backward, only=[rule], examples=4, shrink=False, **options
    )
    return [(cause.kind, cause.name) for cause in report.causes]


def test_what_an_earlier_call_left_is_no_rounding():
    assert causes_of("precision-of-first-call", "after-other-dtype") == [
        ("mistake", "precision-of-first-call")
    ]


@pytest.mark.parametrize("name", ["out-truncated", "dq-in-bfloat16"])
def test_suspicion_of_a_known_mistake_is_named(name):
    options = {"dtypes": ("bfloat16",), "rounding": "fused"}
    assert causes_of(name, "aggregate", **options) == [("mistake", name)]


@pytest.mark.parametrize(
    ("name", "rule", "leaks"),
    [
        ("nan-leaks-through-zero-weight", "hidden-nan-v", True),
        ("maximum-of-all-queries", "nan-query-alone", False),
    ],
)
def test_nan_of_another_query_is_no_leak_from_hidden_positions(name, rule, leaks):
    mistake = MISTAKES[name]
    trial = trial_of(mistake.forward, mistake.backward)
    report = check(
        mistake.forward, backward=mistake.backward, only=[rule], examples=4, diagnosis=False
    )
    bad = [o for o in report.outcomes if o.failed]
    assert bad
    _, causes = search.diagnose([(trial, bad)], set(MISTAKES), contrasts=0)
    assert any(cause.text == TEXT for cause in causes) == leaks
