"""The judge on output gates, head masks and the largest scores [11, 16]."""

from __future__ import annotations

import numpy as np
import pytest

import npattn.oracle.api
from benchmarks.zoo.correct.gated import GatedKernel
from npattn.conventions import Conventions
from npattn.mistakes import MISTAKES, Gated
from npattn.problem.options import OPTIONS
from npattn.testing import Cotangents, Implementation, Recipe, Rounding, check, compare
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.bounds.allowed import bounds, tolerance
from npattn.testing.cases.classes import classes_of_problem, classes_of_recipe
from npattn.testing.cases.options import GATES
from tests.testing.primes import SIZES, B, D, E, H, S, T, problem

LEADS = [None, (), (2,), (3, 2)]


# --- gates as they are sampled --------------------------------------------------------------------


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("name", GATES)
def test_every_gate_broadcasts_and_is_finite(name, lead):
    heads = 1 if lead is None else H
    recipe = Recipe(lead=lead, H=heads, K=heads, T=T, S=S, D=D, E=E, gate=name, seed=3)
    gate = recipe.problem().gate
    assert gate.dtype == np.float32
    assert np.isfinite(gate).all()
    assert name == "head mask" or (gate != 0).all()
    assert classes_of_recipe(recipe) & classes_of_problem(recipe.problem())
    kinds = {x for x in classes_of_recipe(recipe) if x.startswith("gate (")}
    assert kinds <= classes_of_problem(recipe.problem())


@pytest.mark.parametrize("sizes", [{"H": 0, "K": 0}, {"T": 0}, {"E": 0}, {"lead": (0,)}])
def test_gates_exist_for_sizes_of_0(sizes):
    for name in GATES:
        recipe = Recipe(**(SIZES | sizes), gate=name)
        out = npattn.attention(recipe.problem().q, recipe.problem().k, recipe.problem().v)
        assert npattn.oracle.api.evaluate(recipe.problem()).out.shape == out.shape


def test_a_head_mask_has_both_numbers():
    masks = [problem(gate="head mask", seed=n).gate for n in range(8)]
    assert set(np.unique(masks)) == {0, 1}


# --- tolerances -----------------------------------------------------------------------------------

WAYS = {"last": Rounding.upcast(), "apart": Rounding.eager(), "weights": Rounding.eager()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["full", "heads", "one a row", "columns", "one number"])
@pytest.mark.parametrize("place", WAYS)
def test_kernels_with_gates_stay_within_their_bounds(place, kind, dtype):
    kernel = GatedKernel(place=place, rounding=WAYS[place])
    for seed in range(3):
        dropout = 0.5 if seed == 2 else None
        recipe = Recipe(
            **SIZES, dtype=dtype, gate=kind, seed=seed, mask="empty rows", dropout=dropout
        )
        own = recipe.problem()
        dout = recipe.cotangents(own).dout
        got = kernel(own, dout)
        fwd = npattn.oracle.api.evaluate(own)
        wide = dout.astype(np.float64)
        worst = bounds(own, own.q.dtype, WAYS[place], dout=wide)
        likely = tolerance(own, own.q.dtype, WAYS[place], dout=wide)
        assert all((likely[n] <= worst[n]).all() for n in worst)
        assert all(np.isfinite(likely[n]).all() for n in ("o", "dq", "dv", "dgate", "max_score"))
        names = ("o", "dq", "dk", "dv", "dgate")
        arrays = {n: got[n] for n in names}
        found = compare(arrays, own, dout=wide, rounding=WAYS[place])
        assert [c for c in found if not c.passed] == []
        assert fwd.out.shape == got["o"].shape


def test_a_gate_of_0_allows_no_error():
    masked = (problem(gate="head mask", seed=n) for n in range(8))
    own = next(x for x in masked if (x.gate == 0).any() and x.gate.any())
    allowed = tolerance(own, own.q.dtype)["o"]
    off = np.broadcast_to(own.gate == 0, allowed.shape)
    assert off.any()
    assert (allowed[off] == 0).all()
    assert (allowed[~off] > 0).all()


def test_nothing_is_asked_of_dgate_where_a_row_is_nan_by_convention():
    own = problem(gate="one a row", mask="empty rows")
    dout = np.ones((B, H, T, E))
    allowed = tolerance(own, own.q.dtype, dout=dout, conventions=Conventions(empty_row="nan"))
    empty = np.isneginf(npattn.oracle.api.evaluate(own).lse)[..., None]
    np.testing.assert_array_equal(np.isposinf(allowed["dgate"]), empty)


def test_compare_takes_dgate_and_max_score():
    own = problem(gate="full")
    fwd = npattn.oracle.api.evaluate(own)
    dout = np.ones((B, H, T, E))
    got = {"max_score": fwd.max_score, "dgate": npattn.backward(fwd, dout).gate}
    assert all(c.passed for c in compare(got, own, dout=dout))
    got["max_score"] = fwd.max_score + 1e-3
    assert [c.name for c in compare(got, own, dout=dout) if not c.passed] == ["max_score"]


# --- whole checks ---------------------------------------------------------------------------------

RULES = ["shape-dtype", "agreement-o", "agreement-lse", "agreement-max-score", "agreement-dq",
         "agreement-dv", "agreement-dgate", "permute-heads", "permute-batch", "value-euler",
         "directional", "hidden-nan-kv", "nan-value", "empty-row"]  # fmt: skip
SMALL = {"examples": 10, "only": RULES, "diagnosis": False, "shrink": False}


@pytest.mark.thorough
def test_the_gated_base_passes():
    report = check(Gated().forward, backward=Gated().backward, **SMALL)
    asked = {o.rule: o.status for o in report.outcomes if o.rule in RULES}
    assert asked == dict.fromkeys(RULES, "passed"), str(report)


GATE_SHOWS = (
    "gate-through-sigmoid",
    "head-mask-reversed",
    "gate-missing-in-dv",
    "dgate-of-gated-out",
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("gate-through-sigmoid", "agreement-o"),
        ("head-mask-reversed", "agreement-o"),
        ("gate-missing-in-dv", "agreement-dv"),
        ("dgate-of-gated-out", "agreement-dgate"),
        ("max-score-with-sink", "agreement-max-score"),
    ],
)
def test_a_wrong_gate_is_found_and_named(name, rule):
    wrong = MISTAKES[name]
    report = check(wrong.forward, backward=wrong.backward, examples=20, only=[rule])
    assert rule in [o.rule for o in report.outcomes if o.status == "failed"]
    assert report.causes[0].step == wrong.step
    assert ("gate=" in report.script()) == (name in GATE_SHOWS)


# --- names of other libraries ---------------------------------------------------------------------


def head_masked(given):
    def f(q, k, v, head_mask=None):
        given.append(head_mask)
        fwd = npattn.forward(q, k, v, gate=None if head_mask is None else head_mask[:, None, None])
        return fwd.out.astype(q.dtype)

    return f


def test_a_head_mask_gets_one_number_per_head():
    given = []
    read = Implementation(head_masked(given), framework="numpy")
    assert read.features == {"gate"}
    assert read.reads[0].startswith("head_mask as gate")
    own = problem(gate="heads")
    out = read.forward(own)["o"]
    np.testing.assert_array_equal(given[-1], own.gate[:, 0, 0])
    assert all(c.passed for c in compare(out, own))
    with pytest.raises(ImplementationError, match="it takes one number per head"):
        read.forward(problem(gate="full"))
    with pytest.raises(ImplementationError, match="it takes one number per head"):
        read.forward(problem(gate="one number"))


def test_a_head_mask_of_one_head_without_an_axis():
    given = []
    read = Implementation(head_masked(given), framework="numpy")
    own = Recipe(lead=None, T=T, S=S, D=D, E=E, gate="heads").problem()
    read.forward(own)
    assert given[-1].shape == (1,)


def test_the_gradient_of_a_head_mask_is_that_of_the_gate():
    def backward(dout, q, k, v, *, head_mask=None):
        gate = None if head_mask is None else head_mask[:, None, None]
        grads = npattn.backward(npattn.forward(q, k, v, gate=gate), dout)
        named = {n: getattr(grads, n).astype(q.dtype) for n in "qkv"}
        return named | ({} if gate is None else {"head_mask": grads.gate[:, 0, 0]})

    read = Implementation(head_masked([]), backward=backward, framework="numpy")
    own = problem(gate="heads")
    dout = Recipe(**SIZES).cotangents(own).dout
    got = read.gradients(own, Cotangents(dout, None))
    want = npattn.backward(npattn.oracle.api.evaluate(own), dout).gate
    assert got["dgate"].shape == (H, 1, 1)
    np.testing.assert_array_equal(got["dgate"], want)
    report = check(read, examples=8, only=["agreement-o", "agreement-dgate"], diagnosis=False)
    assert [o.status for o in report.outcomes if o.rule.startswith("agreement-")].count(
        "passed"
    ) >= 2
    assert any("gate kinds refused" in line for line in report.refused)


def test_gate_is_the_last_option():
    assert list(OPTIONS)[-1] == "gate"


def test_unknown_option_names_the_gate():
    q = np.zeros((1, 2, 3))
    with pytest.raises(TypeError, match=r"pass gate=head_mask\[:, None, None\]"):
        npattn.attention(q, q, q, head_mask=np.ones(1))
    with pytest.raises(TypeError, match="pass it as gate="):
        npattn.attention(q, q, q, output_gate=np.ones((1, 1, 1)))


def test_torch_functions_are_judged_on_gates():
    pytest.importorskip("torch")

    def attend(q, k, v, *, gate=None):
        o = (q @ k.mT / max(q.shape[-1], 1) ** 0.5).softmax(-1) @ v
        return o if gate is None else gate * o

    sizes = {"D": (8,), "S": (5, 16), "T": (5, 16), "H": (3,), "K": (3,)}
    rules = ["agreement-o", "agreement-dq", "agreement-dgate"]
    report = check(
        attend, framework="torch", examples=8, only=rules, sizes=sizes, diagnosis=False,
        dtypes=("float32", "bfloat16"),
    )  # fmt: skip
    assert {o.status for o in report.outcomes if o.rule in rules} == {"passed"}, str(report)
