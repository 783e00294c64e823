"""Mistakes in reading arrays, and in state that a call keeps or changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs, same_signature
from npattn.mistakes.blind.float32 import as_float32
from npattn.mistakes.register import change, mistake
from npattn.problem.arrays import Array

# --- shapes and dtypes  [14, 15]


@mistake("blind-batch-modulo", "shapes", step="s", where="B > 1")
class BatchModulo(Attention):
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


@mistake("blind-rank-2-weights", "shapes", step="layout", where="weights")
class Rank2Weights(Attention):
    """The weights of rank-2 inputs keep a head axis."""

    @same_signature(Attention.forward)
    def forward(self, q: Array, *args: Any, return_weights: bool = False, **options: Any) -> Any:
        results = super().forward(q, *args, return_weights=return_weights, **options)
        return (*results[:-1], results[-1][None]) if return_weights and q.ndim == 2 else results


change("blind-float64-read-as-float32", "dtypes", "float64 inputs are rounded to float32.",
       step="precision", where="everywhere",
       dtypes=("float64",), read=lambda up, x: as_float32(np.asarray(x)))  # fmt: skip


# --- state, and arrays of the caller


@mistake("blind-cache-without-causal", "state", step="state", where="causal")
class CacheWithoutCausal(Attention):
    """A cached mask is keyed by sizes and window, without causal."""

    def __init__(self) -> None:
        self.kept: dict[Any, Array] = {}

    def visible(self, c: Inputs) -> Array:
        key = c.q.shape[-2], c.k.shape[-2], c.window
        inside = self.kept.setdefault(key, super().visible(c._replace(mask=None)))
        return inside if c.mask is None else inside & self.mask(c.mask, c)


@mistake("blind-bias-masked-in-place", "state", step="state", where="mask and bias")
class BiasMaskedInPlace(Attention):
    """The mask is written into the caller's bias if the shapes allow it."""

    @same_signature(Attention.forward)
    def forward(
        self, q: Array, k: Array, v: Array, mask: Array | None = None, **options: Any
    ) -> Any:
        bias = options.get("bias")
        if bias is None or mask is None or not bias.flags.writeable:
            return super().forward(q, k, v, mask, **options)
        if np.broadcast_shapes(bias.shape, mask.shape) == bias.shape:
            np.copyto(bias, -np.inf, where=~mask)
        return super().forward(q, k, v, mask, **options)


@mistake("blind-values-in-memory-order", "state", step="layout", where="everywhere")
class ValuesInMemoryOrder(Attention):
    """v is read in memory order."""

    def inputs(self, q: Array, k: Array, v: Array, *mask: Any, **options: Any) -> Inputs:
        v = np.ravel(v, order="K").reshape(v.shape)
        return super().inputs(q, k, v, *mask, **options)
