"""Fully masked rows: how they are made, and which rules leave them to empty-row."""

from functools import partial

import numpy as np
import pytest

from npattn.testing import Implementation
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools
from npattn.testing.rules import PROPERTIES
from npattn.testing.trial import Violation
from tests.testing.rules.relations import trial_of

EMPTY_ROW = PROPERTIES["empty-row"]


def nan_if_empty(q, k, v, mask=None, bias=None):
    """−inf − −inf is NaN where a query sees nothing."""
    s = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5)
    s = s if bias is None else s + bias
    s = s if mask is None else np.where(mask, s, np.float32(-np.inf))
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True) @ v).astype(q.dtype)


def forward_trial(f, **space):
    trial = trial_of(f=Implementation(f, framework="numpy"), **space)
    trial.gradients = frozenset()
    return trial


@pytest.mark.parametrize("features", [{"bias"}, {"bias", "mask"}, {"bias", "causal"}])
def test_bias_alone_empties_rows(features):
    trial = forward_trial(nan_if_empty, features=frozenset(features))
    assert EMPTY_ROW.unless(trial) is None
    pools = Pools(trial.space, **EMPTY_ROW.draw(trial))
    recipes = [pools.recipe(seed) for seed in range(40)]
    alone = [r for r in recipes if r.bias == "-inf rows" and not r.mask and not r.causal]
    assert alone
    assert all(trial.empty(trial.problem(recipe)).any() for recipe in alone)


def test_nan_of_a_row_of_minus_inf_fails():
    trial = forward_trial(nan_if_empty, features=frozenset({"bias"}))
    with pytest.raises(Violation, match="got nan"):
        EMPTY_ROW.check(trial, Recipe(bias="-inf rows", T=5))


def test_float8_without_inf_has_no_such_bias():
    trial = forward_trial(nan_if_empty, features=frozenset({"bias"}), dtype="float8_e4m3fn")
    assert EMPTY_ROW.unless(trial) == "nothing empties a row"


def test_one_key_makes_no_empty_rows_once_they_are_wrong():
    def refuse_empty(q, k, v, mask=None, bias=None):
        o = nan_if_empty(q, k, v, mask, bias)
        assert not np.isnan(o).any(), "a row is empty"
        return o

    trial = forward_trial(refuse_empty)
    recipes = [Recipe(bias="-inf padding", T=5, S=3, seed=seed) for seed in range(20)]
    check = partial(PROPERTIES["one-key"].check, trial)
    with pytest.raises(ImplementationError, match="a row is empty"):
        list(map(check, recipes))
    trial.skips_empty_rows = True
    found = list(map(check, recipes))
    assert None in found
    assert max(ratio for ratio in found if ratio is not None) <= 1
