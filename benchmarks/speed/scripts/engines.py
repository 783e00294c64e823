"""Time lost by engine="auto": the dense and the tiled engine on a grid of shapes.

    python -m benchmarks.speed.scripts.engines [SECONDS]

Processor time of one thread, the least of rounds in which the engines take turns, so that other
work of the machine counts little. SECONDS (default 0.5) are for one row of the table. `lost` is the
time of the engine that "auto" takes, divided by that of the better one, forward and with backward;
the constants of `npattn.engines.tiled.tiling` are read off this table.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator

import numpy as np
from threadpoolctl import threadpool_limits

import npattn.oracle.api
from npattn.engines import tiled
from npattn.problem import Problem

ENGINES = ("dense", "tiled")
LEAST, MOST = 3, 200
"""Rounds."""
CLEAR = 2.5
"""Ratio of the first round beyond which no other round is needed."""
LARGEST = 2**24
"""Scores."""


def shapes() -> Iterator[tuple[int, int, int, int]]:
    """Planes (samples × heads), queries, keys, size of a head."""
    for planes, n in itertools.product((1, 8, 64, 512), (16, 32, 64, 128, 256, 512, 1024)):
        if planes * n * n <= LARGEST:
            yield planes, n, n, 64
    for D, planes, n in itertools.product((16, 128), (8, 64), (64, 128, 256)):
        yield planes, n, n, D
    for planes, T, S in itertools.product((1, 8, 64), (1, 7), (512, 4096, 32768)):
        if planes * S <= 2**18:  # keys
            yield planes, T, S, 64
    yield from ((1, 1, 131072, 64), (2, 1, 131072, 64))
    yield from ((8, 64, 1024, 64), (8, 1024, 64, 64), (1, 64, 4096, 64), (8, 64, 4096, 64))
    yield from ((16384, 1, 8, 16), (4096, 1, 64, 16), (4096, 7, 7, 16), (1024, 16, 16, 16))
    yield from ((1024, 4, 64, 64), (1024, 32, 32, 64), (1024, 64, 64, 16))


def seconds(problem: Problem, engine: str) -> tuple[float, float]:
    """Processor time of forward, and of forward with backward."""
    start = time.process_time()
    fwd = npattn.oracle.api.evaluate(problem, engine=engine)
    forward = time.process_time()
    npattn.backward(fwd, fwd.out)
    return forward - start, time.process_time() - start


def measure(problem: Problem, budget: float) -> dict[str, list[float]]:
    """Least processor times of each engine."""
    best = {engine: list(seconds(problem, engine)) for engine in ENGINES}
    ratio = best["dense"][1] / best["tiled"][1]
    rounds = int(np.clip(budget / sum(both for _, both in best.values()), LEAST, MOST))
    for _ in range(1 if max(ratio, 1 / ratio) > CLEAR else rounds):
        for engine, times in best.items():
            best[engine] = list(map(min, times, seconds(problem, engine)))
    return best


def main() -> None:
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    print(
        "planes     T      S    D  dtype    causal   ms: dense         tiled           auto  lost"
    )
    rng, lost, grid = np.random.default_rng(0), [], list(shapes())
    for shape, dtype, causal in itertools.product(grid, ("float32", "float64"), (False, True)):
        planes, T, S, D = shape
        if causal and T != S:
            continue
        q, k, v = (rng.standard_normal((planes, n, D)).astype(dtype) for n in (T, S, S))
        problem = Problem(q, k, v, causal=causal, dtype=dtype)
        chosen, best = tiled.choice(problem), measure(problem, budget)
        least = map(min, *best.values())
        own = [x / y for x, y in zip(best[chosen], least, strict=True)]
        lost += own
        times = "  ".join(f"{1e3 * x:7.2f}" for engine in ENGINES for x in best[engine])
        print(
            f"{planes:6} {T:5} {S:6} {D:4}  {dtype}  {causal!s:6} {times}  {chosen}"
            f"  {own[0]:5.2f}  {own[1]:5.2f}",
            flush=True,
        )
    above = sum(x > 1.15 for x in lost)
    print(f"{len(grid)} shapes, {len(lost)} times: {above} above 1.15, the most {max(lost):.2f}")


if __name__ == "__main__":
    with threadpool_limits(1, user_api="blas"):
        main()
