"""Choose how a worker that nobody trusts is confined, and write the command that does it.

On Linux bubblewrap (``bwrap``), if it is installed, else the namespaces of the kernel themselves.
`confine.py` beside this file is the program that then runs; both ways end in the same limits.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import npattn
from npattn.errors import OptionError
from npattn.testing.worker import confine

Way = Literal["bwrap", "namespaces", "no"]
"""How a worker is confined, as a report says it."""
WAYS: tuple[Way, ...] = ("bwrap", "namespaces")
PROGRAM = Path(confine.__file__)
"""The program that makes the walls: one file, which needs no package."""

MIB = 1 << 20
MEMORY_FOLDERS = {"/tmp": 256 * MIB, "/var/tmp": 64 * MIB, "/run": MIB}
"""Folders that are empty memory for the worker, with their sizes: others' files and sockets."""
SHARED_MEMORY = 64 * MIB
HOME = "/tmp"
DEVICES = ("null", "zero", "full", "random", "urandom")
GPU_DEVICES = ("nvidia*", "nvidia-caps/*", "dri/*", "kfd", "dxg")
"""Devices below /dev that stay, where they are: of a GPU."""
SETTINGS = ("sys", "sysrq-trigger", "irq", "bus")
"""What is below /proc by which root changes the kernel."""
PROCESSES = 256
"""Processes beyond which the worker ends, with all of them."""
SECONDS_TO_TRY = 20.0
NOT_HERE = (
    "untrusted code cannot be confined here, and so there is no verdict. {reasons}. Install "
    "bubblewrap (apt install bubblewrap), or allow user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1, user.max_user_namespaces, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container: its seccomp profile, and a "
    "/proc of which nothing is masked), on Linux 5.12 or later. --unconfined judges all the same: "
    "code that has read npattn can then change the verdict"
)

_lock = threading.Lock()
_found: dict[str, Way] = {}


@dataclass(frozen=True)
class Walls:
    """The files that a confined worker sees, and the limits of what it may use."""

    program: Path  # copy of `confine.py`, where the worker sees it
    shown: tuple[Path, ...]  # files and folders that it can read, wherever they lie
    hidden: tuple[Path, ...]  # folders that are empty for it
    memory: int | None  # bytes that each of its processes may have for data

    def command(self, way: Way, words: Sequence[str]) -> list[str]:
        """Return the command that runs a program of this Python, `words`, confined."""
        if way == "no":
            return [sys.executable, "-I", "-S", *words]
        inside = [
            sys.executable,
            "-I",
            "-S",
            str(self.program),
            json.dumps(self._plan(way)),
            *words,
        ]
        return [*self._bwrap(), *inside] if way == "bwrap" else inside

    def _plan(self, way: Way) -> dict[str, object]:
        """Return what `confine.py` sets up: folders shown and hidden, devices and limits."""
        limits = {
            "NPROC": max(512, 8 * (os.cpu_count() or 1)),
            "NOFILE": 4096,
            "FSIZE": 1 << 30,
            "CORE": 0,
            # Of all its threads: the judge's own time limits are for each call.
            "CPU": 100_000 * (os.cpu_count() or 1),
        }
        devices = list(_devices())
        if self.memory is not None and len(devices) == len(DEVICES):
            limits["DATA"] = self.memory  # a GPU's driver reserves much more than it uses
        return {
            "way": way,
            "memory_folders": _memory_folders(),
            "shared_memory": SHARED_MEMORY,
            "devices": devices,
            "settings": SETTINGS,
            "shown": self._list_shown(),
            "hidden": self._list_hidden(),
            "limits": limits,
            "processes": PROCESSES,
            "home": HOME,
            "folder": str(Path.cwd()),
        }

    def _list_shown(self) -> list[str]:
        """Return what has to be shown, for it lies below a folder that is memory."""
        python = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
        libraries = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
        folders = [*self.shown, *package_folders(), *map(Path, (*python, *libraries))]
        every = {str(x) for path in folders for x in (path.absolute(), path.resolve())}
        below = [x for x in every if x.startswith(tuple(f"{m}/" for m in _memory_folders()))]
        return sorted(x for x in below if os.path.exists(x))

    def _list_hidden(self) -> list[str]:
        return sorted(str(path.resolve()) for path in self.hidden)

    def _bwrap(self) -> list[str]:
        """Return bwrap and its arguments: no network, files read-only, hidden folders empty."""
        words = ["bwrap", "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
        words += ["--unshare-uts", "--unshare-cgroup-try", "--disable-userns", "--as-pid-1"]
        words += ["--cap-drop", "ALL", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        for folder, size in {**_memory_folders(), "/dev/shm": SHARED_MEMORY}.items():
            words += ["--perms", "1777", "--size", str(size), "--tmpfs", folder]
        for path in _devices():
            words += ["--dev-bind", path, path]
        for name in SETTINGS:  # bwrap leaves them to the rights of files, which root has
            path = f"/proc/{name}"
            words += ["--ro-bind", path, path] if os.path.exists(path) else []
        for path in self._list_shown():
            words += ["--ro-bind", path, path]
        hidden = [path for path in self._list_hidden() if self._is_seen(path)]
        for path in hidden:
            words += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        return [*words, "--remount-ro", "/dev", "--"]

    def _is_seen(self, path: str) -> bool:
        """Return True if a folder is there at all: below memory only with one that is shown."""
        below = path.startswith(tuple(f"{folder}/" for folder in _memory_folders()))
        return not below or path.startswith(tuple(f"{x}/" for x in self._list_shown()))


def _memory_folders() -> dict[str, int]:
    """Return the folders that there are, by their true names."""
    return {os.path.realpath(x): n for x, n in MEMORY_FOLDERS.items() if os.path.isdir(x)}


def package_folders() -> list[Path]:
    """Return the folders of installed packages: of this Python, and others on its path."""
    installed = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return [Path(x) for x in dict.fromkeys((*installed, *sys.path)) if x.endswith("-packages")]


def is_memory_folder(folder: Path) -> bool:
    """Return True if a folder is empty memory for a confined worker."""
    return str(folder) in _memory_folders()


def _devices() -> Iterable[str]:
    yield from (f"/dev/{name}" for name in DEVICES)
    for pattern in GPU_DEVICES:
        yield from (x for x in sorted(glob.glob(f"/dev/{pattern}")) if not os.path.isdir(x))


def surround(program: Path, shown: Iterable[Path], memory: int | None) -> Walls:
    """Return walls around a worker that sees `shown`, and nothing of npattn."""
    return Walls(program, tuple(shown), (Path(npattn.__file__).parent,), memory)


def find_way(walls: Walls) -> Way:
    """Return the first way that works here; it is tried once in a process."""
    with _lock:
        if "way" not in _found:
            reasons = []
            for way in WAYS:
                reason = _try(walls, way)
                if reason is None:
                    _found["way"] = way
                    break
                reasons.append(f"{way}: {reason}")
            else:
                raise OptionError(NOT_HERE.format(reasons="; ".join(reasons)))
        return _found["way"]


def _try(walls: Walls, way: Way) -> str | None:
    """Return why nothing can be confined in this way; None if it works."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    if way == "bwrap" and shutil.which("bwrap") is None:
        return "it is not installed"
    command = walls.command(way, [confine.DONE])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS_TO_TRY,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        return str(err)
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return None if done.returncode == 0 else (last or [f"exit code {done.returncode}"])[0]


def protect_judge() -> None:
    """Let no process of this user read or write the memory of this one from now on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(confine.PR_SET_DUMPABLE, 0, 0, 0, 0)
