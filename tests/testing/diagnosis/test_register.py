"""Read steps of the registered mistakes, on chosen recipes: those declared, but for a list."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import npattn.testing
from npattn.mistakes import MISTAKES
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.amount import describe
from npattn.testing.diagnosis.explore import Point, try_recipe
from npattn.testing.diagnosis.sentences import say
from npattn.testing.places import asking
from tests.testing.diagnosis.failures import RECIPES, trial_of

BIG = {"lead": (2,), "T": 19, "S": 37, "D": 11, "E": 7}
CHOSEN = [
    *RECIPES.values(),
    Recipe(**BIG, H=2, K=2, seed=15),
    Recipe(**BIG, H=4, K=2, seed=16, causal=True),
    Recipe(**BIG, H=2, K=2, seed=17, sinks=True),
    Recipe(**BIG, H=2, K=1, seed=18, softcap=2.0, scale=-0.5),
    Recipe(**BIG, H=3, K=3, seed=19, mask="empty rows"),
    Recipe(**BIG, H=2, K=2, seed=21, window=(3, 1), bias="-inf padding"),
]
PLAIN = [m for m in MISTAKES.values() if m.dtypes[0] == "float32" and m.rounding is None]
ONE_CALL = ("nan", "s", "visible", "p", "lse", "o", "dv", "dp", "delta", "ds", "dq", "dk", "dbias")
GROUPS = 20
"""Of mistakes, each with some of every family: the thorough tier has two of them."""


def read(mistake):
    """The step that most failing recipes show, and its sentence."""
    trial = trial_of(mistake.forward, mistake.backward)
    points: list[Point] = [p for p in (try_recipe(trial, r) for r in CHOSEN) if p and p.fault]
    if not points:
        return None, ""
    step, _ = Counter(p.fault.step for p in points).most_common(1)[0]
    amount = describe([p for p in points if p.fault.step == step])
    return step, say(step, "", amount)


@pytest.mark.thorough
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.usefixtures("few_problems")
def test_most_recipes_show_the_declared_step(group):
    mistakes = [m for m in PLAIN[group::GROUPS] if m.step in ONE_CALL]
    declared = {m.name: m.step for m in mistakes}
    with np.errstate(all="ignore"):
        found = {m.name: read(m) for m in mistakes}
    found = {name: x for name, x in found.items() if x[0] is not None}
    assert all(text for _, text in found.values())
    wrong = {name: step for name, (step, _) in found.items() if step != declared[name]}
    assert wrong == {name: step for name, step in MISREAD.items() if name in found}


@pytest.mark.thorough
@pytest.mark.every
@pytest.mark.parametrize(
    ("name", "only", "step", "where"),
    [
        ("mask-after-softmax", "agreement-o", "p", "window or mask or causal"),
        ("window-replaces-mask", "convex-hull", "visible", "mask and window"),
        ("mask-of-last-query", "agreement-o", "visible", "t ≠ T − 1 and mask"),
        ("dweights-dropped", "agreement-dq", "dp", "dweights and dropout"),
        ("empty-row-takes-dlse", "empty-row", "dq", "rows that see no key and dlse"),
        ("weights-without-sink", "agreement-weights", "p", "sinks and weights"),
        ("rank-2-weights", "structure", "layout", "weights"),
        ("sink-of-key-head", "agreement-o", "p", "h ≥ 1 and sinks and G > 1"),
        ("nan-of-query-zeroed", "nan-query", "nan", "contents"),
        ("nan-leaks-through-additive-mask", "hidden-nan-kv", "nan", "hidden keys and contents"),
        ("dk-of-nan-query", "nan-query-alone", "nan", "hidden keys and contents"),
    ],
)
def test_one_cause_has_the_step_and_a_place_that_is_true(name, only, step, where, monkeypatch):
    """A problem that hides nothing, or lacks the gradient of a result, refutes no place."""
    monkeypatch.setattr(asking, "SLACK", 100.0)
    mistake = MISTAKES[name]
    report = npattn.testing.check(
        mistake.forward, backward=mistake.backward, framework="numpy", examples=20, only=[only]
    )
    (cause,) = (*report.causes, *report.other_causes)
    assert (cause.step, cause.where) == (step, where)


MISREAD = {
    "bias-minus-inf-lost": "p",  # visible
    "empty-row-unwritten": "p",  # o
    "keys-and-values-exchanged": "o",  # s
    "sink-scaled": "lse",  # p
    "sink-of-first-head": "lse",  # p
    "sinks-ignored": "lse",  # p
    "sink-has-a-value": "s",  # p
    "weights-without-sink": "precision",  # p
    "sinks-ignored-with-weights": "lse",  # p
    "sink-in-every-split": "lse",  # p
    "out-of-each-split-in-backward": "dp",  # delta
}
"""Mistakes of which most of these recipes show another step than the declared one."""
