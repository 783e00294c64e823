"""Biases of tensors: the same numbers as in NumPy, and gradients by autograd."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn  # noqa: E402
import npattn.torch as nt  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402

B, H, T, S, D, E = 2, 3, 5, 7, 11, 13


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, H, T, D), (B, H, S, D), (B, H, S, E))
    return [rng.standard_normal(n) for n in shapes], rng


KINDS = {
    "alibi": ((H,), lambda module, x: module.biases.alibi(x)),
    "alibi top_left": ((H,), lambda module, x: module.biases.alibi(x, alignment="top_left")),
    "relative": ((8, H), lambda module, x: module.biases.relative(x, max_distance=5)),
    "one side": (
        (4, H),
        lambda module, x: module.biases.relative(x, max_distance=3, bidirectional=False),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("summed", [False, True])
def test_results_and_gradients_are_those_of_numpy(kind, summed):
    (q, k, v), rng = arrays()
    shape, make = KINDS[kind]
    parameter, other = rng.standard_normal(shape), rng.standard_normal((T, S))
    dout = rng.standard_normal((B, H, T, E))
    bias = make(npattn, parameter) + other if summed else make(npattn, parameter)
    fwd = npattn.forward(q, k, v, bias=bias)
    want = npattn.backward(fwd, dout).bias
    own, beside = (torch.from_numpy(x).requires_grad_() for x in (parameter, other))
    tensor_bias = make(nt, own) + beside if summed else make(nt, own)
    out = nt.attention(*map(torch.from_numpy, (q, k, v)), bias=tensor_bias)
    out.backward(torch.from_numpy(dout))
    assert np.allclose(out.detach().numpy(), fwd.out, rtol=1e-12, atol=1e-14)
    found = (own.grad, beside.grad) if summed else (own.grad,)
    for got, exact in zip(found, want if summed else (want,), strict=True):
        assert np.allclose(got.numpy(), exact, rtol=1e-10, atol=1e-12)


def test_sums_of_every_kind():
    (q, k, v), rng = arrays()
    slopes, table = torch.rand(H, dtype=torch.float64), torch.rand(8, H, dtype=torch.float64)
    array, numpy_bias = rng.standard_normal((H, T, S)), npattn.biases.alibi(H)
    whole = nt.biases.alibi(slopes) + nt.biases.relative(table) + array + numpy_bias
    want = npattn.biases.alibi(slopes.numpy()) + npattn.biases.relative(table.numpy())
    want = want + array + numpy_bias
    got = nt.attention(*map(torch.from_numpy, (q, k, v)), bias=array + whole)
    exact = npattn.attention(q, k, v, bias=want + array)
    assert np.allclose(got.numpy(), exact, rtol=1e-12)


def test_second_derivatives():
    (q, k, v), _ = arrays()
    tensors = [torch.from_numpy(x[:1, :, :3, :2]) for x in (q, k, v)]
    slopes = torch.rand(H, dtype=torch.float64, requires_grad=True)

    def loss(x):
        return nt.attention(*tensors, bias=nt.biases.alibi(x)).sin().sum()

    assert torch.autograd.gradcheck(loss, slopes)
    assert torch.autograd.gradgradcheck(loss, slopes)


def test_what_is_no_tensor_is_a_bias_of_npattn():
    assert isinstance(nt.biases.alibi(H), npattn.biases.Bias)
    assert isinstance(nt.biases.relative(np.ones((8, H))), npattn.biases.Bias)
    assert nt.biases.dense is npattn.biases.dense


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nt.biases.alibi(torch.ones(2, 3)), ShapeError, r"slopes has shape \(2, 3\)"),
        (lambda: nt.biases.alibi(torch.ones(2, dtype=torch.int64)), DtypeError, "slopes is int64"),
        (lambda: nt.biases.alibi(torch.ones(2), alignment="left"), OptionError, "alignment"),
        (lambda: nt.biases.relative(torch.ones(3)), ShapeError, r"table has shape \(3,\)"),
        (
            lambda: nt.biases.relative(torch.ones(8, 2), max_distance=1),
            OptionError,
            "max_distance is 1",
        ),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()
