"""Verification of results: a benchmark of wrong results is worthless."""

from __future__ import annotations

from typing import Any

import numpy as np

import npattn
from benchmarks.speed.cases import Task
from npattn.problem.arrays import Array
from npattn.testing import spot_check

SCORES = 2**16
"""Scores to compute for each result."""
ROWS = (8, 64)
"""Fewest and most rows."""


class Verifier:
    """Compares results of one task with the exact ones, in random rows and keys.

    dk and dv are compared with the lse of npattn.tiled, as other systems return none.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed = task, seed
        self.samples = int(np.clip(SCORES // task.T, *ROWS))
        self._lse: Array | None = None

    @property
    def lse(self) -> Array:
        if self._lse is None:
            task = self.task
            options: dict[str, Any] = {"dtype": task.q.dtype, "engine": "tiled"}
            self._lse = npattn.forward(task.q, task.k, task.v, **options, **task.options).lse
        return self._lse

    def verdict(self, results: tuple[Array, ...]) -> str:
        """Describe the first error in (out,) or (out, dq, dk, dv); "" if there is none."""
        task = self.task
        shapes = (task.q.shape, task.q.shape, task.k.shape, task.v.shape)
        for name, array, shape in zip(("out", "dq", "dk", "dv"), results, shapes, strict=False):
            if array.shape != shape or array.dtype != task.q.dtype:
                return f"{name} is {array.dtype} {array.shape}, not {task.q.dtype} {shape}"
        out, *grads = results
        results_by_name: dict[str, Any] = dict(zip(("dq", "dk", "dv"), grads, strict=False))
        results_by_name |= {"dout": task.dout} if grads else {}
        check = spot_check(
            out,
            self.lse if grads else None,
            task.q,
            task.k,
            task.v,
            samples=self.samples,
            seed=self.seed,
            **results_by_name,
            **task.options,
        )
        return "" if check.passed else str(check.failures[0])
