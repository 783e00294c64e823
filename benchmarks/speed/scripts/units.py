"""Cost of a unit of work, and throughput: in processes of this machine, and on a cluster of Dask.

    python -m benchmarks.speed.scripts.units            what a unit costs by itself
    python -m benchmarks.speed.scripts.units --examples 200 --count 40 1 2 local:1 local:2

PLACES are numbers of processes, or clusters, as -n and --cluster of benchmarks.matrix. A unit asks
one rule of `numpy.naive`, of which one example is little but its start. Seconds are from sending
the first unit to receiving the last; processor seconds are of all processes here. The
first unit of each place, for which a Dask worker imports npattn, is not counted.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

from benchmarks.power.tables import markdown
from benchmarks.speed.clock import processor_seconds
from npattn.cli.cluster import open_cluster
from npattn.testing.units.processes import Jobs
from npattn.testing.units.unit import Unit

UNIT = Unit(target="numpy.naive", dtype="float32", rules=("agreement-o",), asks=True)


def judge(executor: Executor, unit: Unit, seeds: range) -> None:
    with Jobs(executor) as jobs:
        for seed in seeds:
            jobs.submit(replace(unit, seed=seed))
        for _ in seeds:
            done, result = jobs.wait()
            if result.state != "done":
                raise SystemExit(f"{done.key} {result.state}: {result.why}")


def measure(place: str, unit: Unit, count: int) -> list[str]:
    here = place.isdigit()
    own = nullcontext((ThreadPoolExecutor(int(place)), int(place))) if here else open_cluster(place)
    with own as (executor, width):
        judge(executor, unit, range(count, count + width))
        before, start = processor_seconds(), time.perf_counter()
        judge(executor, unit, range(count))
        seconds, used = time.perf_counter() - start, processor_seconds() - before
    cells = [f"{seconds / count:.2f}", f"{used / count:.2f}" if here else ""]
    return [place, str(width), *cells, f"{60 * count / seconds:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("places", nargs="*", default=["1", "local:1"])
    parser.add_argument("--target", default=UNIT.target)
    parser.add_argument("--rule", default="agreement-o")
    parser.add_argument("--examples", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    unit = replace(UNIT, target=options.target, rules=(options.rule,), examples=options.examples)
    heads = ["place", "at once", "seconds a unit", "processor seconds", "units a minute"]
    print(markdown(heads, [measure(place, unit, options.count) for place in options.places]))


if __name__ == "__main__":  # the workers of a cluster import this file
    main()
