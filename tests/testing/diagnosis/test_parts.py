"""Candidates of latent attention and of lists of keys: each explains its own mistake alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from npattn.conventions import Conventions  # noqa: E402
from npattn.testing import Implementation, Recipe, Rounding  # noqa: E402
from npattn.testing.cases.space import Space  # noqa: E402
from npattn.testing.diagnosis.evidence import observe  # noqa: E402
from npattn.testing.diagnosis.parts import READS, part_candidates  # noqa: E402
from npattn.testing.trial import Trial  # noqa: E402
from tests.testing import latent_kernels as kernels  # noqa: E402

LATENT = Recipe(lead=(3,), H=3, K=1, T=5, S=7, D=13, E=8)
LISTS = Recipe(lead=(3,), H=2, K=1, T=5, S=7, D=3, E=2, mask="documents", seed=2)
CAUSES = {
    kernels.NoRotary: "the rotary parts are left out of the scores",
    kernels.NoContent: "the parts without position are left out of the scores",
    kernels.NoValueGradient: "the gradient of the compressed keys lacks their share as values",
    kernels.NoKeyGradient: "the gradient of the compressed keys lacks their share in the scores",
}


def evidence_of(f, recipe, conventions=None, **arguments):
    """Run a kernel on the problem of a recipe."""
    implementation = Implementation(f, framework="torch", **arguments)
    conventions = conventions or Conventions()
    implementation.conventions = conventions
    trial = Trial(implementation, conventions, Rounding.undeclared("float32"), Space())
    trial.gradients = frozenset({"dq", "dk", "dv"})
    problem = trial.problem(recipe)
    return observe(trial, problem, trial.cotangents(recipe, problem))


def explanations(evidence):
    return [c.text for c in part_candidates(evidence) if c.explains(evidence)]


@pytest.mark.parametrize("wrong", CAUSES, ids=lambda wrong: wrong.__name__)
def test_a_part_that_is_left_out_is_named(wrong):
    evidence = evidence_of(wrong(), LATENT, rename={"attn_mask": "mask"})
    assert evidence.wrong
    assert explanations(evidence) == [CAUSES[wrong]]


def test_the_scale_of_a_part_is_named():
    evidence = evidence_of(kernels.with_scale_of_q, replace(LATENT, H=4, K=2))
    text = "the default scale is 1/√R, of the rotary parts alone, instead of 1/√(C + R)"
    assert explanations(evidence) == [text]
    given = evidence_of(kernels.with_scale_of_q, replace(LATENT, scale=0.5))
    assert not given.wrong


class Reads(kernels.Gathered):
    """Reads lists in another way."""

    def __init__(self, change):
        self.change = change

    def read(self, lists, S):
        changed = np.array(self.change(lists.numpy(), S))
        return super().read(torch.from_numpy(changed), S)


@pytest.mark.parametrize("text", READS)
def test_lists_that_are_read_otherwise_are_named(text):
    evidence = evidence_of(Reads(READS[text]), LISTS)
    assert evidence.wrong
    assert explanations(evidence) == [text]


def test_meanings_of_true_that_differ():
    text = "−1 in a list is read as the last key"
    hide = Conventions(mask_true="hide")
    assert explanations(evidence_of(Reads(READS[text]), LISTS, hide)) == [text]


def test_unused_entries_that_take_weight_are_named():
    evidence = evidence_of(kernels.UnusedTakeWeight(), LISTS)
    assert explanations(evidence) == [kernels.UnusedTakeWeight.cause]
    wrong_gradients = evidence_of(kernels.AssignsGradients(), LISTS)
    assert wrong_gradients.wrong.keys() == {"dk", "dv"}
    assert explanations(wrong_gradients) == []


@pytest.mark.parametrize("right", [True, False])
def test_lists_beside_a_mask(right):
    change = READS["each entry of a list is read as the key after it"]

    def both(q, k, v, indices, mask=None):
        kernel = kernels.Gathered() if right else Reads(change)
        lists = indices if mask is None else indices.clone()
        if mask is not None:
            whole = mask.expand(len(q), 1, *mask.shape[-2:])[:, 0]
            read = lists if right else torch.from_numpy(np.array(change(lists.numpy(), 7)))
            seen = torch.gather(whole, 2, read.clamp(min=0).long())
            lists = lists.masked_fill(~seen, -1)
        return kernel(q, k, v, lists)

    evidence = evidence_of(both, LISTS)
    assert bool(evidence.wrong) != right
    expected = [] if right else ["each entry of a list is read as the key after it"]
    assert explanations(evidence) == expected


def test_others_have_no_candidates():
    evidence = evidence_of(lambda q, k, v: v[:, :, : q.shape[2]], Recipe(T=3, S=3, D=5, E=5))
    assert list(part_candidates(evidence)) == []
