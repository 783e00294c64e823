"""Time lost by engine="auto": the dense and the tiled engine on a grid of shapes.

    python benchmarks/engines.py [SECONDS]

Processor time of one thread, the least of rounds in which the engines take turns, so that other
work of the machine counts little. SECONDS (default 0.5) is about the time for a shape. The last column is the
time of the engine that "auto" takes, divided by that of the better one; the constants of
`npattn.tiled.choice` are read off this table.
"""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np

import npattn
from npattn import threads, tiled
from npattn.problem import Problem

ENGINES = ("dense", "tiled")
LEAST, MOST = 3, 200
"""Rounds."""
# Planes (samples × heads), queries, keys, size of a head.
TRAINING = [
    (planes, n, n, D)
    for planes, n in (
        *((1, n) for n in (64, 256, 512, 1024)),
        *((8, n) for n in (16, 64, 128, 192, 256, 512, 1024)),
        *((64, n) for n in (8, 32, 64, 128, 256, 512)),
        *((512, n) for n in (4, 16, 64, 128)),
    )
    for D in (64,)
] + [(8, 256, 256, 16), (8, 256, 256, 128), (64, 64, 64, 16), (64, 128, 128, 128)]
DECODING = [
    (8, 1, 512),
    (8, 1, 4096),
    (8, 1, 32768),
    (8, 1, 131072),
    (256, 1, 512),
    (256, 1, 4096),
    (8, 7, 4096),
]
MANY = [(65536, 1, 8, 16), (8192, 1, 64, 16), (4096, 7, 7, 16), (2048, 16, 16, 16)]
SHAPES = [*TRAINING, *((*shape, 64) for shape in DECODING), *MANY]


def seconds(problem: Problem, engine: str, both: bool) -> float:
    """Processor time of forward, or of forward and backward."""
    start = time.process_time()
    fwd = npattn.api.evaluate(problem, engine=engine)
    if both:
        npattn.backward(fwd, fwd.out)
    return time.process_time() - start


def measure(problem: Problem, budget: float, both: bool) -> dict[str, float]:
    """Least processor time of each engine."""
    best = {engine: seconds(problem, engine, both) for engine in ENGINES}  # the first is cold
    rounds = int(np.clip(budget / sum(best.values()), LEAST, MOST))
    for _ in range(rounds):
        for engine in ENGINES:
            best[engine] = min(best[engine], seconds(problem, engine, both))
    return best


def main() -> None:
    budget = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    print(
        "planes     T      S    D  dtype    causal  pass      ms: dense      tiled  auto   / best"
    )
    rng, losses = np.random.default_rng(0), []
    for shape, dtype, causal in itertools.product(SHAPES, ("float32", "float64"), (False, True)):
        planes, T, S, D = shape
        if causal and T == 1:
            continue
        q, k, v = (rng.standard_normal((planes, n, D)).astype(dtype) for n in (T, S, S))
        problem = Problem(q, k, v, causal=causal and "bottom_right", dtype=dtype)
        chosen = tiled.choice(problem)
        for both in (False, True):
            best = measure(problem, budget, both)
            losses.append(best[chosen] / min(best.values()))
            print(
                f"{planes:6} {T:5} {S:6} {D:4}  {dtype}  {causal!s:6}  {'both' if both else 'forward':7}"
                f"  {1e3 * best['dense']:9.3f}  {1e3 * best['tiled']:9.3f}  {chosen}  {losses[-1]:6.2f}",
                flush=True,
            )
    print(
        f"{len(SHAPES)} shapes, {len(losses)} rows: {sum(x > 1.15 for x in losses)} above 1.15, worst {max(losses):.2f}"
    )


if __name__ == "__main__":
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"):
        assert threads.count() == 1
        main()
