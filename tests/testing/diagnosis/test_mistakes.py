"""A mistake that is no candidate for a rule's failure does not stop the diagnosis."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace

import numpy as np
import pytest

from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES, Attention
from npattn.testing import check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis.evidence import collect, observe
from npattn.testing.diagnosis.mistakes import breaks_alike, mistake_candidates
from npattn.testing.diagnosis.steps import step_candidates
from npattn.testing.rules import PROPERTIES, RULES
from npattn.testing.runner.rounds import Judge
from npattn.testing.targets import load_implementation
from npattn.testing.trial import Violation
from tests.testing.diagnosis.failures import fail, trial_of


def test_mistake_wrong_in_every_call_breaks_no_rule_about_calls():
    mistake = MISTAKES["input-changed"]
    trial = trial_of(mistake.forward, mistake.backward)
    for outcome in fail(trial, ["plain", "wide"], kind="after"):
        object.__setattr__(outcome, "rule", "after-other-dtype")
        assert not breaks_alike(mistake, trial, outcome)


def test_a_mistake_that_gives_numbers_is_no_cause_of_nan():
    mistake = MISTAKES["cache-kept"]
    trial = trial_of(mistake.forward, mistake.backward, features=())
    judge = Judge(trial, 20, 0, lambda *_: None, shrinks=False)
    outcome = judge.judge(PROPERTIES["after-other-dtype"], trial)
    assert breaks_alike(mistake, trial, outcome)
    nan = re.sub(r"got [^,]+,", "got nan,", outcome.message)
    assert nan != outcome.message
    assert not breaks_alike(mistake, trial, replace(outcome, message=nan))


def test_what_the_first_call_left_is_a_known_mistake():
    mistake = MISTAKES["scale-of-first-call"]
    used = type(mistake.forward.__self__)()
    trial = trial_of(used.forward, used.backward, features=())
    first, later = fail(trial, ["wide", "plain"])
    results = trial.results(first.problem, first.cotangents)
    evidence = collect(trial, later)
    assert evidence.wrong
    (candidate,) = (c for c in mistake_candidates(evidence) if c.name == mistake.name)
    assert not candidate.explains(evidence)  # made alone, the call is right
    trial.first_calls = ((first.problem, first.cotangents, results),)
    assert candidate.explains(evidence)


def turn_mask(mask=None, **options):
    return options if mask is None else options | {"mask": ~mask}


def narrow_window(window=None, **options):
    return options | {"window": window and (window[0] - 1, window[1])}


def add_to_hidden(mask=None, bias=None, **options):
    least = np.finfo(np.float32).min
    with np.errstate(over="ignore"):
        hidden = np.where(mask, bias, bias + least)
    return options | {"bias": hidden.astype(np.float32)}


MASKED = Recipe(lead=(2,), H=2, K=2, T=7, S=5, D=3, E=2, seed=1)
OTHERS = {
    "mask_true": (
        turn_mask,
        Conventions(mask_true="hide"),
        "mask-of-first-sample",
        {"mask": "full"},
    ),
    "window": (
        narrow_window,
        Conventions(window="inclusive"),
        "window-ignored-in-backward",
        {"window": (1, 2)},
    ),
    "hidden_add": (
        add_to_hidden,
        Conventions(hidden_add="min", empty_row="nan"),
        "empty-row-nan-in-backward",
        {"mask": "empty rows", "bias": "-inf rows"},
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_mistake_is_known_under_other_conventions(case):
    translate, conventions, name, options = OTHERS[case]
    mistake = MISTAKES[name]

    def forward(q, k, v, mask=None, *, bias=None, window=None):
        given = translate(mask=mask, bias=bias, window=window)
        o = mistake.forward(q, k, v, **given)
        if case != "hidden_add":
            return o
        return np.where((given["bias"] == -np.inf).all(-1, keepdims=True), np.nan, o).astype("f4")

    def backward(dout, q, k, v, mask=None, *, bias=None, window=None):
        given = translate(mask=mask, bias=bias, window=window)
        out, lse = mistake.forward(q, k, v, return_lse=True, **given)
        return mistake.backward(dout, q, k, v, out=out, lse=lse, **given)

    trial = trial_of(forward, backward, conventions=conventions)
    trial.gradients = frozenset(("dq", "dk", "dv"))
    recipe = replace(MASKED, **options)
    problem = trial.problem(recipe)
    evidence = observe(trial, problem, trial.cotangents(recipe, problem))
    assert evidence.wrong
    (candidate,) = (c for c in mistake_candidates(evidence) if c.name == name)
    assert candidate.explains(evidence)
    default = replace(
        trial, conventions=replace(conventions, **{case: getattr(Conventions(), case)})
    )
    assert not candidate.explains(replace(evidence, trial=default))


def in_base_2(mistake):
    """Its lse is in base 2, and +inf in rows that see nothing."""

    def forward(q, k, v, mask=None, *, return_lse=False):
        out, lse = mistake.forward(q, k, v, mask, return_lse=True)
        lse = np.where(lse == -np.inf, np.inf, lse * np.log2(np.e)).astype(lse.dtype)
        return (out, lse) if return_lse else out

    def backward(dout, q, k, v, mask=None, *, out, lse, dlse=None):
        dlse = None if dlse is None else dlse * np.log2(np.e)
        return mistake.backward(dout, q, k, v, out=out, lse=lse, dlse=dlse, mask=mask)

    return forward, backward


@pytest.mark.parametrize(
    ("conventions", "option"), [({"mask_true": "hide"}, "mask"), ({"causal": "top_left"}, "causal")]
)
def test_a_rule_is_asked_of_a_mistake_under_its_own_conventions(conventions, option):
    """A mistake that takes True to attend would seem wrong with any mask, if True is to hide.

    Causal is aligned as it is declared, by the mistake too.
    """
    wrong = type(MISTAKES["bias-scaled"].forward.__self__)()
    wrong.alignment = conventions.get("causal", "bottom_right")

    def forward(q, k, v, mask=None, *, causal=False, bias=None):
        return wrong.forward(q, k, v, causal=causal, **turn_mask(mask=mask, bias=bias))

    trial = trial_of(forward, conventions=Conventions(**conventions))
    trial.implementation.conventions = trial.conventions
    trial.space = replace(trial.space, features=frozenset({option, "bias"}))
    (outcome,) = fail(trial, ["plain"], rule="agreement-o")
    recipe = replace(MASKED, **{option: {"mask": "full", "causal": True}[option]}, bias="full")
    with pytest.raises(Violation) as caught:
        RULES["agreement-o"].check(trial, recipe)
    found = {"kind": caught.value.kind, "message": str(caught.value)}
    outcome = replace(outcome, rule="agreement-o", sampled=recipe, **found)
    assert breaks_alike(MISTAKES["bias-scaled"], trial, outcome)
    assert not breaks_alike(MISTAKES["dk-unscaled"], trial, outcome)


def with_heads_in_turn(mistake):
    """Query head h uses key head h % K."""

    def whole(q, x):
        return x[..., np.arange(q.shape[-3]) % x.shape[-3], :, :]

    def sum_shared(dx, x):
        *lead, H, S, n = dx.shape
        return dx.reshape(*lead, H // x.shape[-3], x.shape[-3], S, n).sum(-4)

    def forward(q, k, v):
        return mistake.forward(q, whole(q, k), whole(q, v))

    def backward(dout, q, k, v, *, out, lse):
        grads = mistake.backward(dout, q, whole(q, k), whole(q, v), out=out, lse=lse)
        return grads | {"k": sum_shared(grads["k"], k), "v": sum_shared(grads["v"], v)}

    return forward, backward


def with_scaled_bias(mistake):
    """The bias is added to q · k, before both are scaled."""

    def forward(q, k, v, *, bias=None, scale=None):
        bias = None if bias is None else bias * scale
        return mistake.forward(q, k, v, bias=bias, scale=scale)

    def backward(dout, q, k, v, *, bias=None, scale=None, out, lse):
        own = None if bias is None else bias * scale
        grads = mistake.backward(dout, q, k, v, bias=own, scale=scale, out=out, lse=lse)
        return grads if bias is None else grads | {"bias": grads["bias"] * np.float32(scale)}

    return forward, backward


def with_dropped_weights(mistake):
    """It returns the weights after dropout."""

    def forward(q, k, v, *, dropout_mask=None, dropout_rate=0.0, return_weights=False):
        given = {"dropout_mask": dropout_mask, "dropout_rate": dropout_rate}
        out, weights = mistake.forward(q, k, v, return_weights=True, **given)
        if dropout_mask is not None:
            weights = weights * np.float32(1 / (1 - dropout_rate)) * dropout_mask
        return (out, weights) if return_weights else out

    def backward(dout, q, k, v, *, dropout_mask=None, dropout_rate=0.0, out, lse, dweights=None):
        given = {"dropout_mask": dropout_mask, "dropout_rate": dropout_rate}
        if dropout_mask is not None and dweights is not None:
            dweights = dweights * dropout_mask / (1 - dropout_rate)
        return mistake.backward(dout, q, k, v, out=out, lse=lse, dweights=dweights, **given)

    return forward, backward


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "conventions", "recipe"),
    [
        (in_base_2, {"lse_base": "2", "lse_empty": np.inf}, {"mask": "empty rows"}),
        (in_base_2, {"lse_base": "2", "lse_empty": np.inf}, {"mask": "full"}),
        (with_heads_in_turn, {"kv_head": "tile"}, {"H": 6, "K": 3}),
        (with_scaled_bias, {"bias": "before_scale"}, {"bias": "full", "scale": 0.37}),
        (with_dropped_weights, {"weights": "after_dropout"}, {"dropout": 0.3}),
    ],
)
def test_results_of_a_mistake_are_translated(make, conventions, recipe):
    declared = Conventions(**conventions)
    trial = trial_of(*make(MISTAKES["dq-unscaled"]), conventions=declared)
    trial.implementation.conventions = declared
    recipe = replace(MASKED, **recipe)
    problem = trial.problem(recipe)
    cotangents = trial.cotangents(recipe, problem, weights=True)
    evidence = observe(trial, problem, cotangents)
    assert [*evidence.wrong] == ["dq"]
    assert {x.removeprefix("return_") for x in trial.implementation.returns} <= {*evidence.observed}

    def explanations(evidence):
        return {c.name for c in mistake_candidates(evidence) if c.explains(evidence)}

    assert "dq-unscaled" in explanations(evidence)
    assert "dk-unscaled" not in explanations(evidence)
    default = replace(evidence, trial=replace(trial, conventions=Conventions()))
    assert "dq-unscaled" not in explanations(default)


def test_mistakes_are_aligned_as_the_implementation_is():
    """Query t sees keys s ≤ t: with more keys than queries, other keys than bottom-right."""
    mistake = MISTAKES["causal-before-scale"]
    made = type(mistake.forward.__self__)()
    made.alignment = "top_left"
    trial = trial_of(made.forward, made.backward, conventions=Conventions(causal="top_left"))
    trial.implementation.conventions = trial.conventions
    recipe = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=11, causal=True, scale=-0.75)
    problem = trial.problem(recipe)
    evidence = observe(trial, problem, trial.cotangents(recipe, problem))
    assert evidence.wrong
    (candidate,) = (c for c in mistake_candidates(evidence) if c.name == mistake.name)
    assert candidate.explains(evidence)
    other = replace(evidence, trial=replace(trial, implementation=bottom_right(trial)))
    assert not candidate.explains(other)


def bottom_right(trial):
    implementation = copy(trial.implementation)
    implementation.conventions = Conventions()
    return implementation


@pytest.mark.thorough
@pytest.mark.broad
@pytest.mark.parametrize(
    ("rule", "name"),
    [("scale-of-query", "causal-alone-before-scale"), ("offset-bias", "weights-from-rounded-lse")],
)
def test_mistakes_of_pytorch_are_named(rule, name):
    """docs/findings.md shows both without npattn, and calls no other path of PyTorch wrong."""
    pytest.importorskip("torch")
    report = check(load_implementation("torch.sdpa"), only=[rule])
    (cause,) = (cause for cause in report.causes if f"{rule}[float32]" in cause.rules)
    assert cause.name == name


@pytest.mark.parametrize(("keys", "text"), [(-1, "early"), (1, "late")])
def test_steps_are_aligned_as_the_implementation_is(keys, text):
    class Off(Attention):
        def diagonal(self, T, S):
            return np.arange(T)[:, None] + keys

    trial = trial_of(Off().forward, Off().backward, conventions=Conventions(causal="top_left"))
    trial.implementation.conventions = trial.conventions
    recipe = Recipe(lead=(2,), H=3, K=3, T=5, S=7, D=11, E=13, causal=True)
    problem = trial.problem(recipe)
    evidence = observe(trial, problem, trial.cotangents(recipe, problem))
    names = {c.name for c in step_candidates(evidence) if c.explains(evidence)}
    assert f"the diagonal is one key too {text}" in names
