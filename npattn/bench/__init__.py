"""Cost of attention here: npattn's engines beside NumPy, torch, JAX and ONNX, in one run.

``npattn bench`` on the command line; docs/performance.md explains the figures.
"""

from npattn.bench.cases import CASES, Case, Task
from npattn.bench.contestants import CONTESTANTS, Calls, Contestant
from npattn.bench.report import Cell, Report, Times
from npattn.bench.run import Settings, bench

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
