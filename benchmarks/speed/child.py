"""Child process of `benchmarks.speed.memory.probe`: measure one contestant on one task."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.speed.limits import limit_threads
from benchmarks.speed.memory import WARM, measure


def main() -> None:
    """Measure the task named by the first argument, and print the Probe as JSON."""
    contestant, case, dtype, T, seed, threads = json.loads(sys.argv[1])
    with suppress(OSError):  # if memory runs out, kill this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    with limit_threads(threads):
        _warm_blas(dtype)
        print(json.dumps(asdict(measure(contestant, case, dtype, T, seed, threads))))


def _warm_blas(dtype: str) -> None:
    """Let BLAS allocate its buffers, which are no part of the memory of a call."""
    square = np.ones((2 * WARM, 2 * WARM), dtype)
    np.matmul(square, square)


if __name__ == "__main__":
    main()
