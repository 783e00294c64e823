"""Kernels that misread packed, shared or reused arrays fail; correct ones of any framework pass."""

import itertools

import numpy as np
import pytest

from benchmarks.zoo.mutants import MUTANTS
from npattn.conventions import Conventions
from npattn.mistakes import Attention
from npattn.mistakes.attention import same_signature
from npattn.testing import Implementation, Rounding
from npattn.testing.adapters.views import pack, unpack
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE
from npattn.testing.report.reproducer import script
from npattn.testing.rules import PROPERTIES
from npattn.testing.rules.calls import show
from npattn.testing.targets.numpy import flash
from npattn.testing.trial import Violation
from tests.testing.rules.relations import trial_of

RULES = ("packed-inputs", "aliased-inputs", "arrays-reused", "outputs-kept", "two-threads")


def ask(trial, rule, seed=0, examples=100):
    """Return the ratios of the first recipes of a rule."""
    recipes = PROPERTIES[rule].recipes(trial, seed, examples)
    return [PROPERTIES[rule].check(trial, recipe) for recipe in recipes]


def violation(trial, rule, seed=0):
    with pytest.raises(Violation) as caught:
        ask(trial, rule, seed)
    return caught.value


class Mutant:
    """A mutant anew: its state is its own."""

    def __init__(self, name):
        kind = type(MUTANTS[name].forward.__self__)
        attention = kind()
        self.forward, self.backward = attention.forward, attention.backward


WRONG = {
    "packed-inputs": ("packed-in-one-order", "as slices of one buffer, head by head"),
    "aliased-inputs": ("value-scaled-with-key", "where v is k"),
    "arrays-reused": ("contents-of-first-call", "where the same objects hold other contents"),
    "outputs-kept": ("out-written-again", "read after 39 other calls"),
    "two-threads": ("work-shared-by-threads", "in one of two threads"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", RULES)
def test_mutant_of_the_rule_fails(rule, seed):
    name, message = WRONG[rule]
    error = violation(trial_of(Mutant(name)), rule, seed)
    assert str(error).startswith(f"results are wrong {message}")
    assert error.kind == "calls"
    assert error.ratio > 1


@pytest.mark.parametrize("rule", RULES)
def test_what_is_always_wrong_is_left_to_other_rules(rule):
    def doubled(q, k, v):
        return 2 * flash(q, k, v)

    trial = trial_of(f=Implementation(doubled, framework="numpy"))
    trial.gradients = frozenset()
    assert set(ask(trial, rule, examples=20)) == {None}


# --- other mistakes, each in one step ---


class ViewOfInput(Attention):
    """A query that sees everything equally returns a slice of v itself."""

    def forward(self, q, k, v):
        return v[..., :1, :] if q.shape[-2] == k.shape[-2] == 1 else super().forward(q, k, v)

    def backward(self, dout, q, k, v, *, out, lse=None):
        return super().backward(dout, q, k, v, out=out, lse=lse)


def test_result_that_is_a_view_of_an_input_fails():
    error = violation(trial_of(ViewOfInput(), sizes={"T": (1,), "S": (1,)}), "arrays-reused")
    assert "where the inputs changed before the results were read" in str(error)


class RingOfBuffers(Attention):
    """Gradients lie in one of 16 buffers, by turns."""

    def __init__(self):
        self.ring = [{} for _ in range(16)]
        self.turn = itertools.count()

    @same_signature(Attention.backward)
    def backward(self, *arrays, **options):
        gradients = super().backward(*arrays, **options)
        for name, x in gradients.items():
            buffer = self.ring[next(self.turn) % 16].setdefault((x.shape, x.dtype), x)
            buffer[...] = x
            gradients[name] = buffer
        return gradients


def test_ring_of_buffers_fails():
    assert "d" in str(violation(trial_of(RingOfBuffers()), "outputs-kept"))


class StridesOfQuery(Attention):
    """k is read by the strides of q if they share a buffer."""

    def inputs(self, q, k, v, mask=None, **options):
        if q.base is not None and q.base is v.base:
            v = np.lib.stride_tricks.as_strided(q, v.shape, v.strides)
        return super().inputs(q, k, v, mask, **options)


def test_slices_taken_from_the_start_of_their_buffer_fail():
    assert "one buffer" in str(violation(trial_of(StridesOfQuery()), "packed-inputs"))


# --- where a rule does not apply ---


def test_packed_inputs_may_be_refused():
    def contiguous_alone(q, k, v):
        if not (q.flags.c_contiguous and k.flags.c_contiguous):
            raise NotImplementedError("strides")
        return flash(q, k, v)

    trial = trial_of(f=Implementation(contiguous_alone, framework="numpy"))
    assert PROPERTIES["packed-inputs"].unless(trial) == (
        "refuses slices of one buffer (raised NotImplementedError: strides)"
    )
    plain = trial_of(structure=frozenset(STRUCTURE) - {"transposed", "stepped"})
    assert PROPERTIES["packed-inputs"].unless(plain) == "refuses every view that is not contiguous"
    oblong = trial_of(sizes={"T": (5,), "S": (7,)})
    assert PROPERTIES["packed-inputs"].unless(oblong) == "sizes allow no T = S with D = E"
    assert PROPERTIES["packed-inputs"].unless(trial_of()) is None


@pytest.mark.parametrize("rule", RULES)
def test_sizes_of_0_alone_leave_nothing_to_ask(rule):
    assert PROPERTIES[rule].recipes(trial_of(sizes={"D": (0,)}), 0, 10) == []


@pytest.mark.parametrize("rule", RULES)
def test_sizes_of_the_user_are_kept(rule):
    sizes = {"T": (4,), "S": (4, 6), "D": (24,)}
    recipes = PROPERTIES[rule].recipes(trial_of(sizes=sizes), 0, 10)
    assert recipes
    assert all(getattr(r, letter) in sizes[letter] for r in recipes for letter in sizes)


# --- packing ---


@pytest.mark.parametrize(
    ("recipe", "by_head"),
    [
        (Recipe(lead=(2,), H=6, K=3, T=5, S=5, D=7, E=7), False),
        (Recipe(lead=(2,), H=3, K=3, T=5, S=5, D=7, E=7), True),
        (Recipe(lead=(), H=3, K=1, T=5, S=5, D=7, E=7), False),
        (Recipe(lead=None, T=5, S=5, D=7, E=7), False),
    ],
)
@pytest.mark.parametrize("swap", [False, True])
def test_unpack_gives_back_what_was_packed(recipe, by_head, swap):
    problem = recipe.problem()
    packed = pack(problem.q, problem.k, problem.v, by_head)
    parts = unpack(packed, problem, by_head, swap)
    for part, x in zip(parts, (problem.q, problem.k, problem.v), strict=True):
        assert np.shares_memory(part, packed)
        swapped = part.swapaxes(-2, -3) if swap and recipe.lead is not None else part
        assert np.array_equal(swapped, x)


# --- scripts ---


@pytest.mark.parametrize("gradients", [True, False])
def test_script_repeats_the_experiment(gradients, capsys):
    trial = trial_of(Mutant("value-scaled-with-key"))
    error = violation(trial, "aliased-inputs")
    cotangents = error.cotangents if gradients else None
    show("aliased-inputs", trial.implementation, error.problem, cotangents, Conventions(),
         Rounding.eager())  # fmt: skip
    assert capsys.readouterr().out.startswith("WRONG results are wrong where v is k:\no[")
    show("outputs-kept", trial.implementation, error.problem, cotangents, Conventions(),
         Rounding.eager())  # fmt: skip
    assert capsys.readouterr().out.startswith("ok ")
    error.cotangents = cotangents
    text = script(trial, "aliased-inputs", error.problem, error)
    arguments = "Cotangents(dout, dlse, dweights)" if gradients else "None"
    assert f"show('aliased-inputs', f, problem, {arguments}, conventions, rounding)" in text


# --- torch ---


def torch_trial(f, **options):
    pytest.importorskip("torch")
    implementation = Implementation(f, framework="torch", **options)
    views = frozenset(STRUCTURE) - {"reversed"}
    return trial_of(f=implementation, structure=views, conventions=Conventions(causal="top_left"))


def torch_attention(q, k, v):
    import torch

    groups = q.shape[-3] // k.shape[-3] if q.ndim > 2 else 1
    k, v = (x.repeat_interleave(groups, -3) if groups > 1 else x for x in (k, v))
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def test_torch_function_that_cuts_the_graph_fails():
    def cut(q, k, v):
        leaf = q if q.is_leaf else q.detach()
        return torch_attention(leaf, k, v)

    assert "dq" in str(violation(torch_trial(cut), "packed-inputs"))


def test_torch_cache_by_address_fails():
    known = {}

    def cached(q, k, v):
        keys = known.setdefault((k.data_ptr(), k.shape, k.stride()), k.clone())
        return torch_attention(q, keys, v)

    assert "same objects" in str(violation(torch_trial(cached), "arrays-reused"))
