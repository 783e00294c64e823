"""Functions that take lists of keys, judged: right ones pass, mistakes are found and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch  # noqa: E402
from npattn import variants  # noqa: E402
from npattn.errors import OptionError  # noqa: E402
from npattn.testing import Implementation, Recipe, check  # noqa: E402
from npattn.testing.adapters.base import ImplementationError  # noqa: E402
from npattn.testing.device.judging import results_on_device  # noqa: E402
from tests.testing import latent_kernels as kernels  # noqa: E402

RULES = (
    *("agreement", "look-alike-masks", "hidden-finite", "one-key", "permute-keys", "unseen-keys"),
    *("arrays-reused", "inputs-unchanged", "causal-as-mask"),
)
RECIPE = Recipe(lead=(2,), H=4, K=2, T=5, S=7, D=3, E=2, mask="padding")
SMALL = {"B": (2,), "H": (2,), "K": (2, 1), "T": (3, 5), "S": (5, 7), "D": (3,), "E": (2,)}
H_LISTS = "key lists of heads"


def of_heads(q, k, v, indices, causal=False):
    """Lists of each head, without a default."""
    causal = "bottom_right" if causal else False
    return npattn.torch.variants.gathered.attention(q, k, v, indices, causal=causal, dtype=q.dtype)


def beside_a_mask(q, k, v, indices, mask=None):
    return npattn.torch.variants.gathered.attention(
        q, k, v, indices[:, None], mask=mask, dtype=q.dtype
    )


def without_its_mask(q, k, v, indices, mask=None):
    return beside_a_mask(q, k, v, indices)


@pytest.mark.thorough
def test_a_right_kernel_passes():
    report = check(kernels.Gathered(), framework="torch", only=RULES, examples=3)
    assert report.passed, str(report)
    failed = {o.rule: o.status for o in report.outcomes if o.status != "passed"}
    untested = {f"agreement-d{name}" for name in ("bias", "sinks", "gate")}
    assert failed.keys() == untested | {"agreement-max-score"}


FIRST = (kernels.WrapsAround, kernels.UnusedTakeWeight)
EACH = [
    pytest.param(w, marks=() if w in FIRST else pytest.mark.nightly, id=w.__name__)
    for w in kernels.WRONG_LISTS
]


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", EACH)
def test_a_mistake_is_found_and_named(wrong):
    sizes = SMALL if wrong in FIRST else None
    report = check(wrong(), framework="torch", only=["agreement-o"], examples=10, sizes=sizes)
    assert not report.passed
    steps = {kernels.WrapsAround: "visible", kernels.UnusedTakeWeight: "p"}
    if wrong in steps:
        assert [cause.step for cause in report.causes] == [steps[wrong]]


@pytest.mark.thorough
def test_gradients_that_are_assigned_are_found():
    report = check(
        kernels.AssignsGradients(), framework="torch", only=["agreement"], examples=5, sizes=SMALL
    )
    failed = {o.rule for o in report.outcomes if o.status == "failed"}
    assert failed == {"agreement-dk", "agreement-dv"}


@pytest.mark.thorough
def test_lists_of_each_head_that_are_always_passed():
    arguments = {"framework": "torch", "rename": {"indices": H_LISTS}, "examples": 3}
    report = check(of_heads, only=["agreement-o", "agreement-dk"], **arguments)
    assert report.passed, str(report)


@pytest.mark.thorough
def test_a_mask_beside_lists_hides_some_of_their_keys():
    for f, right in ((beside_a_mask, True), (without_its_mask, False)):
        report = check(f, framework="torch", only=["agreement-o"], examples=5, sizes=SMALL)
        assert report.passed == right, str(report)


@pytest.mark.parametrize("mask", ["matrix", "padding", "single key", "empty rows", None])
@pytest.mark.parametrize("meaning", ["key lists", H_LISTS])
@pytest.mark.parametrize("hide", [False, True])
def test_lists_have_the_visible_keys(mask, meaning, hide):
    f = Implementation(of_heads, framework="numpy", rename={"indices": meaning})
    if hide:
        f.conventions = replace(f.conventions, mask_true="hide")
    problem = replace(RECIPE, mask=mask).problem(mask_true="hide" if hide else "attend")
    shape = np.shape(problem.mask)
    if meaning == "key lists" and len(shape) == 4 and shape[1] > 1:
        with pytest.raises(ImplementationError, match="heads share its lists"):
            f.inputs(problem)
        return
    given = f.inputs(problem)
    assert "mask" not in given
    lists = given[meaning]
    assert lists.dtype == np.int32
    whole = (2, 5, lists.shape[-1]) if meaning == "key lists" else (2, 4, 5, lists.shape[-1])
    assert lists.shape == whole
    visible = np.ones((5, 7), bool) if problem.mask is None else problem.mask ^ hide
    found = variants.gathered.index_mask(lists, 7)
    found = found[:, None] if meaning == "key lists" else found
    assert np.array_equal(
        np.broadcast_to(found, (2, 4, 5, 7)), np.broadcast_to(visible, (2, 4, 5, 7))
    )
    assert np.array_equal(variants.gathered.drop_repeats(lists), lists)
    assert np.array_equal(f.inputs(problem)[meaning], lists)  # the same again


def test_without_a_mask_optional_lists_keep_their_default():
    f = Implementation(kernels.Gathered(), framework="numpy")
    assert f.features >= {"mask"}
    assert "key lists" not in f.inputs(replace(RECIPE, mask=None).problem())
    assert any(line.startswith("lists of visible keys (B, T, n)") for line in f.reads)


def test_one_head_without_an_axis():
    f = Implementation(of_heads, framework="numpy", rename={"indices": H_LISTS})
    problem = Recipe(lead=None, H=1, K=1, T=5, S=7, mask="matrix").problem()
    assert f.inputs(problem)[H_LISTS].shape[0] == 5


def test_errors():
    def two(q, k, v, indices=None, topk_indices=None):
        return q

    def cache(q, k, v, indices, cache_seqlens):
        return q

    with pytest.raises(OptionError, match="two has indices and topk_indices"):
        Implementation(two, framework="numpy")
    with pytest.raises(OptionError, match=r"cache takes lists of visible keys .*judge passes one"):
        Implementation(cache, framework="numpy")
    f = Implementation(kernels.Gathered(), framework="numpy")
    with pytest.raises(OptionError, match="sweep on a device has no latent inputs or lists"):
        results_on_device(f, RECIPE.problem(), {}, None)
    with pytest.raises(ImplementationError, match="packed, quantized, parts or lists"):
        f.call({}, {})
