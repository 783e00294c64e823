"""Packed sequences, pages and merged parts on tensors: those of NumPy, by autograd."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch as npt  # noqa: E402
from npattn import biases, cache  # noqa: E402
from npattn.errors import DtypeError, OptionError, ShapeError  # noqa: E402
from tests.make import normal  # noqa: E402

H, K, T, D, E = 4, 2, 3, 6, 5
U = 2.0**-53
CLOSE = {"rtol": 0, "atol": 1e4 * U}


def leaves(*arrays):
    return [torch.tensor(x, requires_grad=True) for x in arrays]


@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_packed_sequences_are_those_of_numpy(causal):
    q, k, v = normal(9, H, D), normal(12, K, D, seed=1), normal(12, K, E, seed=2)
    bounds, sinks = ([0, 3, 3, 9], [0, 5, 7, 12]), normal(H, seed=3)
    want = cache.varlen_forward(q, k, v, *bounds, causal=causal, sinks=sinks, bias=biases.alibi(H))
    dout, dlse = normal(*want.out.shape, seed=7), normal(*want.lse.shape, seed=8)
    grads = cache.varlen_backward(want, dout, dlse)
    tensors = leaves(q, k, v, sinks)
    got = npt.cache.varlen_forward(
        *tensors[:3], torch.tensor(bounds[0]), bounds[1], causal=causal, sinks=tensors[3],
        bias=biases.alibi(H),
    )  # fmt: skip
    assert np.allclose(got.out.detach(), want.out, **CLOSE)
    assert np.allclose(got.lse.detach(), want.lse, **CLOSE)
    torch.autograd.backward(got, (torch.tensor(dout), torch.tensor(dlse)))
    for x, wanted in zip(tensors, (grads.q, grads.k, grads.v, grads.sinks), strict=True):
        assert np.allclose(x.grad, wanted, **CLOSE)


@pytest.mark.parametrize("rotary", [None, {"base": 100.0}])
@pytest.mark.parametrize("table", [None, [[1, 3], [2, 0]]])
def test_appended_keys_are_those_of_numpy(table, rotary):
    N, P = (2, 8) if table is None else (4, 5)
    inputs = [
        normal(N, P, K, D), normal(N, P, K, E, seed=1),
        normal(2, T, K, D, seed=2), normal(2, T, K, E, seed=3),
    ]  # fmt: skip
    seqlens, options = np.array([0, 5]), {"block_table": table, "rotary": rotary}
    want = cache.append(*inputs, seqlens, **options)
    dout = [normal(*x.shape, seed=4) for x in want[:2]]
    grads = cache.append_backward(*dout, *inputs[2:], seqlens, **options)
    tensors = leaves(*inputs)
    got = npt.cache.append(*tensors, torch.tensor(seqlens), **options)
    assert got.seqlens.tolist() == want[2].tolist() == [T, 5 + T]
    for x, wanted in zip(got, want, strict=True):
        assert np.array_equal(x.detach(), wanted)
    torch.autograd.backward(got[:2], [torch.tensor(x) for x in dout])
    for x, wanted in zip(tensors, grads, strict=True):
        assert np.array_equal(x.grad, wanted)


def test_pages_are_those_of_numpy():
    q, k, v = normal(2, T, H, D), normal(5, 4, K, D, seed=1), normal(5, 4, K, E, seed=2)
    table, lengths = np.array([[4, 1, -9], [0, 99, 99]]), [7, 4]
    k[2:4], v[2:4] = np.nan, np.inf  # nobody reads them
    k[1, 3] = np.nan
    want = cache.paged_forward(q, k, v, table, lengths, causal="bottom_right")
    dout, dlse = normal(*want.out.shape, seed=7), normal(*want.lse.shape, seed=8)
    grads = cache.paged_backward(want, dout, dlse)
    tensors = leaves(q, k, v)
    got = npt.cache.paged_forward(
        *tensors, torch.tensor(table), torch.tensor(lengths), causal="bottom_right"
    )
    assert np.allclose(got.out.detach(), want.out, **CLOSE)
    assert np.allclose(got.lse.detach(), want.lse, **CLOSE)
    torch.autograd.backward(got, (torch.tensor(dout), torch.tensor(dlse)))
    for x, wanted in zip(tensors, (grads.q, grads.k, grads.v), strict=True):
        assert np.allclose(x.grad, wanted, **CLOSE)


@pytest.mark.parametrize("base", ["e", "2"])
def test_merged_parts_are_those_of_numpy(base):
    outs, lses = [normal(T, E, seed=n) for n in range(3)], [normal(T, seed=9 + n) for n in range(3)]
    lses[0][0] = -np.inf
    for x in lses:
        x[2] = -np.inf  # a row that sees nothing
    outs[0][0] = outs[1][2] = np.nan
    want = cache.merge(outs, lses, base=base)
    dout, dlse = normal(T, E, seed=20), normal(T, seed=21)
    dlse[2] = 0
    wanted = cache.merge_backward(outs, lses, dout, dlse, base=base)
    parts, logs = leaves(*outs), leaves(*lses)
    got = npt.cache.merge(parts, logs, base=base)
    for x, y in zip(got, want, strict=True):
        assert np.allclose(x.detach(), y, **CLOSE)
    torch.autograd.backward(got, (torch.tensor(dout), torch.tensor(dlse)))
    for xs, ys in zip((parts, logs), wanted, strict=True):
        for x, y in zip(xs, ys, strict=True):
            assert np.allclose(x.grad, y, **CLOSE)


def test_narrow_parts_are_merged_in_float64():
    outs, lses = (
        [normal(T, E, seed=n) for n in range(4)],
        [1e3 + normal(T, seed=n) for n in range(4)],
    )
    parts = [[torch.tensor(x).bfloat16() for x in xs] for xs in (outs, lses)]
    got = npt.cache.merge(*(iter(xs) for xs in parts))
    want = cache.merge(*([x.double().numpy() for x in xs] for xs in parts))
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.float64
        assert np.allclose(x, y, **CLOSE)


def test_no_sequence_and_no_sample():
    empty = [torch.zeros(0, n, m) for n, m in ((H, D), (K, D), (K, E))]
    out, lse = npt.cache.varlen_forward(*empty, [0])
    assert (out.shape, lse.shape) == ((0, H, E), (H, 0))
    pages = torch.zeros(3, 4, K, D), torch.zeros(3, 4, K, E)
    none = torch.zeros(0, T, H, D), *pages, np.zeros((0, 2), int), np.zeros(0, int)
    out, lse = npt.cache.paged_forward(*none)
    assert (out.shape, lse.shape) == ((0, T, H, E), (0, H, T))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: npt.cache.varlen(x.numpy(), x, x, [0, 3]), DtypeError, "use npattn.cache"),
        (lambda x: npt.cache.varlen(x, x, x, [0, 2]), OptionError, "end at the number of tokens"),
        (lambda x: npt.cache.varlen(x, x, x, [0, 3], causal=3), OptionError, "causal is 3"),
        (lambda x: npt.cache.paged(x, x, x, [[0]], [1]), ShapeError, "must be (B, T, H, D)"),
        (lambda x: npt.cache.merge([x], [x]), ShapeError, "all alike"),
        (lambda x: npt.cache.merge([x.int()], [x[..., 0]]), DtypeError, "outs is int32"),
        (lambda x: npt.cache.merge([x * 1j], [x[..., 0]]), DtypeError, "must be a real tensor"),
        (lambda x: npt.cache.merge([x], [x[..., 0]], base=2), OptionError, "must be one of e, 2"),
    ],
)
def test_errors_are_those_of_numpy(call, error, words):
    with pytest.raises(error) as caught:
        call(torch.ones(3, 2, 4))
    assert words in str(caught.value)


@pytest.mark.thorough
def test_compiled_calls_give_the_same():
    x = torch.rand(2, 3, 4)
    calls = (
        lambda: npt.cache.varlen(x, x, x, [0, 2]),
        lambda: npt.cache.merge([x], [x[..., 0]]).out,
        lambda: npt.variants.linear.attention(x, x, x, causal=True),
        lambda: npt.variants.gathered.top_k(x, 2),
        lambda: npt.quantization.dequantize(x, torch.ones(2)),
    )
    for call in calls:
        assert torch.equal(torch.compile(call, backend="eager")(), call())
