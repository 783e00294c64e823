"""Differences of two implementations: what is measured, and the answer in words."""

import json

import numpy as np
import pytest

from npattn.errors import DtypeError, OptionError
from npattn.testing import Implementation, diff
from npattn.testing.cases.recipe import Recipe
from npattn.testing.difference import measure
from npattn.testing.difference.measure import ratios
from npattn.testing.targets import numpy
from tests.testing.difference import kernels

SIZES = {"B": (2,), "T": (7, 11), "S": (13,), "D": (5,), "E": (3,)}


def compare(a, b, **options):
    return diff(a, b, **({"examples": 5, "sizes": SIZES} | options))


def result(difference, name):
    [found] = [one for one in difference.results if one.name == name]
    return found


def factor(difference, name):
    [found] = [one for one in difference.factors if one.factor.startswith(name)]
    return found


def test_identical_functions():
    difference = compare(kernels.right, kernels.right)
    assert difference.alike
    assert difference.answer == ("They agree bit by bit in o and lse on 5 problems.",)
    assert all(one.same == one.elements > 0 for one in difference.results)
    assert difference.factors == ()
    assert all(one.place is None and one.ratio == 0 for one in difference.results)


@pytest.fixture(scope="module")
def narrow():
    """Compare with weights rounded to bfloat16, in both passes."""
    f, backward = kernels.narrow_weights, kernels.narrow_backward
    right = Implementation(kernels.right, backward=kernels.backward)
    return compare(right, Implementation(f, backward=backward), examples=5)


@pytest.mark.thorough
def test_rounding_of_the_weights_is_named(narrow):
    assert not narrow.alike
    text = "\n".join(narrow.answer)
    assert "B is wrong in o, dq, dk and dv (up to " in text
    for where in ("the forward pass", "the gradients"):
        assert f"In {where} the difference is explained (9" in text
    assert text.count("in B the weights are rounded to bfloat16.") >= 2
    assert "lse" in text
    assert result(narrow, "lse").ratio == 0
    assert result(narrow, "o").b_ratio > 1 > result(narrow, "o").a_ratio
    assert result(narrow, "o").b_rms > result(narrow, "o").a_rms > 0


@pytest.mark.thorough
def test_worst_element_can_be_made_again(narrow):
    worst = max(narrow.results, key=lambda one: one.ratio)
    problem = eval(worst.place.recipe, {"Recipe": Recipe})
    if worst.name == "o":
        assert kernels.narrow_weights(problem.q, problem.k, problem.v, bool(problem.causal))[
            worst.place.index
        ] == np.float32(worst.place.b)
    assert worst.place.a != worst.place.b
    assert worst.place.recipe in str(narrow)


@pytest.mark.thorough
def test_text_and_json(narrow):
    text = str(narrow)
    assert text.startswith("A is right, B is narrow_weights: implementations, dtype float32")
    assert "one factor at a time" in text
    assert "takes no mask" in text
    loaded = json.loads(json.dumps(narrow.as_dict(), allow_nan=False))
    assert loaded["alike"] is False
    assert loaded["results"][0]["name"] == "o"
    assert loaded["factors"][0]["apart"][0] > 1


def test_rounding_within_the_tolerance_is_named_too():
    difference = compare(kernels.narrow_scores, kernels.right, dtype="bfloat16", examples=3)
    assert difference.alike
    text = "\n".join(difference.answer)
    assert "In the forward pass the difference is explained" in text
    assert "in A q kᵀ is rounded to bfloat16" in text
    assert "wrong" not in text


def test_another_order_of_keys():
    difference = compare(kernels.without_options, kernels.from_the_last_key)
    assert difference.alike
    assert 0 < result(difference, "o").ratio <= 1
    text = "\n".join(difference.answer)
    assert "Both are as near" in text or "nearer" in text
    assert "no rounding of one step explains it" in text
    assert "moves A and B as far: it has the size of roundings" in text
    assert factor(difference, "the same call").a == (0, 0)
    assert factor(difference, "keys in another").a[0] > 0
    assert factor(difference, "keys in two parts").a == "returns no lse"
    assert factor(difference, "half of the queries (causal)").b == "takes no causal"


@pytest.mark.parametrize("factor", [1.01, 1.2])
def test_difference_that_could_be_twofold_unseen_has_no_verdict(factor):
    def backward(dout, q, k, v, *, causal=False):
        dq, dk, dv = kernels.backward(dout, q, k, v, causal=causal)
        return (factor * dq.astype(np.float32)).astype(q.dtype), dk, dv

    one = Implementation(kernels.right, backward=kernels.backward)
    other = Implementation(kernels.narrow_scores, backward=backward)
    sizes = {"B": (1,), "T": (67,), "S": (211,), "D": (5,), "E": (3,)}
    options = {"dtype": "bfloat16", "examples": 1, "sizes": sizes}
    difference = compare(one, other, **options)
    assert (difference.alike, difference.exit_code) == (False, 2)
    assert difference.reason == "not judged: dq"
    assert "dq: twice the result would not have been seen" in str(difference)
    assert difference.as_dict()["reason"] == difference.reason
    assert compare(one, other, accept=("dq",), **options).exit_code == 0


@pytest.mark.parametrize("blind", [abs, np.zeros_like], ids=["sign", "all"])
def test_distance_that_misses_mistakes_is_a_defect(blind, monkeypatch):
    def misses(a, b):
        return ratios(*(x._replace(array=blind(x.array), exact=blind(x.exact)) for x in (a, b)))

    monkeypatch.setattr(measure, "ratios", misses)
    difference = compare(kernels.without_options, kernels.from_the_last_key, examples=2)
    assert (difference.alike, difference.exit_code) == (False, 2)
    assert "a defect of npattn: the negative result in o" in difference.reason


@pytest.mark.thorough
def test_convention_that_is_not_declared():
    difference = compare(kernels.right, kernels.top_left)
    assert not difference.alike
    assert difference.answer[0].startswith("They follow different conventions: causal.")
    assert difference.answer[1] == "B follows causal=top_left, which it does not declare."
    assert difference.answer[2].startswith("They agree bit by bit")
    [one] = difference.conventions
    assert one.topic == "causal"
    assert one.example.values() == ("o = [[1.5]]", "o = [[1]]")
    assert "wrong" not in "\n".join(difference.answer)


@pytest.mark.thorough
def test_two_that_are_wrong_alike():
    same = compare(kernels.without_scale, kernels.without_scale, examples=3)
    assert same.alike
    assert [line[:10] for line in same.answer[1:]] == ["A is wrong", "B is wrong"]
    assert "the scores s are wrong: q·k × 1/scale [" in same.answer[1]


@pytest.mark.nightly
def test_two_that_are_wrong_otherwise():
    other = compare(kernels.without_scale, kernels.narrow_scores)
    assert not other.alike
    assert {line[0] for line in other.answer if " is wrong in " in line} == {"A", "B"}
    assert not any("nearer" in line for line in other.answer)


@pytest.mark.thorough
def test_what_one_takes_alone():
    difference = compare(kernels.right, kernels.with_mask, examples=3)
    *alone, gradients = difference.beside
    assert alone == ["only A takes: causal", "only A returns: lse", "only B takes: mask"]
    assert gradients.startswith("gradients are not compared, for neither has any: ")
    masked = compare(kernels.with_mask, kernels.with_mask, examples=3)
    assert masked.alike


@pytest.mark.thorough
def test_lse_of_one_alone_has_no_prediction():
    """Roundings are predicted for the first, which returns no lse."""
    difference = diff(numpy.naive, numpy.flash, examples=2)
    assert not difference.alike
    assert "lse" not in {one.name for one in difference.results}


def test_gradients_of_one_alone_are_named_as_such():
    right = Implementation(kernels.right, backward=kernels.backward)
    difference = compare(right, kernels.right, examples=2)
    assert difference.beside[0] == "only A returns: dq, dk, dv"
    assert not any("not compared" in line for line in difference.beside)


@pytest.mark.thorough
def test_hidden_keys_that_are_added():
    def from_the_last_key(q, k, v, mask=None):
        return kernels.with_mask(
            q, k[..., ::-1, :], v[..., ::-1, :], None if mask is None else mask[..., ::-1]
        )

    difference = compare(kernels.with_mask, from_the_last_key, examples=3)
    moved = factor(difference, "31 hidden keys")
    assert moved.a[0] < 1
    assert moved.b[0] < 1


@pytest.mark.thorough
def test_another_shape():
    difference = compare(kernels.without_options, kernels.with_axes_swapped, examples=3)
    assert not difference.alike
    assert difference.answer[0] == "They return o in different shapes."
    assert "another shape" in difference.answer[1]
    assert difference.factors == ()


@pytest.mark.thorough
def test_crashes_in_workers():
    difference = compare(kernels.right, kernels.dies_if_causal, examples=2, isolate=True)
    assert not difference.alike
    assert any("crashed in option-causal" in line for line in difference.answer)
    assert difference.beside[:-1] == ("only A takes: causal",)


@pytest.mark.thorough
def test_crash_on_the_plainest_problem():
    difference = compare(f"{kernels.__file__}:dies", kernels.right)
    assert not difference.alike
    assert difference.results == ()
    assert "A crashed in structure" in difference.answer[1]


def test_exception_on_some_problems():
    difference = compare(kernels.right, kernels.dies_late, sizes=SIZES | {"T": (7, 11)})
    assert not difference.alike
    assert any(
        "B did not answer" in line and "no eleventh row" in line for line in difference.answer
    )
    both = compare(kernels.dies_late, kernels.dies_late)
    assert both.alike


def test_nothing_in_common():
    with pytest.raises(OptionError, match="refuses accepts nothing: even the plainest problem"):
        compare(kernels.right, kernels.refuses)
    with pytest.raises(OptionError, match="no problem in common: a rank of q, k and v"):
        compare(kernels.one_head, kernels.batch, sizes=None)


def test_arguments():
    with pytest.raises(DtypeError, match="dtype is 'int8'"):
        diff(kernels.right, kernels.right, dtype="int8")
    with pytest.raises(OptionError, match="examples is 0"):
        diff(kernels.right, kernels.right, examples=0)
