"""Functions of latent attention, judged: right ones pass, mistakes are found and named."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from npattn.errors import OptionError  # noqa: E402
from npattn.oracle.api import backward, forward  # noqa: E402
from npattn.problem import Cotangents  # noqa: E402
from npattn.testing import Implementation, Recipe, check  # noqa: E402
from npattn.testing.adapters.base import ImplementationError, NotAsked, ResultError  # noqa: E402
from npattn.testing.device.judging import results_on_device  # noqa: E402
from tests.testing import latent_kernels as kernels  # noqa: E402

AGREEMENT = ("agreement",)
SMALL = {"B": (2,), "T": (3, 5), "S": (5, 7), "D": (13,), "E": (5, 3)}
STEPS = {
    kernels.ScaleOfContent: "",
    kernels.NoRotary: "",
    kernels.NoContent: "",
    kernels.NoValueGradient: "dk",
    kernels.NoKeyGradient: "dk",
}
"""Step of each wrong kernel: where values are a part of the keys, the weights cannot be read."""
RECIPE = Recipe(lead=(2,), H=3, K=1, T=5, S=7, D=13, E=8, dtype="float64")


def judge(f, **arguments):
    given = {"framework": "torch", "examples": 5, "rename": {"attn_mask": "mask"}} | arguments
    if not isinstance(f, kernels.Latent):
        given.pop("rename")
    return check(f, **given)


RULES = (
    *("agreement", "permute-heads", "hidden-finite", "one-key", "unseen-keys", "directional"),
    *("arrays-reused", "inputs-unchanged", "cotangent-linear", "aggregate"),
)


NIGHTLY = pytest.mark.nightly


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=NIGHTLY)])
def test_a_right_kernel_passes(dtype):
    report = judge(kernels.Latent(), dtypes=(dtype,), examples=2, only=RULES)
    assert report.passed, str(report)
    statuses = {o.rule: o.status for o in report.outcomes}
    untested = {"agreement-weights", "agreement-max-score"}
    untested |= {f"agreement-d{name}" for name in ("v", "bias", "sinks", "gate")}
    assert {n for n, status in statuses.items() if status != "passed"} == untested
    assert not [line for line in report.refused if "dv:" in line]


@pytest.mark.nightly
@pytest.mark.parametrize("kernel", [kernels.Latent(), kernels.with_qv, kernels.Gathered()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_right_kernels_pass_every_rule(kernel, dtype):
    report = judge(kernel, dtypes=(dtype,), examples=30)
    assert report.passed, str(report)


FIRST = (kernels.NoRotary, kernels.NoValueGradient)


@pytest.mark.parametrize(
    "wrong", [pytest.param(w, marks=() if w in FIRST else NIGHTLY, id=w.__name__) for w in STEPS]
)
def test_a_mistake_is_found_and_named(wrong):
    report = judge(wrong(), only=AGREEMENT, sizes=SMALL)
    assert not report.passed
    assert [cause.step for cause in report.causes] == [STEPS[wrong]]


@pytest.mark.thorough
def test_qv_is_the_first_part_of_q():
    report = judge(kernels.with_qv, only=(*AGREEMENT, "shared-heads"), examples=3)
    assert report.passed, str(report)
    wrong = judge(
        kernels.with_scale_of_q, only=["agreement-o"], sizes=SMALL | {"H": (2,), "K": (1, 2)}
    )
    assert [cause.step for cause in wrong.causes] == [""]


def test_optional_qv_keeps_its_default_unless_it_is_named():
    def optional(q, k, v, qv=None):
        return q

    f = Implementation(optional, framework="numpy")
    assert f.latent is None
    assert any(line.startswith("qv: optional, and q, k and v whole") for line in f.untested)
    named = Implementation(optional, framework="numpy", rename={"qv": "latent queries"})
    assert named.signature.leading == ("q", "k", "v")


@pytest.mark.thorough
@pytest.mark.parametrize("right", [True, False])
def test_a_backward_returns_a_gradient_for_each_part(right):
    kernel = kernels.NumPyLatent() if right else kernels.FirstHeadAlone()
    arguments = {"backward": kernel.backward, "framework": "numpy", "only": AGREEMENT}
    arguments["sizes"] = SMALL
    report = check(kernel, **arguments, examples=7)
    assert report.passed == right, str(report)
    if not right:
        assert {o.rule for o in report.outcomes if o.status == "failed"} == {"agreement-dk"}


def test_a_backward_may_return_a_mapping_by_its_own_names():
    kernel = kernels.NumPyLatent()

    def backward_by_name(*args, **kwargs):
        names = ("q_nope", "q_pe", "ckv", "kpe")
        return dict(zip(names, kernel.backward(*args, **kwargs), strict=True))

    f = Implementation(kernel, backward=backward_by_name, framework="numpy")
    plain = Implementation(kernel, backward=kernel.backward, framework="numpy")
    problem = f.fit(RECIPE.problem())
    cotangents = RECIPE.cotangents(problem)
    one, other = (x.gradients(problem, cotangents) for x in (f, plain))
    assert [name for name, _ in one.pairs] == ["dq", "dk"]
    for name in ("dq", "dk"):
        assert np.array_equal(one[name], other[name])


@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
def test_parts_are_those_of_q_and_k(layout):
    f = Implementation(kernels.Latent(), framework="numpy", layout=layout)
    problem = f.fit(RECIPE.problem())
    assert np.array_equal(problem.v, problem.k[..., :8])
    assert f.fit(problem) is problem
    parts = f.inputs(problem)
    q = problem.q.swapaxes(1, 2) if layout == "BTHD" else problem.q
    assert np.array_equal(np.concatenate([parts["latent queries"], parts["q"]], -1), q)
    assert np.array_equal(np.concatenate([parts["v"], parts["k"]], -1), problem.k[:, 0])
    assert f.signature.leading == ("latent queries", "q", "v", "k")


def test_dk_is_the_gradient_of_keys_and_values():
    f = Implementation(kernels.Latent(), framework="torch", rename={"attn_mask": "mask"})
    problem = f.fit(RECIPE.problem())
    cotangents = RECIPE.cotangents(problem, lse=False)
    got = f.gradients(problem, cotangents)
    grads = backward(forward(problem.q, problem.k, problem.v), cotangents.dout)
    whole = grads.k.copy()
    whole[..., :8] += grads.v
    sums = 2 * (13 + 8 + 7 + 5 * 3)  # terms of the sums that a gradient goes through
    assert abs(got["dk"] - whole).max() <= sums * 2.0**-53 * abs(whole).sum()
    assert got["dk"].shape == problem.k.shape


def test_values_that_are_no_part_of_keys_are_not_asked():
    f = Implementation(kernels.Latent(), framework="numpy")
    with pytest.raises(NotAsked, match="v is not the first columns of k"):
        f.inputs(RECIPE.problem())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"E": 17}, "values that are wider than keys"),
        ({"H": 4, "K": 2}, "keys of 2 heads"),
        ({"lead": None, "H": 1}, "two axes"),
    ],
)
def test_what_no_parts_hold_is_refused(changes, message):
    f = Implementation(kernels.Latent(), framework="numpy")
    from dataclasses import replace

    problem = f.fit(replace(RECIPE, **changes).problem())
    with pytest.raises(ImplementationError, match=message):
        f.inputs(problem)


def test_a_gradient_of_a_wrong_shape_is_an_error():
    kernel = kernels.NumPyLatent()

    def with_heads(*args, **kwargs):
        *rest, dkpe = kernel.backward(*args, **kwargs)
        return *rest, dkpe[:, None]

    f = Implementation(kernel, backward=with_heads, framework="numpy")
    problem = f.fit(RECIPE.problem())
    with pytest.raises(ResultError, match=r"dk has shape \(2, 1, 7, 5\), must be \(2, 7, 5\)"):
        f.gradients(problem, Cotangents(np.ones((2, 3, 5, 8)), None))
    three = Implementation(kernel, backward=lambda *args, **_: (1, 2, 3), framework="numpy")
    with pytest.raises(ResultError, match="must return \\(dlatent queries, dq, dv, dk\\)"):
        three.gradients(problem, Cotangents(np.ones((2, 3, 5, 8)), None))


def test_errors():
    def half(q, k, v, q_pe):
        return q

    def paged(q_nope, q_pe, ckv, kpe, block_table, cache_seqlens):
        return q_nope

    with pytest.raises(OptionError, match="half has rotary queries, must begin with all of"):
        Implementation(half, framework="numpy")
    with pytest.raises(OptionError, match=r"paged takes .*, and q \(B, T, H, D\)"):
        Implementation(paged, framework="numpy")
    f = Implementation(kernels.Latent(), framework="numpy")
    with pytest.raises(ImplementationError, match="packed, quantized, parts or lists"):
        f.call({}, {})
    with pytest.raises(OptionError, match="sweep on a device has no latent inputs"):
        results_on_device(f, RECIPE.problem(), {}, None)


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_a_worker_is_asked_the_same():
    pytest.importorskip("cloudpickle")
    right = judge(kernels.Latent(), only=["agreement-dk"], isolate=True, examples=3, sizes=SMALL)
    assert right.passed, str(right)
    wrong = judge(
        kernels.NoValueGradient(), only=["agreement-dk"], isolate=True, examples=3, sizes=SMALL
    )
    assert [c.step for c in wrong.causes] == ["dk"]


@pytest.mark.thorough
def test_a_script_has_tied_arrays():
    report = judge(kernels.NoRotary(), only=["agreement-o"], examples=3)
    assert "first columns of k for v" in report.outcomes[0].recipe
    assert "rename={'attn_mask': 'mask'}" in report.outcomes[0].script()
