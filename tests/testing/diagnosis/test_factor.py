"""A factor of all scores is fitted, and named where nothing simpler explains what failed."""

from __future__ import annotations

import numpy as np
import pytest

from npattn.mistakes import MISTAKES, Attention
from npattn.testing.diagnosis.causes import diagnose
from npattn.testing.diagnosis.evidence import sample
from npattn.testing.diagnosis.ratios import ratio_candidates
from npattn.testing.diagnosis.steps import factor_candidates
from npattn.testing.rules.systematic_error import plain_recipes
from tests.testing.diagnosis.failures import fail, trial_of

pytestmark = pytest.mark.unmeasured  # other tests run these lines

LOG2E = 1.44  # 1.442695


class FewDigits(Attention):
    """The softmax is computed by 2^x, with log₂e in three digits."""

    def final(self, x, visible, c):
        return LOG2E * np.log(2) * Attention.final(self, x, visible, c)


class Scale(Attention):
    """The scale is wrong by a thousandth, forward and backward."""

    def inputs(self, *arrays, **options):
        c = Attention.inputs(self, *arrays, **options)
        return c._replace(scale=1.001 * c.scale)


class Log2eInFloat32(FewDigits):
    """log₂e was rounded to float32, and the kernel computes in float64."""

    def final(self, x, visible, c):
        return float(np.float32(np.log2(np.e))) * np.log(2) * Attention.final(self, x, visible, c)


def cause_of(wrong, dtype="float32", features=None):
    trial = trial_of(wrong.forward, wrong.backward, dtype=dtype, features=features)
    outcomes = fail(trial, ["plain", "wide", "bias", "longer"])
    return diagnose([(trial, outcomes)], contrasts=0)[1][0]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log2e_with_few_digits(dtype):
    cause = cause_of(FewDigits(), dtype)
    assert (cause.kind, len(cause.rules)) == ("factor", 4)
    assert "multiplied by 0.998132 before the softmax" in cause.text


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_scale_that_is_wrong_by_a_thousandth(dtype):
    cause = cause_of(Scale(), dtype)
    assert (cause.kind, cause.name, len(cause.rules)) == (
        "factor",
        "the scale is 1.001 times what it should be",
        4,
    )


@pytest.mark.thorough
def test_a_constant_in_float32():
    cause = cause_of(Log2eInFloat32(), "float64")
    assert (cause.kind, len(cause.rules)) == ("factor", 4)
    assert "multiplied by 1 − 1.3e-08 before the softmax" in cause.text


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["scale-one", "scale-twice", "weights-base-2"])
@pytest.mark.broad
def test_a_mistake_that_has_a_name_keeps_it(name):
    mistake = MISTAKES[name]
    wrong = type(mistake.forward.__self__)()
    assert cause_of(wrong, features=("bias", "causal")).kind != "factor"


def plain(f):
    trial = trial_of(f, features=())
    (evidence,) = sample(trial, plain_recipes(trial.space, 0)[:1])
    return evidence


def test_no_factor_of_what_is_right_or_is_no_mean_of_values():
    right = Attention().forward
    for f in (
        right,
        lambda q, k, v: right(q, k, v) * np.float32(np.nan),
        lambda q, k, v: right(q, k, v) * np.float32(np.inf),
        lambda q, k, v: right(q, k, v) * np.float32(1e30),
        lambda q, k, v: right(q, k, v)[..., :1],
        lambda q, k, v: right(q, k, v) * 2j,
    ):
        assert not list(factor_candidates(plain(f)))


@pytest.mark.parametrize(
    ("factor", "text"), [(1 + 1e-5, "1 + 1e-05"), (1 - 1e-5, "1 − 1e-05"), (1.5, "1.5")]
)
def test_a_factor_beside_1_is_printed_as_one(factor, text):
    right = Attention().forward
    trial = trial_of(lambda q, k, v: factor * right(q, k, v), features=(), dtype="float64")
    (evidence,) = sample(trial, plain_recipes(trial.space, 0)[:1])
    (candidate,) = ratio_candidates(evidence)
    assert candidate.text == f"o is multiplied by {text}"
