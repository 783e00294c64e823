"""Judge units in processes of their own: what ends one, or takes too long, costs that unit alone.

An executor takes units and gives results back as they come. `Local` has threads that each wait for
a process; `npattn.matrix.cluster` has those of Dask, which call `judge_in_process` too.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

from npattn.matrix.unit import Result, Unit
from npattn.testing.worker.compilation_cache import cache_variables
from npattn.threads import ONE_THREAD

__all__ = ["Executor", "Local", "judge_in_process"]

GRACE_SECONDS = 20.0
"""Time in which a process that was asked to end says what it knows."""
LINES = 3
"""Lines of its error stream that are quoted when a process ends without a result."""

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""With these XLA compiles a program in 0.4 of the time; it computes the same, slower."""


class Executor(Protocol):
    """Runs units somewhere; a context, on whose exit nothing runs any more.

    Attributes
    ----------
    width : int
        Number of units that are done at once.
    """

    @property
    def width(self) -> int: ...

    def submit(self, unit: Unit) -> None:
        """Take a unit."""

    def wait(self) -> tuple[Unit, Result]:
        """Return the next result, in the order in which they come."""

    def running(self) -> list[Unit]:
        """Return the units in work, as far as it is known."""

    def __enter__(self) -> Executor: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def judge_in_process(
    text: str, started: Callable[[subprocess.Popen[bytes]], object] | None = None
) -> str:
    """Judge a unit in a new process, within its limit of time.

    Parameters
    ----------
    text : str
        As of `Unit.to_text`.
    started : callable, optional
        Called with the process.

    Returns
    -------
    str
        As of `Result.to_text`. A process that ends without a result gives the state "crashed".
    """
    unit = Unit.from_text(text)
    with tempfile.TemporaryDirectory(prefix="npattn-") as folder:
        path, errors = Path(folder, "result.json"), Path(folder, "errors")
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "npattn.matrix.child", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env={**_jax_variables(), **os.environ, **ONE_THREAD},
                start_new_session=True,  # an interrupt of the terminal is ours to pass on
            )
        if started is not None:
            started(process)
        try:
            late = _wait(process, text, unit.limit)
        finally:
            process.kill()
            process.wait()
        if not path.exists():
            return _without_result(process.returncode, late, errors, unit).to_text()
        result = Result.from_text(path.read_text("utf-8"))
    if late and result.state == "timed out":
        result = replace(result, why=f"not done after {unit.limit:g} s")
    return result.to_text()


def _jax_variables() -> dict[str, str]:
    """Return variables for processes of JAX, without those that the user has set.

    They share what they compiled until this process ends: its targets are asked the same shapes, so
    that most of it is the same. XLA compiles each of a thousand small programs for a few calls.
    """
    found = cache_variables()
    return found if "XLA_FLAGS" in os.environ else {**found, "XLA_FLAGS": XLA_FLAGS}


def _wait(process: subprocess.Popen[bytes], text: str, limit: float | None) -> bool:
    """Send the unit and wait; return True if it took longer than its limit."""
    assert process.stdin is not None
    with process.stdin as stream:
        try:
            stream.write(text.encode() + b"\n")
            stream.flush()
        except BrokenPipeError:  # it has ended, and says why
            pass
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            return True
    return False


def _without_result(code: int, late: bool, errors: Path, unit: Unit) -> Result:
    if late:
        return Result("timed out", f"not done after {unit.limit:g} s", float(unit.limit or 0))
    lines = errors.read_text("utf-8", "replace").strip().splitlines()[-LINES:]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Result("crashed", ": ".join([f"the judge ended with {ended}", *lines]))


class Local:
    """Judge units on this machine, `n` at a time.

    Parameters
    ----------
    n : int
    """

    def __init__(self, n: int) -> None:
        self.pool, self.width = ThreadPoolExecutor(n), n
        self.done: queue.SimpleQueue[tuple[Unit, Future[Result]]] = queue.SimpleQueue()
        self._lock, self._ended = threading.Lock(), False
        self._processes: dict[int, tuple[Unit, subprocess.Popen[bytes]]] = {}

    def submit(self, unit: Unit) -> None:
        future = self.pool.submit(self._judge, unit)
        future.add_done_callback(lambda known: self.done.put((unit, known)))

    def _judge(self, unit: Unit) -> Result:
        def keep(process: subprocess.Popen[bytes]) -> None:
            with self._lock:
                self._processes[threading.get_ident()] = unit, process
                if self._ended:
                    process.terminate()

        try:
            return Result.from_text(judge_in_process(unit.to_text(), keep))
        finally:
            with self._lock:
                self._processes.pop(threading.get_ident(), None)

    def wait(self) -> tuple[Unit, Result]:
        unit, future = self.done.get()
        return unit, future.result()

    def running(self) -> list[Unit]:
        with self._lock:
            return [unit for unit, _ in self._processes.values()]

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._ended = True
            for _, process in self._processes.values():
                process.terminate()
        self.pool.shutdown()
