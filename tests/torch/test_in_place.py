"""The engine changes tiles in place, and nothing that somebody else still needs."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import npattn.torch  # noqa: E402
from npattn.torch import Problem  # noqa: E402
from npattn.torch.engine.operations import TileOps  # noqa: E402

B, H, T, S, D, E = 2, 3, 5, 7, 11, 13


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def operands():
    return normal(B, H, T, D), normal(B, H, S, D, seed=1), normal(B, H, S, E, seed=2)


def test_tiles_are_changed_in_place():
    ops, s = TileOps(Problem(*operands()), one_tile=True), normal(B, H, T, S)
    assert ops.exp(s) is s
    assert ops.subtract(s, normal(B, H, T)) is s
    assert ops.multiply(s, normal(B, H, T, S)) is s


def test_what_autograd_records_stays():
    ops = TileOps(Problem(*operands()), one_tile=True)
    s = 2 * normal(B, H, T, S).requires_grad_()
    before = s.detach().clone()
    ops.exp(s)
    ops.subtract(s, normal(B, H, T))
    ops.multiply(s, normal(B, H, T, S))
    plain = before.clone()
    ops.multiply(plain, s)
    ops.subtract(plain, normal(B, H, T).requires_grad_())
    assert torch.equal(s, before)
    assert torch.equal(plain, before)


def test_nothing_is_changed_in_a_transform():
    seen = []

    def f(x):
        seen.append(TileOps(Problem(*operands()), one_tile=True).overwrites)
        return x

    torch.func.vmap(f)(torch.ones(2))
    assert seen == [False]


def test_a_tensor_that_score_mod_returns_stays():
    table = normal(B, H, T, S, seed=3)
    before = table.clone()
    fwd = npattn.torch.forward(*operands(), score_mod=lambda s, *at: table)
    npattn.torch.backward(fwd, normal(B, H, T, E))
    assert torch.equal(table, before)
