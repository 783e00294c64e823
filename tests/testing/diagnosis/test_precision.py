"""A function that computes in a narrower format is told from one that is wrong by a little."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from npattn import attention
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.diagnosis import precision
from npattn.testing.diagnosis.causes import diagnose
from npattn.testing.diagnosis.evidence import collect
from npattn.testing.diagnosis.precision import explain_rounding, precision_candidates, where_rounded
from npattn.testing.trial import GRADIENTS
from tests.testing.diagnosis.failures import attend, fail, trial_of

torch = pytest.importorskip("torch")

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


AS_LARGE = "the errors of {} are as large as rounding {} to {} makes them"


@pytest.mark.parametrize(
    ("computed", "dtype", "text"),
    [
        ("float32", "float64", "the errors of o are as large as computing in float32 makes them"),
        ("bfloat16", "float64", AS_LARGE.format("o", "the weights", "bfloat16")),
        ("bfloat16", "float32", "the errors of o are as large as computing in bfloat16 makes them"),
    ],
)
def test_a_softmax_in_a_narrower_format_is_named(computed, dtype, text):
    (found,) = candidates(softmax_in(NARROW[computed]), dtype)
    assert found.text == text


def keep(x):
    return x


def to_bfloat16(x):
    return x.bfloat16().to(x.dtype)


def to_float16(x):
    return x.half().to(x.dtype)


def rounding(operands=keep, weights=keep, dv_weights=keep, ds=keep, delta=keep):
    """Attention in torch that rounds what enters each product."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            q, k, v = map(operands, (q, k, v))
            p = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
            ctx.save_for_backward(q, k, v, p)
            return weights(p) @ v

        @staticmethod
        def backward(ctx, do):
            q, k, v, p = ctx.saved_tensors
            dp = operands(do) @ v.mT
            dx = ds(p * (dp - delta((p * dp).sum(-1, keepdim=True)))) * q.shape[-1] ** -0.5
            return dx @ k, dx.mT @ q, dv_weights(p).mT @ operands(do)

    return lambda q, k, v: Rounded.apply(q, k, v)


TO = to_bfloat16, to_float16
WHOLE = "the errors of o, dq, dk, dv are as large as computing in bfloat16 makes them"


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (rounding(dv_weights=TO[0]), AS_LARGE.format("dv", "the weights", "bfloat16")),
        (rounding(dv_weights=TO[1]), AS_LARGE.format("dv", "the weights", "tf32 or float16")),
        (rounding(weights=TO[0]), AS_LARGE.format("o", "the weights", "bfloat16")),
        (rounding(keep, TO[0], TO[0]), AS_LARGE.format("o, dv", "the weights", "bfloat16")),
        (rounding(ds=TO[0]), AS_LARGE.format("dq, dk", "the gradients of the scores", "bfloat16")),
        (
            rounding(keep, TO[1], TO[1], TO[1]),
            AS_LARGE.format(
                "o, dq, dk, dv", "the weights and the gradients of the scores", "tf32 or float16"
            ),
        ),
        (rounding(*4 * TO[:1]), WHOLE),
        (rounding(*4 * TO[1:]), WHOLE.replace("bfloat16", "tf32 or float16")),
    ],
)
def test_what_is_rounded_is_told_from_the_size_of_the_errors(f, text):
    trial = trial_of(f, features=(), framework="torch")
    trial.gradients = frozenset(GRADIENTS)
    (found,) = precision_candidates(trial)
    assert found.text == text


def test_roundings_of_no_factor_of_a_product_are_no_format():
    """With δ alone rounded dq and dk are wrong by as much, but neither o nor dv."""
    trial = trial_of(rounding(delta=to_bfloat16), features=(), framework="torch")
    trial.gradients = frozenset(GRADIENTS)
    assert not list(precision_candidates(trial))


def test_a_format_is_told_where_exp_alone_is_rounded():
    """Its errors are as large as those of an implementation in tf32 can be."""

    def f(q, k, v):
        s = q @ k.mT * q.shape[-1] ** -0.5
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return to_bfloat16(e) @ v / e.sum(-1, keepdim=True)

    trial = trial_of(f, features=(), framework="torch")
    trial.gradients = frozenset(GRADIENTS)
    (found,) = precision_candidates(trial)
    assert found.text == WHOLE
    assert explain_rounding(trial).name == "bfloat16"


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


def narrow_if(condition):
    """Return a softmax in float32 on problems of which a condition of q and k holds, else exact."""
    narrow, exact = softmax_in(np.float32), softmax_in()

    def f(q, k, v):
        groups = q.shape[1] // k.shape[1]
        k, v = (np.repeat(x, groups, 1) for x in (k, v))
        return (narrow if condition(q, k) else exact)(q, k, v)

    return trial_of(f, features=(), dtype="float64")


@pytest.mark.parametrize(
    ("condition", "where"),
    [
        (lambda q, k: True, "everywhere"),
        (lambda q, k: k.shape[2] > 127, ""),
        (lambda q, k: q.shape[1] > 1, ""),
        (lambda q, k: False, ""),
    ],
    ids=["everywhere", "many keys", "several heads", "nowhere"],
)
def test_roundings_of_one_head_at_each_length_are_everywhere(condition, where):
    assert where_rounded(narrow_if(condition)) == where


@pytest.mark.parametrize(
    ("f", "where"),
    [
        (rounding(dv_weights=TO[0], ds=TO[0]), "backward: everywhere"),
        (rounding(dv_weights=TO[0]), "everywhere"),
        (rounding(weights=TO[0], dv_weights=TO[0], ds=TO[0]), "everywhere"),
    ],
    ids=["the weights of the backward", "dv", "o too"],
)
def test_roundings_of_all_gradients_alone_are_of_the_backward(f, where):
    trial = trial_of(f, features=(), framework="torch")
    trial.gradients = frozenset(GRADIENTS)
    assert where_rounded(trial) == where


@pytest.mark.thorough
def test_it_is_the_cause_of_what_failed():
    trial = trial_of(softmax_in(np.float32), features=(), dtype="float64")
    _, (cause,) = diagnose([(trial, fail(trial, ["plain", "wide", "longer"]))])
    assert (cause.step, cause.name, len(cause.rules)) == ("precision", "float32", 3)


@pytest.mark.parametrize(("errors", "where"), [([2.0, 2.0], "everywhere"), ([2.0, None], "")])
def test_roundings_at_one_length_are_not_everywhere(errors, where, monkeypatch):
    left = iter(errors)
    sample = SimpleNamespace(names=lambda: ["o"])
    monkeypatch.setattr(precision, "measure_errors", lambda trial, recipe: sample)
    monkeypatch.setattr(precision, "excessive", lambda *_: next(left))
    assert where_rounded(trial_of(attend)) == where
