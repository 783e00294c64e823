"""Mutants: a cached past, tails of tiles and vectors, limits of sizes and offsets, strides."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.arrays import Array
from npattn.mistakes.attention import TILE, Attention, Inputs
from npattn.mistakes.register import mistake

# --- a cached past: S − T keys before those of the queries ---


@mistake("causal-over-past", "cache", "onnx/onnx#7297")
class _CausalOverPast(Attention):
    """The cached past has a causal mask of its own: query t sees its keys up to t."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        key = np.arange(S)
        hidden = (key < S - T) & (key > np.arange(T)[:, None])
        return super().visible(c) & ~hidden if c.causal else super().visible(c)


@mistake("cache-evicts-early", "cache", "huggingface/transformers#37574")
class _CacheEvictsEarly(Attention):
    """A rolling cache has dropped the first key of the window when the last query looks."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        left, _ = self.sides(c)
        first = np.inf if left is None else S - 1 - left
        last = np.arange(T)[:, None] == T - 1
        return np.asarray(super().visible(c) & ~(last & (np.arange(S) == first)))


@mistake("cache-appended-late", "cache")
class _CacheAppendedLate(Attention):
    """A single query, as in decoding, looks before its own key is in the cache."""

    def visible(self, c: Inputs) -> Array:
        T, S = c.q.shape[-2], c.k.shape[-2]
        late = T == 1 and S > 1
        return np.asarray(super().visible(c) & (np.arange(S) < S - late))


@mistake("cache-kept", "cache")
class _CacheKept(Attention):
    """The past of the call before is kept, where its keys and queries were as many."""

    last: tuple[Any, Array] = ((), np.zeros(0))

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        past = max(c.k.shape[-2] - c.q.shape[-2], 0)
        shapes = c.q.shape, c.k.shape
        if self.last[0] != shapes:
            self.last = shapes, c.k[..., :past, :]
        return c._replace(k=np.concatenate([self.last[1], c.k[..., past:, :]], axis=-2))


# --- tails: sizes that are no whole number of tiles or vectors ---


@mistake("tail-of-queries-unwritten", "tails")
class _TailOfQueriesUnwritten(Attention):
    """The rows of out after the last whole tile stay 0, where there is a whole one."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        T = o.shape[-2]
        return np.where(np.arange(T)[:, None] < (T // TILE * TILE or T), o, 0), lse, p


@mistake("tail-of-columns-unwritten", "tails")
class _TailOfColumnsUnwritten(Attention):
    """The columns of out after the last whole vector of 4 stay 0, where there is a whole one."""

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        E = o.shape[-1]
        return np.where(np.arange(E) < (E // 4 * 4 or E), o, 0), lse, p


@mistake("tail-of-channels-skipped", "tails")
class _TailOfChannelsSkipped(Attention):
    """The channels after the last whole vector of 4 are not in q kᵀ, where there is a whole one."""

    def product(self, c: Inputs) -> Array:
        D = c.q.shape[-1]
        return super().product(c._replace(q=c.q * (np.arange(D) < (D // 4 * 4 or D))))


# --- limits: sizes that a kernel was not made for ---


@mistake("keys-beyond-128-ignored", "limits", "NVIDIA/TensorRT#2541")
class _KeysBeyond128Ignored(Attention):
    """Only the first 128 keys are read."""

    def visible(self, c: Inputs) -> Array:
        return super().visible(c) & (np.arange(c.k.shape[-2]) < 128)


@mistake("channels-beyond-64-ignored", "limits", "triton-lang/triton#621")
class _ChannelsBeyond64Ignored(Attention):
    """Only the first 64 channels are in q kᵀ."""

    def product(self, c: Inputs) -> Array:
        return super().product(c._replace(q=c.q * (np.arange(c.q.shape[-1]) < 64)))


@mistake("key-offset-wraps", "limits", "Dao-AILab/flash-attention#2260")
class _KeyOffsetWraps(Attention):
    """Offsets into k wrap at 2¹², as those of 32 bits do at 2³²."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        wrapped = c.k.ravel()[np.arange(c.k.size) % 2**12]
        return c._replace(k=wrapped.reshape(c.k.shape))


@mistake("bias-offset-wraps", "limits", "pytorch/pytorch#187227")
class _BiasOffsetWraps(Attention):
    """Offsets into the bias of a head wrap at 2⁸, as those of 32 bits do at 2³²."""

    def bias(self, c: Inputs) -> Array | float:
        bias = np.asarray(c.bias)
        if bias.ndim == 0:
            return c.bias
        *lead, T, S = bias.shape
        return bias.reshape(*lead, T * S)[..., np.arange(T * S) % 2**8].reshape(bias.shape)


# --- strides ---


@mistake("negative-strides-misread", "memory")
class _NegativeStridesMisread(Attention):
    """A negative stride is taken for a positive one."""

    def read(self, x: Array) -> Array:
        steps = (slice(None, None, -1 if stride < 0 else 1) for stride in x.strides)
        return super().read(x[tuple(steps)])


@mistake("inner-stride-ignored", "memory", "pytorch/pytorch#187506")
class _InnerStrideIgnored(Attention):
    """The last axis is taken to be contiguous."""

    def read(self, x: Array) -> Array:
        if x.strides[-1] > x.itemsize:  # never beyond the end of what x covers
            strides = (*x.strides[:-1], x.itemsize)
            x = np.lib.stride_tricks.as_strided(x, strides=strides, writeable=False)
        return super().read(x)
