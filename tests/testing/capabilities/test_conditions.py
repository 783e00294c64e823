"""Deliberate refusals are conditions, learned from one of them and said in the verdict."""

import re

import numpy as np
import pytest

import npattn
from npattn.testing import check
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.cases.conditions import letters_of
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.space import Space
from npattn.testing.cases.strategies import Pools
from npattn.testing.trial import Trial

QUICK = {"framework": "numpy", "shrink": False, "diagnosis": False, "examples": 20}


def kernel(refuses, hides=None):
    """Return right attention (B, H, T, D) that asserts what it takes; `hides` makes it wrong."""

    def f(q, k, v, causal=False):
        assert not refuses(q.shape[-2], k.shape[-2], q.shape[-1], causal)
        mask = None if hides is None else hides(q.shape[-2], k.shape[-2])
        alignment = "bottom_right" if causal else False
        return npattn.attention(q, k, v, mask, causal=alignment).astype(q.dtype)

    return f


def lengths_of(problems):
    return {(p.T, p.S, bool(p.causal)) for p in problems}


def test_options_and_sizes_that_are_refused_together_are_left_out():
    f = kernel(lambda T, S, D, causal: causal and T > S)
    report = check(f, only=["agreement-o"], **QUICK)
    assert report.passed, report
    assert [o.status for o in report.outcomes if o.rule == "agreement-o"] == ["passed"]
    assert any("causal and T > S: refused (AssertionError: assert not" in x for x in report.refused)
    assert "causal with T > S refused" in str(report).splitlines()[-1]


@pytest.mark.thorough
def test_what_is_taken_alone_is_sampled():
    f = kernel(lambda T, S, D, causal: D < 16)
    report = check(f, only=["agreement-o"], sizes={"D": (16, 5, 8)}, **QUICK)
    assert report.passed, report
    assert "; D" not in str(report).splitlines()[-1]
    assert any("only D" in line and "taken" in line for line in report.refused)


def test_wrong_beside_a_refusal_is_red():
    f = kernel(
        lambda T, S, D, causal: causal and T > S,
        lambda T, S: np.arange(S)[None, :] < (S - 1 if S > 17 else S),
    )
    report = check(f, only=["agreement-o"], **QUICK)
    assert not report.passed
    assert [o.status for o in report.outcomes if o.rule == "agreement-o"] == ["failed"]
    assert str(report).splitlines()[-1] == "FAILED; causal with T > S refused: 1 failed"


@pytest.mark.parametrize(("sizes", "asked"), [({"T": "64x", "S": "48x"}, 20), ({"S": (19,)}, 200)])
def test_fewer_problems_are_planned_where_the_smallest_is_large(sizes, asked):
    sizes = sizes | {"B": (1,), "H": (1,), "D": (3,), "E": (2,)}
    options = QUICK | {"examples": None, "only": ["agreement-o"], "sizes": sizes}
    f = kernel(lambda T, S, D, causal: False)
    report = check(f, **options)
    assert report.settings["examples"] == asked == report.outcomes[0].examples
    assert report.settings.get("planned for") == (
        "3072 scores a head at least" if asked < 200 else None
    )
    more = check(f, **options | {"examples": 23})
    assert more.settings["examples"] == 23
    assert "planned for" not in more.settings


def test_refusals_without_a_condition_are_left_out_and_said():
    def f(q, k, v):
        if int(abs(q).sum() * 1000) % 3 == 0 and q.size:
            raise ValueError("not today")
        return npattn.attention(q, k, v).astype(q.dtype)

    report = check(f, only=["agreement-o"], **QUICK)
    assert any("not today" in line and "left out" in line for line in report.refused), report
    assert "some problems refused" in str(report).splitlines()[-1]


def test_other_exceptions_stay_errors():
    """Arrays that do not fit are no refusal, and the place is told."""

    def f(q, k, v):
        if q.shape[-2] % 16 == 15:
            k.reshape(3, 1, 4)
        return npattn.attention(q, k, v).astype(q.dtype)

    report = check(f, only=["agreement-o"], **(QUICK | {"examples": 60}))
    (outcome,) = (o for o in report.outcomes if o.rule == "agreement-o")
    assert outcome.status == "error"
    assert re.search(r"ValueError: cannot reshape .*\(test_conditions.py:\d+\)", outcome.message)


def restricted(q, k, v, causal=False):
    """(B, T, H, D), float16, D of 64 or 128, lengths of 64, no shared heads, T ≤ S with causal."""
    T, S, D = q.shape[1], k.shape[1], q.shape[3]
    assert q.dtype == np.float16
    assert D in (64, 128), "head size"
    assert T % 64 == 0
    assert S % 64 == 0
    assert q.shape[2] == k.shape[2]
    assert not causal or T <= S
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    o = npattn.attention(q, k, v, causal="bottom_right" if causal else False)
    return o.swapaxes(1, 2).astype(q.dtype)


def test_a_refused_kernel_is_answered_with_settings_that_work():
    report = check(restricted, **(QUICK | {"only": ["agreement-o"]}))
    assert report.verdict == "no verdict"
    flags = "--dtype float16 --layout BTHD --sizes D=64,128 --sizes T=64x --sizes S=64x"
    assert f"it takes problems with {flags}" in str(report)
    sizes = {"D": (64,), "T": "64x", "S": "64x"}
    assert 'layout="BTHD", sizes={"D": (64, 128), "T": "64x", "S": "64x"}' in str(report)
    own = QUICK | {"examples": 12, "only": ["agreement-o"]}
    report = check(restricted, dtypes="float16", layout="BTHD", sizes=sizes, **own)
    assert report.passed, report
    verdict = str(report).splitlines()[-1]
    assert verdict.startswith("passed for D = 64, T % 64 = 0, S % 64 = 0; causal with T")


def test_pools_avoid_what_is_excluded():
    space = Space(features=frozenset({"causal"}), excluded=("causal and T > S",))
    recipes = [Pools(space).recipe(seed) for seed in range(300)]
    assert not any(space.excludes(r) for r in recipes)
    assert {(r.causal, r.T > r.S) for r in recipes} == {
        (True, False),
        (False, True),
        (False, False),
    }
    forced = [Pools(space, force={"causal": True}).recipe(seed) for seed in range(100)]
    assert all(r.causal and r.T <= r.S for r in forced)


def test_letters_of_a_recipe():
    letters = letters_of(Recipe(lead=(3,), H=6, K=2, T=4, S=5, D=7, E=8, causal=True))
    assert {x: letters[x] for x in "BKGTSDE"} == dict(
        zip("BKGTSDE", (3, 2, 3, 4, 5, 7, 8), strict=True)
    )
    assert letters["causal"] is True
    assert letters["mask"] is False


def test_few_problems_that_are_taken_are_no_verdict():
    """T = S = 16 alone: green only for who asks for it."""
    f = kernel(lambda T, S, D, causal: (T, S) != (16, 16))
    report = check(f, only=["agreement-o"], **QUICK)
    assert report.verdict == "no verdict"
    assert report.reason == "in float32 it takes 4% of the problems"
    assert "it takes problems with --sizes T=16" in str(report)
    report = check(f, only=["agreement-o"], sizes={"T": (16,), "S": (16,)}, **QUICK)
    assert report.passed, report


def test_sizes_that_nobody_asks_for_may_raise_anything():
    """A rule that adds keys leaves `sizes`, and an array that does not fit there is no error."""
    implementation = Implementation(restricted, framework="numpy")
    space = Space(sizes={"S": (8,)}, excluded=("causal and T > 3",))
    trial = Trial(implementation, npattn.Conventions(), Rounding.eager(), space)

    def skips(recipe, cause):
        err = ImplementationError("raised")
        err.__cause__, err.problem = cause, recipe.problem()
        return trial.has_refused(err, recipe)

    foreign, deliberate = ValueError("does not fit"), NotImplementedError("not this one")
    assert skips(Recipe(S=9), foreign)
    assert not skips(Recipe(S=8), foreign)
    assert not skips(Recipe(S=8), deliberate)
    assert skips(Recipe(S=8, T=4, causal=True), deliberate)
    assert not skips(Recipe(S=8, T=4, causal=True), foreign)
