"""No name that fits by chance, and none for the place where an earlier call shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npattn.mistakes import MISTAKES, Attention
from npattn.testing import check
from npattn.testing.diagnosis.causes import diagnose
from npattn.testing.diagnosis.chance import merge_leaks
from npattn.testing.diagnosis.evidence import collect
from npattn.testing.diagnosis.leaks import TEXT
from npattn.testing.diagnosis.steps.step import step_candidates
from tests.testing.diagnosis.failures import RECIPES, fail, trial_of


class UnknownButOnce(Attention):
    """The scale is 1/√(H·D) on one problem; on the others o is moved by a wave."""

    def results(self, c):
        lone = c.k.shape[-2] == RECIPES["plain"].S
        o, lse, p = super().results(c._replace(scale=c.scale / 2**0.5) if lone else c)
        return o if lone else o + np.sin(np.arange(o.size).reshape(o.shape) + o.size), lse, p


@pytest.mark.thorough
def test_name_that_fits_one_of_many_problems_is_chance():
    wrong = UnknownButOnce()
    trial = trial_of(wrong.forward, features=())
    trial.space = replace(trial.space, few_shapes=True)  # no further problem is tried
    _, (alone,) = diagnose([(trial, fail(trial, ["plain"]))], contrasts=0)
    assert (alone.kind, alone.text) == ("step", "the scale is 1/√(H·D)")
    _, (cause,) = diagnose(
        [(trial, fail(trial, ["plain", "wide", "longer", "longest"]))], contrasts=0
    )
    assert (cause.kind, len(cause.rules)) == ("unexplained", 4)


@pytest.mark.thorough
def test_name_that_fits_no_other_size_is_chance():
    wrong = UnknownButOnce()
    trial = trial_of(wrong.forward, features=())
    _, (cause,) = diagnose([(trial, fail(trial, ["plain"]))], contrasts=0)
    assert cause.kind == "unexplained"


def causes_of(name, rule, **options):
    mistake = MISTAKES[name]
    report = check(
        mistake.forward, backward=mistake.backward, only=[rule], examples=4, shrink=False, **options
    )
    return [(cause.kind, cause.name) for cause in report.causes]


@pytest.mark.thorough
def test_what_an_earlier_call_left_is_no_rounding():
    assert causes_of("precision-of-first-call", "after-other-dtype") == [
        ("mistake", "precision-of-first-call")
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["out-truncated", "dq-in-bfloat16"])
def test_suspicion_of_a_known_mistake_is_named(name):
    options = {"dtypes": ("bfloat16",), "rounding": "fused"}
    assert causes_of(name, "aggregate", **options) == [("mistake", name)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "rule", "leaks"),
    [
        ("nan-leaks-through-zero-weight", "hidden-nan-v", True),
        ("maximum-of-all-queries", "nan-query-alone", False),
    ],
)
@pytest.mark.unmeasured
def test_nan_of_another_query_is_no_leak_from_hidden_positions(name, rule, leaks):
    mistake = MISTAKES[name]
    trial = trial_of(mistake.forward, mistake.backward)
    report = check(
        mistake.forward, backward=mistake.backward, only=[rule], examples=4, diagnosis=False
    )
    bad = [o for o in report.outcomes if o.failed]
    assert bad
    _, causes = diagnose([(trial, bad)], set(MISTAKES), contrasts=0)
    assert any(cause.text == TEXT for cause in causes) == leaks


class FillsAndLeaks(Attention):
    """Hidden scores are low numbers, and hidden positions are multiplied."""

    def masked_matmul(self, w, x, live):
        return w @ x


def test_step_of_which_nothing_but_nan_is_seen_is_the_leak():
    """Another score of hidden positions lets NaN through, as any product with 0 does."""
    leaking = FillsAndLeaks()
    report = check(
        leaking.forward, backward=leaking.backward, only=["hidden-nan-v"], examples=4,
        features=("causal",), framework="numpy", diagnosis=False, shrink=False,
    )  # fmt: skip
    trial = trial_of(leaking.forward, leaking.backward, features=("causal",))
    (bad,) = (o for o in report.outcomes if o.failed)
    evidence = collect(trial, bad)
    fills = [c for c in step_candidates(evidence) if c.topic == "hidden" and c.explains(evidence)]
    assert fills
    for fill in fills:
        ((cause, claimed),), rest = merge_leaks([(fill, [evidence])], [])
        assert (cause.text, claimed, rest) == (TEXT, [evidence], [])
    mistake = replace(fills[0], kind="mistake")
    assert merge_leaks([(mistake, [evidence])], [])[0] == [(mistake, [evidence])]
