"""Mistakes with arrays that share memory, hold new contents, or belong to another thread."""

import time
from typing import Any

import numpy as np

from npattn.mistakes.attention import Attention, Inputs
from npattn.mistakes.register import mistake
from npattn.problem.arrays import Array

KEPT = 64
"""Arrays that a cache holds."""


@mistake("packed-in-one-order", "memory", step="layout", where="everywhere")
class _PackedInOneOrder(Attention):
    """Slices of one packed buffer are read as [Q | K | V], also where they lie head by head."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        q, k, v, *rest = arrays
        bases = {id(x.base) for x in (q, k, v)}
        if len(bases) == 1 and q.base is not None and q.ndim > 2:
            (*lead, H, T, D), K = q.shape, k.shape[-3]
            packed = q.base.reshape(*lead, T, H + 2 * K, D).swapaxes(-2, -3)
            q, k, v = np.split(packed, [H, H + K], axis=-3)
        return super().inputs(q, k, v, *rest, **options)


@mistake("contents-of-first-call", "memory", step="state", where="everywhere")
class _ContentsOfFirstCall(Attention):
    """Arrays are prepared once and known by their identity, whatever they hold later."""

    def __init__(self) -> None:
        self.first_read: dict[int, tuple[Array, Array]] = {}

    def read(self, x: Array) -> Array:
        if id(x) not in self.first_read:
            self.first_read[id(x)] = x, super().read(x)  # with x, so that no other gets its id
        prepared = self.first_read[id(x)][1]
        if len(self.first_read) > KEPT:
            del self.first_read[next(iter(self.first_read))]
        return prepared.copy()


@mistake("value-scaled-with-key", "memory", step="o", where="D = E")
class _ValueScaledWithKey(Attention):
    """The scale goes into a copy of k, which also stands for v if they are one array."""

    def inputs(self, *arrays: Any, **options: Any) -> Inputs:
        c = super().inputs(*arrays, **options)
        return c._replace(v=c.scale * c.v) if arrays[1] is arrays[2] else c


@mistake("work-shared-by-threads", "memory", step="state", where="everywhere")
class _WorkSharedByThreads(Attention):
    """The inputs wait in a place that all threads share."""

    waiting: Inputs

    def results(self, c: Inputs) -> tuple[Array, Array, Array]:
        self.waiting = c
        time.sleep(0.005)  # in which another thread may call
        return super().results(self.waiting)
