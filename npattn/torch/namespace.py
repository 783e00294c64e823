"""Functions of torch under NumPy's names, for `npattn.conventions` on tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

Tensor = torch.Tensor


class Namespace:
    """Functions with NumPy's names and arguments, on tensors of one device."""

    nan = math.nan
    broadcast_to = staticmethod(torch.broadcast_to)
    full_like = staticmethod(torch.full_like)
    tanh = staticmethod(torch.tanh)
    unravel_index = staticmethod(torch.unravel_index)
    where = staticmethod(torch.where)
    zeros_like = staticmethod(torch.zeros_like)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def arange(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device)

    def zeros(self, shape: Sequence[int], dtype: Any = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def concatenate(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(list(tensors), dim=axis)

    def minimum(self, x: Tensor, most: int) -> Tensor:
        return torch.clamp(x, max=most)

    def isfinite(self, x: Tensor) -> Tensor:
        return torch.isfinite(x.float() if x.element_size() == 1 else x)


@lru_cache
def namespace(device: torch.device) -> Namespace:
    return Namespace(device)
