"""Start a worker, exchange frames with it within limits, and say how it ended if it did."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npattn.errors import OptionError
from npattn.testing.adapters.base import Crash, ImplementationError, TimedOut
from npattn.testing.worker.child import LARGEST, Tensor, parse_frame, write_frame
from npattn.testing.worker.description import read_description
from npattn.testing.worker.values import GARBAGE

__all__ = ["Limits", "Worker"]

START_SECONDS = 120.0
"""Time to start and to import the target: compilers and frameworks take long."""
LINES, LINE = 8, 300
"""Last lines of standard error that are kept, and characters of each."""
BLOCK = 1 << 20
PATIENCE = 0.2
"""Seconds for a process to end by itself."""
ROUNDS = 20
"""Times that the processes of a session are looked for, to be ended."""
WATCH_SECONDS = 0.05
"""Time between two looks at the memory of a worker."""


@dataclass(frozen=True)
class Limits:
    """Limits of a worker.

    Attributes
    ----------
    timeout : float or None
        Seconds a call; None: 10, or 120 for the first call of a shape where a framework compiles.
    memory : int or None
        Bytes that its processes may have resident; None: no limit.
    """

    timeout: float | None = None
    memory: int | None = None


class Worker:
    """A process that answers requests; it is started when needed, and anew after it ended.

    Parameters
    ----------
    command : sequence of str
    limits : Limits
    settings, tensors : mapping
        Added to the request `describe`, with which each process begins.
    environment : mapping, optional
        Its environment variables; default: those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        limits: Limits,
        settings: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.command, self.limits, self.settings = tuple(command), limits, dict(settings)
        self.tensors, self.environment = dict(tensors or {}), environment
        self.description: dict[str, Any] = {}
        self.generation = 0
        self.seclusion: object = None  # a folder that it needs
        self._begin()

    def _begin(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[Any, Any], Worker] | None = None
        self._ids = itertools.count(1)
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._answers: dict[int, tuple[Any, dict[str, Tensor]]] = {}
        self._channels: dict[int, int] = {}
        self._owner = threading.get_ident()
        self._last_lines: deque[str] = deque(maxlen=LINES)

    def __getstate__(self) -> dict[str, Any]:
        names = ("command", "limits", "settings", "tensors", "environment", "description")
        return {name: getattr(self, name) for name in (*names, "generation")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # --- the process ------------------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Start a process and return its description of the target.

        With the setting `fresh` the first call of the process is never one that nobody judges.

        Raises
        ------
        OptionError
            If the command cannot be run, or the target cannot be used.
        """
        try:
            answer = self._describe(self.settings)
        except ImplementationError:  # its first call may end it, and does not have to be made
            try:
                answer = self._describe({**self.settings, "untried": True})
            except ImplementationError as err:
                raise OptionError(f"the target cannot be imported: {err}") from err
        if "usage" in answer:
            self.close()
            raise OptionError(str(answer["usage"]))
        if "raised" in answer:
            self.close()
            raised = answer["raised"]
            words = (raised.get("type"), raised.get("message")) if isinstance(raised, dict) else ()
            raise OptionError(f"the target cannot be imported: {': '.join(map(str, words))}")
        self.description = read_description(answer)
        self.settings["framework"] = self.description["framework"]  # later processes try nothing
        if answer.get("tried") and self.settings.get("fresh"):
            return self.start()
        return self.description

    def _describe(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Start a process, and ask it what it holds."""
        self.close()
        self._begin()
        self.generation += 1
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self.environment,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as err:
            raise OptionError(f"the worker cannot be started: {err}") from err
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)
        drain = threading.Thread(
            target=_drain, args=(self.process.stderr, self._last_lines), daemon=True
        )
        drain.start()
        self._end = weakref.finalize(self, _end, self.process, drain)
        answer, _ = self._exchange({"do": "describe", **settings}, self.tensors, START_SECONDS)
        return answer

    def close(self) -> None:
        """End the process, and all that it has started."""
        process = self.process
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()  # it ends by itself, with what it has to do then
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
        self.kill()

    # --- requests ---------------------------------------------------------------------------------

    def request(
        self, message: dict[str, Any], tensors: Mapping[str, Tensor], seconds: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the answer to a request.

        Raises
        ------
        Crash
            If the process ends, answers with garbage, or needs more memory than it may.
        TimedOut
            If there is no answer in time.
        OptionError
            If the process cannot be started.
        """
        if self.process is None:
            self.start()
        return self._exchange(message, tensors, seconds)

    def _exchange(
        self, message: dict[str, Any], tensors: Mapping[str, Tensor], seconds: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        number, deadline = next(self._ids), time.monotonic() + seconds
        own = threading.get_ident()
        channel = (
            0 if own == self._owner else self._channels.setdefault(own, len(self._channels) + 1)
        )
        message = {**message, "id": number, **({"channel": channel} if channel else {})}
        try:
            with self._sending:
                write_frame(lambda data: self._send(data, deadline), message, dict(tensors))
            return self._answer(number, deadline)
        except (BrokenPipeError, EOFError):
            raise self._describe_end() from None
        except _OutOfTime:
            self.kill()
            text = f"timed out: no answer within {seconds:g} s (--timeout)"
            raise TimedOut(self._with_errors(text)) from None
        except _OutOfMemory as err:
            self.kill()
            raise Crash(f"crashed: {err} (--memory)") from None
        except GARBAGE as err:
            self.kill()
            text = f"crashed: its process answered with garbage ({type(err).__name__}: {err})"
            raise Crash(self._with_errors(text)) from None
        except KeyboardInterrupt:
            self.kill()  # its answer would be taken for that of the next request
            raise

    def _send(self, data: bytes, deadline: float) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        pipe, view = self.process.stdin.fileno(), memoryview(data)
        while view:
            try:
                view = view[os.write(pipe, view) :]
            except BlockingIOError:
                self._wait(pipe, select.POLLOUT, deadline)

    def _answer(self, number: int, deadline: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Read frames until the one with this number; others are for other threads."""
        while True:
            with self._reading:
                if number in self._answers:
                    return self._answers.pop(number)
                length = int.from_bytes(self._read(8, deadline), "little")
                if not 8 <= length <= LARGEST:
                    raise ValueError(f"a frame of {length} bytes")
                message, tensors = parse_frame(self._read(length, deadline))
                if not isinstance(message, dict):
                    raise ValueError("a message that is no object")
                self._answers[message["id"]] = message, tensors

    def _read(self, count: int, deadline: float) -> bytearray:
        assert self.process is not None
        assert self.process.stdout is not None
        pipe, data = self.process.stdout.fileno(), bytearray()
        while len(data) < count:  # grown as it comes: the length may be a lie
            self._wait(pipe, select.POLLIN, deadline)
            block = os.read(pipe, min(BLOCK, count - len(data)))
            if not block:
                raise EOFError
            data += block
        return data

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        """Wait until a pipe is ready; watch time and memory."""
        poll = select.poll()
        poll.register(pipe, event)
        while True:
            left = deadline - time.monotonic()
            step = left if self.limits.memory is None else min(left, WATCH_SECONDS)
            if poll.poll(max(step, 0) * 1000):
                return
            if self.limits.memory is not None:
                self._check_memory(self.limits.memory)
            if left <= 0:
                raise _OutOfTime

    def _check_memory(self, limit: int) -> None:
        assert self.process is not None
        used = sum(_resident(pid) for pid in _session(self.process.pid))
        if used > limit:
            raise _OutOfMemory(f"its processes use {used >> 20} MiB, more than {limit >> 20} MiB")

    # --- how it ended -----------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process at once, and all that it has started."""
        self.process = None
        if self._end is not None:
            self._end()

    def _describe_end(self) -> Crash:
        process = self.process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)  # its end of the pipe may close before it is gone
        code = process.poll()
        self.kill()
        if code is None:
            how = "closed its output"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return Crash(self._with_errors(f"crashed: its process {how}"))

    def _with_errors(self, text: str) -> str:
        lines = [line for line in list(self._last_lines) if line]
        return (
            f"{text}; the last lines of its standard error: {' | '.join(lines)}" if lines else text
        )


def _end(process: subprocess.Popen[bytes], drain: threading.Thread) -> None:
    """Kill a process with its session, and close its pipes."""
    _end_session(process.pid)
    process.wait()
    drain.join(PATIENCE)
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()


class _OutOfTime(Exception):
    pass


class _OutOfMemory(Exception):
    pass


def _drain(pipe: Any, lines: deque[str]) -> None:
    """Keep the last lines of a stream."""
    rest = b""
    with contextlib.suppress(OSError, ValueError):
        while block := os.read(pipe.fileno(), 1 << 16):
            *whole, rest = (rest + block).split(b"\n")
            rest = rest[-LINE:]
            for line in whole[-LINES:]:
                lines.append(line[:LINE].decode("utf-8", "backslashreplace"))
    if rest:
        lines.append(rest[:LINE].decode("utf-8", "backslashreplace"))


def _session(leader: int) -> list[int]:
    """Return the running processes of a session; its leader where the system does not tell."""
    if not Path("/proc/self/stat").exists():
        return [leader]
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, _, _, session, *_ = entry.read_text().rpartition(")")[2].split()
            if int(session) == leader and state not in "ZX":
                found.append(int(entry.parent.name))
    return found


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _end_session(leader: int) -> None:
    """Kill every process of a session, also those that it starts meanwhile."""
    for _ in range(ROUNDS):
        pids = _session(leader)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
