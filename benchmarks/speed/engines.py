"""Contestants of the engines dense and tiled, called as users call them."""

from __future__ import annotations

from typing import Any

import npattn
from benchmarks.speed.cases import Task
from benchmarks.speed.contestants import Calls
from npattn.problem.arrays import Array


def dense_engine(task: Task, threads: int) -> Calls:
    return _calls(task, "dense")


def tiled_engine(task: Task, threads: int) -> Calls:
    return _calls(task, "tiled")


def _calls(task: Task, engine: str) -> Calls:
    def forward() -> Any:
        return npattn.forward(
            task.q, task.k, task.v, dtype=task.q.dtype, engine=engine, **task.options
        )

    def both() -> Any:
        fwd = forward()
        return fwd, npattn.backward(fwd, task.dout)

    return Calls(forward, both, _read, task.bytes)


def _read(results: Any) -> tuple[Array, ...]:
    if not isinstance(results, tuple):
        return (results.out,)
    fwd, grads = results
    return fwd.out, grads.q, grads.k, grads.v
