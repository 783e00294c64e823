"""Peak memory, and seconds, of one contestant on one task, in a process of its own.

The process warms up with a small task, makes its inputs, notes the memory that it holds, computes,
and notes the peak in between.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.cases import CASES, make_task
from benchmarks.speed.contestants import CONTESTANTS

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM = 256
"""Queries of the warm-up task."""

REFUSALS = (RuntimeError, ValueError, TypeError, MemoryError)
"""Raised by systems for unsupported options; RuntimeError includes NotImplementedError."""


@dataclass(frozen=True)
class Probe:
    """Measurements of one process."""

    inputs: int = 0  # bytes of the inputs
    forward: int | None = None  # peak of bytes above the inputs; results are part of it
    both: int | None = None
    seconds: float = 0.0  # one call of either, together
    refused: str = ""  # reason for not computing, or ""


def describe_method() -> str:
    """Describe how the peak is measured here."""
    if CLEAR.exists():
        return "VmHWM, reset through /proc/self/clear_refs, − VmRSS before the call"
    return "ru_maxrss after − ru_maxrss before the call"


def probe(
    contestant: str, case: str, dtype: str, T: int, seed: int, threads: int, timeout: float
) -> Probe:
    """Measure a contestant in a process of its own."""
    task = json.dumps([contestant, case, dtype, T, seed, threads])
    # Freed blocks go back to the system at once, and are not kept for the next call.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-m", "benchmarks.speed.child", task]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(refused=f"did not end within {timeout:.0f} s")
    if done.returncode < 0:
        return Probe(refused=f"ended by signal {-done.returncode}, perhaps for its memory")
    if done.returncode or not done.stdout:
        return Probe(refused=f"failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return Probe(**json.loads(done.stdout.splitlines()[-1]))


def measure(contestant: str, case: str, dtype: str, T: int, seed: int, threads: int) -> Probe:
    """Measure a contestant in this process."""
    entry, kind = CONTESTANTS[contestant], CASES[case]
    try:
        small = entry.start(make_task(kind, min(T, WARM), dtype, seed), threads)
        for call in (small.forward, small.both, small.forward):
            _ = None if call is None else call()
        task = make_task(kind, T, dtype, seed)
        ready = entry.start(task, threads)
        start = time.perf_counter()
        forward = _peak(ready.forward)
        both = None if ready.both is None else _peak(ready.both)
        return Probe(ready.bytes, forward, both, time.perf_counter() - start)
    except REFUSALS as err:
        return Probe(refused=first_line(err))


def first_line(err: BaseException) -> str:
    """Format the type and the first line of an exception."""
    lines = str(err).strip().splitlines()
    return f"{type(err).__name__}: {lines[0] if lines else 'no word'}"


def _peak(call: Callable[[], Any]) -> int:
    """Peak of bytes while `call` runs, above those before."""
    with suppress(OSError):
        CLEAR.write_text("5")
    before = _status_bytes("VmRSS") if CLEAR.exists() else _peak_rss()
    result = call()
    after = _status_bytes("VmHWM") if CLEAR.exists() else _peak_rss()
    del result
    return max(after - before, 0)


def _status_bytes(field: str) -> int:
    return int(STATUS.read_text().split(f"{field}:")[1].split()[0]) * 1024


def _peak_rss() -> int:
    import resource  # not on every system

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
