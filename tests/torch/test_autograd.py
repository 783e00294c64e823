"""Autograd through the weights, and transforms of torch.func that are refused in words."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn  # noqa: E402
import npattn.torch as nt  # noqa: E402
import npattn.torch.autograd  # noqa: E402
from npattn.errors import OptionError  # noqa: E402

# The first call of forward mode compiles torch's own decompositions.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

B, H, K, T, S, D, E = 2, 4, 2, 3, 5, 7, 11


def sample(seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, H, T, D), (B, K, S, D), (B, K, S, E))
    return [rng.standard_normal(n) for n in shapes], rng


CONVENTIONS = (None, npattn.Conventions(causal="top_left", weights="after_dropout"))


@pytest.mark.parametrize("conventions", CONVENTIONS)
def test_weights_are_differentiable(conventions):
    arrays, rng = sample()
    options = {
        "bias": rng.standard_normal((H, T, S)),
        "sinks": rng.standard_normal(H),
        "softcap": 2.0,
        "dropout_mask": rng.random((B, H, T, S)) < 0.7,
        "dropout_rate": 0.3,
        "causal": "bottom_right" if conventions is None else True,
    }
    dout, dweights = rng.standard_normal((B, H, T, E)), rng.standard_normal((B, H, T, S))
    fwd = npattn.forward(*arrays, **options, conventions=conventions)
    want = npattn.backward(fwd, dout, None, dweights)
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays]
    for name in ("bias", "sinks"):
        options[name] = torch.from_numpy(options[name]).requires_grad_()
    options["dropout_mask"] = torch.from_numpy(options["dropout_mask"])
    got = nt.forward(*tensors, **options, conventions=conventions)
    assert np.allclose(got.weights.detach().numpy(), fwd.weights, rtol=1e-12, atol=1e-15)
    loss = (got.out * torch.from_numpy(dout)).sum()
    (loss + (got.weights * torch.from_numpy(dweights)).sum()).backward()
    leaves = dict(zip("qkv", tensors, strict=True)) | {n: options[n] for n in ("bias", "sinks")}
    for name, leaf in leaves.items():
        exact = getattr(want, name)
        assert np.allclose(leaf.grad.numpy(), exact, rtol=1e-9, atol=1e-12), name


def test_weights_of_rank_2_and_without_gradients():
    q, k, v = (torch.randn(n, 3, dtype=torch.float64) for n in (2, 4, 4))
    assert not nt.forward(q, k, v).weights.requires_grad
    q.requires_grad_()
    with torch.no_grad():
        assert not nt.forward(q, k, v).weights.requires_grad

    def weigh(x):
        return nt.forward(x, k, v).weights

    assert torch.autograd.gradcheck(weigh, q)


@pytest.mark.thorough
@pytest.mark.parametrize("conventions", CONVENTIONS)
def test_weights_are_differentiable_twice(conventions):
    arrays, rng = sample()
    q, k, _ = (torch.from_numpy(x[:1, :2, :3, :3]).contiguous() for x in arrays)
    bias = torch.from_numpy(rng.standard_normal((2, 3, 3)))
    inputs = tuple(x.requires_grad_() for x in (q, k, bias))

    def weigh(q, k, bias):
        options = {"bias": bias, "softcap": 1.5, "conventions": conventions}
        return nt.forward(q, k, k, causal=True, **options).weights

    assert torch.autograd.gradgradcheck(weigh, inputs)


def test_weights_of_results_taken_for_constants_are_seen(monkeypatch):
    """gradgradcheck sees a second derivative that takes lse for a constant."""
    q = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)

    def weigh(q):
        return nt.forward(q, q, q).weights

    real = nt.autograd.attend
    monkeypatch.setattr(nt.autograd, "attend", lambda call: (0, 0, detached(real(call)[2])))
    with pytest.raises(RuntimeError, match="mismatch"):
        torch.autograd.gradgradcheck(weigh, q)


def detached(saved):
    return type(saved)(*(None if x is None else x.detach() for x in saved))


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
    "jacrev of the weights": lambda f, x: torch.func.jacrev(lambda y: nt.forward(y, y, y).weights)(
        x
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_goes_through_vmap_is_answered_with_what_to_use(name):
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    with pytest.raises(OptionError, match=r"call torch\.autograd\.functional\.jacobian"):
        TRANSFORMS[name](lambda y: nt.attention(y, y, y), x)


def test_what_that_error_names_works():
    x = torch.randn(1, 2, 3, dtype=torch.float64)
    k = torch.randn(1, 4, 3, dtype=torch.float64)

    def f(y):
        return nt.attention(y, k, k)

    jacobian = torch.autograd.functional.jacobian(f, x)
    assert jacobian.shape == (1, 2, 3, 1, 2, 3)
    d = torch.randn_like(x)
    along = torch.func.jvp(f, (x,), (d,))[1]
    assert torch.allclose(torch.einsum("abcdef,def->abc", jacobian, d), along)
    hessian = torch.autograd.functional.hessian(lambda y: f(y).sin().sum(), x)
    assert torch.allclose(hessian.reshape(6, 6), hessian.reshape(6, 6).T)


def test_export_is_refused_in_words():
    class Module(torch.nn.Module):
        def forward(self, q):
            return nt.attention(q, q, q)

    with pytest.raises(OptionError, match="which no graph can: call it outside"):
        torch.export.export(Module(), (torch.randn(1, 2, 3),))
