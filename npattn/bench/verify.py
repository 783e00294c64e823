"""Whether what a contestant computed is right: a benchmark of wrong results is worthless."""

from __future__ import annotations

from typing import Any

import numpy as np

import npattn
from npattn.arrays import Array
from npattn.bench.cases import Task
from npattn.testing import spot_check

__all__ = ["Judge"]

SCORES = 2**16
"""Scores that are looked at of each result; of short sequences, `ROWS` rows."""
ROWS = (8, 64)


class Judge:
    """Holds results of one task against the exact ones, in rows and keys drawn at random.

    dk and dv are judged with the lse of npattn.tiled, which other systems do not return.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed = task, seed
        self.samples = int(np.clip(SCORES // task.T, *ROWS))
        self._lse: Array | None = None

    @property
    def lse(self) -> Array:
        if self._lse is None:
            task = self.task
            words: dict[str, Any] = {"dtype": task.q.dtype, "engine": "tiled"}
            self._lse = npattn.forward(task.q, task.k, task.v, **words, **task.options).lse
        return self._lse

    def verdict(self, results: tuple[Array, ...]) -> str:
        """What is wrong with (out,) or (out, dq, dk, dv); empty where nothing is."""
        task = self.task
        shapes = (task.q.shape, task.q.shape, task.k.shape, task.v.shape)
        for name, array, shape in zip(("out", "dq", "dk", "dv"), results, shapes, strict=False):
            if array.shape != shape or array.dtype != task.q.dtype:
                return f"{name} is {array.dtype} {array.shape}, not {task.q.dtype} {shape}"
        out, *grads = results
        words: dict[str, Any] = dict(zip(("dq", "dk", "dv"), grads, strict=False))
        words |= {"dout": task.dout} if grads else {}
        found = spot_check(
            out,
            self.lse if grads else None,
            task.q,
            task.k,
            task.v,
            samples=self.samples,
            seed=self.seed,
            **words,
            **task.options,
        )
        return "" if found.passed else str(found.failures[0])
