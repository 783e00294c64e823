"""Rules about hidden positions and NaN: what is asked, and what is not."""

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.testing import Implementation, Rounding
from npattn.testing.cases.recipe import Recipe
from npattn.testing.rules import PROPERTIES
from npattn.testing.trial import Violation
from tests.testing.rules.relations import ratios, trial_of

FILL = -1e9


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
    return e / e.sum(-1, keepdims=True)


def select_dropped(q, k, v, *, dropout_mask=None, dropout_rate=0.0):
    """Kernels select: a dropped weight is 0, even if it was NaN."""
    p = softmax(q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5))
    if dropout_mask is not None:
        p = np.where(dropout_mask, p / np.float32(1 - dropout_rate), np.float32(0))
    return (p @ v).astype(q.dtype)


def clear_nan(q, k, v, *, dropout_mask=None, dropout_rate=0.0):
    """NaN becomes 0 wherever there is one."""
    return np.nan_to_num(select_dropped(q, k, v, dropout_mask=dropout_mask))


@np.errstate(all="ignore")
def first_ratios(f, rule, count=20, backward=None, **kwargs):
    f = Implementation(f, backward=backward, framework="numpy")
    trial = trial_of(f=f, **kwargs)
    trial.gradients = frozenset({"dq", "dk", "dv"} if backward else ())
    trial.space = type(trial.space)(trial.space.features, frozenset({"rank 4", "T != S"}))
    return ratios(trial, rule, count)


@pytest.mark.parametrize("rule", ["nan-query", "nan-value", "nan-query-alone"])
def test_dropped_weight_need_not_carry_nan(rule):
    assert max(first_ratios(select_dropped, rule)) <= 1


@pytest.mark.parametrize("rule", ["nan-query", "nan-value"])
def test_cleared_nan_fails_beside_dropout(rule):
    with pytest.raises(Violation):
        first_ratios(clear_nan, rule)


class Filled:
    """Hidden scores become a number; the backward replaces hidden keys, or multiplies them by 0."""

    def __init__(self, replaces):
        self.replaces = replaces

    def weights(self, q, k, mask):
        s = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
        visible = np.broadcast_to(True if mask is None else mask, s.shape)
        return softmax(np.where(visible, s, np.float32(FILL))), visible

    def forward(self, q, k, v, mask=None):
        return (self.weights(q, k, mask)[0] @ v).astype(q.dtype)

    def backward(self, dout, q, k, v, mask=None):
        p, visible = self.weights(q, k, mask)
        dp = dout @ v.swapaxes(-1, -2)
        ds = np.where(visible, p * (dp - (p * dp).sum(-1, keepdims=True)), 0)
        ds = ds * np.float32(q.shape[-1] ** -0.5)
        keys = np.where(visible.any(-2)[..., None], k, 0) if self.replaces else k
        return ds @ keys, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


FILLED = Conventions(hidden_fill=FILL)


def test_gradients_behind_a_fill_may_pass():
    kernel = Filled(replaces=True)
    found = first_ratios(
        kernel.forward, "hidden-nan-k", 5, backward=kernel.backward, conventions=FILLED
    )
    assert max(found) <= 1


def test_nan_in_gradients_behind_a_fill_fails():
    kernel = Filled(replaces=False)
    with pytest.raises(Violation, match=r"(?s)dq.*got nan"):
        first_ratios(
            kernel.forward, "hidden-nan-k", 5, backward=kernel.backward, conventions=FILLED
        )


def test_gradients_are_not_asked_if_the_forward_is_nan():
    """A weight of 0 times NaN is NaN; a framework would compile the backward for nothing."""
    kernel, asked = Filled(replaces=True), []

    def backward(dout, q, k, v, mask=None):
        asked.append(q.shape)
        return kernel.backward(dout, q, k, v, mask)

    f = Implementation(kernel.forward, backward=backward, framework="numpy")
    trial = trial_of(f=f, conventions=FILLED)
    trial.gradients = frozenset({"dq", "dk", "dv"})
    recipe = Recipe(lead=(2,), T=3, S=7, mask="padding", seed=1)
    assert PROPERTIES["hidden-nan-v"].check(trial, recipe) is None
    assert not asked
    assert PROPERTIES["hidden-nan-k"].check(trial, recipe) <= 1
    assert asked


def test_fill_without_gradients_asks_nothing():
    kernel = Filled(replaces=True)
    trial = trial_of(f=Implementation(kernel.forward, framework="numpy"), conventions=FILLED)
    trial.gradients = frozenset()
    assert PROPERTIES["hidden-nan-k"].unless(trial) == "hidden_fill lets hidden keys matter"


def eager(q, k, v, mask=None, scale=None):
    """Every product is stored in the dtype of the inputs, as by matrix products of float16."""
    s = (q @ k.swapaxes(-1, -2) * q.dtype.type(scale or q.shape[-1] ** -0.5)).astype(q.dtype)
    s = s if mask is None else np.where(mask, s, -np.inf)
    return softmax(s.astype(np.float32)).astype(q.dtype), s


def eager_forward(q, k, v, mask=None, *, scale=None):
    return eager(q, k, v, mask, scale)[0] @ v


def eager_backward(dout, q, k, v, *, out, mask=None, scale=None):
    p, _ = eager(q, k, v, mask, scale)
    dp = (dout @ v.swapaxes(-1, -2)).astype(q.dtype)
    ds = p * (dp - (dout * out).sum(-1, keepdims=True)).astype(q.dtype)
    ds = ds * q.dtype.type(scale or q.shape[-1] ** -0.5)
    ds = ds if mask is None else np.where(mask, ds, q.dtype.type(0))
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


@pytest.mark.parametrize("distribution", ["large logits", "one-hot"])
@np.errstate(all="ignore")
def test_garbage_does_not_overflow_scores_that_see_it(distribution):
    f = Implementation(eager_forward, backward=eager_backward, framework="numpy")
    trial = trial_of(f=f, dtype="float16")
    trial.gradients = frozenset({"dq", "dk", "dv"})
    trial.rounding = Rounding.from_name("eager")
    rule = PROPERTIES["hidden-finite"]
    asked = 0
    for seed in range(60):
        recipe = Recipe(
            lead=(2,), H=1, K=1, T=2, S=5, D=3, E=2, dtype="float16", seed=seed,
            distribution=distribution, mask="full",
        )  # fmt: skip
        asked += rule.check(trial, recipe) is not None
    assert asked > 30
