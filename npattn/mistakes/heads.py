"""Mistakes in shared heads and in the layout of axes."""

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs, same_signature
from npattn.mistakes.register import after, change, mistake, one_result
from npattn.problem.arrays import Array

# --- which key/value head a query head uses ---


def take_heads(x: Array, heads: Array) -> Array:
    """Return a head of x for each query head, by number modulo K."""
    return np.asarray(np.take(x, heads % max(x.shape[-3], 1), axis=-3))


def key_heads(c: Inputs) -> Array:
    """Return h // G for each query head."""
    H, K = c.q.shape[-3], c.k.shape[-3]
    return np.arange(H) // (H // max(K, 1) or 1)


change("heads-tiled", "heads", "Query head h uses key/value head h % K instead of h // G.",
       "onnx/onnx#7274", step="s", where="h % K ≠ h // G",
       share=lambda up, x, H: take_heads(x, np.arange(H)))  # fmt: skip


@mistake("heads-of-padded-group", "heads", "ggml-org/llama.cpp#19115", step="s",
         where="h // 4 ≠ h // G and G = 3")  # fmt: skip
class _HeadsOfPaddedGroup(Attention):
    """Query head h uses key/value head h // G with G rounded up to a power of two."""

    def share(self, x: Array, H: int) -> Array:
        group = 1
        while group * x.shape[-3] < H:
            group *= 2
        return np.asarray(np.take(x, np.arange(H) // group, axis=-3))


change("heads-by-number-of-keys", "heads",
       "Query head h uses key/value head (h // K) % K instead of h // G.", "PSAL-POSTECH/ONNXim#34",
       step="s", where="h // K % K ≠ h // G",
       share=lambda up, x, H: take_heads(x, np.arange(H) // max(x.shape[-3], 1)))  # fmt: skip
change("heads-all-of-first", "heads",
       "If heads are shared, all query heads use the first key/value head.",
       step="s", where="h ≥ G and G > 1",
       share=lambda up, x, H: up(x if x.shape[-3] == H else x[..., :1, :, :], H))  # fmt: skip
change("heads-repeated-along-keys", "heads",
       "k and v are repeated along the key axis instead of the head axis.",
       "PrimeIntellect-ai/prime-rl#2681", step="layout", where="G > 1",
       share=lambda up, x, H: np.repeat(x, H // max(x.shape[-3], 1), axis=-2).reshape(
           *x.shape[:-3], H, *x.shape[-2:]))  # fmt: skip


@mistake("heads-offset-by-queries", "heads", step="s", where="b ≥ 1 and G > 1")
class _HeadsOffsetByQueries(Attention):
    """The key heads of batch entry b are read from offset b · H instead of b · K."""

    def share(self, x: Array, H: int) -> Array:
        *lead, K, S, n = x.shape
        B = int(np.prod(lead))
        head = np.arange(B)[:, None] * H + np.arange(H) // max(H // max(K, 1), 1)
        return np.asarray(x.reshape(B * K, S, n)[head % max(B * K, 1)].reshape(*lead, H, S, n))


change("sink-of-key-head", "heads", "Query head h uses the sink of head h // G.", step="p",
       where="h // G ≠ h and sinks",
       inputs=after(lambda c: c._replace(sinks=c.sinks[key_heads(c)])))  # fmt: skip


# --- gradients of shared heads ---


change("dk-of-first-head", "heads",
       "dk and dv take only the first query head of each group instead of their sum.",
       step="dv", where="G > 1", share_back=lambda up, dx, x:
           dx[..., :: dx.shape[-3] // max(x.shape[-3], 1) or 1, :, :])  # fmt: skip
change("dk-of-last-head", "heads",
       "dk and dv take only the last query head of each group instead of their sum.",
       step="dv", where="G > 1",
       share_back=lambda up, dx, x: dx[..., (dx.shape[-3] // max(x.shape[-3], 1) or 1) - 1 ::
           dx.shape[-3] // max(x.shape[-3], 1) or 1, :, :])  # fmt: skip
change("dk-mean-over-group", "heads",
       "dk and dv are averaged over the query heads of a group instead of summed.",
       step="dv", where="G > 1", share_back=lambda up, dx, x:
           np.asarray(up(dx, x) / max(dx.shape[-3] // max(x.shape[-3], 1), 1)))  # fmt: skip


def add_tiled(dx: Array, x: Array) -> Array:
    """(..., H, S, n) → (..., K, S, n): sum over the query heads h of one h % K."""
    *lead, H, S, n = dx.shape
    K = x.shape[-3]
    return np.asarray(dx.reshape(*lead, H // max(K, 1), K, S, n).sum(-4))


change("heads-tiled-in-backward", "heads",
       "Backward adds query head h to key/value head h % K, while forward uses h // G.",
       "XunhaoLai/native-sparse-attention-triton#27", step="dv", where="K > 1 and G > 1",
       share_back=lambda up, dx, x: add_tiled(dx, x))  # fmt: skip
change("heads-interleaved", "heads",
       "Query head h uses key/value head h % K in forward and backward.", step="s",
       where="h % K ≠ h // G", share=lambda up, x, H: take_heads(x, np.arange(H)),
       share_back=lambda up, dx, x: add_tiled(dx, x))  # fmt: skip


# --- arrays and axes taken for others ---


change("keys-and-values-exchanged", "layout", "k and v are swapped if their shapes are equal.",
       "tenstorrent/tt-mlir#8958", step="s", where="D = E", inputs=after(lambda c:
           c._replace(k=c.v, v=c.k) if c.k.shape == c.v.shape else c))  # fmt: skip
change("queries-and-keys-exchanged", "layout", "q and k are swapped if their shapes are equal.",
       step="s", where="T = S and H = K",
       inputs=after(lambda c:
           c._replace(q=c.k, k=c.q) if c.k.shape == c.q.shape else c))  # fmt: skip
change("values-ignored", "layout", "out is computed from k instead of v if their shapes are equal.",
       "ruvnet/agentic-flow#191", step="o", where="D = E",
       inputs=after(lambda c: c._replace(v=c.k) if c.k.shape == c.v.shape else c))  # fmt: skip
change("key-axes-exchanged", "layout",
       "k is read with its head and key axes swapped if they have equal length.",
       "pytorch/pytorch#195320", step="layout", where="K = S",
       inputs=after(lambda c: c._replace(
           k=c.k.swapaxes(-2, -3) if c.k.shape[-2] == c.k.shape[-3] else c.k)))  # fmt: skip
change("heads-split-by-reshape", "layout",
       "q, k, v (T, H, D) are reshaped to (H, T, D) without moving the head axis.",
       "reczoo/FuxiCTR#30", step="layout", where="H > 1",
       read=lambda up, x: up(x.swapaxes(-2, -3).reshape(x.shape) if x.ndim > 2 else x))  # fmt: skip
change("heads-merged-by-reshape", "layout",
       "out (H, T, E) is reshaped to (T, H, E) without moving the head axis.",
       "jsbaan/transformer-from-scratch#6", step="o", where="H > 1 and T > 1",
       results=one_result(0, lambda o, c: o.reshape(
           *o.shape[:-3], o.shape[-2], o.shape[-3], o.shape[-1]).swapaxes(-2, -3)))  # fmt: skip


@mistake("batch-modulo", "layout", step="s", where="B > 1")
class _BatchModulo(Attention):
    """Batch entry b of q uses entry b % n of k and v instead of broadcasting."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        lead = c.q.shape[:-3]
        return c._replace(k=self.tile_batch(c.k, lead), v=self.tile_batch(c.v, lead))

    def tile_batch(self, x: Array, lead: tuple[int, ...]) -> Array:
        count = math.prod(lead)
        if x.size == 0 or count == 0:
            return x
        flat = x.reshape(-1, *x.shape[-3:])
        return np.asarray(flat[np.arange(count) % len(flat)].reshape(*lead, *x.shape[-3:]))


@mistake("rank-2-weights", "layout", step="layout", where="weights")
class _Rank2Weights(Attention):
    """The weights of rank-2 inputs keep a head axis."""

    @same_signature(Attention.forward)
    def forward(self, q: Array, *args: Any, return_weights: bool = False, **options: Any) -> Any:
        results = super().forward(q, *args, return_weights=return_weights, **options)
        return (*results[:-1], results[-1][None]) if return_weights and q.ndim == 2 else results
