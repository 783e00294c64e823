"""Backwards that are given q, k and v in 8 bits: gradients of these times their factors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import npattn
from npattn.errors import OptionError
from npattn.quantization import dequantize, dequantize_backward
from npattn.testing import Implementation, Recipe, check
from npattn.testing.bounds.allowed import tolerance
from tests.testing import backward_kernels as kernels

RULES = ("agreement-d", "shared-heads")
ASKED = (*RULES, "shape-dtype", "structure", "permute-", "packed-inputs", "outputs-kept", "views")
FP8 = {"framework": "numpy", "quantized": "fp8", "dtypes": ("bfloat16",)}


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (kernels.FORWARD, kernels.Backward()),
        (kernels.forward_in_8_bits, kernels.backward_of_8_bits),
    ],
    ids=["o in 16 bits", "o in 8 bits"],
)
def test_right_backwards_pass(forward, backward):
    few = {"examples": 3, "accept": ("dq", "dk", "dv")}  # too few for their power
    report = check(forward, backward=backward, only=ASKED, **few, **FP8)
    assert report.passed, str(report)
    ran = {o.rule: o.worst for o in report.outcomes if o.status in ("passed", "not judged")}
    assert ran.keys() >= {"agreement-dq", "agreement-dk", "agreement-dv"}
    assert 0 < max(ran[f"agreement-d{x}"] for x in "qkv") < 1


@pytest.mark.thorough
@pytest.mark.broad
@pytest.mark.parametrize("wrong", kernels.WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_backward_is_found(wrong):
    sizes = {"T": (3, 5), "S": (5, 17), "D": (5, 7)}  # causes of small problems take half the time
    asked = {"examples": 5, "only": ["agreement-d"], "diagnosis": wrong.cause is not None}
    report = check(kernels.FORWARD, backward=wrong(), **asked, sizes=sizes, **FP8)
    assert not report.passed
    if wrong.cause is not None:
        assert [cause.text for cause in report.causes] == [wrong.cause]


@pytest.mark.thorough
def test_backward_without_the_factor_of_o_is_found():
    f, wrong = kernels.forward_in_8_bits, kernels.backward_without_factor_of_o
    asked = {"examples": 10, "only": ["agreement-dq"], "diagnosis": False}
    assert not check(f, backward=wrong, **asked, **FP8).passed


def test_autograd_alone_is_not_asked():
    torch = pytest.importorskip("torch")

    def f(q, k, v, q_descale=None, k_descale=None, v_descale=None):
        assert not any(x.requires_grad for x in (q, k, v))
        wide = (x.double() for x in (q, k, v))
        q, k, v = (
            x * y[..., None, None].repeat_interleave(x.shape[1] // y.shape[1], 1)
            for x, y in zip(wide, (q_descale, k_descale, v_descale), strict=True)
        )
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).bfloat16()

    asked = {"framework": "torch", "quantized": "fp8", "dtypes": ("bfloat16",), "examples": 3}
    report = check(f, only=["agreement-o"], **asked)
    assert report.passed, str(report)


def test_a_backward_needs_the_factors():
    def plain(dout, q, k, v, q_descale=None, v_descale=None):
        return q, k, v

    with pytest.raises(OptionError, match=r"backward has no k_descale, and gets k in float8"):
        Implementation(kernels.FORWARD, backward=plain, framework="numpy", quantized="fp8")


def test_gradients_of_the_numbers_of_8_bits_and_of_their_factors():
    """The library's own: dequantize_backward after npattn.backward, against the kernel's."""
    f = Implementation(
        kernels.FORWARD, backward=kernels.Backward(), framework="numpy", quantized="fp8"
    )
    recipe = Recipe(lead=(2,), H=6, K=3, T=5, S=7, D=11, E=13, dtype="bfloat16", causal=False)
    problem = f.fit(recipe.problem())
    stored, factors = f.quantized.split(problem)
    own = f.quantized.by_input(factors)
    arrays = [dequantize(getattr(stored, x), own[x]) for x in "qkv"]
    dout = recipe.cotangents(problem).dout
    grads = npattn.backward(npattn.forward(*arrays), dout.astype(float))
    given = f.gradients(problem, recipe.cotangents(problem))
    for n, x in enumerate("qkv"):
        exact = getattr(grads, x)
        assert given[f"d{x}"].dtype == ml_dtypes.bfloat16
        assert np.array_equal(arrays[n], getattr(problem, x).astype(float))
        dvalues, ddescale = dequantize_backward(exact, getattr(stored, x), own[x])
        assert ddescale.shape == (2, 3)
        # Both are the same loss's: values · dvalues and descale · ddescale sum to x · dx.
        total = float((exact * arrays[n]).sum())
        assert np.isclose((dvalues * getattr(stored, x)).sum(), total, rtol=1e-12)
        assert np.isclose((ddescale * own[x]).sum(), total, rtol=1e-12)


def test_an_out_of_8_bits_widens_gradients_alone():
    recipe = Recipe(lead=(2,), H=2, K=2, T=5, S=7, D=11, E=13, dtype="float32", seed=3)
    problem = recipe.problem()
    dout = recipe.cotangents(problem).dout.astype(float)
    delivered = np.full((2, 2, 5, 13), 0.25)
    plain = tolerance(problem, np.float32, dout=dout)
    wide = tolerance(problem, np.float32, dout=dout, delivered=delivered)
    assert np.array_equal(plain["o"], wide["o"])
    assert np.array_equal(plain["dv"], wide["dv"])  # which needs no D
    assert (wide["dq"] > plain["dq"]).all()
    assert (wide["dk"] > plain["dk"]).all()
