"""Causes say which step is wrong, where and how much, and nothing of what is right."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import npattn
from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES, Attention
from npattn.problem import Cotangents
from npattn.testing import check
from npattn.testing.cases.recipe import Recipe
from npattn.testing.diagnosis import causes
from npattn.testing.diagnosis.conventions import convention_candidates, with_another
from npattn.testing.report.cause import STEPS
from npattn.testing.report.words import convention_flag
from tests.testing import sequence_kernels
from tests.testing.diagnosis import wrong_kernels
from tests.testing.diagnosis.failures import changed, fail, trial_of


def attend(q, k, v, causal=False, conventions=None):
    own = Conventions(**conventions or {})
    return npattn.attention(q, k, v, causal=causal and own.causal, conventions=own).astype(q.dtype)


def gradients(dout, q, k, v, factor=1.0):
    g = npattn.backward(npattn.forward(q, k, v), dout.astype(float))
    return g.q.astype(q.dtype), (g.k * factor).astype(k.dtype), g.v.astype(v.dtype)


def diagnose(trial, outcomes):
    """Return the causes; each outcome has exactly one."""
    explained, found = causes.diagnose([(trial, outcomes)])
    assert sorted(o.id for o in outcomes) == sorted(rule for c in found for rule in c.rules)
    named = {rule: c.name for c in found for rule in c.rules}
    assert [o.diagnosis for o in explained] == [named[o.id] for o in outcomes]
    return found


def only_cause(trial, outcomes):
    (cause,) = diagnose(trial, outcomes)
    return cause


@pytest.mark.thorough
@pytest.mark.every
@pytest.mark.parametrize("name", wrong_kernels.KERNELS)
@pytest.mark.unmeasured
def test_kernels_of_public_reports(name):
    """The first line sends its author to the line of the code."""
    kernel = wrong_kernels.KERNELS[name]
    trial = trial_of(kernel.forward, kernel.backward, features=kernel.features)
    cause = only_cause(trial, fail(trial, [kernel.recipe]))
    assert (cause.step, cause.where) == (kernel.step, kernel.where)
    assert cause.amount.startswith(kernel.amount)
    assert cause.confirmed > 10
    assert cause.text.count(cause.where) == 1


@pytest.mark.thorough
def test_results_that_are_kept_between_calls_are_state():
    kept = {}

    def cached(q, k, v):
        key = q.shape, k.shape, v.shape, float(q.sum())
        return kept.setdefault(key, attend(q, k, v)).copy()

    rules = ("value-linear", "permute-keys", "repeatable")
    report = check(cached, only=rules, examples=6, framework="numpy", shrink=False)
    assert {(c.step, c.where, c.amount) for c in report.causes} == {
        ("state", "everywhere", "depends on earlier calls")
    }


AGREEMENT = ("agreement-o", "agreement-lse", *(f"agreement-d{x}" for x in ("q", "k", "v")))
SAMPLED = [m for m in MISTAKES.values() if m.dtypes[0] == "float32" and m.rounding is None][::24]


@pytest.mark.thorough
@pytest.mark.every
@pytest.mark.parametrize("mistake", SAMPLED, ids=lambda m: m.name)
@pytest.mark.usefixtures("few_problems")
@pytest.mark.unmeasured
def test_registered_mistakes_have_their_step(mistake):
    report = check(
        mistake.forward, backward=mistake.backward, only=AGREEMENT, examples=12, framework="numpy",
        shrink=False,
    )  # fmt: skip
    if not report.causes:
        pytest.skip("no rule on agreement fails in a few problems")
    assert report.causes[0].step == mistake.step


@pytest.mark.thorough
@pytest.mark.usefixtures("few_problems")
def test_two_mistakes_are_two_causes():
    steps = {"delta": lambda up, p, dp: 0 * up(p, dp), "mask": lambda up, mask, c: mask | True}
    wrong = changed(**steps)
    trial = trial_of(wrong.forward, wrong.backward, features=("mask",))
    outcomes = fail(trial, ["plain", "mask"])
    found = {c.step: (c.where, c.amount) for c in diagnose(trial, outcomes)}
    assert found == {
        "visible": ("mask", "hidden keys take weight"),
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
    assert "causal" in {c.where for c in found}


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ({"kv_head": "tile"}, ["groups"]),
        ({"causal": "top_left"}, ["causal"]),
        ({"causal": "top_left", "kv_head": "tile"}, ["groups", "causal"]),
    ],
)
@pytest.mark.thorough
def test_another_convention_is_named_with_its_flag(declared, names):
    def f(q, k, v, causal=False):
        return attend(q, k, v, causal, declared)

    trial = trial_of(f)
    cause = only_cause(trial, fail(trial, names))
    assert cause.name == ", ".join(f"{n}={x}" for n, x in declared.items())
    assert cause.conventions == Conventions(**declared)
    assert convention_flag(cause) == " ".join(f"--convention {n}={x}" for n, x in declared.items())
    assert cause.step in STEPS[4:9]


class TwoConventions(Attention):
    """Causal is aligned top-left, and lse has base 2: each problem shows both."""

    def diagonal(self, T, S):
        return np.arange(T)[:, None]

    def lse(self, pivot, total, e_sink):
        return super().lse(pivot, total, e_sink) / np.log(2)

    def use_dlse(self, dlse, live):
        return dlse / np.log(2)


def test_two_conventions_in_one_problem_are_one_cause():
    wrong = TwoConventions()
    trial = trial_of(wrong.forward, wrong.backward, features=("causal", "return_lse"))
    cause = only_cause(trial, fail(trial, ["causal"]))
    assert cause.name == "causal=top_left, lse_base=2"


@pytest.mark.thorough
def test_a_convention_beside_a_leaking_nan():
    """A convention that explains a NaN, and other problems less well, is not added."""

    def both(q, k, v, mask=None, *, return_lse=False):
        fwd = npattn.forward(q, k, v, mask, conventions=Conventions(lse_base="2"))
        out = (fwd.out + 0 * v.sum(-2, keepdims=True)).astype(q.dtype)
        return (out, fwd.lse) if return_lse else out

    trial = trial_of(both)
    base, row = fail(trial, ["plain", "plain"])
    q, v = row.problem.q[..., :1, :], row.problem.v.copy()
    v[..., 0, :] = np.nan
    problem = row.problem.replace(q=q, v=v, mask=np.zeros((1, 5), bool))
    cotangents = Cotangents(row.cotangents.dout[..., :1, :], None)
    found = diagnose(trial, [base, replace(row, problem=problem, cotangents=cotangents)])
    assert "lse_base=2" in {cause.name for cause in found}


@pytest.mark.parametrize("field", ["hidden_add", "hidden_fill"])
@pytest.mark.parametrize("declared", [{}, {"hidden_add": -1e4}, {"hidden_fill": -1e9}])
def test_no_pair_of_conventions_fills_hidden_scores_twice(field, declared):
    """A problem that hides nothing tells neither, and each is paired with any other."""
    trial = SimpleNamespace(conventions=Conventions(**declared))
    hides, plain = (
        SimpleNamespace(trial=trial, problem=Recipe(mask=mask).problem())
        for mask in ("matrix", None)
    )
    named = [c for c in convention_candidates(hides) if f"{field}=" in c.name]
    others = [two.conventions for own in named for two in with_another(own, plain)]
    assert len(others) > 10
    assert all(None in (c.hidden_add, c.hidden_fill) for c in others)


@pytest.mark.thorough
def test_a_convention_is_predicted_on_the_keys_of_each_sequence(monkeypatch):
    """A padded problem has the keys of a sample last; the function gets no padding."""
    top_left = ("packed", "end], causal)", "end], causal, 0)")
    monkeypatch.setitem(sequence_kernels.MISTAKES, "top left", top_left)
    rules = ("agreement-o", "empty-row")
    options = {"framework": "numpy", "dtypes": "float32", "examples": 10}
    (cause,) = check(sequence_kernels.build("top left"), only=rules, **options).causes
    assert cause.conventions == Conventions(causal="top_left")
    assert {rule.partition("[")[0] for rule in cause.rules} == {*rules}


# --- layouts, formats, exceptions ---


def swapped(q, k, v, **options):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return npattn.attention(q, k, v, **options).swapaxes(1, 2).astype(q.dtype)


def swapped_gradients(dout, q, k, v, **options):
    dout, q, k, v = (x.swapaxes(1, 2) for x in (dout, q, k, v))
    g = npattn.backward(npattn.forward(q, k, v, **options), dout.astype(float))
    return tuple(x.swapaxes(1, 2).astype(q.dtype) for x in (g.q, g.k, g.v))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("declared", "layout", "forward", "backward"),
    [(None, "BTHD", swapped, swapped_gradients), ("BTHD", "BHTD", attend, gradients)],
)
def test_other_layout_is_a_cause(declared, layout, forward, backward):
    trial = trial_of(forward, backward, features=(), layout=declared)
    square, long = fail(trial, ["square", "plain"])  # T ≠ S are two sets of heads that do not fit
    raised = replace(long, status="error", kind="raised", message="ValueError: heads")
    cause = only_cause(trial, [square, raised])
    assert (cause.step, cause.name) == ("layout", layout)
    assert f"--layout {layout}" in cause.text


def lse_first(q, k, v, *, return_lse=False):
    fwd = npattn.forward(q, k, v)
    o = fwd.out.astype(q.dtype)
    return (fwd.lse.astype(np.float32), o) if return_lse else o


@pytest.mark.thorough
def test_results_in_another_order_are_a_cause():
    trial = trial_of(lse_first, features=("return_lse",))
    cause = only_cause(trial, fail(trial, ["square"]))
    assert cause.step == "layout"
    assert cause.text.startswith("it returns (lse, o), must return (o,")


@pytest.mark.thorough
def test_an_exception_in_either_layout_is_no_layout():
    def raises(q, k, v):
        if q.shape[-1] == 13:  # as in "wide"
            raise ValueError("no 13")
        return swapped(q, k, v)

    trial = trial_of(raises)
    square, wide = fail(trial, ["square", "wide"])
    raised = replace(wide, status="error", kind="raised", message="ValueError: no 13")
    assert sorted(c.step for c in diagnose(trial, [square, raised])) == ["layout", "refusal"]


def test_exceptions_are_grouped_by_message():
    def raises(q, k, v, causal=False):
        raise ValueError("no causal" if causal else "no")

    trial = trial_of(raises)
    outcomes = [
        *fail(trial, ["plain", "wide"], "a", "error", kind="raised", message="ValueError: no"),
        *fail(trial, ["causal"], "b", "error", kind="raised", message="ValueError: no causal"),
    ]
    found = diagnose(trial, outcomes)
    assert [(c.step, len(c.rules)) for c in found] == [("refusal", 2), ("refusal", 1)]
    assert found[0].text == "it raises: ValueError: no"


@pytest.mark.thorough
def test_dtype_that_a_sum_is_rounded_to():
    """Partial sums in bfloat16 leave a result whose elements are bfloat16 numbers."""
    import ml_dtypes

    def halves(q, k, v):
        even = (np.arange(k.shape[-2]) % 2 == 0)[:, None]
        first, second = (npattn.attention(q, k, v * keys) for keys in (even, ~even))
        return sum(x.astype(ml_dtypes.bfloat16) for x in (first, second)).astype(q.dtype)

    trial = trial_of(halves, features=())
    cause = only_cause(trial, fail(trial, ["plain", "wide"]))
    assert (cause.step, cause.name) == ("precision", "o: bfloat16")


# --- what no step explains ---


def noise(x):
    return (x * np.random.default_rng(0).normal(1, 0.1, x.shape)).astype(x.dtype)


@pytest.mark.thorough
@pytest.mark.usefixtures("few_problems")
def test_noise_in_o_is_of_o_alone():
    trial = trial_of(lambda q, k, v: noise(npattn.attention(q, k, v)).astype(q.dtype))
    assert only_cause(trial, fail(trial, ["plain", "wide"])).step == "o"


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
