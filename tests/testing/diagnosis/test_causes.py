"""Causes say which step is wrong, where and how much, and nothing of what is right."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import npattn
from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES, Attention
from npattn.testing import check
from npattn.testing.comparison import Comparison
from npattn.testing.diagnosis import borders, causes
from npattn.testing.diagnosis.evidence import collect
from npattn.testing.diagnosis.explore import Point, try_recipe
from npattn.testing.diagnosis.locate import Fault
from npattn.testing.report.cause import Cause
from npattn.testing.report.pair import Pair
from tests.testing.diagnosis import wrong_kernels
from tests.testing.diagnosis.failures import (
    RECIPES,
    attend,
    attention_with,
    diagnose,
    fail,
    only_cause,
    trial_of,
    trial_with,
)


@pytest.mark.thorough
@pytest.mark.every
@pytest.mark.parametrize("name", wrong_kernels.KERNELS)
def test_kernels_of_public_reports(name):
    """The first line sends its author to the line of the code."""
    kernel = wrong_kernels.KERNELS[name]
    trial = trial_of(kernel.forward, kernel.backward, features=kernel.features)
    cause = only_cause(trial, fail(trial, [kernel.recipe]))
    assert cause.step == kernel.step
    assert cause.where in (kernel.where, kernel.finer)
    assert cause.amount.startswith(kernel.amount)
    assert cause.confirmed > 10
    assert not cause.where or cause.text.count(cause.where) == 1


@pytest.mark.thorough
def test_results_that_are_kept_between_calls_are_state():
    kept = {}

    def attend_by_cache(q, k, v):
        key = q.shape, k.shape, v.shape, float(q.sum())
        return kept.setdefault(key, attend(q, k, v)).copy()

    rules = ("value-linear", "permute-keys", "repeatable")
    report = check(attend_by_cache, only=rules, examples=6, framework="numpy", shrink=False)
    assert {(c.step, c.where, c.amount) for c in report.causes} == {
        ("state", "everywhere", "depends on earlier calls")
    }


def test_a_wrong_structure_has_a_cause_at_each_level():
    """Sizes of 0 and NaN, which are not required, do not hide what K < H does."""

    def tiled(q, k, v):
        _, _, _, D = q.shape
        k, v = (np.tile(x, (1, q.shape[1] // x.shape[1], 1, 1)) for x in (k, v))
        s = q @ np.swapaxes(k, -1, -2) / np.sqrt(D)  # NaN where D = 0
        p = np.exp(s - s.max(-1, keepdims=True, initial=np.finfo(q.dtype).min))
        return (p @ np.nan_to_num(v) / p.sum(-1, keepdims=True)).astype(q.dtype)

    rules = ("agreement-o", "nan-query", "hidden-nan-v", "hidden-nan-k", "hidden-nan-kv")
    report = check(tiled, only=rules, examples=12, framework="numpy", dtypes="float32")
    wrong = {o.level: o.diagnosis for o in report.outcomes if o.rule == "structure"}
    assert report.causes[0].conventions == Conventions(kv_head="tile")
    assert wrong.pop("values") == report.causes[0].name == "kv_head=tile"
    assert wrong
    assert "kv_head=tile" not in wrong.values()
    assert "passes with --convention kv_head=tile" in str(report)


AGREEMENT = ("agreement-o", "agreement-lse", *(f"agreement-d{x}" for x in ("q", "k", "v")))
SAMPLED = [m for m in MISTAKES.values() if m.dtypes[0] == "float32" and m.rounding is None][::12]


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", SAMPLED, ids=lambda m: m.name)
@pytest.mark.usefixtures("few_problems")
def test_registered_mistakes_have_their_step(mistake):
    report = check(
        mistake.forward, backward=mistake.backward, only=AGREEMENT, examples=12, framework="numpy",
        shrink=False,
    )  # fmt: skip
    steps = [c.step for c in report.causes[:1]]
    assert steps == [mistake.step] or (report.passed and not steps)


@pytest.mark.thorough
@pytest.mark.usefixtures("few_problems")
def test_two_mistakes_are_two_causes():
    steps = {"delta": lambda up, p, dp: 0 * up(p, dp), "mask": lambda up, mask, c: mask | True}
    wrong = attention_with(**steps)
    trial = trial_of(wrong.forward, wrong.backward, features=("mask",))
    outcomes = fail(trial, ["plain", "mask"])
    found = {c.step: (c.where, c.amount) for c in diagnose(trial, outcomes)}
    assert found == {
        "visible": ("mask", "the mask is not applied"),
        "delta": ("everywhere", "δ is 0"),
    }


@pytest.mark.thorough
@pytest.mark.usefixtures("few_problems")
def test_a_convention_and_a_mistake_are_two_causes():
    def both(q, k, v, causal=False):
        return attend(q, k, v, causal=causal, conventions={"kv_head": "tile"}) * (
            -1 if causal else 1
        )

    trial = trial_of(both)
    found = diagnose(trial, fail(trial, ["groups", "causal"]))
    assert Conventions(kv_head="tile") in [c.conventions for c in found]
    assert ("o", "× −1") in [(c.step, c.amount) for c in found]


# --- what no step explains ---


def noise(x):
    return (x * np.random.default_rng(0).normal(1, 0.1, x.shape)).astype(x.dtype)


@pytest.mark.thorough
@pytest.mark.usefixtures("few_problems")
def test_noise_in_o_is_of_o_alone():
    trial = trial_of(lambda q, k, v: noise(npattn.attention(q, k, v)).astype(q.dtype))
    assert only_cause(trial, fail(trial, ["plain", "wide"])).step == "o"


@pytest.mark.usefixtures("few_problems")
def test_nan_everywhere_is_no_factor():
    trial = trial_of(lambda q, k, v: np.full_like(attend(q, k, v), np.nan))
    cause = only_cause(trial, fail(trial, ["plain"]))
    assert (cause.step, cause.where) == ("nan", "everywhere")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_right_results_have_no_step(dtype):
    right = Attention()
    trial = trial_of(right.forward, right.backward, dtype=dtype)
    cause = only_cause(trial, fail(trial, ["plain", "mask", "groups", "window", "dropout"]))
    assert (cause.step, cause.name) == ("", "unexplained")


def test_passed_outcomes_have_no_diagnosis():
    trial = trial_of(attend, features=())
    outcomes, found = causes.diagnose([(trial, fail(trial, ["plain"], status="passed"))])
    assert found == ()
    assert outcomes[0].diagnosis is None


def test_numbers_that_decide_are_contents_and_no_place():
    """One number of q turns the fault on: neither sizes nor indices tell where."""
    marked = float(RECIPES["plain"].problem().q.flat[0])

    def f(q, k, v):
        o = attend(q, k, v)
        return 2 * o if abs(float(q.flat[0]) - marked) < 0.01 else o

    trial = trial_of(f)
    cause = only_cause(trial, fail(trial, ["plain"]))
    assert cause.where == "contents"
    assert "and right for others" in cause.text


def test_a_convention_is_found_beside_a_mistake_in_a_gradient():
    wrong = attention_with(
        diagonal=lambda up, T, S: np.arange(T)[:, None], dk=lambda up, *args: 2 * up(*args)
    )
    trial = trial_of(wrong.forward, wrong.backward, features=("causal",))
    found = diagnose(trial, fail(trial, ["causal", "plain"]))
    assert [c.conventions for c in found if c.conventions] == [Conventions(causal="top_left")]
    assert [(c.step, c.amount) for c in found if not c.conventions] == [("dk", "× 2")]


def test_an_order_that_is_kept_from_the_first_call_is_state():
    """As the first array of its shape, a view is right."""
    order = {}

    def f(q, k, v):
        first = order.setdefault((q.shape, k.shape), k.strides)
        return attend(q, k if k.strides == first else k[..., ::-1], v)

    trial = trial_of(f)
    for name in ("plain", "wide"):
        f(*(getattr(trial.problem(RECIPES[name]), x) for x in "qkv"))
    cause = only_cause(trial, fail(trial, ["plain", "wide"], view="transposed"))
    assert (cause.step, cause.where, cause.name) == ("state", "everywhere", "after")


@pytest.mark.thorough
@pytest.mark.parametrize("names", [("o",), ("dq", "dv"), ("o", "dk")])
def test_roundings_of_several_results_are_one_cause(names):
    """A few of their errors look like a factor, or a score, by chance."""

    def coarse(x):
        return np.round(x * 2**5 / 2.0 ** (e := np.frexp(x)[1])) / 2**5 * 2.0**e

    def results(up, c):
        o, *others = up(c)
        return coarse(o) if "o" in names else o, *others

    def gradients(up, *args):
        found = zip(("dq", "dk", "dv", "ds", "dsinks"), up(*args), strict=True)
        return tuple(coarse(x) if name in names else x for name, x in found)

    f = attention_with(results=results, gradients=gradients)
    trial = trial_of(f.forward, f.backward, dtype="bfloat16")
    outcomes = fail(trial, ["longest", "longer", "wide", "plain", "groups", "causal"])
    cause = only_cause(trial, [o for o in outcomes if collect(trial, o).wrong])
    assert (cause.step, cause.where) == ("precision", "everywhere")


def test_strides_that_are_misread_are_a_layout():
    def f(q, k, v):
        return attend(q, k, v.ravel(order="K").reshape(v.shape))

    trial = trial_of(f)
    cause = only_cause(trial, fail(trial, ["plain", "wide"], view="transposed"))
    assert (cause.step, cause.where, cause.name) == ("layout", "everywhere", "strides")


def test_options_that_another_call_of_a_shape_had_are_state(monkeypatch):
    """The bias is kept; which call comes first is not told by the failing problem."""
    kept = {}

    def f(q, k, v, bias=None, causal=False):
        own = kept.setdefault((q.shape, k.shape), bias)
        return npattn.attention(q, k, v, bias=own, causal=causal).astype(q.dtype)

    trial = trial_of(f, features=("bias", "causal"))
    plain = RECIPES["bias"].problem()
    f(plain.q, plain.k, plain.v)
    cause = only_cause(trial, fail(trial, ["bias"]))
    assert (cause.step, cause.where) == ("state", "")
    monkeypatch.setattr(causes, "KEPT", -1.0)  # there is no time to ask
    assert [c.step for c in diagnose(trial, fail(trial, ["bias"]))] != ["state"]


def test_sizes_that_fail_in_turn_are_no_state():
    """As the second call of its shape it has an odd number of rows, and fails."""

    def f(q, k, v, causal=False):
        return attend(q, k, v, causal=causal) * q.dtype.type(1 + q.shape[-2] % 2)

    trial = trial_of(f, features=("causal",))
    assert only_cause(trial, fail(trial, ["causal"])).step == "p"


def test_what_every_third_call_does_is_state():
    """Each problem takes three calls, of which the first is wrong."""
    wrong = MISTAKES["result-changes"]
    trial = trial_of(wrong.forward, wrong.backward)
    (outcome,) = fail(trial, ["plain"])
    while not (evidence := collect(trial, outcome)).wrong:
        wrong.forward(evidence.problem.q, evidence.problem.k, evidence.problem.v)
    assert evidence.equals(collect(trial, outcome))
    cause = only_cause(trial, [outcome])
    assert cause.text.startswith("two calls on the same problem give different results")


def test_what_comes_after_a_call_that_writes_to_its_arrays_is_of_that_call():
    """The first call scales q in place: the second returns the lse of another q."""

    def scale_in_place(up, *arrays, **options):
        c = up(*arrays, **options)
        arrays[0][...] *= 2
        return c

    wrong = attention_with(inputs=scale_in_place)
    trial = trial_of(wrong.forward, features=("return_lse",))
    outcomes = fail(trial, ["plain"], rule="lse")
    outcomes += fail(trial, ["wide"], rule="written", kind="change", message="q was written to")
    (cause,) = diagnose(trial, outcomes)
    assert (cause.text, cause.step, len(cause.rules)) == ("q was written to", "state", 2)


def test_a_failure_that_a_second_call_does_not_show_is_state():
    trial = trial_of(attend)
    comparison = Comparison("o", 3.0, (0,), 1.0, 2.0, 0.1, 1, 1)
    cause = only_cause(trial, fail(trial, ["plain"], comparisons=(comparison,)))
    assert (cause.step, cause.where) == ("state", "everywhere")
    assert "is right when it is made again" in cause.text


def test_without_time_failures_are_joined_by_what_may_come_of_a_step(monkeypatch):
    monkeypatch.setattr(causes, "SECONDS", -1.0)
    wrong = attention_with(dk=lambda up, *args: 2 * up(*args))
    trial = trial_of(wrong.forward, wrong.backward)
    cause = only_cause(trial, fail(trial, ["plain", "wide", "groups"]))
    assert cause.step == "dk"
    assert len(cause.rules) == 3


def test_a_problem_that_its_rule_has_changed_fails_where_the_place_says():
    """127 of the 128 keys that it was made with: the place holds there, and not on the others."""

    def f(q, k, v):
        return attend(q, k, v) * (1 if k.shape[-2] % 64 == 0 else q.dtype.type(0.5))

    trial = trial_of(f)
    (changed,) = fail(trial, ["rows of tiles"], rule="changed")
    problem = changed.problem
    shorter = problem.replace(k=problem.k[..., :127, :], v=problem.v[..., :127, :])
    changed = replace(changed, problem=shorter, recipe="Recipe(…).problem(), then changed: …")
    cause = only_cause(trial, [*fail(trial, ["longer"]), changed])
    assert (cause.step, cause.where) == ("p", "S % 64 ≠ 0")
    assert len(cause.rules) == 2


@pytest.mark.parametrize(("small", "steps"), [(2, {"precision"}), (1, {"s", "dp"})])
def test_problems_with_roundings_alone_decide_if_they_are_most(small, steps):
    """A rounding may look like a factor; a factor is small on some problems."""
    s, dp = (Fault(x, None, None, None) for x in ("s", "dp"))
    faults = [replace(s, step="precision", facts={"read": dp})] * small + [s]
    points = [Point(None, SimpleNamespace(problem=None), fault) for fault in faults]
    assert {p.fault.step for p in causes._agree(points)} == steps


def test_nan_of_inputs_and_nan_of_a_function_are_two_causes():
    of_inputs, own = (Fault("nan", None, None, None, facts={"of_inputs": x}) for x in (True, False))
    assert causes._same_step(own, own)
    assert not causes._same_step(of_inputs, own)


@pytest.mark.parametrize(
    "known", [{"where": "s ≥ 8"}, {"amount": "× 2"}, {"passes_when": "fails only where S > 16"}, {}]
)
def test_a_cause_that_is_known_needs_no_sharper_model(known, monkeypatch):
    asked, trial = [], trial_of(attend)
    (outcome,) = fail(trial, ["plain"])
    own = Cause("s is wrong", (outcome.id,), "s", name="s", pair=Pair("", ""), **known)
    monkeypatch.setattr(causes, "_read_suspicion", lambda *x: asked.append(x))
    monkeypatch.setattr(causes._Diagnosis, "causes", lambda _: iter([own]))
    only_cause(trial, [outcome])
    assert bool(asked) is (not known)


@pytest.mark.parametrize("backward", [None, lambda dout, q, k, v, *, out, lse: (q, k, v)])
def test_a_failing_problem_is_read_again_without_gradients_if_it_has_any(backward, monkeypatch):
    recipes = []
    monkeypatch.setattr(causes, "try_recipe", lambda *x: recipes.append(x[1]) or try_recipe(*x))
    trial = trial_of(lambda q, k, v: 2 * attend(q, k, v), backward)
    (outcome,) = fail(trial, ["plain"])
    points = causes._Diagnosis(trial, [outcome])._points(collect(trial, outcome))
    assert len(points) > 10
    assert len(recipes) == (1 if backward is None else 2)


def test_problems_around_a_failing_one_have_gradients_of_the_weights_too():
    mistake = MISTAKES["dweights-ignored"]
    trial = trial_of(mistake.forward, mistake.backward)
    cause = only_cause(trial, fail(trial, ["plain"]))
    assert (cause.step, cause.confirmed > 10) == ("dp", True)


def test_gradients_that_are_wrong_alike_have_one_cause():
    def twice(up, c, *args):
        dq, dk, dv, *rest = up(c, *args)
        n = 2 if c.k.shape[-2] > 16 else 1
        return dq, n * dk, n * dv, *rest

    wrong = attention_with(gradients=twice)
    trial = trial_of(wrong.forward, wrong.backward)
    outcomes = []
    for name in ("dv", "dk"):
        own = (Comparison(name, 3.0, (0,), 1.0, 2.0, 0.1, 1, 1),)
        outcomes += fail(trial, ["longest"], rule=name, comparisons=own)
    cause = only_cause(trial, outcomes)
    assert cause.text == "dv and dk are wrong where S > 16: × 2"
    assert (cause.step, cause.where, cause.amount) == ("dv", "S > 16", "× 2")


def test_a_place_has_the_time_that_others_left(monkeypatch):
    """The first failure shows dk as well, and is put off."""
    given = []
    monkeypatch.setattr(causes.Asked, "of", lambda *args: given.append(args[-1]))

    def gradients(up, c, *args):
        dq, dk, dv, *rest = up(c, *args)
        n = c.k.shape[-2] > 16
        return dq, (1 + 2 * n) * dk, (1 + n) * dv, *rest

    wrong = attention_with(gradients=gradients)
    trial = trial_of(wrong.forward, wrong.backward)
    own = (Comparison("dv", 3.0, (0,), 1.0, 2.0, 0.1, 1, 1),)
    outcomes = [*fail(trial, ["longest"], rule="both")]
    outcomes += fail(trial, ["longest"], rule="dv", comparisons=own)
    assert [c.step for c in diagnose(trial, outcomes)] == ["dv", "dk"]
    first, second = given
    assert causes.OTHERS < second < first == causes.PLACE


def test_a_gradient_that_is_0_in_part_of_what_its_place_names_says_so():
    """The padding of each sample is stored over the first key of the next."""

    def spill(x):
        stored = x.copy()
        stored[1:, 0, 0] = 0
        return stored

    for change, amount in ((spill, "0 in part"), (np.zeros_like, "0")):
        trial = trial_with(dk=lambda up, *args, change=change: change(up(*args)))
        cause = only_cause(trial, fail(trial, ["bias", "plain"]))
        assert (cause.step, cause.amount) == ("dk", amount)


def test_a_cause_is_read_from_a_problem_that_has_scores():
    """Without a key, most gradients are 0, and right."""

    def nan(up, *args):
        dq, *rest = up(*args)
        return np.full_like(dq, np.nan), *rest

    wrong = attention_with(gradients=nan)
    trial = trial_of(wrong.forward, wrong.backward)
    outcomes = [*fail(trial, ["no keys"], rule="first"), *fail(trial, ["mask"], rule="second")]
    cause, *_ = diagnose(trial, outcomes)
    assert cause.reading.got.shape == (3, 7)
    assert "S=5" in cause.reading.problem


def test_the_matrix_is_the_same_however_many_problems_there_was_time_for(monkeypatch):
    def f(q, k, v):
        return attend(q, k, v) * (2 if k.shape[-2] > 16 else 1)

    lines = set()
    for most in (borders.LEAST, borders.MOST):
        monkeypatch.setattr(borders, "MOST", most)
        trial = trial_of(f)
        lines.add(only_cause(trial, fail(trial, ["longest"])).reading.problem)
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("fails", "where", "wrong", "explained"),
    [
        (True, "T > 3", "dk", True),
        (False, "T > 3", "dk", False),  # right there by its place
        (None, "T > 3", "dk", False),  # of which the place says nothing
        (True, "", "dk", False),
        (True, "T > 3", "dv", False),  # which dq and dk do not reach
    ],
)
def test_errors_that_are_small_belong_to_a_cause_whose_place_has_them(
    fails, where, wrong, explained
):
    asked = SimpleNamespace(fails_on=lambda recipe, problem: fails)
    evidence = SimpleNamespace(recipe=None, problem=None, outcome=None, wrong={wrong: 2.0})
    cause = SimpleNamespace(step="dp", where=where)
    assert causes._explains(cause, asked, evidence) is explained
    assert not causes._explains(cause, None, evidence)


def test_weights_that_underflow_have_one_cause_whatever_makes_scores_low(monkeypatch):
    small = replace(RECIPES["plain"], H=1, K=1, T=2, S=3)
    for seed, numbers in ((21, {"bias": "-1e4 rows"}), (16, {"distribution": "huge logits"})):
        monkeypatch.setitem(RECIPES, str(seed), replace(small, seed=seed, **numbers))
    trial = trial_of(MISTAKES["maximum-of-padding"].forward)
    cause = only_cause(trial, fail(trial, ["21", "16"]))
    assert (cause.step, cause.where, len(cause.rules)) == ("p", "contents and S % 16 ≠ 0", 2)


def test_options_that_the_first_call_of_a_shape_had_are_state():
    kept = {}

    def f(q, k, v, causal=False):
        return attend(q, k, v, causal=kept.setdefault((q.shape, k.shape), causal))

    trial = trial_of(f, features=("causal",))
    plain = RECIPES["plain"].problem()
    f(plain.q, plain.k, plain.v)
    cause = only_cause(trial, fail(trial, ["causal"]))
    assert (cause.step, cause.where) == ("state", "")


def test_a_place_that_was_asked_with_another_source_is_not_said(monkeypatch):
    """Exchanged samples and heads show nothing where the heads are fewer."""
    for name, lead, heads in (("one lead", (2,), 2), ("two leads", (2, 3), 3)):
        own = replace(RECIPES["plain"], lead=lead, H=heads, K=heads, mask="padding", seed=24)
        monkeypatch.setitem(RECIPES, name, own)
    trial = trial_of(MISTAKES["mask-samples-as-heads"].forward)
    outcomes = fail(trial, ["one lead", "two leads"])
    assert only_cause(trial, outcomes[:1]).where == "b ≠ h and B = H and mask"
    assert only_cause(trial, outcomes).where == ""
