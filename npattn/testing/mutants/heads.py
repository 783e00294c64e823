"""Mutants: heads."""

from __future__ import annotations

import numpy as np

from npattn.problem import Array
from npattn.testing.mutants.attention import Attention
from npattn.testing.mutants.register import mutant


@mutant("heads-tiled", "heads", "agreement-o structure", "onnx/onnx#7274")
class _HeadsTiled(Attention):
    """Query head h uses key/value head h % K."""

    def share(self, x: Array, H: int) -> Array:
        K = x.shape[-3]
        return np.asarray(np.take(x, np.arange(H) % max(K, 1), axis=-3))


@mutant("heads-of-padded-group", "heads", "agreement-o structure", "ggml-org/llama.cpp#19115")
class _HeadsOfPaddedGroup(Attention):
    """Query head h uses key/value head h // G with G rounded up to a power of two."""

    def share(self, x: Array, H: int) -> Array:
        group = 1
        while group * x.shape[-3] < H:
            group *= 2
        return np.asarray(np.take(x, np.arange(H) // group, axis=-3))


@mutant("dk-of-first-head", "heads", "agreement-dk agreement-dv")
class _DkOfFirstHead(Attention):
    """dk and dv are those of the first query head of each group, not the sum over the group."""

    def share_back(self, dx: Array, x: Array) -> Array:
        K = x.shape[-3]
        return dx[..., :: dx.shape[-3] // max(K, 1) or 1, :, :]
