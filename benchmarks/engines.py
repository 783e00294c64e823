"""Crossover of the dense and the tiled engine: forward and backward, both in turn.

    python benchmarks/engines.py

`npattn.tiled.LARGE`, from which "auto" takes the tiled engine, is read off this table.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

import npattn
from npattn import tiled
from npattn.problem import Problem

ROUNDS = 9
REST = 0.1
"""Seconds between two calls: the threads of a BLAS spin a while before they sleep."""


def measure(problem: Problem, engine: str) -> tuple[float, float]:
    """Seconds of forward and of forward with backward."""
    start = time.perf_counter()
    fwd = npattn.api.evaluate(problem, engine=engine)
    forward = time.perf_counter()
    npattn.backward(fwd, fwd.out)
    return forward - start, time.perf_counter() - start


def main() -> None:
    print("heads     T  dtype    causal  scores   dense / tiled: forward, with backward   auto")
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        for heads in (1, 8):
            for T in (16, 32, 64, 128, 256, 512, 1024):
                for causal in (False, True):
                    q, k, v = (rng.standard_normal((heads, T, 64)).astype(dtype) for _ in "qkv")
                    problem = Problem(q, k, v, causal=causal, dtype=dtype)
                    times = {"dense": [], "tiled": []}
                    for _ in range(ROUNDS):
                        for engine, seconds in times.items():
                            time.sleep(REST)
                            seconds.append(measure(problem, engine))
                    dense, other = (
                        [median(column) for column in zip(*seconds, strict=True)]
                        for seconds in times.values()
                    )
                    ratios = [a / b for a, b in zip(dense, other, strict=True)]
                    print(
                        f"{heads:5} {T:5}  {dtype}  {causal!s:6} {heads * T * T:8}"
                        f"   {ratios[0]:10.2f} {ratios[1]:12.2f}   {tiled.choice(problem)}"
                    )


if __name__ == "__main__":
    main()
