"""q, k and v from one array, and into one."""

import numpy as np
import pytest

import npattn
from npattn.cache import pack, unpack, varlen
from npattn.errors import OptionError, ShapeError
from tests.make import normal

B, T, H, D = 2, 5, 3, 7


def packed_gradients(fwd, dout):
    grads = npattn.backward(fwd, dout)
    return pack(grads.q, grads.k, grads.v)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("order", ["parts", "heads"])
@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
def test_each_part_is_that_of_its_index(n, order, layout):
    packed = normal(*((B, T, n, H, D) if order == "parts" else (B, T, H, n, D)))
    parts = unpack(packed, order=order, layout=layout)
    assert len(parts) == n
    for b, t, h, i in np.ndindex(B, T, H, n):
        want = packed[b, t, i, h] if order == "parts" else packed[b, t, h, i]
        got = parts[i][b, h, t] if layout == "BHTD" else parts[i][b, t, h]
        np.testing.assert_array_equal(got, want)
    assert all(np.shares_memory(x, packed) for x in parts)
    np.testing.assert_array_equal(pack(*parts, order=order, layout=layout), packed)


def test_packed_gradients_are_the_gradient_of_what_is_packed():
    qkv, step, dout = normal(B, T, 3, H, D), normal(B, T, 3, H, D, seed=1), normal(B, H, T, D)
    dqkv = packed_gradients(npattn.forward(*unpack(qkv)), dout)
    slope = np.vdot(dqkv, step)
    h = 1e-20  # one complex step: exact to rounding
    moved = npattn.forward(*unpack(qkv + 1j * h * step), engine="dense").out
    want = np.vdot(dout, moved.imag) / h
    terms = abs(dqkv * step).sum()
    assert abs(slope - want) <= 64 * (T + D + qkv.size) * 2.0**-53 * terms


def test_packed_sequences_take_parts_as_they_are():
    qkv = normal(11, 3, H, D)
    q, k, v = unpack(qkv, layout="BTHD")
    want = varlen(q, k, v, [0, 4, 11])
    np.testing.assert_array_equal(want[:4], varlen(q[:4], k[:4], v[:4], [0, 4]))
    assert unpack(qkv.tolist())[0].shape == (H, 11, D)


def test_gradients_of_tensors_flow_to_one_array():
    torch = pytest.importorskip("torch")
    import npattn.torch as npt

    numbers, dout = normal(B, T, 3, H, D), normal(B, H, T, D, seed=2)
    qkv = torch.tensor(numbers, requires_grad=True)
    npt.attention(*npt.cache.unpack(qkv)).backward(torch.tensor(dout))
    want = packed_gradients(npattn.forward(*unpack(numbers)), dout)
    assert np.allclose(qkv.grad, want, rtol=0, atol=1e4 * 2.0**-53 * abs(want).max())


@pytest.mark.parametrize("shape", [(B, T, 5, H, D), (3, H, D), (B, T, H + 1, 3, D)])
def test_what_has_no_parts_is_an_error(shape):
    with pytest.raises(ShapeError, match=r'must be \(..., T, n, H, D\) .* pass order="heads"'):
        unpack(np.zeros(shape))


def test_words_and_shapes_are_checked():
    with pytest.raises(OptionError, match="order is 'THD', must be"):
        unpack(np.zeros((B, T, 3, H, D)), order="THD")
    with pytest.raises(OptionError, match="layout is 'TBHD', must be"):
        pack(np.zeros((B, H, T, D)), np.zeros((B, H, T, D)), layout="TBHD")
    for parts in ([np.zeros((H, T, D))], [np.zeros((H, T, D)), np.zeros((H, T, D + 1))]):
        with pytest.raises(ShapeError, match="must be two or three of one shape"):
            pack(*parts)
    with pytest.raises(ShapeError, match=r"must be \(..., T, H, n, D\)"):
        unpack(np.zeros((B, T, 3, H, D))[:, :, :, :1], order="heads")
