"""The process in which `npattn.bench.memory.probe` measures: one contestant, one task."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from npattn.bench.limits import limited
from npattn.bench.memory import WARM, measured

__all__ = ["main"]


def main() -> None:
    """Print a Probe as JSON, of what the first argument names."""
    contestant, case, dtype, T, seed, threads = json.loads(sys.argv[1])
    with suppress(OSError):  # if somebody must go for lack of memory, then this process
        Path("/proc/self/oom_score_adj").write_text("1000")
    with limited(threads):
        _warm_blas(dtype)
        print(json.dumps(asdict(measured(contestant, case, dtype, T, seed, threads))))


def _warm_blas(dtype: str) -> None:
    """Its buffers are made once, and are no part of what a call needs."""
    square = np.ones((2 * WARM, 2 * WARM), dtype)
    np.matmul(square, square)


if __name__ == "__main__":
    main()
