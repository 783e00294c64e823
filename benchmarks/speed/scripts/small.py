"""Cost of one small call: npattn.attention on (2, 4, 16, 16), beside the bare NumPy arithmetic.

    python -m benchmarks.speed.scripts.small

Prints medians in µs and their ratio, measured in turns in one run.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

import npattn
from benchmarks.speed.clock import times_in_turns


def bare(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute the same without checks, options or fully masked rows."""
    s = q @ k.swapaxes(-1, -2) / 4
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, 16, 16)) for _ in range(3))
    calls: dict[str, Callable[[], object]] = {
        "bare NumPy": lambda: bare(q, k, v),
        "npattn.attention": lambda: npattn.attention(q, k, v),
        "npattn.attention, causal": lambda: npattn.attention(q, k, v, causal=True),
    }
    times = times_in_turns(calls.values(), 2000, clock=time.perf_counter)
    medians = [statistics.median(seconds) for seconds in times]
    for name, median in zip(calls, medians, strict=True):
        print(f"{name:26s} {1e6 * median:7.1f} µs   {median / medians[0]:5.2f} × bare")


if __name__ == "__main__":
    main()
