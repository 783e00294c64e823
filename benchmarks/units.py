"""Cost of a unit of work, and throughput: in processes of this machine, and on a cluster of Dask.

    python benchmarks/units.py                                   what a unit costs by itself
    python benchmarks/units.py --examples 200 --count 40 1 2 local:1 local:2

PLACES are numbers of processes, as `npattn matrix -n`, or clusters, as its `--cluster`. A unit asks
one rule of `numpy.naive`, of which one example is little but its start. Seconds are from sending
the first unit to receiving the last; processor seconds are of all processes, the scheduler too. The
first unit of each place, for which a Dask worker imports npattn, is not counted. The last column is
what Dask takes for a task that does nothing.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace
from typing import Any

from tables import markdown

from npattn.matrix.cluster import Cluster
from npattn.matrix.processes import Executor, Local
from npattn.matrix.unit import Unit

UNIT = Unit(target="numpy.naive", dtype="float32", rules=("agreement-o",), asks=True)
TASKS = 500


def processor_seconds() -> float:
    """Return those of this process, and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def everywhere(executor: Executor) -> float:
    """Return the processor seconds here and in all Dask workers."""
    client: Any = getattr(executor, "client", None)
    return processor_seconds() + sum(client.run(processor_seconds).values() if client else ())


def judge(executor: Executor, unit: Unit, seeds: range) -> None:
    for seed in seeds:
        executor.submit(replace(unit, seed=seed))
    for _ in seeds:
        done, result = executor.wait()
        if result.state != "done":
            raise SystemExit(f"{done.key} {result.state}: {result.why}")


def milliseconds_of_a_task(executor: Executor) -> str:
    client: Any = getattr(executor, "client", None)
    if client is None:
        return ""
    start = time.perf_counter()
    client.gather([client.submit(abs, n, pure=False) for n in range(TASKS)])
    return f"{1000 * (time.perf_counter() - start) / TASKS:.2f}"


def measure(place: str, unit: Unit, count: int) -> list[str]:
    with Local(int(place)) if place.isdigit() else Cluster(place) as executor:
        judge(executor, unit, range(count, count + executor.width))
        before, start = everywhere(executor), time.perf_counter()
        judge(executor, unit, range(count))
        seconds, used = time.perf_counter() - start, everywhere(executor) - before
        figures = [seconds / count, used / count, 60 * count / seconds]
        cells = [f"{figure:.2f}" for figure in figures]
        return [place, str(executor.width), *cells, milliseconds_of_a_task(executor)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("places", nargs="*", default=["1", "local:1"])
    parser.add_argument("--target", default=UNIT.target)
    parser.add_argument("--rule", default="agreement-o")
    parser.add_argument("--examples", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    unit = replace(UNIT, target=options.target, rules=(options.rule,), examples=options.examples)
    heads = [
        "place",
        "at once",
        "seconds a unit",
        "processor seconds",
        "units a minute",
        "task, ms",
    ]
    print(markdown(heads, [measure(place, unit, options.count) for place in options.places]))


if __name__ == "__main__":  # the workers of a cluster import this file
    main()
