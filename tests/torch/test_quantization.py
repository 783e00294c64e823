"""Formats of 8 bits on tensors: the same numbers as in NumPy, gradients by autograd."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch as nt  # noqa: E402
from npattn import quantization  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402
from npattn.torch.quantization import dequantize, fake_quantize, quantize  # noqa: E402

CASES = (
    {},
    {"per": "head"},
    {"per": "head", "heads": 3},
    {"per": "block", "rows": 3},
    {"per": "token"},
)


def sample(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((2, 6, 7, 5)))


@pytest.mark.parametrize("dtype", quantization.FORMATS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_numbers_as_in_numpy(case, dtype):
    x = sample()
    own, other = quantize(x, getattr(torch, dtype), **case), quantize(x, dtype, **case)
    want = quantization.quantize(x.numpy(), dtype, **case)
    for found in (own, other):
        assert found.values.dtype == getattr(torch, dtype)
        assert found.values.view(torch.int8).numpy().tobytes() == want.values.tobytes()
        assert np.array_equal(found.descale.numpy(), want.descale)
    rows = case.get("rows")
    product = dequantize(own.values, own.descale, rows=rows).numpy()
    assert np.array_equal(product, quantization.dequantize(*want, rows=rows))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_numpy(case):
    values, descale = quantize(sample(), "int8", **case)
    values, descale = values.double().requires_grad_(), descale.double().requires_grad_()
    dx, rows = sample(1), case.get("rows")
    dequantize(values, descale, rows=rows).backward(dx)
    arrays = (x.detach().numpy() for x in (dx, values, descale))
    dvalues, ddescale = quantization.dequantize_backward(*arrays, rows=rows)
    assert np.array_equal(values.grad.numpy(), dvalues)
    assert np.allclose(descale.grad.numpy(), ddescale, rtol=1e-13, atol=0)


def test_the_gradient_of_fake_quantize_is_that_of_numpy():
    x, dout = sample().requires_grad_(), sample(1)
    descale = torch.full((2, 6), 0.01, dtype=torch.float32)
    found = fake_quantize(x, "int8", descale=descale)
    plain = x.detach().numpy()
    values, _ = quantization.quantize(plain, "int8", descale=descale.numpy())
    want = quantization.dequantize(values, descale.numpy())
    assert np.array_equal(found.detach().numpy(), want)
    assert (abs(values.astype(int)) == 127).any()
    found.backward(dout)
    through = quantization.dequantize_backward(dout.numpy(), values, descale.numpy())[0]
    passed = quantization.quantize_backward(through, plain, "int8", descale.numpy())
    assert np.allclose(x.grad.numpy(), passed, rtol=1e-14, atol=0)


def test_scale_of_o_is_numpys():
    o, scale = sample(2), torch.tensor(100.0)
    found = quantize(o, "int8", scale=scale)
    want = quantization.quantize(o.numpy(), "int8", scale=100.0)
    assert np.array_equal(found.values.numpy(), want.values)
    assert float(found.descale) == 1 / 100
    fake = fake_quantize(o, "int8", scale=scale).numpy()
    assert np.array_equal(fake, quantization.dequantize(*want))


def test_attention_learns_its_factors():
    q, k, v = (quantize(sample(seed), per="head") for seed in range(3))
    descale = v.descale.clone().requires_grad_()
    arrays = [dequantize(x.values, x.descale) for x in (q, k)]
    o = nt.attention(*arrays, dequantize(v.values, descale), causal=True)
    o.sum().backward()
    weights = o.detach().sum((-2, -1)) / v.descale  # o is linear in the factor of its head
    assert torch.allclose(descale.grad.double(), weights, rtol=1e-6)


def test_errors():
    with pytest.raises(DtypeError, match="dtype is float16"):
        quantize(sample(), torch.float16)
    with pytest.raises(DtypeError, match="values is int32, must be floating or int8"):
        dequantize(sample().int(), torch.ones(()))
    with pytest.raises(OptionError, match="finite numbers above 0"):
        dequantize(sample(), torch.zeros(()))
    with pytest.raises(ShapeError, match="descale has shape"):
        dequantize(sample(), torch.ones(2, 4))
