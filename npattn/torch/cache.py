"""Packed sequences, pages, caches and merged parts on torch tensors, differentiable by autograd.

Each sequence is one problem of `npattn.torch.forward`; the meanings are those of `npattn.cache`,
whose `unpack` takes tensors as they are.
"""

from typing import NamedTuple

import torch

from npattn import cache
from npattn.cache import unpack
from npattn.torch.twins import Tensors

__all__ = [
    "Appended", "CacheResults", "append", "merge", "paged", "paged_forward", "unpack", "varlen",
    "varlen_forward",
]  # fmt: skip

Tensor = torch.Tensor


class CacheResults(NamedTuple):
    """Output and lse."""

    out: Tensor
    lse: Tensor


class Appended(NamedTuple):
    """A cache with new keys and values, and the number of keys of each sample."""

    k_cache: Tensor
    v_cache: Tensor
    seqlens: Tensor  # int64, on the device of the cache


_on_tensors = Tensors(__name__).bind
varlen = _on_tensors(cache.varlen, Tensor)
varlen_forward = _on_tensors(cache.varlen_forward, CacheResults)
paged = _on_tensors(cache.paged, Tensor)
paged_forward = _on_tensors(cache.paged_forward, CacheResults)
append = _on_tensors(cache.append, Appended)
merge = _on_tensors(cache.merge, CacheResults)
