"""One process of a worker: frames to and from it within limits, and how it ended."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from npattn.errors import OptionError
from npattn.testing.adapters.base import Crash, TimedOut
from npattn.testing.adapters.child import (
    LARGE_BLOCK,
    LARGEST,
    Tensor,
    parse_frame,
    read_frame,
    write_frame,
)
from npattn.testing.worker.shared import SharedMemory
from npattn.testing.worker.values import GARBAGE, OF_ALL

LINES, LINE = 8, 300
"""Last lines of standard error that are kept, and characters of each."""
PATIENCE = 0.2
"""Seconds for a process to end by itself, and for what it wrote last to come."""
END_SECONDS = 5.0
"""Seconds at most to wait for processes that were killed: one may be busy in the kernel."""
WATCH_SECONDS, LOOK_SECONDS = 0.05, 0.5
"""Time between two looks at the memory of a worker: while it computes, and while it answers."""
PROCESSES = Path("/proc")
HEADER = 1 << 20
"""Bytes of the header of an answer: JSON makes up to a hundred times as much memory of it."""


@dataclass(frozen=True)
class Limits:
    """Limits of a worker."""

    # seconds a call; None: 10, or 120 for the first call of a shape where a framework compiles
    timeout: float | None = None
    memory: int | None = None  # bytes that its processes may have resident; None: no limit


class Connection:
    """A process that answers requests, which several threads may make.

    Raises OSError if the command cannot be run. Raises OptionError if memory is limited, and the
    system does not tell how much a process uses.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        memory: int | None,  # bytes that its processes may have resident
        *,
        # its exit code is 128 and the number of a signal if that ended the worker
        confined: bool = False,
    ) -> None:
        if memory is not None and not PROCESSES.is_dir():
            raise OptionError(
                "memory (--memory) needs /proc to be watched, and there is none here: leave it out"
            )
        self.memory, self.confined, self.ended = memory, confined, False
        self.seclusion: object = None  # a folder that it needs longer than who started it
        self._looked = time.monotonic()
        self.answered, self.began = -1, time.monotonic()  # the answer to describe is no call
        self._ids = itertools.count(1)
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._answers: dict[int, tuple[Any, dict[str, Tensor]]] = {}
        self._channels: dict[int, int] = {}
        self._most: dict[int, int] = {}  # bytes of the answer to each open request
        self.owner = threading.get_ident()
        self._last_lines: deque[str] = deque(maxlen=LINES)
        self._shared = SharedMemory()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
                bufsize=0,
                pass_fds=self._shared.descriptors,
            )
        finally:
            self._shared.close_descriptors()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._from = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._to, False)
        _widen(self._to, self._from)
        self._writable, self._readable = select.poll(), select.poll()
        self._writable.register(self._to, select.POLLOUT)
        self._readable.register(self._from, select.POLLIN)
        self._rest = bytearray()  # what was read behind a frame
        self._drain = threading.Thread(
            target=_drain, args=(self.process.stderr, self._last_lines), daemon=True
        )
        self._drain.start()

    # --- frames -----------------------------------------------------------------------------------

    def describe(
        self, settings: Mapping[str, Any], tensors: Mapping[str, Tensor], seconds: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the answer to the request that comes first; agree on memory to share.

        Raises Crash or TimedOut as `exchange` does.
        """
        request = {"do": "describe", **settings, **self._shared.offer}
        answer, out = self.exchange(request, tensors, seconds, most=OF_ALL)
        self._shared.agree(answer.get("shared"))
        return answer, out

    def exchange(
        self,
        message: dict[str, Any],
        tensors: Mapping[str, Tensor],
        seconds: float,
        work: Callable[[], object] | None = None,
        most: int = LARGEST,
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the answer to a request; call `work` while waiting for it.

        Each call of the request may take so many seconds. Its answer has at most `most` bytes.

        Raises Crash if the process ends, answers with garbage, or needs more memory than it may.
        Raises TimedOut if there is no answer in time.
        """
        calls = max(1, len(message.get("calls", ())))
        number, deadline = next(self._ids), time.monotonic() + calls * seconds
        channel = self._channel(threading.get_ident())
        message = {**message, "id": number, **({"channel": channel} if channel else {})}
        shared = None if channel else self._shared.view  # one request at a time may lie there
        limit = f"{seconds:g} s" + (f" for each of {calls} calls" if calls > 1 else "")
        self._most[number] = most
        with contextlib.ExitStack() as unanswered:
            # An answer that nobody reads would be taken for that of the next request.
            unanswered.callback(self.end)
            with self._translate_errors(limit), self._sending:
                self._check_alive()
                write = partial(self._send, deadline=deadline)
                write_frame(write, message, dict(tensors), shared)
            if work is not None:
                work()
            with self._translate_errors(limit):
                answer = self._answer(number, deadline)
            unanswered.pop_all()
        self.answered += calls
        return answer

    @contextlib.contextmanager
    def _translate_errors(self, limit: str) -> Iterator[None]:
        """Raise `Crash` or `TimedOut` for errors at the pipes; end the process."""
        try:
            yield
        except (BrokenPipeError, EOFError):
            raise Crash(self._with_errors(f"crashed: its process {self._describe_end()}")) from None
        except _OutOfTime:
            self.end()
            text = f"timed out: no answer within {limit} (--timeout)"
            raise TimedOut(self._with_errors(text)) from None
        except _OutOfMemory as err:
            self.end()
            raise Crash(f"crashed: {err} (--memory)") from None
        except GARBAGE as err:
            self.end()
            text = f"crashed: its process answered with garbage ({type(err).__name__}: {err})"
            raise Crash(self._with_errors(text)) from None

    def _channel(self, thread: int) -> int:
        """Return the number of the worker's thread that answers one of here; 0 is its main one."""
        if thread == self.owner:
            return 0
        return self._channels.setdefault(thread, len(self._channels) + 1)

    def _check_alive(self) -> None:
        if self.ended:  # by another thread
            raise EOFError

    def _send(self, data: Any, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._to, view) :]
            except BlockingIOError:
                self._wait(self._writable, deadline)

    def _answer(self, number: int, deadline: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Read frames until the one with this number; others are for other threads."""
        while True:
            with self._reading:
                if number in self._answers:
                    return self._answers.pop(number)
                self._check_alive()
                receive = partial(self._receive, deadline=deadline)
                most = max(self._most.values())
                body = read_frame(receive, self._rest, self._shared.view, most)
                message, tensors = parse_frame(body, HEADER)
                if not isinstance(message, dict):
                    raise ValueError("a message that is no object")
                most = self._most.pop(message["id"])  # KeyError: nobody has asked
                if len(body) > most:
                    raise ValueError(f"an answer of {len(body)} bytes, more than {most}")
                self._answers[message["id"]] = message, tensors

    def _receive(self, count: int, deadline: float) -> bytes:
        self._wait(self._readable, deadline)
        block = os.read(self._from, count)
        if not block:
            raise EOFError
        return block

    def _wait(self, pipe: select.poll, deadline: float) -> None:
        """Wait until a pipe is ready; watch time and memory."""
        while True:
            now = time.monotonic()
            seconds = deadline - now
            if self.memory is not None and now - self._looked > LOOK_SECONDS:
                self._check_memory(self.memory)  # threads may take it between quick answers
            step = seconds if self.memory is None else min(seconds, WATCH_SECONDS)
            if pipe.poll(max(step, 0) * 1000):
                return
            if self.memory is not None:
                self._check_memory(self.memory)
            if seconds <= 0:
                raise _OutOfTime

    def _check_memory(self, limit: int) -> None:
        self._looked = time.monotonic()
        used = sum(_resident(pid) for pid in _family(self.process.pid))
        if used > limit:
            raise _OutOfMemory(f"its processes use {used >> 20} MiB, more than {limit >> 20} MiB")

    # --- its end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the process end by itself for a moment, then end it."""
        pids: list[int] = []
        if not self.ended:
            assert self.process.stdin is not None
            pids = _family(self.process.pid)  # who left the session is found by its parent
            with self._sending, contextlib.suppress(OSError):
                self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        self.end(pids)

    def end(self, pids: Sequence[int] = ()) -> None:
        """Kill the process and all that it has started; close its pipes."""
        if self.ended:
            return
        self.ended = True
        _end_family(self.process.pid, pids)
        self.process.wait()
        self._drain.join(PATIENCE)
        with self._sending, self._reading:  # nobody is at the pipes any more
            for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            self._shared.close()

    def _describe_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)  # its end of the pipe may close before it is gone
        code = self.process.poll()
        self.end()
        if code is not None and self.confined and code > 128:
            code = 128 - code
        if code is None:
            return "closed its output"
        return f"was killed by {_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def _with_errors(self, text: str) -> str:
        lines = " | ".join(line for line in list(self._last_lines) if line)
        return f"{text}; the last lines of its standard error: {lines}" if lines else text


class _OutOfTime(Exception):
    pass


class _OutOfMemory(Exception):
    pass


def _widen(*pipes: int) -> None:
    """Let pipes hold more, where the system has words for it: large arrays are twice as fast."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        for pipe in pipes:
            with contextlib.suppress(OSError):  # this user may have no more
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, LARGE_BLOCK)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one for real-time programs
        return f"signal {number}"


def _drain(pipe: Any, lines: deque[str]) -> None:
    """Keep the last lines of a stream."""
    rest = b""
    with contextlib.suppress(OSError, ValueError):
        while block := os.read(pipe.fileno(), 1 << 16):
            *complete, rest = (rest + block).split(b"\n")
            rest = rest[-LINE:]
            for line in complete[-LINES:]:
                lines.append(line[:LINE].decode("utf-8", "backslashreplace"))
    if rest:
        lines.append(rest[:LINE].decode("utf-8", "backslashreplace"))


def _running() -> dict[int, tuple[int, int]]:
    """Return parent and session of each running process, where the system tells."""
    found = {}
    for entry in PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent, _, session, *_ = entry.read_text().rpartition(")")[2].split()
            if state not in "ZX":
                found[int(entry.parent.name)] = int(parent), int(session)
    return found


def _family(leader: int, running: Mapping[int, tuple[int, int]] | None = None) -> list[int]:
    """Return the running processes of a session and their descendants."""
    running = _running() if running is None else running
    found = {pid for pid, (_, session) in running.items() if session == leader}
    while more := {pid for pid, (parent, _) in running.items() if parent in found} - found:
        found |= more
    return list(found)


def _resident(pid: int) -> int:
    try:
        pages = int((PROCESSES / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _end_family(leader: int, pids: Sequence[int]) -> None:
    """Kill every process of a session and its descendants, also those that they start meanwhile.

    It returns when they are gone: a process that is killed runs until it is scheduled again. One
    that leaves the session is found by its parent, while that runs; `pids` has those that were
    found before.
    """
    deadline = time.monotonic() + END_SECONDS
    alive = {*pids, *_family(leader)}
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    while alive and time.monotonic() < deadline:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        running = _running()
        alive = (alive & running.keys()) | set(_family(leader, running))
