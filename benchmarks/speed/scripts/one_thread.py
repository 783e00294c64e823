"""Processor time of the tiled engine on one thread, beside torch's fused kernel and the floor.

    python -m benchmarks.speed.scripts.one_thread [CASES] [LENGTHS] [DTYPES] [SECONDS]

Each an argument with commas, by default plain,causal 1024,2048,4096 float32,float64 10. Contestants
take turns, and the least time of each counts, so that a machine that others use too gives figures
to compare; benchmarks.speed measures time on the clock and all threads. `torch` is torch's time
divided by that of npattn.tiled, above 1 where npattn is faster; `floor` is that of the products and
exponentials of the same tiles, which no engine of these operations can exceed.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from benchmarks.speed.cases import CASES, make_task
from benchmarks.speed.clock import times_in_turns
from benchmarks.speed.contestants import CONTESTANTS, Calls

NAMES = ("npattn.tiled", "torch.fused", "products+exp")
LEAST = 3
"""Rounds."""


def measure(calls: list[Calls], budget: float) -> list[list[float]]:
    """Least processor times of each: of forward, and of forward and backward."""
    each: list[Any] = [call for one in calls for call in (one.forward, one.both)]
    best = [min(times) for times in times_in_turns(each, LEAST, budget)]
    return [best[::2], best[1::2]]


def main() -> None:
    given = (
        sys.argv[1:]
        + ["plain,causal", "1024,2048,4096", "float32,float64", "10"][len(sys.argv) - 1 :]
    )
    cases, lengths, dtypes, budget = *(x.split(",") for x in given[:3]), float(given[3])
    torch.set_num_threads(1)
    print("                       ms: forward  torch  floor    both  torch  floor")
    for case, dtype, T in itertools.product(cases, dtypes, map(int, lengths)):
        task = make_task(CASES[case], T, dtype, 0)
        found = measure([CONTESTANTS[name].start(task, 1) for name in NAMES], budget)
        row = ""
        for own, peer, floor in found:
            row += f"  {1e3 * own:7.1f}  {peer / own:5.2f}  {floor / own:5.2f}"
        print(f"{case:7} {dtype} {T:5}     {row}", flush=True)


if __name__ == "__main__":
    with threadpool_limits(1, user_api="blas"):
        main()
