"""Every step that may be wrong changes a result, and a new mistake is told by its step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npattn.mistakes import Attention
from npattn.mistakes.attention import same_signature
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis import causes as search
from npattn.testing.diagnosis.evidence import observe
from npattn.testing.diagnosis.steps.step import STEPS, step_candidates
from tests.testing.diagnosis.failures import RECIPES, fail, trial_of

SIZES = {"lead": (2,), "H": 4, "K": 2, "T": 6, "S": 5, "D": 7, "E": 3}
PROBLEMS = [
    Recipe(**SIZES | {"H": 6}, causal=True, window=(0, 1), softcap=2.0, sinks=True, seed=1),
    Recipe(**SIZES | {"T": 3}, causal=True, bias="full", dropout=0.3, scale=-0.5, seed=2),
    Recipe(**SIZES, mask="full", bias="full", softcap=1.5, broadcast=True, seed=3),
    Recipe(**SIZES | {"E": 7}, window=(1, 2), bias="keys", sinks=True, dropout=0.2, seed=4),
    Recipe(**SIZES, mask="empty rows", distribution="huge logits", seed=6),
    Recipe(**SIZES, bias="-inf rows", seed=7),
    Recipe(lead=(1,), T=2, S=300, D=3, E=2, seed=5),
    Recipe(lead=(1,), T=2, S=3, D=300, E=301, seed=5),
    Recipe(lead=(1,), T=300, S=3, D=2, E=2, seed=5),
]


@pytest.fixture(autouse=True)
def few_probes(monkeypatch):
    monkeypatch.setattr(search, "PROBES", 5)


def evidence_of(trial, recipe, nan=False):
    problem = trial.problem(recipe)
    if nan:
        k = problem.k.copy()
        k[..., -1, :] = np.nan
        problem = problem.replace(k=k, v=np.where(np.isnan(k[..., :1]), np.nan, problem.v))
    return observe(trial, problem, trial.cotangents(recipe, problem, weights=True), recipe.view)


def test_every_step_changes_a_result():
    right = Attention()
    trial = trial_of(right.forward, right.backward)
    with_nan = replace(PROBLEMS[4], distribution="normal")
    unseen = {step.text for step in STEPS}
    for evidence in (
        *(evidence_of(trial, recipe) for recipe in PROBLEMS),
        evidence_of(trial, with_nan, nan=True),
    ):
        assert not evidence.wrong
        changed = [c for c in step_candidates(evidence) if not c.explains(evidence)]
        unseen -= {c.name.removesuffix(" in backward") for c in changed}
    assert unseen == set()


def test_step_of_a_new_mistake_is_told():
    class ScaledTwiceInBackward(Attention):
        def recompute(self, c):
            return c._replace(scale=c.scale**2)

    wrong = ScaledTwiceInBackward()
    trial = trial_of(wrong.forward, wrong.backward, features=())
    _, (cause,) = search.diagnose([(trial, fail(trial, ["plain", "wide"]))], contrasts=0)
    assert (cause.kind, cause.text) == ("step", "the scale is applied twice in backward")


def test_step_wrong_on_some_problems_only_is_told():
    class MaskIgnoredWithManyKeys(Attention):
        def mask(self, mask, c):
            return mask | (c.k.shape[-2] == RECIPES["mask"].S)

    wrong = MaskIgnoredWithManyKeys()
    trial = trial_of(wrong.forward, wrong.backward, features=("mask",))
    without = {"mask-without-effect"}
    _, (cause,) = search.diagnose([(trial, fail(trial, ["mask"]))], without, contrasts=0)
    assert (cause.kind, cause.text) == ("step", "the mask is ignored")


def test_unsteady_results_are_conduct():
    class Unsteady(Attention):
        calls = 0

        @same_signature(Attention.forward)
        def forward(self, *arrays, **options):
            self.calls += 1
            return super().forward(*arrays, **options) * (1 + 0.01 * self.calls)

    trial = trial_of(Unsteady().forward, features=())
    _, (cause,) = search.diagnose([(trial, fail(trial, ["plain", "wide"]))], contrasts=0)
    assert (cause.kind, cause.name) == ("conduct", "unsteady")
