"""The operator Attention of ONNX by its reference evaluator, which is NumPy too; forward only."""

from __future__ import annotations

from typing import Any

from benchmarks.speed.cases import Task
from benchmarks.speed.contestants import Calls
from npattn.problem.arrays import Array
from npattn.testing.targets.onnx import attention


def reference(task: Task, threads: int) -> Calls:
    # The function has an option for the window.
    mask = None if task.case.window else task.arrays.mask
    bias = task.arrays.bias

    def forward() -> tuple[Array, ...]:
        options: dict[str, Any] = {"causal": task.case.causal, "window": task.case.window}
        return (attention(task.q, task.k, task.v, mask, bias=bias, **options),)

    size = sum(x.nbytes for x in (mask, bias) if x is not None)
    return Calls(forward, None, lambda results: results, task.bytes + size)
