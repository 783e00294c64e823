"""Mutants: memory, state, dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn.problem import Array
from npattn.testing.mutants.attention import Attention, Call
from npattn.testing.mutants.register import mutant


@mutant("out-widened", "dtype", "shape-dtype")
class _OutWidened(Attention):
    """out comes in float32 whatever the inputs are, and in float64 for float32."""

    def out_dtype(self, dtype: np.dtype[Any]) -> Any:
        return np.float64 if dtype == np.float32 else np.float32


@mutant("input-changed", "memory", "inputs-unchanged")
class _InputChanged(Attention):
    """q is scaled in place."""

    def call(self, arrays: tuple[Any, ...], *options: Any) -> Call:
        call = super().call(arrays, *options)
        q = arrays[0]
        if q.flags.writeable:
            q *= np.asarray(call.scale, q.dtype)
        return call


@mutant("views-misread", "memory", "views", "pytorch/pytorch#181133")
class _ViewsMisread(Attention):
    """A transposed or expanded array is read in the order of its memory."""

    def read(self, x: Array) -> Array:
        order = np.argsort([-abs(stride) for stride in x.strides], kind="stable")
        in_memory = x.transpose(order) if min(x.shape, default=0) > 1 else x
        return super().read(in_memory).reshape(x.shape)


@mutant("state-kept", "memory", "repeatable nan-query", "flashinfer-ai/flashinfer#4270")
class _StateKept(Attention):
    """A second call with the shapes and options of the first returns what the first returned."""

    last: tuple[Any, Any] = (None, None)

    def results(self, c: Call) -> tuple[Array, Array, Array]:
        key = [(x.shape, x.dtype) if isinstance(x, np.ndarray) else x for x in c]
        if self.last[0] != key:
            self.last = key, super().results(c)
        found: tuple[Array, Array, Array] = self.last[1]
        return found


@mutant("result-changes", "memory", "repeatable", "Dao-AILab/flash-attention#359")
class _ResultChanges(Attention):
    """Every third call is off by 2⁻⁷, as a race would make it."""

    calls = 0

    def results(self, c: Call) -> tuple[Array, Array, Array]:
        o, lse, p = super().results(c)
        self.calls += 1
        return (o if self.calls % 3 else o * (1 + 2.0**-7)), lse, p
