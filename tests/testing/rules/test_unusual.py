"""Contents and cotangents by which a problem may be recognised, and shortcuts that are caught."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.zoo.cheats import plain
from npattn.testing import Implementation
from npattn.testing.cases.recipe import UNUSUAL, Recipe
from npattn.testing.rules import PROPERTIES
from npattn.testing.targets.numpy import flash
from npattn.testing.trial import Violation, WrongAnyway
from tests.testing.rules.relations import trial_of

CONTENTS, DOUTS = PROPERTIES["unusual-contents"], PROPERTIES["unusual-cotangents"]
RECOGNISED = {
    "small": lambda q, k, v: abs(q).max() < 0.1,
    "positive": lambda q, k, v: min(q.min(), k.min(), v.min()) >= 0 and q.min() > 0,
    "sparse": lambda q, k, v: (v == 0).mean() > 0.3 and (q == 0).mean() > 0.3,
    "large values": lambda q, k, v: abs(v).min() > 200,
    "equal queries": lambda q, k, v: (q == q[..., :1, :]).all() and q.any(),
    "unit rows": lambda q, k, v: np.allclose((q * q).sum(-1), 1) and (q != 0).all(),
    "one-hot rows": lambda q, k, v: ((k == 0).sum(-1) == k.shape[-1] - 1).all(),
    "zero keys": lambda q, k, v: (k == 0).all(-1).any() and q.any(),
    "self-attention": lambda q, k, v: q.shape == v.shape and (q == k).all() and (q == v).all(),
    "half-precision numbers": lambda q, k, v: (q.astype(np.float16) == q).all() and (q != 0).all(),
}


def trial_that_errs_where(condition):
    """Return a trial of a function that gives the mean of all values for some contents."""

    def f(q, k, v):
        return plain.mean_of_values(q, k, v) if condition(q, k, v) else flash(q, k, v)

    trial = trial_of(f=Implementation(f, framework="numpy"))
    trial.gradients = frozenset()
    return trial


def run(rule, trial):
    """Return the distributions of the problems on which a rule fails."""
    failed = []
    for recipe in rule.recipes(trial, 0, 1):
        try:
            rule.check(trial, recipe)
        except Violation:
            failed.append(recipe.distribution)
    return failed


@pytest.mark.parametrize("name", UNUSUAL)
def test_shortcut_by_contents_is_caught(name):
    assert name in run(CONTENTS, trial_that_errs_where(RECOGNISED[name]))


def test_what_is_wrong_anyway_is_left_to_agreement():
    trial = trial_that_errs_where(lambda q, k, v: True)
    with pytest.raises(WrongAnyway):
        CONTENTS.check(trial, replace(CONTENTS.recipes(trial, 0, 1)[0], distribution="positive"))


CONDITIONS = {
    "of the sum of o": lambda dout: dout.std() == 0 and dout.any(),
    "of a loss that is scaled up": lambda dout: abs(dout).max() > 1e3,
    "of a loss that is scaled down": lambda dout: 0 < abs(dout).max() < 1e-3,
    "of the last query alone": lambda dout: not dout[..., :-1, :].any() and dout.any(),
    "of a constant": lambda dout: not dout.any(),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_shortcut_by_cotangents_is_caught(name):
    def f(q, k, v):
        return plain.attention(q, k, v)

    def backward(dout, q, k, v):
        dq, dk, dv = plain.gradients(dout, q, k, v)
        return dq, dk + bool(CONDITIONS[name](dout)), dv

    trial = trial_of(f=Implementation(f, backward=backward, framework="numpy"))
    trial.gradients = frozenset({"dq", "dk", "dv"})
    for recipe in DOUTS.recipes(trial, 0, 1):
        with pytest.raises(Violation, match=name):
            DOUTS.check(trial, recipe)


def test_sizes_that_are_refused_are_not_asked():
    structure = trial_of().space.structure - {"D % 8"}
    trial = trial_of(structure=structure)
    sizes = {recipe.D % 8 for rule in (CONTENTS, DOUTS) for recipe in rule.recipes(trial, 0, 1)}
    assert sizes == {0}


def test_plain_ones_are_square_and_have_no_options():
    recipe = next(r for r in CONTENTS.recipes(trial_of(), 0, 1) if r.distribution == "positive")
    assert (recipe.T, recipe.D, recipe.H) == (recipe.S, recipe.E, recipe.K)
    assert replace(recipe, mask=None, causal=False, bias=None) == recipe
    assert isinstance(recipe, Recipe)
