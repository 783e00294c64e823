"""Judge each unit in a process of its own: what ends one, or takes too long, costs one unit.

Any `concurrent.futures.Executor` does: a `ThreadPoolExecutor`, whose threads wait for processes of
this machine, or `distributed.Client(...).get_executor(pure=False)` for many machines.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import CancelledError, Executor, Future, wait
from dataclasses import replace
from pathlib import Path

from npattn.engines.threads import ONE_THREAD
from npattn.errors import NpattnError, OptionError
from npattn.testing.adapters.child import format_exception_line
from npattn.testing.units.unit import Result, Unit
from npattn.testing.worker.compilation_cache import cache_variables

GRACE_SECONDS = 20.0
"""Time in which a process that was asked to end says what it knows."""
POLL_SECONDS = 0.1
LINES = 3
"""Lines of its error stream that are quoted when a process ends without a result."""

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""With these XLA compiles a program in 0.4 of the time; it computes the same, slower."""


_processes: dict[str, subprocess.Popen[bytes]] = {}
"""Text of a unit → the process that judges it for a thread of this one."""


class Jobs:
    """Units that an executor is judging; a context, on whose exit it judges none of them any more.

    Parameters
    ----------
    executor : concurrent.futures.Executor
        It is told to call `judge_in_process` with text, and is not shut down here.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._units: dict[Future[str], Unit] = {}
        self._done: queue.SimpleQueue[Future[str]] = queue.SimpleQueue()

    def submit(self, unit: Unit) -> None:
        future = self._executor.submit(judge_in_process, unit.to_text())
        self._units[future] = unit
        future.add_done_callback(self._done.put)

    def wait(self) -> tuple[Unit, Result]:
        """Return the next result, in the order in which they come."""
        future = self._done.get()
        unit = self._units.pop(future)
        try:
            return unit, Result.from_text(future.result())
        except NpattnError:
            raise
        except CancelledError:
            raise OptionError(
                "the executor was lost; what has a journal goes on with --resume"
            ) from None
        except Exception as err:  # noqa: BLE001  a worker of the executor has ended: its unit says so
            return unit, Result("crashed", " ".join(format_exception_line(err).split()))

    def running(self) -> list[Unit]:
        """Return the units in work, or all that are not done where the executor does not tell."""
        units = dict(self._units)
        return [unit for future, unit in units.items() if future.running()] or [*units.values()]

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        running = [future for future in self._units if not future.cancel()]
        while wait(running, POLL_SECONDS).not_done:
            for future in running:
                if process := _processes.get(self._units[future].to_text()):
                    process.terminate()


def judge_in_process(text: str) -> str:
    """Judge a unit in a new process, within its limit of time.

    Parameters
    ----------
    text : str
        As of `Unit.to_text`.

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
                [sys.executable, "-m", "npattn.testing.units.child", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env={**_jax_variables(), **os.environ, **ONE_THREAD},
                start_new_session=True,  # an interrupt of the terminal is ours to pass on
            )
        _processes[text] = process
        try:
            late = _wait(process, text, unit.limit)
        finally:
            del _processes[text]
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
