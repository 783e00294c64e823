"""Linear attention on tensors: NumPy's values and gradients, and second ones, by autograd."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch as npt  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402
from npattn.testing.bounds.linear import linear_bounds  # noqa: E402
from npattn.variants import linear  # noqa: E402
from tests.variants.test_linear import (  # noqa: E402
    FORMS,
    NAMES,
    assert_within,
    cotangents,
    delta_sample,
    sample,
)


def tensors_of(arrays, dtype=torch.float64):
    return {n: torch.tensor(x, dtype=dtype, requires_grad=True) for n, x in arrays.items()}


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("feature_map", ["elu", "identity", "relu", "softmax", "callable"])
@pytest.mark.parametrize("decay", [None, "head", "feature", "all keys"])
@pytest.mark.parametrize("normalise", [True, False])
def test_values_and_gradients_are_those_of_numpy(form, feature_map, decay, normalise):
    causal = decay != "all keys"
    arrays, options = sample(
        21, causal=causal, normalise=normalise, decay=decay if causal else None,
        state=decay is not None, feature_map=np.tanh if feature_map == "callable" else feature_map,
    )  # fmt: skip
    exact = linear.forward(**arrays, **options)
    douts = cotangents(exact)
    bounds = linear_bounds(exact, np.float64, *douts)
    tensors = tensors_of(arrays)
    if feature_map == "callable":
        options["feature_map"] = torch.tanh
    got = npt.variants.linear.forward(**tensors, **options, **form)
    pairs = [(y, d) for y, d in zip(got, douts, strict=True) if d is not None]
    loss = sum((y * torch.tensor(d)).sum() for y, d in pairs)
    grads = torch.autograd.grad(loss, [*tensors.values()])
    results = {n: y.detach().numpy() for n, y in got._asdict().items() if y is not None}
    results |= {"d" + n: g.numpy() for n, g in zip(tensors, grads, strict=True)}
    assert_within(bounds, results, times=2)
    assert all(np.array_equal(tensors[n].detach().numpy(), x) for n, x in arrays.items())


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
@pytest.mark.parametrize("decay", [None, "head", "feature"])
def test_the_delta_rule_is_that_of_numpy(form, decay):
    arrays, options = delta_sample(21, decay, state=True)
    exact = linear.forward(**arrays, **options)
    douts = cotangents(exact)
    tensors = tensors_of(arrays)
    got = npt.variants.linear.forward(**tensors, **options, **form)
    cotangent = [torch.tensor(d) for d in douts[:2]]
    grads = torch.autograd.grad(got[:2], [*tensors.values()], cotangent)
    results = {"out": got.out.detach().numpy(), "state": got.state.detach().numpy()}
    results |= {"d" + n: g.numpy() for n, g in zip(tensors, grads, strict=True)}
    assert_within(linear_bounds(exact, np.float64, *douts), results, times=2)


@pytest.mark.parametrize("reset", [-1e15, -np.inf])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_reset_is_that_of_numpy(form, reset):
    rng, T, D = np.random.default_rng(13), 7, 3
    q, k, v = rng.standard_normal((3, 1, T, D))
    g = -abs(rng.standard_normal((1, T, 1)))
    g[0, 4] = reset
    options = {"causal": True, "normalise": False}
    fwd = linear.forward(q, k, v, log_decay=g, **options)
    grads = linear.backward(fwd, np.ones_like(fwd.out))
    leaves = {n: torch.tensor(x, requires_grad=True) for n, x in zip("qkv", (q, k, v), strict=True)}
    leaves["log_decay"] = torch.tensor(g, requires_grad=True)
    out = npt.variants.linear.attention(**leaves, **options, **form)
    np.testing.assert_allclose(out.detach(), fwd.out, rtol=1e-12)
    out.sum().backward()
    for name, leaf in leaves.items():
        np.testing.assert_allclose(leaf.grad, getattr(grads, name), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_the_second_gradient(form):
    rng = np.random.default_rng(0)
    shapes = ((2, 3, 2), (1, 3, 2), (1, 3, 1), (1, 3, 2))
    q, k, v, g = (torch.tensor(rng.standard_normal(s), requires_grad=True) for s in shapes)

    def call(q, k, v, g):
        return npt.variants.linear.attention(q, k, v, log_decay=-g.exp(), causal=True, **form)

    assert torch.autograd.gradcheck(call, (q, k, v, g))
    assert torch.autograd.gradgradcheck(call, (q, k, v, g))


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_rank_2_and_no_keys(form, causal):
    arrays, options = sample(5, causal=causal, normalise=True)
    one = {n: torch.tensor(x[0, 0]) for n, x in arrays.items()}
    got = npt.variants.linear.forward(**one, **options, **form)
    want = linear.forward(**{n: x[0, 0] for n, x in arrays.items()}, **options)
    assert_within(
        linear_bounds(want, np.float64),
        {n: y.numpy() for n, y in zip(got._fields, got, strict=True)},
        times=2,
    )
    empty = torch.ones(1, 0, 2)
    query = empty if causal else torch.ones(1, 3, 2)
    out = npt.variants.linear.attention(query, empty, empty, causal=causal, **form)
    assert out.shape == query.shape
    assert not out.any()
    bare = npt.variants.linear.forward(one["q"], one["k"], one["v"], normalise=False, **form)
    assert bare.normaliser is None


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_dtype_of_the_result(dtype):
    x = torch.ones(1, 3, 2, dtype=torch.bfloat16)
    out = npt.variants.linear.attention(x, x, x, dtype=dtype)
    assert out.dtype == (dtype or torch.float64)


def test_a_query_whose_weights_add_up_to_0_passes_no_gradient():
    q, k = -torch.ones(1, 2, 3, requires_grad=True), torch.ones(1, 2, 3, requires_grad=True)
    out = npt.variants.linear.attention(-abs(q), k, k, feature_map="relu")
    out.sum().backward()
    assert not out.any()
    assert not k.grad.any()


@pytest.mark.every
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": np.ones((1, 3, 2))}, DtypeError, "use npattn.variants.linear.attention"),
        ({"q": torch.ones(1, 3, 2) + 0j}, DtypeError, "must be a real tensor"),
        ({"q": torch.ones(1, 3, 2).long()}, DtypeError, "q is int64"),
        ({"k": torch.ones(1, 3, 2, device="meta")}, OptionError, "k is on meta, must be on cpu"),
        ({"feature_map": linear.FEATURE_MAPS["elu"]}, OptionError, "pass a callable f(x) on"),
        ({"feature_map": torch.sum}, OptionError, "feature_map returned ()"),
        ({"feature_map": lambda x: 1.0}, OptionError, "feature_map returned float"),
        ({"dtype": torch.bfloat16}, DtypeError, "dtype is bfloat16, must be float32 or float64"),
        ({"log_decay": torch.zeros(1)}, ShapeError, "log_decay[:, None, None]"),
    ],
)
def test_errors_name_the_way_out(change, error, words):
    x = torch.ones(1, 3, 2)
    with pytest.raises(error) as caught:
        npt.variants.linear.attention(**({"q": x, "k": x, "v": x, "causal": True} | change))
    assert words in str(caught.value)


def test_the_names_of_inputs_are_those_of_numpy():
    assert set(NAMES) <= set(npt.variants.linear.attention.__annotations__)


def test_a_decay_above_1_warns():
    x = torch.ones(2, 3, 5)
    options = {"causal": True, "normalise": False}
    with pytest.warns(UserWarning, match="for a factor γ pass log"):
        npt.variants.linear.forward(x, x, x, log_decay=torch.full((2, 1, 1), 0.9), **options)
    npt.variants.linear.forward(x, x, x, log_decay=torch.full((2, 1, 1), -0.1), **options)
