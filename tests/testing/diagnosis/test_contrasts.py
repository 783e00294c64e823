"""Contrasts: what separates the problems on which a mutant fails from those on which it passes."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from npattn.oracle.api import attention
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import STRUCTURE
from npattn.testing.diagnosis import verdicts
from npattn.testing.diagnosis.contrasts import contrast
from npattn.testing.diagnosis.predicates import RELATIONS
from npattn.testing.diagnosis.statement import state, state_views
from npattn.testing.report.outcome import Outcome, add_reproducer
from npattn.testing.rules import PROPERTIES
from tests.testing.rules.relations import trial_of


def right(q, k, v, mask=None, *, causal=False, scale=None):
    causal = "bottom_right" if causal else False
    return attention(q, k, v, mask, causal=causal, scale=scale).astype(q.dtype)


def padded_tail(q, k, v, mask=None, *, causal=False, scale=None):
    """Tiles of 16 keys, the last padded with keys of zeros that nobody hides."""
    short = [(0, 0)] * (k.ndim - 2) + [(0, -k.shape[-2] % 16), (0, 0)]
    return right(q, np.pad(k, short), np.pad(v, short))


def tiled_heads(q, k, v, mask=None, *, causal=False, scale=None):
    heads = np.arange(q.shape[-3]) % max(k.shape[-3], 1)
    return right(q, k[..., heads, :, :], v[..., heads, :, :], mask, causal=causal, scale=scale)


def tile_of_4_heads(q, k, v, mask=None, *, causal=False, scale=None):
    """The first head of a tile of 4 says which keys all of them read."""
    H, group = q.shape[-3], q.shape[-3] // max(k.shape[-3], 1)
    own = np.arange(H) // min(group, 4) * min(group, 4) // group
    return right(q, k[..., own, :, :], v[..., own, :, :], mask, causal=causal, scale=scale)


def heads_of_one_model(q, k, v, mask=None, *, causal=False, scale=None):
    wrong = (q.shape[-3], k.shape[-3]) == (28, 4)
    return right(q, k, v, mask, causal=causal, scale=scale) * np.float32(1 + wrong)


def falsy_scale(q, k, v, mask=None, *, causal=False, scale=None):
    return right(q, k, v, mask, causal=causal, scale=scale or None)


def absolute_scale(q, k, v, mask=None, *, causal=False, scale=None):
    return right(q, k, v, mask, causal=causal, scale=None if scale is None else abs(scale))


def mask_lost_when_causal(q, k, v, mask=None, *, causal=False, scale=None):
    return right(q, k, v, None if causal else mask, causal=causal, scale=scale)


def other_corner(q, k, v, mask=None, *, causal=False, scale=None):
    causal = "top_left" if causal else False
    return attention(q, k, v, mask, causal=causal, scale=scale).astype(q.dtype)


def late_queries(q, k, v, mask=None, *, causal=False, scale=None):
    o = right(q, k, v, mask, causal=causal, scale=scale)
    o[..., 128:, :] *= np.float32(0.5)
    return o


def odd_key(q, k, v, mask=None, *, causal=False, scale=None):
    k = np.array(k)
    k[..., k.shape[-2] // 2 * 2 :, :] = 0
    return right(q, k, v, mask, causal=causal, scale=scale)


def vector_tail(q, k, v, mask=None, *, causal=False, scale=None):
    own = q.shape[-1] ** -0.5 if scale is None else scale
    n = q.shape[-1] // 8 * 8
    return right(q[..., :n], k[..., :n], v, mask, causal=causal, scale=own)


def no_scale(q, k, v, mask=None, *, causal=False, scale=None):
    return right(q, k, v, mask, causal=causal, scale=1.0 if scale is None else scale)


def by_chance(q, k, v, mask=None, *, causal=False, scale=None):
    o = right(q, k, v, mask, causal=causal, scale=scale)
    return o * np.float32(2 if str(abs(q.flat[0]))[-1] in "02468" else 1)


def failed(f, recipe, rule="agreement-o", **kwargs):
    """Return a trial of `f` and the outcome that a failing recipe gives."""
    trial = trial_of(f=Implementation(f, framework="numpy"), **kwargs)
    trial.gradients = frozenset()
    asked = "agreement-o" if rule == "structure" else rule
    with pytest.raises(Exception) as caught:
        PROPERTIES[asked].check(trial, recipe)
    outcome = Outcome(rule, "1", "", "float32", "failed")
    return trial, add_reproducer(outcome, trial, trial.problem(recipe), recipe, caught.value)


def masked_tail(q, k, v, mask=None, *, causal=False, window=None, bias=None):
    """Tiles of 16 keys; a mask or a bias is padded with what hides nothing."""
    if mask is None and bias is None:
        return attention(q, k, v, causal=causal and "bottom_right", window=window).astype(q.dtype)
    short = [(0, 0)] * (k.ndim - 2) + [(0, -k.shape[-2] % 16), (0, 0)]
    more = {"mask": (mask, True), "bias": (bias, 0)}
    for name, (array, value) in more.items():
        wide = None if array is None else [(0, 0)] * (array.ndim - 1) + [short[-2]]
        padded = None if array is None else np.pad(array, wide, constant_values=value)
        more[name] = padded
    o = attention(q, np.pad(k, short), np.pad(v, short), **more)
    return o.astype(q.dtype)


def hides_too_much(q, k, v, mask=None, *, causal=False, window=None, bias=None):
    """A window and causal both lose the first key."""
    causal = "bottom_right" if causal else False
    if causal or window is not None:
        first = np.arange(k.shape[-2]) > 0
        mask = first if mask is None else mask & first
    return attention(q, k, v, mask, causal=causal, window=window, bias=bias).astype(q.dtype)


CASES = [
    (padded_tail, {}, "fails only where S is no multiple of 16"),
    (tiled_heads, {"H": 6, "K": 3}, "fails only with 1 < K < H"),
    (tile_of_4_heads, {"H": 10, "K": 2}, "fails only where G = 5, 6, 7 or 9 of 11 tried"),
    (heads_of_one_model, {"H": 28, "K": 4}, "fails only where H = 28 and K = 4"),
    (falsy_scale, {"scale": 0.0}, "fails only at scale = 0"),
    (absolute_scale, {"scale": -0.75}, "fails only at scale < 0"),
    (mask_lost_when_causal, {"mask": "matrix", "causal": True},
     "fails only with a mask and causal together"),
    (other_corner, {"causal": True, "mask": "matrix"}, "fails only with causal where T ≠ S"),
    (late_queries, {"T": 131}, "fails only where T > 128"),
    (masked_tail, {"bias": "matrix"},
     "fails only with a mask or a bias where S is no multiple of 16"),
    (hides_too_much, {"window": (3, None)}, "fails only with causal or a window"),
    (vector_tail, {}, "fails only where D is no multiple of 8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "fields", "text"), CASES, ids=lambda x: getattr(x, "__name__", "")
)
@pytest.mark.broad(3)
def test_contrast(mutant, fields, text):
    trial, outcome = failed(mutant, Recipe(S=7, D=5, **fields))
    assert contrast(trial, outcome).text == text


@pytest.mark.parametrize("mutant", [no_scale, by_chance])
def test_nothing_tells(mutant):
    """Neither a failure everywhere nor one by chance has a contrast."""
    recipes = (Recipe(S=7, seed=n) for n in range(9))
    trial = trial_of(f=Implementation(mutant, framework="numpy"))
    trial.gradients = frozenset()
    assert contrast(*failed(mutant, next(filter(trial.fails_unaltered, recipes)))).text == ""


def test_sizes_that_must_be_equal_are_varied_together():
    def f(q, k, v):
        o = attention(q, k, v).astype(q.dtype)
        return o * np.float32(1 + (k.shape[-2] > 32))

    equal = frozenset(STRUCTURE) - {"T != S", "T > S"}
    text, _ = contrast(*failed(f, Recipe(T=67, S=67), structure=equal))
    assert text == "fails only where T > 32"


def test_contrast_comes_back_from_another_process_and_knows_what_contradicts_it():
    trial, outcome = failed(mask_lost_when_causal, Recipe(S=7, mask="matrix", causal=True))
    text, holds = pickle.loads(pickle.dumps(contrast(trial, outcome)))
    plain = replace(outcome, sampled=Recipe(S=7), problem=Recipe(S=7).problem())
    assert text
    assert holds(outcome)
    assert holds(replace(outcome, sampled=None, problem=None))
    assert not holds(plain)
    assert not holds(replace(plain, sampled=None))
    assert holds(replace(plain, sampled=outcome.sampled))  # the rule changes what was sampled


@pytest.mark.parametrize(
    ("known", "fields", "other"),
    [
        (state([("scale",)], (0,)), {"scale": 0.0}, {"scale": 0.5}),
        (state([()], inputs=["low"]), {"distribution": "low"}, {"distribution": "normal"}),
        (state_views(["stepped"]), {"view": "stepped"}, {"view": "reversed"}),
        (state([()], condition=RELATIONS[0]), {"H": 6, "K": 3}, {"H": 2, "K": 2}),
        (state([("mask",), ("bias",)]), {"bias": "matrix"}, {"causal": True}),
    ],
)
def test_problem_without_what_is_needed_contradicts(known, fields, other):
    def outcome(fields):
        recipe = Recipe(S=7, **fields)
        own = {"problem": recipe.problem(), "sampled": recipe, "view": recipe.view}
        return Outcome("agreement-o", "1", "", "float32", "failed", **own)

    assert known.holds(outcome(fields))
    assert not known.holds(outcome(other))


def test_passing_and_not_applicable_outcomes_have_none():
    trial, outcome = failed(odd_key, Recipe(S=7))
    assert contrast(trial, replace(outcome, status="passed")).text == ""
    assert contrast(trial, replace(outcome, sampled=None)).text == ""


def test_right_implementation_has_none():
    """The rule no longer fails, so that nothing can be said of when it does."""
    _, outcome = failed(odd_key, Recipe(S=7))
    trial = trial_of(f=Implementation(right, framework="numpy"))
    assert contrast(trial, outcome).text == ""


def views_misread(q, k, v):
    apart = k.strides[-1] != k.itemsize or k.strides[-2] < 0
    return attention(q, k[..., ::-1] if apart else k, v).astype(q.dtype)


@pytest.mark.parametrize(
    ("mutant", "fields", "missing", "text"),
    [
        (tiled_heads, {"H": 6, "K": 2}, "K < H", "fails only with 1 < K < H"),
        (views_misread, {"view": "stepped"}, "stepped", "fails only on views: stepped, reversed"),
    ],
)
def test_structure_that_the_probe_found_wrong(mutant, fields, missing, text):
    """It is sampled no more, and tried again for its contrast."""
    trial, outcome = failed(mutant, Recipe(T=5, S=7, D=6, E=11, **fields), "structure")
    narrow = replace(trial.space, structure=trial.space.structure - {missing})
    assert contrast(replace(trial, space=narrow), outcome).text == text


def no_maximum(q, k, v):
    e = np.exp(np.float32(q.shape[-1] ** -0.5) * (q @ k.swapaxes(-1, -2)))
    return (e / e.sum(-1, keepdims=True) @ v).astype(q.dtype)


def test_inputs():
    trial, outcome = failed(no_maximum, Recipe(S=7, distribution="huge logits"))
    text, _ = contrast(trial, outcome)
    assert text.startswith('fails only on inputs of "one-hot", "huge logits", "low"')


def test_inputs_on_which_the_rule_is_not_asked():
    """A rule that leaves wrong problems to others fails on what few are right, by luck."""

    def f(q, k, v, mask=None):
        wrong = np.float32(1 + (abs(k).max() > 1e-30))
        return right(q, k, v, mask) * wrong + 0 * v.sum(-2, keepdims=True)

    recipe = Recipe(S=7, mask="matrix", distribution="subnormal", seed=2)
    assert PROPERTIES["hidden-nan-v"].alters
    assert contrast(*failed(f, recipe, "hidden-nan-v")).text == ""


def test_sizes_stay_in_the_space():
    """Only sizes that the implementation takes are tried, and nothing is said of others."""
    sizes = {"S": (3, 4, 5, 7, 8, 10, 11), "D": (16,), "T": (2,), "E": (16,)}
    seen = set()

    def f(q, k, v, mask=None, *, causal=False, scale=None):
        seen.add((q.shape[-1], k.shape[-2]))
        return odd_key(q, k, v, mask, causal=causal, scale=scale)

    trial, outcome = failed(f, Recipe(S=7, D=16, E=16), sizes=sizes)
    assert contrast(trial, outcome).text == "fails only where S is odd"
    assert {D for D, _ in seen} == {16}
    assert {S for _, S in seen} <= set(sizes["S"])


def test_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(verdicts, "CALLS", 10)
    trial, outcome = failed(odd_key, Recipe(S=7))
    assert contrast(trial, outcome).text == ""


def test_nothing_is_tried_where_a_framework_compiles():
    calls = []

    def f(q, k, v, mask=None, *, causal=False, scale=None):
        calls.append(k.shape)
        return odd_key(q, k, v, mask, causal=causal, scale=scale)

    trial, outcome = failed(f, Recipe(S=7))
    before = len(calls)
    compiled = replace(trial, space=replace(trial.space, few_shapes=True))
    assert contrast(compiled, outcome).text == ""
    assert len(calls) == before
    assert contrast(trial, outcome).text == "fails only where S is odd"


def test_exception_has_a_contrast():
    """A call that raises fails as one, and not as a wrong result."""

    def f(q, k, v, mask=None, *, causal=False, scale=None):
        if causal and mask is not None:
            raise IndexError("tile")
        return right(q, k, v, mask, causal=causal, scale=scale)

    trial, outcome = failed(f, Recipe(S=7, mask="matrix", causal=True))
    text, _ = contrast(trial, replace(outcome, status="error"))
    assert outcome.kind == "raised"
    assert text == "fails only with a mask and causal together"


def test_no_more_sizes_are_tried_where_it_passes_at_every_other():
    """They would tell nothing: T = S alone matters."""
    seen = set()

    def f(q, k, v, mask=None, *, causal=False, scale=None):
        seen.add((q.shape[-2], k.shape[-2]))
        o = right(q, k, v, mask, causal=causal, scale=scale)
        return -o if q.shape[-2] == k.shape[-2] else o

    trial, outcome = failed(f, Recipe(T=7, S=7))
    assert contrast(trial, outcome).text == "fails only where T = S"
    alone = {T for T, S in seen if S == 7} | {S for T, S in seen if T == 7}
    assert {3, 4, 16, 33, 128, 129} <= alone
    assert not {12, 15, 31, 63, 65, 127} & alone
