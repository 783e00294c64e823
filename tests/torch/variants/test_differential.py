"""Differential attention on tensors: values and gradients of NumPy's, by autograd."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch as npt  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402
from npattn.testing.bounds.differential import differential_bounds  # noqa: E402
from npattn.variants import differential  # noqa: E402
from tests.variants import test_differential as cases  # noqa: E402
from tests.variants.test_differential import assert_within, normal, sample  # noqa: E402

B, H, T, S, D, E = cases.B, cases.H, cases.T, cases.S, cases.D, cases.E
INPUTS, NAMES, NORMS, OPTIONS = cases.INPUTS, cases.NAMES, cases.NORMS, cases.OPTIONS


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("option", [n for n in OPTIONS if n != "score_mod"])
def test_values_and_gradients_are_those_of_numpy(option, norm):
    inputs, options = sample(1), OPTIONS[option] | NORMS[norm]
    inputs |= {n: options[n] for n in INPUTS if n in options}
    rest = {n: x for n, x in options.items() if n not in inputs}
    exact = differential.forward(**inputs, **rest)
    dout = normal(*exact.out.shape, seed=9)
    bounds = differential_bounds(exact, np.float64, dout)
    tensors = {n: torch.tensor(x, requires_grad=True) for n, x in inputs.items()}
    got = npt.variants.differential.forward(**tensors, **rest)
    grads = torch.autograd.grad(got.out, [*tensors.values()], torch.tensor(dout))
    results = {"d" + n: g.numpy() for n, g in zip(tensors, grads, strict=True)}
    assert_within(bounds, results | {"out": got.out.detach().numpy()}, times=2)
    weighted = got.weights.detach().numpy() - exact.weights
    assert abs(weighted).max() <= bounds["out"][1].max() + 64 * S * 2.0**-53


def test_gradients_of_the_weights():
    tensors = {n: torch.tensor(x, requires_grad=True) for n, x in sample(1).items()}
    fwd = npt.variants.differential.forward(**tensors)
    dweights, inputs = normal(B, H, T, S, seed=4), [*tensors.values()]
    cotangent = torch.tensor(dweights)
    grads = torch.autograd.grad(fwd.weights, inputs, cotangent, allow_unused=True)
    exact = differential.forward(**sample(1))
    want = differential.backward(exact, np.zeros_like(exact.out), dweights)
    for name, got in zip(tensors, grads, strict=True):
        size = abs(getattr(want, name)).max()
        got = torch.zeros(1) if got is None else got
        assert abs(got.numpy() - getattr(want, name)).max() <= 64 * S * D * 2.0**-53 * (1 + size)


def test_lambda_and_its_gradients():
    vectors = [normal(H, D, seed=i) for i in range(4)]
    tensors = [torch.tensor(x, requires_grad=True) for x in vectors]
    lam = npt.variants.differential.reparametrise(*tensors, 0.2)
    want = differential.reparametrise(*vectors, 0.2)
    size = sum(np.exp(abs(x * y).sum(-1)) for x, y in (vectors[:2], vectors[2:]))
    u = 16 * D * 2.0**-53
    assert (abs(lam.detach().numpy() - want) <= u * (size + 1)).all()
    dlam = normal(H)
    grads = torch.autograd.grad(lam, tensors, torch.tensor(dlam))
    for got, exact in zip(grads, differential.reparametrise_backward(dlam, *vectors), strict=True):
        assert (abs(got.numpy() - exact) <= u * (1 + D) * abs(exact)).all()


def test_rank_2_and_a_number():
    flat = {n: torch.tensor(x[0, 0]) for n, x in sample().items() if n in NAMES}
    out = npt.variants.differential.attention(**flat, lam=0.4, norm=True)
    want = differential.forward(**{n: x.numpy() for n, x in flat.items()}, lam=0.4, norm=True)
    assert out.shape == (T, E)
    named = {n: x.numpy()[None] for n, x in flat.items()}
    bounds = differential_bounds(differential.forward(**named, lam=0.4, norm=True), np.float64)
    assert (abs(out.numpy() - want.out) <= 2 * bounds["out"][1][0]).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q1": np.ones((B, H, T, D))}, DtypeError, "use npattn.variants.differential"),
        ({"q2": torch.ones(B, H, T + 1, D)}, ShapeError, "q2 has shape"),
        ({"lam": torch.ones(H + 1)}, ShapeError, "must be one number, or have (H,) = (6,)"),
        ({"lam": torch.ones(H).long()}, DtypeError, "lam is int64, must be floating"),
        ({"lam": torch.ones(H, device="meta")}, OptionError, "lam is on meta, must be on cpu"),
        ({"lam": True}, DtypeError, "lam is bool, must be a tensor"),
        ({"norm_weight": torch.ones(E)}, OptionError, "pass norm=True"),
        ({"scaling": 1.0}, OptionError, "scaling"),
        ({"out_scale": math.nan}, OptionError, "out_scale is nan"),
        ({"dtype": torch.bfloat16}, DtypeError, "emulates no mixed precision"),
    ],
)
def test_errors_name_the_way_out(change, error, words):
    tensors = {n: torch.tensor(x) for n, x in sample().items()}
    with pytest.raises(error) as caught:
        npt.variants.differential.attention(**(tensors | change))
    assert words in str(caught.value)


def test_errors_of_lambda():
    one = torch.ones(D)
    with pytest.raises(ShapeError, match="lambda_k2 has shape"):
        npt.variants.differential.reparametrise(one, one, one, torch.ones(D + 1), 0.1)
    with pytest.raises(DtypeError, match="lambda_q1 is ndarray"):
        npt.variants.differential.reparametrise(np.ones(D), one, one, one, 0.1)
