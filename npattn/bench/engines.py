"""npattn's own engines, called as users call them."""

from __future__ import annotations

from typing import Any

import npattn
from npattn.arrays import Array
from npattn.bench.cases import Task
from npattn.bench.contestants import Calls

__all__ = ["dense", "tiled"]


def dense(task: Task, threads: int) -> Calls:
    return _calls(task, "dense")


def tiled(task: Task, threads: int) -> Calls:
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


def _read(found: Any) -> tuple[Array, ...]:
    if not isinstance(found, tuple):
        return (found.out,)
    fwd, grads = found
    return fwd.out, grads.q, grads.k, grads.v
