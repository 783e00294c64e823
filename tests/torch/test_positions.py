"""Rotary positions on tensors: those of NumPy, with gradients by autograd."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch as npt  # noqa: E402
from npattn import positions  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402
from tests.make import normal  # noqa: E402

H, T, D = 3, 5, 14
OPTIONS = (
    {},
    {"layout": "interleaved", "size": 6, "offset": 3},
    {"frequencies": positions.yarn(D, 4.0, trained_length=32)},
    {"positions": np.arange(2 * T).reshape(2, T), "sections": (3, 4)},
)


@pytest.mark.parametrize("options", OPTIONS)
def test_forward_and_gradient_are_those_of_numpy(options):
    x, dout = normal(H, T, D), normal(H, T, D, seed=1)
    tensor = torch.tensor(x, requires_grad=True)
    out = npt.positions.rope(tensor, **options)
    assert np.array_equal(out.detach().numpy(), positions.rope(x, **options))
    out.backward(torch.tensor(dout))
    want = positions.rope_backward(dout, **options)
    assert np.allclose(tensor.grad.numpy(), want, rtol=0, atol=16 * 2.0**-53)
    assert np.array_equal(tensor.detach().numpy(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_tensors_are_computed_in_float64(dtype):
    x = torch.tensor(normal(T, D)).to(dtype)
    out = npt.positions.rope(x)
    assert out.dtype == torch.float64
    assert torch.equal(out, npt.positions.rope(x.double()))


@pytest.mark.parametrize("dtype", [torch.float32, "float32", np.float32])
def test_the_dtype_of_the_result(dtype):
    assert npt.positions.rope(torch.ones(T, D), dtype=dtype).dtype == torch.float32


def test_positions_may_be_a_tensor():
    x, places = normal(H, T, D), np.array([3, 1, 4, 1, 5])
    got = npt.positions.rope(torch.tensor(x), positions=torch.tensor(places))
    assert np.array_equal(got.numpy(), positions.rope(x, positions=places))
    narrow = npt.positions.rope(torch.tensor(x), positions=torch.tensor(places).bfloat16())
    assert torch.equal(narrow, got)


def test_the_second_gradient_is_that_of_a_linear_map():
    x = torch.tensor(normal(T, D), requires_grad=True)
    assert torch.autograd.gradcheck(npt.positions.rope, (x,))
    assert torch.autograd.gradgradcheck(npt.positions.rope, (x,))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: npt.positions.rope(x.numpy()), DtypeError, "use npattn.positions.rope"),
        (lambda x: npt.positions.rope(x.long()), DtypeError, "must be floating"),
        (lambda x: npt.positions.rope(x, dtype=torch.bfloat16), DtypeError, "must be float32"),
        (lambda x: npt.positions.rope(x, dtype="longdouble"), DtypeError, "must be float32"),
        (lambda x: npt.positions.rope(x, size=3), OptionError, "must be even"),
        (lambda x: npt.positions.rope(x[0]), ShapeError, "must be (..., T, D)"),
    ],
)
def test_errors_are_those_of_numpy(call, error, words):
    with pytest.raises(error) as caught:
        call(torch.ones(T, D))
    assert words in str(caught.value)
