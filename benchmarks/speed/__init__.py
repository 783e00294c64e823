"""Cost of attention here: npattn's engines beside NumPy, torch, JAX and ONNX, in one run.

``python -m benchmarks.speed`` on the command line; docs/performance.md explains the figures.
"""

from benchmarks.speed.cases import CASES, Case, Task
from benchmarks.speed.contestants import CONTESTANTS, Calls, Contestant
from benchmarks.speed.report import Cell, Report, Times
from benchmarks.speed.run import Settings, bench

__all__ = [
    "CASES",
    "CONTESTANTS",
    "Calls",
    "Case",
    "Cell",
    "Contestant",
    "Report",
    "Settings",
    "Task",
    "Times",
    "bench",
]
