"""Latent and gathered attention on a device that is not the CPU: the same bits, and all there."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
elsewhere = pytest.importorskip("tests.elsewhere", exc_type=ImportError)

import npattn.torch as npt  # noqa: E402
from tests.variants import test_gathered as gathered  # noqa: E402
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
        return npt.variants.latent_forward(*tensors, form=form, causal="bottom_right")

    pairs = (results(call, sample(), device) for device in ("cpu", elsewhere.DEVICE))
    for here, there in zip(*pairs, strict=True):
        assert np.array_equal(here, there)


def test_gathered():
    lists = gathered.draw_lists((gathered.B, 1, gathered.T))

    def call(q, k, v):
        own = torch.tensor(lists).to(q.device)
        assert npt.variants.index_mask(own, gathered.S).device == q.device
        assert npt.variants.top_k(q[..., :3], 2).device == q.device
        return npt.variants.gathered_forward(q, k, v, own, causal="bottom_right")

    pairs = (results(call, gathered.sample(), device) for device in ("cpu", elsewhere.DEVICE))
    for here, there in zip(*pairs, strict=True):
        assert np.array_equal(here, there)
