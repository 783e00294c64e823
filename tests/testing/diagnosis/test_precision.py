"""A function that computes in a narrower format is told from one that is wrong by a little."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from npattn import attention
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.diagnosis.causes import diagnose
from npattn.testing.diagnosis.evidence import collect
from npattn.testing.diagnosis.precision import precision_candidates
from tests.testing.diagnosis.failures import fail, trial_of

NARROW = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def softmax_in(dtype=np.float64, eps=0.0, scale=1.0):
    """Attention whose softmax is computed in a dtype, or is wrong by a little."""

    def f(q, k, v):
        scores = (scale * q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])).astype(dtype)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.astype(float).sum(-1, keepdims=True) + eps
        return (weights.astype(float) / total @ v).astype(q.dtype)

    return f


def candidates(f, dtype="float64"):
    return list(precision_candidates(trial_of(f, features=(), dtype=dtype)))


@pytest.mark.parametrize(
    ("computed", "dtype"),
    [("float32", "float64"), ("bfloat16", "float64"), ("bfloat16", "float32")],
)
def test_a_softmax_in_a_narrower_format_is_named(computed, dtype):
    (found,) = candidates(softmax_in(NARROW[computed]), dtype)
    assert found.text.startswith(f"o is computed in {computed}: ")


@pytest.mark.parametrize("shared", [1e-8, 1e-6, 1e-3])
def test_a_small_mistake_is_no_precision(shared):
    assert not candidates(softmax_in(scale=1 + shared))
    assert not candidates(softmax_in(eps=shared))


@pytest.mark.parametrize("factor", [np.nan, np.inf, 1e300])
def test_what_is_no_number_or_huge_is_no_precision(factor):
    assert not candidates(lambda q, k, v: attention(q, k, v) * factor)


def test_what_is_right_or_raises_computes_in_no_narrower_format():
    def refuse(q, k, v):
        raise TypeError("refused")

    assert not candidates(attention)
    assert not candidates(refuse)


def test_the_format_of_the_inputs_is_not_narrower():
    trial = trial_of(softmax_in(ml_dtypes.bfloat16), features=(), dtype="bfloat16")
    trial.rounding = Rounding.upcast()  # which promises more than it keeps
    assert not list(precision_candidates(trial))


def test_what_a_format_does_not_explain_is_left():
    """A function in float32 that is grossly wrong at an odd size, and only there."""
    narrow = softmax_in(np.float32)
    trial = trial_of(
        lambda q, k, v: narrow(q, k, v) * (1 if q.shape[-2] != 7 else 1.1),
        features=(),
        dtype="float64",
    )
    (found,) = precision_candidates(trial)
    plain, wide = fail(trial, ["plain", "wide"])  # T is 3 and 7
    assert found.explains(collect(trial, plain))
    assert not found.explains(collect(trial, wide))


def test_it_is_the_cause_of_what_failed():
    trial = trial_of(softmax_in(np.float32), features=(), dtype="float64")
    _, (cause,) = diagnose([(trial, fail(trial, ["plain", "wide", "longer"]))], contrasts=0)
    assert (cause.kind, cause.name, len(cause.rules)) == ("precision", "float32", 3)
