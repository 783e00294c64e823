"""Cost of the worker: a small call, the whole default check, and large arrays, with and without it.

    python -m benchmarks.speed.scripts.worker [calls | check | arrays ...]

Prints medians, their differences and ratios, measured in turns in one run. Large arrays go to a
worker that returns q; beside it stands a lower bound: four copies of the array, into and out of a
mapping.
"""

import mmap
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.speed.clock import times_in_turns
from npattn.problem import Cotangents, Problem
from npattn.testing import Implementation, check
from npattn.testing.targets import load_implementation
from npattn.testing.worker.connect import connect

TARGET = "numpy.flash"
B, H, T, S, D, E = 2, 3, 5, 7, 11, 13
MIB = 2**20


def echo(q: Any, k: Any, v: Any) -> Any:
    """Return q: a worker that does nothing but take and give."""
    return q


def measure(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call, made in turns."""
    times = times_in_turns(calls.values(), rounds, clock=time.perf_counter)
    return dict(zip(calls, map(statistics.median, times), strict=True))


def time_calls(rounds: int = 1000) -> dict[str, tuple[float, float]]:
    """Return seconds in this process and in a worker, by what is asked, of one small problem."""
    rng = np.random.default_rng(0)
    shapes = ((B, H, T, D), (B, H, S, D), (B, H, S, E), (B, H, T, E))
    q, k, v, dout = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    problem, cotangents = Problem(q, k, v), Cotangents(dout, None)
    here, there = load_implementation(TARGET), connect(TARGET)
    calls: dict[str, Callable[[], object]] = {}
    for place, f in (("here", here), ("there", there)):
        calls[f"forward {place}"] = lambda f=f: f.forward(problem)  # type: ignore[misc]
        calls[f"gradients {place}"] = lambda f=f: f.gradients(problem, cotangents)  # type: ignore[misc]
    try:
        seconds = measure(calls, rounds)
    finally:
        there.worker.close()
    requests = 1 + bool(here.returns)  # a forward is called plainly, and once more for its lse
    return {
        "a call of the forward": (
            seconds["forward here"] / requests,
            seconds["forward there"] / requests,
        ),
        "forward and backward": (seconds["gradients here"], seconds["gradients there"]),
    }


def time_check(rounds: int = 1, **options: Any) -> tuple[float, float]:
    """Return the seconds of the default check in this process and in a worker, its start too."""

    def judge_there() -> None:
        remote = connect(TARGET)
        try:
            assert check(remote, **options).passed
        finally:
            remote.worker.close()

    def judge_here() -> None:
        assert check(load_implementation(TARGET), **options).passed

    seconds = measure({"here": judge_here, "there": judge_there}, rounds)
    return seconds["here"], seconds["there"]


def time_arrays(size: int, rounds: int = 9) -> dict[str, float]:
    """Return the seconds of q of `size` bytes and back: here, in a worker, through a mapping."""
    q = np.ones((1, 1, size // 256, 64), np.float32)
    k = np.ones((1, 1, 1, 64), np.float32)
    problem, here, there = Problem(q, k, k), Implementation(echo), connect(f"{__file__}:echo")
    mapping = np.frombuffer(mmap.mmap(-1, 2 * q.nbytes), q.dtype)
    to, back = mapping.reshape(2, *q.shape)

    def copy_through() -> None:
        to[...] = q  # the judge
        back[...] = to.copy()  # the worker: its implementation may keep and change the array
        back.copy()  # the judge once more: the worker may change what is shared

    calls: dict[str, Callable[[], object]] = {
        "here": lambda: here.forward(problem),
        "worker": lambda: there.forward(problem),
        "mapping": copy_through,
    }
    try:
        return measure(calls, rounds)
    finally:
        there.worker.close()


def main(*parts: str) -> None:
    parts = parts or ("calls", "check", "arrays")
    for name, (here, there) in time_calls().items() if "calls" in parts else ():
        more = 1e3 * (there - here)
        print(f"{name:22s} {1e3 * here:6.3f} ms here, {1e3 * there:6.3f} there, {more:+.3f}")
    if "check" in parts:
        here, there = time_check()
        ratio = there / here
        print(f"{'default check':22s} {here:6.1f} s  here, {there:6.1f} there, {ratio:.2f} times")
    for mib in (1, 16, 64) if "arrays" in parts else ():
        seconds = time_arrays(mib * MIB)
        more = seconds["worker"] - seconds["here"]
        rate, least = 2 * mib / more / 1024, 1e3 * seconds["mapping"]
        name = f"{mib} MiB to it and back"
        print(f"{name:22s} {1e3 * more:+.1f} ms ({rate:.1f} GiB/s), at least {least:.1f} mapped")


if __name__ == "__main__":
    main(*sys.argv[1:])
