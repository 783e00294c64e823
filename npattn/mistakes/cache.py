"""Mistakes with a cached past, tails of tiles and vectors, limits of sizes, and strides."""

from typing import Any

import numpy as np

from npattn.mistakes.attention import TILE, Attention, Inputs
from npattn.mistakes.register import after, change, mistake, one_result
from npattn.problem.arrays import Array

# --- a cached past: S − T keys before those of the queries ---


@mistake("causal-over-past", "cache", "onnx/onnx#7297", step="visible",
         where="s > t and s < S − T and causal")  # fmt: skip
class _CausalOverPast(Attention):
    """Causal also masks the cached past: query t sees past keys only up to index t."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        key = np.arange(S)
        hidden = (key < S - T) & (key > np.arange(T)[:, None])
        return super().visible(c) & ~hidden if c.causal else super().visible(c)


@mistake("cache-evicts-early", "cache", "huggingface/transformers#37574", step="visible",
         where="t = T − 1 and window")  # fmt: skip
class _CacheEvictsEarly(Attention):
    """A rolling cache has evicted the first key of the window before the last query reads it."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        left_keys, _ = self.sides(c)
        first = np.inf if left_keys is None else S - 1 - left_keys
        last = np.arange(T)[:, None] == T - 1
        return np.asarray(super().visible(c) & ~(last & (np.arange(S) == first)))


change("cache-appended-late", "cache",
       "A single query (decoding) attends before its own key is in the cache.", step="visible",
       where="s = S − 1 and T = 1",
       visible=lambda up, c: np.asarray(up(c) & (np.arange(c.k.shape[-2])
           < c.k.shape[-2] - (c.q.shape[-2] == 1 < c.k.shape[-2]))))  # fmt: skip


@mistake("cache-kept", "cache", step="state", where="s < S − T")
class _CacheKept(Attention):
    """The past keys of the previous call are used again if the shapes are the same."""

    last: tuple[Any, Array] = ((), np.zeros(0))

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        past = max(c.k.shape[-2] - c.q.shape[-2], 0)
        shapes = c.q.shape, c.k.shape
        if self.last[0] != shapes:
            self.last = shapes, c.k[..., :past, :]
        return c._replace(k=np.concatenate([self.last[1], c.k[..., past:, :]], axis=-2))


# --- tails: sizes that are not a multiple of a tile or vector ---


def before_tail(n: int, tile: int) -> Array:
    """Return True before the partial tile that ends an axis, and in an axis of less than a tile."""
    return np.arange(n) < (n // tile * tile or n)


change("tail-of-queries-unwritten", "tails",
       "Rows of out after the last whole tile of 16 queries are left 0.", step="o",
       where="t // 16 = T // 16 and T > 16",
       results=one_result(0, lambda o, c:
           np.where(before_tail(o.shape[-2], TILE)[:, None], o, 0)))  # fmt: skip
change("tail-of-columns-unwritten", "tails",
       "Columns of out after the last whole vector of 4 are left 0.", step="o",
       where="e // 4 = E // 4 and E > 4",
       results=one_result(0, lambda o, c: np.where(before_tail(o.shape[-1], 4), o, 0)))  # fmt: skip
change("tail-of-channels-skipped", "tails",
       "q kᵀ leaves out the channels after the last whole vector of 4.", step="s",
       where="D % 4 ≠ 0 and D > 4",
       product=lambda up, c:
           up(c._replace(q=c.q * before_tail(c.q.shape[-1], 4))))  # fmt: skip


# --- limits: sizes beyond those of the kernel ---


change("keys-beyond-128-ignored", "limits", "Only the first 128 keys are read.",
       "NVIDIA/TensorRT#2541", step="visible", where="s ≥ 128",
       visible=lambda up, c: up(c) & (np.arange(c.k.shape[-2]) < 128))  # fmt: skip
change("channels-beyond-64-ignored", "limits", "q kᵀ takes only the first 64 channels.",
       "triton-lang/triton#621", step="s", where="D > 64",
       product=lambda up, c: up(c._replace(q=c.q * (np.arange(c.q.shape[-1]) < 64))))  # fmt: skip
change("key-offset-wraps", "limits",
       "Offsets into k wrap around at 2¹², as 32-bit offsets do at 2³².",
       "Dao-AILab/flash-attention#2260", step="s", where="B · K · S · D > 4096",
       inputs=after(lambda c: c._replace(
           k=c.k.ravel()[np.arange(c.k.size) % 2**12].reshape(c.k.shape))))  # fmt: skip


@mistake("bias-offset-wraps", "limits", "pytorch/pytorch#187227", step="s",
         where="t · S + s ≥ 256 and bias")  # fmt: skip
class _BiasOffsetWraps(Attention):
    """Offsets into the bias of a head wrap around at 2⁸, as 32-bit offsets do at 2³²."""

    def bias(self, c: Inputs) -> Array | float:
        bias = np.asarray(c.bias)
        if bias.ndim == 0:
            return c.bias
        *lead, T, S = bias.shape
        return bias.reshape(*lead, T * S)[..., np.arange(T * S) % 2**8].reshape(bias.shape)


# --- strides ---


@mistake("negative-strides-misread", "memory", step="layout", where="everywhere")
class _NegativeStridesMisread(Attention):
    """Negative strides are read as positive ones."""

    def read(self, x: Array) -> Array:
        steps = (slice(None, None, -1 if stride < 0 else 1) for stride in x.strides)
        return super().read(x[tuple(steps)])


@mistake("inner-stride-ignored", "memory", "pytorch/pytorch#187506", step="layout",
         where="everywhere")  # fmt: skip
class _InnerStrideIgnored(Attention):
    """The last axis is assumed to be contiguous; its stride is ignored."""

    def read(self, x: Array) -> Array:
        if x.strides[-1] > x.itemsize:  # never beyond the end of x
            strides = (*x.strides[:-1], x.itemsize)
            x = np.lib.stride_tricks.as_strided(x, strides=strides, writeable=False)
        return super().read(x)
