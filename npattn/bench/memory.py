"""Peak memory, and seconds, of one contestant on one task, in a process of its own.

The process is warmed up with a small task, then makes its inputs, notes what it holds, computes,
and notes the most that it held in between.
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

from npattn.bench.cases import CASES, made
from npattn.bench.contestants import CONTESTANTS

__all__ = ["REFUSALS", "WARM", "Probe", "how", "measured", "probe", "told"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM = 256
"""Queries of the small task."""

REFUSALS = (RuntimeError, ValueError, TypeError, MemoryError)
"""What systems raise for what they do not have; RuntimeError includes NotImplementedError."""


@dataclass(frozen=True)
class Probe:
    """What one process found.

    Attributes
    ----------
    inputs : int
        Bytes of what the contestant was given.
    forward, both : int or None
        Peak of bytes above that; results are part of it.
    seconds : float
        Of one call of either, together.
    refused : str
        Why it did not compute; empty where it did.
    """

    inputs: int = 0
    forward: int | None = None
    both: int | None = None
    seconds: float = 0.0
    refused: str = ""


def how() -> str:
    """How the peak is measured here."""
    if CLEAR.exists():
        return "VmHWM, reset through /proc/self/clear_refs, − VmRSS before the call"
    return "ru_maxrss after − ru_maxrss before the call"


def probe(
    contestant: str, case: str, dtype: str, T: int, seed: int, threads: int, timeout: float
) -> Probe:
    """Run a contestant in a process of its own."""
    words = json.dumps([contestant, case, dtype, T, seed, threads])
    # Blocks that are freed go back to the system, and are not kept for the next call.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-m", "npattn.bench.child", words]
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


def measured(contestant: str, case: str, dtype: str, T: int, seed: int, threads: int) -> Probe:
    """The same, in this process."""
    entry, kind = CONTESTANTS[contestant], CASES[case]
    try:
        small = entry.start(made(kind, min(T, WARM), dtype, seed), threads)
        for call in (small.forward, small.both, small.forward):
            _ = None if call is None else call()
        task = made(kind, T, dtype, seed)
        ready = entry.start(task, threads)
        start = time.perf_counter()
        forward = _peak(ready.forward)
        both = None if ready.both is None else _peak(ready.both)
        return Probe(ready.bytes, forward, both, time.perf_counter() - start)
    except REFUSALS as err:
        return Probe(refused=told(err))


def told(err: BaseException) -> str:
    """The first line of what was raised."""
    lines = str(err).strip().splitlines()
    return f"{type(err).__name__}: {lines[0] if lines else 'no word'}"


def _peak(call: Callable[[], Any]) -> int:
    """The most that was held while it ran, above what was held before: bytes."""
    with suppress(OSError):
        CLEAR.write_text("5")
    before = _held("VmRSS") if CLEAR.exists() else _most()
    result = call()
    after = _held("VmHWM") if CLEAR.exists() else _most()
    del result
    return max(after - before, 0)


def _held(field: str) -> int:
    return int(STATUS.read_text().split(f"{field}:")[1].split()[0]) * 1024


def _most() -> int:
    import resource  # which not every system has

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
