"""Mistakes in shared heads and in the layout of axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import after, change, mistake
from npattn.problem.arrays import Array

# --- which key/value head a query head uses ---


change("heads-tiled", "heads", "Query head h uses key/value head h % K instead of h // G.",
       "onnx/onnx#7274", step="s", where="h % K ≠ h // G", share=lambda up, x, H:
           np.asarray(np.take(x, np.arange(H) % max(x.shape[-3], 1), axis=-3)))  # fmt: skip


@mistake(
    "heads-of-padded-group",
    "heads",
    "ggml-org/llama.cpp#19115",
    step="s",
    where="h // 4 ≠ h // G and G = 3",
)
class _HeadsOfPaddedGroup(Attention):
    """Query head h uses key/value head h // G with G rounded up to a power of two."""

    def share(self, x: Array, H: int) -> Array:
        group = 1
        while group * x.shape[-3] < H:
            group *= 2
        return np.asarray(np.take(x, np.arange(H) // group, axis=-3))


@mistake(
    "heads-by-number-of-keys",
    "heads",
    "PSAL-POSTECH/ONNXim#34",
    step="s",
    where="h // K % K ≠ h // G",
)
class _HeadsByNumberOfKeys(Attention):
    """Query head h uses key/value head (h // K) % K instead of h // G."""

    def share(self, x: Array, H: int) -> Array:
        K = max(x.shape[-3], 1)
        return np.asarray(np.take(x, np.arange(H) // K % K, axis=-3))


change("heads-all-of-first", "heads",
       "If heads are shared, all query heads use the first key/value head.",
       step="s", where="h ≥ G and G > 1",
       share=lambda up, x, H: up(x if x.shape[-3] == H else x[..., :1, :, :], H))  # fmt: skip


@mistake(
    "heads-repeated-along-keys", "heads", "PrimeIntellect-ai/prime-rl#2681", step="s", where="G > 1"
)
class _HeadsRepeatedAlongKeys(Attention):
    """k and v are repeated along the key axis instead of the head axis."""

    def share(self, x: Array, H: int) -> Array:
        *lead, K, S, n = x.shape
        return np.repeat(x, H // max(K, 1), axis=-2).reshape(*lead, H, S, n)


@mistake("heads-offset-by-queries", "heads", step="s", where="b ≥ 1 and G > 1")
class _HeadsOffsetByQueries(Attention):
    """The key heads of batch entry b are read from offset b · H instead of b · K."""

    def share(self, x: Array, H: int) -> Array:
        *lead, K, S, n = x.shape
        B = int(np.prod(lead))
        head = np.arange(B)[:, None] * H + np.arange(H) // max(H // max(K, 1), 1)
        return np.asarray(x.reshape(B * K, S, n)[head % max(B * K, 1)].reshape(*lead, H, S, n))


@mistake("sink-of-key-head", "heads", step="p", where="h // G ≠ h and sinks")
class _SinkOfKeyHead(Attention):
    """Query head h uses the sink of head h // G."""

    def softmax(self, s: Array, c: Inputs, live: Array) -> tuple[Array, Array, Array]:
        H, K = c.q.shape[-3], c.k.shape[-3]
        head = np.arange(H) // (H // max(K, 1) or 1)
        return super().softmax(s, c._replace(sinks=c.sinks[head]), live)


# --- gradients of shared heads ---


change("dk-of-first-head", "heads",
       "dk and dv take only the first query head of each group instead of their sum.",
       step="dv", where="G > 1", share_back=lambda up, dx, x:
           dx[..., :: dx.shape[-3] // max(x.shape[-3], 1) or 1, :, :])  # fmt: skip
change("dk-mean-over-group", "heads",
       "dk and dv are averaged over the query heads of a group instead of summed.",
       step="dv", where="G > 1", share_back=lambda up, dx, x:
           np.asarray(up(dx, x) / max(dx.shape[-3] // max(x.shape[-3], 1), 1)))  # fmt: skip


@mistake(
    "heads-tiled-in-backward",
    "heads",
    "XunhaoLai/native-sparse-attention-triton#27",
    step="dv",
    where="K > 1 and G > 1",
)
class _HeadsTiledInBackward(Attention):
    """Backward adds query head h to key/value head h % K, while forward uses h // G."""

    def share_back(self, dx: Array, x: Array) -> Array:
        *lead, H, S, n = dx.shape
        K = x.shape[-3]
        return np.asarray(dx.reshape(*lead, H // max(K, 1), K, S, n).sum(-4))


# --- arrays and axes taken for others ---


change("keys-and-values-exchanged", "layout", "k and v are swapped if their shapes are equal.",
       "tenstorrent/tt-mlir#8958", step="s", where="D = E", inputs=after(lambda c:
           c._replace(k=c.v, v=c.k) if c.k.shape == c.v.shape else c))  # fmt: skip
change("values-ignored", "layout", "out is computed from k instead of v if their shapes are equal.",
       "ruvnet/agentic-flow#191", step="o", where="D = E",
       inputs=after(lambda c: c._replace(v=c.k) if c.k.shape == c.v.shape else c))  # fmt: skip


@mistake("key-axes-exchanged", "layout", "pytorch/pytorch#195320", step="layout", where="K = S")
class _KeyAxesExchanged(Attention):
    """k is read with its head and key axes swapped if they have equal length."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        return c._replace(k=c.k.swapaxes(-2, -3)) if c.k.shape[-2] == c.k.shape[-3] else c


change("heads-split-by-reshape", "layout",
       "q, k, v (T, H, D) are reshaped to (H, T, D) without moving the head axis.",
       "reczoo/FuxiCTR#30", step="layout", where="H > 1",
       read=lambda up, x: up(x.swapaxes(-2, -3).reshape(x.shape) if x.ndim > 2 else x))  # fmt: skip


@mistake(
    "heads-merged-by-reshape",
    "layout",
    "jsbaan/transformer-from-scratch#6",
    step="o",
    where="H > 1 and T > 1",
)
class _HeadsMergedByReshape(Attention):
    """out (H, T, E) is reshaped to (T, H, E) without moving the head axis."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        *lead, H, T, E = o.shape
        return o.reshape(*lead, T, H, E).swapaxes(-2, -3), lse, p
