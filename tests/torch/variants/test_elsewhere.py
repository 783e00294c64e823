"""Latent and gathered attention on a device that is not the CPU: the same bits, and all there."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
elsewhere = pytest.importorskip("tests.elsewhere", exc_type=ImportError)

import npattn.torch as npt  # noqa: E402
from tests.variants import test_gathered as lists_of  # noqa: E402
from tests.variants.test_latent import FORMS, sample  # noqa: E402


def results(call, arrays, device):
    """Output and gradients of a call on a device."""
    tensors = [torch.tensor(x).to(device).requires_grad_() for x in arrays]
    found = call(*tensors)
    assert found.out.device.type == torch.device(device).type
    found.out.sum().backward()
    arrays = [found.out, found.lse, found.weights, *(x.grad for x in tensors)]
    return [x.detach().cpu().numpy() for x in arrays]


@pytest.mark.parametrize("form", FORMS)
def test_latent(form):
    def call(*tensors):
        return npt.variants.latent.forward(*tensors, form=form, causal="bottom_right")

    pairs = (results(call, sample(), device) for device in ("cpu", elsewhere.DEVICE))
    for here, there in zip(*pairs, strict=True):
        assert np.array_equal(here, there)


def test_gathered():
    lists = lists_of.draw_lists((lists_of.B, 1, lists_of.T))

    def call(q, k, v):
        own = torch.tensor(lists).to(q.device)
        assert npt.variants.gathered.index_mask(own, lists_of.S).device == q.device
        assert npt.variants.gathered.top_k(q[..., :3], 2).device == q.device
        return npt.variants.gathered.forward(q, k, v, own, causal="bottom_right")

    pairs = (results(call, lists_of.sample(), device) for device in ("cpu", elsewhere.DEVICE))
    for here, there in zip(*pairs, strict=True):
        assert np.array_equal(here, there)
