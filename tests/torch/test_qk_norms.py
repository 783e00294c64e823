"""Norms of queries and keys in the module on tensors: those of NumPy, there and back."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from npattn import MultiHeadAttention as NumPyModule  # noqa: E402
from npattn.errors import OptionError  # noqa: E402
from npattn.torch import MultiHeadAttention  # noqa: E402
from tests.oracle.test_qk_norms import CASES, IN, B, D, E, H, K, T, U, module, normal  # noqa: E402


def numpy_module(kind, which):
    biases = {f"b{c}": normal(n) for c, n in (("q", H * D), ("k", K * D), ("v", K * E))}
    return module(kind, which).replace(**biases)


@pytest.mark.parametrize(("kind", "which"), CASES)
def test_values_and_gradients_are_those_of_numpy(kind, which):
    mha, x = numpy_module(kind, which), normal(B, T, IN)
    fwd = mha.forward(x)
    dout = normal(*fwd.out.shape, seed=6)
    grads = mha.backward(fwd, dout)
    ours = MultiHeadAttention.from_numpy(mha)
    tensor = torch.tensor(x, requires_grad=True)
    out = ours(tensor, tensor, tensor)[0]
    out.backward(torch.tensor(dout))
    # Both compute in float64: sums of IN, D (or H·D), T and H·E terms, in another order.
    count = 8 * (IN + H * D + T + H * E) * U
    assert abs(out.detach().numpy() - fwd.out).max() <= count * (1 + abs(fwd.out).max())
    assert abs(tensor.grad.numpy() - grads.query).max() <= count * abs(dout).sum()
    for name, want in vars(grads).items():
        if name.startswith("norm") and want is not None:
            got = getattr(ours, name).grad.numpy()
            assert got.shape == want.shape
            assert abs(got - want).max() <= count * (abs(want).max() + abs(dout).sum())


@pytest.mark.parametrize(("kind", "which"), CASES)
def test_modules_come_back_with_the_same_bits(kind, which):
    mha = numpy_module(kind, which)
    ours = MultiHeadAttention.from_numpy(mha)
    back = ours.to_numpy()
    assert back.options == mha.options
    for name, array in mha.parameters.items():
        assert getattr(back, name).tobytes() == array.tobytes()
    if kind.endswith("projection"):
        with pytest.raises(OptionError, match="whose size is that of all heads"):
            ours.prune([0, 1])
        assert ours.prune([]).num_heads == H
        return
    pruned, want = ours.prune([0, 1]), mha.prune([0, 1])
    for name, array in want.parameters.items():
        assert np.array_equal(getattr(pruned.to_numpy(), name), array)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"qk_norm": "l2", "norm_weight": "number"}, (3, 1)),
        ({"qk_norm": "layer", "norm_weight": "head"}, (3, 4)),
        ({"qk_norm": "rms_projection"}, (12,)),
        ({"qk_norm": "rms"}, (4,)),
    ],
)
def test_parameters_of_new_modules(options, shape):
    ours = MultiHeadAttention(12, 3, **options)
    assert ours.norm_q.shape == ours.norm_k.shape == shape
    assert (ours.norm_q == 1).all()
    assert hasattr(ours, "norm_q_bias") == (options["qk_norm"] == "layer")
    weights = options.get("norm_weight", "shared")
    assert ("norm_weight" in ours.extra_repr()) == (weights != "shared")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qk_norm": "l2", "norm_weight": "row"}, "norm_weight is 'row', must be one of shared"),
        ({"norm_weight": "head"}, "norm_weight is 'head' with qk_norm None"),
        ({"qk_norm": "rms_projection", "norm_weight": "head"}, "must be 'shared'"),
    ],
)
def test_illegal_options_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        MultiHeadAttention(12, 3, **options)


def test_mixed_kinds_of_weights_are_refused():
    plain = NumPyModule.init(
        12, 3, seed=0, qk_norm="rms", norm_q=np.ones(4), norm_k=np.ones((3, 4))
    )
    with pytest.raises(OptionError, match="norm_q and norm_k differ in kind"):
        MultiHeadAttention.from_numpy(plain)
    terms = NumPyModule.init(12, 3, seed=0, qk_norm="l2", norm_q_bias=np.ones(4))
    with pytest.raises(OptionError, match='a bias beside qk_norm="l2"'):
        MultiHeadAttention.from_numpy(terms)
