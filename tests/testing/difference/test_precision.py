"""Roundings that explain errors: a step that takes most of them away, and no other."""

from dataclasses import replace

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.oracle.api import backward, evaluate
from npattn.testing.cases.recipe import Recipe
from npattn.testing.difference.measure import Answer, Judged
from npattn.testing.difference.precision import RIGHT, ROUNDINGS, explain_errors, remaining, replay
from tests.testing.diagnosis.failures import trial_with


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


BASE = Recipe(lead=(2,), H=6, K=3, T=5, S=11, D=7, E=13, dtype="float64", seed=3)
OPTIONS = [
    {},
    {"lead": None, "H": 1, "K": 1},
    {"broadcast": True, "scale": -0.37},
    {"mask": "empty rows", "softcap": 1.5},
    {"causal": True, "window": (3, 1), "sinks": True},
    {"bias": "full"},
]


def arrays(recipe):
    trial = trial_with("float64")
    problem = trial.problem(recipe)
    return problem, trial.cotangents(recipe, problem, weights=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_replay_without_a_change_is_the_oracle(options):
    problem, cotangents = arrays(replace(BASE, **options))
    found = replay(problem, cotangents, Conventions(), {})
    fwd = evaluate(problem, Conventions())
    grads = backward(fwd, cotangents.dout, cotangents.dlse, cotangents.dweights)
    wanted = {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}
    wanted |= {f"d{n}": getattr(grads, n) for n in ("q", "k", "v", "bias", "sinks")}
    wanted = {name: x for name, x in wanted.items() if x is not None}
    assert wanted.keys() == found.keys() - {"max_score"}
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-9, atol=1e-11, err_msg=name)


def test_conventions_are_translated():
    conventions = Conventions(lse_base="2", kv_head="tile", hidden_fill=-3.0)
    problem, cotangents = arrays(replace(BASE, causal=True))
    found = replay(problem, cotangents, conventions, {})
    fwd = evaluate(problem, conventions)
    grads = backward(fwd, cotangents.dout, cotangents.dlse, cotangents.dweights)
    wanted = {"o": fwd.out, "lse": fwd.lse, "weights": fwd.weights}
    for name, x in (wanted | {f"d{n}": getattr(grads, n) for n in "qkv"}).items():
        np.testing.assert_allclose(found[name], x, rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("s", {"o", "lse", "weights", "dq", "dk", "dv"}),
        ("p", {"o", "weights", "dq", "dk", "dv"}),
        ("lse", {"lse"}),
    ],
)
def test_what_follows_a_change_alone_is_changed(name, changed):
    problem, cotangents = arrays(BASE)
    before, after = (
        replay(problem, cotangents, Conventions(), changes)
        for changes in ({}, {name: lambda x: 2 * x})
    )
    different = {n for n in before if not np.allclose(before[n], after[n])}
    assert different - {"max_score"} == changed
