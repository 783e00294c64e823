"""Run a command of tests with something in the place of the function, each time in a fork.

A fork has what the parent has imported: NumPy, torch, pytest and its plugins are loaded once.
"""

import json
import os
import pickle
import runpy
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from npattn.errors import OptionError
from npattn.mutants.patch import VARIABLE, Patch

STATUSES = ("survived", "failed", "crashed", "timed out", "not collected")
SLOWER = 10
"""Times as long as the slower of the green runs until a run has timed out, beside `STARTING`: a
mistake may take more tiles, and as many processes as there are share the processors."""
STARTING = 5.0
"""Seconds that a process may take to start on a busy machine."""
POLL = 0.01
NO_COVERAGE = "--no-cov"
NOT_COLLECTED = 64
"""Exit code of a fork whose pytest ran no test: an error in a module of tests, or no tests."""


@dataclass(frozen=True)
class Run:
    """One run of the tests."""

    status: str  # one of `STATUSES`
    seconds: float
    output: str = field(repr=False)  # its last lines
    # fields of the `Spy`; empty if the run ended before they were written
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def calls(self) -> int:
        """Number of calls of the function."""
        return int(self.record.get("calls", 0))


def choose_runner(command: Sequence[str]) -> Callable[[], int] | None:
    """Return a function that runs a command of this Python in this process, and its exit code.

    Returns None for any other command, which `run_all` hands a plugin of pytest.
    """
    if not command:
        raise OptionError("no command is given: write it behind --, as in -- pytest tests")
    name, *rest = command
    here = name == Path(name).name or Path(name).parent == Path(sys.executable).parent
    if here and Path(name).name.startswith("python") and rest[:1] == ["-m"]:
        name, *rest = rest[1:] if rest[1:2] == ["pytest"] else command
    if here and Path(name).name == "pytest":
        return lambda: _run_pytest(rest)
    if here and Path(name).name.startswith("python") and rest:
        if rest[0] == "-m":
            return lambda: _run_script(lambda: runpy.run_module(rest[1], {}, "__main__"), rest[1:])
        if not rest[0].startswith("-"):
            return lambda: _run_script(lambda: runpy.run_path(rest[0], {}, "__main__"), rest)
    if shutil.which(name) is None:
        raise OptionError(f"there is no command {name!r}")
    return None


def covers(command: Sequence[str]) -> bool:
    """Return True if a command, or the configuration of pytest here, asks for coverage."""
    if not find_spec("pytest_cov"):
        return False
    files = [Path(n) for n in ("pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini")]
    text = "".join(file.read_text("utf-8", "replace") for file in files if file.is_file())
    return any(x.startswith("--cov") for x in command) or "--cov" in text


def _run_pytest(arguments: Sequence[str]) -> int:
    import pytest

    # The first failure is enough, and processes of xdist would have the function itself.
    more = ["-x", "-p", "no:cacheprovider", *(["-n0"] if find_spec("xdist") else [])]
    # Modules are loaded before coverage begins: a threshold would fail.
    more += [NO_COVERAGE] if find_spec("pytest_cov") else []
    code = int(pytest.main([*arguments, *more]))
    return code if code in (0, 1) else NOT_COLLECTED


def _run_script(run: Callable[[], object], argv: Sequence[str]) -> int:
    sys.argv[:] = argv
    if Path(argv[0]).is_file():
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    run()
    return 0


def run_all(
    patches: Iterable[Patch], command: Sequence[str], *, folder: Path, processes: int = 1,
    timeout: float | None = None,
) -> Iterator[tuple[Patch, Run]]:  # fmt: skip
    """Run the command once for each patch, and yield the runs as they end.

    Their output goes to `folder`; `processes` run at a time. A run is ended after `timeout`
    seconds, never for None.
    """
    runner = choose_runner(command)
    waiting = iter(patches)
    running: dict[int, tuple[Patch, float]] = {}
    try:
        while True:
            while len(running) < processes and (patch := next(waiting, None)) is not None:
                start = time.monotonic()
                running[_start(patch, command, runner, folder)] = patch, start
            if not running:
                return
            for pid, (patch, start) in list(running.items()):
                ended, code = os.waitpid(pid, os.WNOHANG)
                seconds = time.monotonic() - start
                late = timeout is not None and seconds > timeout
                if late and not ended:
                    _end(pid)
                elif not ended:
                    continue
                del running[pid]
                status = "timed out" if late and not ended else _status(code)
                yield patch, _read(pid, patch, folder, status, seconds)
            time.sleep(POLL)
    finally:
        for pid in running:
            _end(pid)


def _end(pid: int) -> None:
    """End a run with all processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _start(
    patch: Patch, command: Sequence[str], runner: Callable[[], int] | None, folder: Path
) -> int:
    """Fork a process that runs the command; return its id."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads of OpenBLAS, idle here
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        stem = folder / f"{os.getpid()}"
        output = os.open(f"{stem}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code = _run_here(patch, command, runner, stem)
    except SystemExit as err:
        code = int(err.code not in (0, None))
    except BaseException:  # noqa: BLE001  of a script: it is its verdict
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_here(
    patch: Patch, command: Sequence[str], runner: Callable[[], int] | None, stem: Path
) -> int:
    """Return the exit code of the runner under the patch; a command replaces this process."""
    if runner is None:
        stem.with_suffix(".pickle").write_bytes(pickle.dumps(patch))
        os.environ[VARIABLE] = str(stem.with_suffix(".pickle"))
        options = os.environ.get("PYTEST_ADDOPTS", "")
        os.environ["PYTEST_ADDOPTS"] = f"{options} -x -p npattn.mutants.patch"
        os.execvp(command[0], [*command])
    with threadpool_limits(1):  # tests are small, and several processes share the processors
        write = patch.apply()
        try:
            return runner()
        finally:
            write()


def _status(code: int) -> str:
    if os.WIFSIGNALED(code):
        return "crashed"
    status = {0: "survived", NOT_COLLECTED: "not collected"}
    return status.get(os.WEXITSTATUS(code), "failed")


def _read(pid: int, patch: Patch, folder: Path, status: str, seconds: float) -> Run:
    output, record = folder / f"{pid}.txt", Path(patch.record)
    text = output.read_text("utf-8", "replace") if output.exists() else ""
    found = json.loads(record.read_text("utf-8")) if record.exists() else {}
    return Run(status, seconds, text[-4000:], found)
