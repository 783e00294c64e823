"""Gathered attention and lists of keys on torch tensors, as `npattn.variants.gathered`."""

from typing import Any, NamedTuple

import torch

from npattn.problem import Forward
from npattn.torch.twins import Tensors
from npattn.variants import gathered

Tensor = torch.Tensor


class GatheredResults(NamedTuple):
    """Output, lse, and the attention inside, whose queries are a batch axis."""

    out: Tensor
    lse: Tensor
    attention: Forward
    headless: bool

    @property
    def weights(self) -> Tensor:
        """Weights (..., H, T, n) of the entries of each list, differentiable once."""
        inside: Any = self.attention.weights
        weights: Tensor = inside[..., 0, :].swapaxes(-3, -2)
        return weights[0] if self.headless else weights


_tensors = Tensors(__name__)
forward = _tensors.bind(gathered.forward, GatheredResults)
attention = _tensors.bind(gathered.attention, Tensor)
top_k = _tensors.bind(gathered.top_k, Tensor)
index_mask = _tensors.bind_on_host(gathered.index_mask, Tensor)
drop_repeats = _tensors.bind_on_host(gathered.drop_repeats, Tensor)
