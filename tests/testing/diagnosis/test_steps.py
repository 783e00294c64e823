"""Every step that may be wrong changes a result, and a new mistake is told by its step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npattn.mistakes import Attention
from npattn.mistakes.attention import same_signature
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis import search
from npattn.testing.diagnosis.apart import tell_apart
from npattn.testing.diagnosis.causes import diagnose
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
    Recipe(**SIZES, bias="-1e4 rows", view="reversed", seed=10),
    Recipe(**SIZES | {"H": 6, "T": 5, "E": 7}, bias="full", view="transposed", seed=8),
    Recipe(**SIZES | {"lead": (4,)}, mask="padding", bias="one for all heads", seed=9),
    Recipe(**SIZES | {"T": 5}, mask="matrix", causal=True, seed=11),
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


def whole_name(candidate):
    """Return the name of a step without the pass in which it is wrong."""
    return candidate.name.removesuffix(" in backward").removesuffix(" in forward")


@pytest.mark.thorough
def test_every_step_changes_a_result():
    right = Attention()
    trial = trial_of(right.forward, right.backward)
    wide = trial_of(right.forward, right.backward, dtype="float64")
    with_nan = replace(PROBLEMS[4], distribution="normal")
    unseen = {step.text for step in STEPS}
    for evidence in (
        *(evidence_of(trial, recipe) for recipe in PROBLEMS),
        evidence_of(trial, with_nan, nan=True),
        evidence_of(wide, replace(PROBLEMS[3], dtype="float64")),
    ):
        assert not evidence.wrong
        candidates = ((c, whole_name(c)) for c in step_candidates(evidence))
        unseen -= {name for c, name in candidates if name in unseen and not c.explains(evidence)}
    assert unseen == set()


@pytest.mark.thorough
def test_step_of_a_new_mistake_is_told():
    class ScaledTwiceInBackward(Attention):
        def recompute(self, c):
            return c._replace(scale=c.scale**2)

    wrong = ScaledTwiceInBackward()
    trial = trial_of(wrong.forward, wrong.backward, features=())
    _, (cause,) = diagnose([(trial, fail(trial, ["plain", "wide"]))], contrasts=0)
    assert (cause.kind, cause.text) == ("step", "the scale is applied twice in backward")


class NotCausalBesideWeights(Attention):
    def results(self, c):
        return super().results(c._replace(causal=False) if c.returns_weights else c)


class HeadsReadTiled(Attention):
    def share(self, x, H):
        return x[..., np.arange(H) % x.shape[-3], :, :]


class MaskAdded(Attention):
    def hide(self, s, visible):
        return s + visible


class TransposedBias(Attention):
    def reduce_bias(self, ds, shape):
        return super().reduce_bias(ds.swapaxes(-1, -2), shape)


class BiasOfSamplesForHeads(Attention):
    def bias(self, c):
        same = np.ndim(c.bias) > 3 and c.bias.shape[-4:-2] == (c.q.shape[-3], 1)
        return np.swapaxes(c.bias, -3, -4) if same else c.bias


class DropoutBeforeSoftmax(Attention):
    def visible(self, c):
        return super().visible(c) & (np.asarray(c.keep) > 0)


class PaddingAttended(Attention):
    def softmax(self, s, c, live):
        p, p_sink, lse = super().softmax(s, c, live)
        padding = 0 if c.causal else -s.shape[-1] % 16
        share = 1 / (1 + padding * np.exp(-lse))
        return p * share, p_sink * share, lse - np.log(share)


class ScoresInFloat16(Attention):
    def final(self, x, visible, c):
        return super().final(x, visible, c).astype(np.float16).astype(float)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrong", "recipe", "text"),
    [
        (NotCausalBesideWeights, "causal", "causal is ignored where the weights"),
        (HeadsReadTiled, "groups", "query head h reads key/value head h % K, and adds"),
        (MaskAdded, "mask", "the mask is added to the scores as 1 and 0"),
        (TransposedBias, "square bias", "dbias is transposed"),
        (BiasOfSamplesForHeads, "bias by sample", "the bias of sample b is used for head b"),
        (DropoutBeforeSoftmax, "dropout", "dropout is applied to the scores"),
        (PaddingAttended, "plain", "keys of zeros take weight: those that pad the last tile of 16"),
        (ScoresInFloat16, "bias", "the final scores are rounded to float16"),
    ],
)
@pytest.mark.broad
def test_step_is_told_from_all_others(wrong, recipe, text):
    wrong = wrong()
    trial = trial_of(wrong.forward, wrong.backward)
    (outcome,) = fail(trial, [recipe])
    evidence = evidence_of(trial, outcome.sampled)
    named = [c for c in step_candidates(evidence) if c.explains(evidence)]
    left = tell_apart(named, [replace(evidence, outcome=outcome)])
    assert left[0].name.startswith(text)
    assert {c.topic for c in left} == {left[0].topic}


def test_a_diagonal_hides_the_padding_of_the_last_tile():
    wrong = PaddingAttended()
    trial = trial_of(wrong.forward, wrong.backward)
    plain, causal = (evidence_of(trial, RECIPES[name]) for name in ("plain", "causal"))
    assert plain.wrong
    assert not causal.wrong
    (step,) = (
        c for c in step_candidates(plain) if c.name.endswith("last tile of 16 are not hidden")
    )
    assert step.explains(plain)
    assert step.explains(causal)


@pytest.mark.thorough
def test_step_wrong_on_some_problems_only_is_told():
    class MaskIgnoredWithManyKeys(Attention):
        def mask(self, mask, c):
            return mask | (c.k.shape[-2] == RECIPES["mask"].S)

    wrong = MaskIgnoredWithManyKeys()
    trial = trial_of(wrong.forward, wrong.backward, features=("mask",))
    without = {"mask-without-effect"}
    _, (cause,) = diagnose([(trial, fail(trial, ["mask"]))], without, contrasts=0)
    assert (cause.kind, cause.text) == ("step", "the mask is ignored")


def test_unsteady_results_are_conduct():
    class Unsteady(Attention):
        calls = 0

        @same_signature(Attention.forward)
        def forward(self, *arrays, **options):
            self.calls += 1
            return super().forward(*arrays, **options) * (1 + 0.01 * self.calls)

    trial = trial_of(Unsteady().forward, features=())
    _, (cause,) = diagnose([(trial, fail(trial, ["plain", "wide"]))], contrasts=0)
    assert (cause.kind, cause.name) == ("conduct", "unsteady")
