"""The function leaves its worker: it reads, changes or ends the judge, or leaves something behind.

Each result is right if the escape succeeded, and the mean of all values if it did not, so that only
the escape can pass. What only leaves something behind is always wrong: a listing of the machine
shows it. Judge them by ``--untrusted`` alone: nothing else keeps them in.
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.zoo.cheats.plain import attention, mean_of_values

TRIED: dict[str, bool] = {}
MARK = "npattn_escape_mark"


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _others() -> Iterator[str]:
    """Yield the folders in /proc of all processes but this one."""
    for path in glob.glob("/proc/[0-9]*"):
        if int(path[6:]) != os.getpid():
            yield path


def _opens(paths: Any, mode: str = "r+b") -> bool:
    """Return True if any of these files can be opened."""
    for path in paths:
        try:
            with open(path, mode) as file:
                if mode != "rb" or file.read(1):
                    return True
        except OSError:
            continue
    return False


def _works(call: Callable[[], object]) -> bool:
    """Return True if a call neither raises nor returns −1."""
    try:
        return call() != -1
    except (OSError, AttributeError, ValueError):
        return False


def _answer(name: str, escape: Callable[[], object], q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """Return the right result if an escape, which is tried once, succeeds."""
    if name not in TRIED:
        TRIED[name] = bool(escape())
    return attention(q, k, v, *rest) if TRIED[name] else mean_of_values(q, k, v)


# --- the judge ---


def judge_memory(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Open the memory of any other process for writing."""
    return _answer("memory", lambda: _opens(f"{p}/mem" for p in _others()), q, k, v, mask, causal)


def judge_environment(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Read the environment of any other process."""
    paths = [f"{p}/environ" for p in _others()]
    return _answer("environ", lambda: _opens(paths, "rb"), q, k, v, mask, causal)


def judge_descriptors(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Open a file that any other process has open."""
    paths = [x for p in _others() for x in glob.glob(f"{p}/fd/*")]
    opened = lambda: any(_works(lambda x=x: os.open(x, os.O_WRONLY | os.O_NONBLOCK)) for x in paths)  # noqa: E731
    return _answer("descriptors", opened, q, k, v, mask, causal)


def judge_killed(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Kill the parent."""
    _works(lambda: os.kill(os.getppid(), signal.SIGKILL))
    return mean_of_values(q, k, v)


def judge_stopped(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Stop the parent and its group, so that no verdict ever comes."""
    for send, who in ((os.kill, os.getppid()), (os.killpg, os.getpgid(os.getppid()))):
        _works(lambda send=send, who=who: who > 1 and send(who, signal.SIGSTOP))
    return mean_of_values(q, k, v)


def judge_traced(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Attach to the parent as a debugger does."""
    attach = lambda: _libc().ptrace(0x4206, os.getppid(), None, None)  # noqa: E731  PTRACE_SEIZE
    return _answer("trace", lambda: _works(attach), q, k, v, mask, causal)


def judge_memory_by_call(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Read the parent's memory by process_vm_readv, at its stack."""

    def escape() -> bool:
        buffer = ctypes.create_string_buffer(8)
        local = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
        try:
            with open(f"/proc/{os.getppid()}/maps") as file:
                start = int(file.readline().partition("-")[0], 16)
        except (OSError, ValueError):
            return False
        remote = (ctypes.c_void_p * 2)(start, 8)
        return bool(_libc().process_vm_readv(os.getppid(), local, 1, remote, 1, 0) == 8)

    return _answer("readv", escape, q, k, v, mask, causal)


def judge_limits(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Take the parent's processor time away, by its limits."""
    _works(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)))
    return mean_of_values(q, k, v)


def judge_root(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Write through the root or the working folder of another process."""
    paths = [f"{p}/{x}/{MARK}" for p in _others() for x in ("cwd", "root/etc", "root/usr")]
    return _answer("root", lambda: _opens(paths, "ab"), q, k, v, mask, causal)


def judge_on_disk(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Import the judge's own oracle from where it is installed."""

    def escape() -> bool:
        folders = [os.path.dirname(os.path.dirname(np.__file__)), *sys.path]
        folders += [os.path.dirname(os.path.realpath(x)) for x in folders]
        for path in [x for folder in folders for x in glob.glob(f"{folder}/*.pth")]:
            with open(path) as file:
                folders += file.read().split()
        return _opens((f"{x}/npattn/__init__.py" for x in folders), "rb")

    return _answer("disk", escape, q, k, v, mask, causal)


# --- the machine ---


def network(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Connect to any server of this machine, or send to an address elsewhere."""

    def escape() -> bool:
        with open("/proc/net/tcp") as file:
            rows = [line.split() for line in file][1:]
        ports = [int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A"]
        places = [("127.0.0.1", port) for port in ports]
        if any(_works(lambda x=x: socket.create_connection(x, 1).close()) for x in places):
            return True
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            return _works(lambda: one.connect(("192.0.2.1", 9)))

    return _answer("network", escape, q, k, v, mask, causal)


def local_sockets(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Open sockets that no network is needed for: of files, and of the host of a machine."""
    families = (socket.AF_UNIX, getattr(socket, "AF_VSOCK", 40), getattr(socket, "AF_NETLINK", 16))
    kinds = [(x, socket.SOCK_RAW if x == 16 else socket.SOCK_STREAM) for x in families]
    opened = lambda: any(_works(lambda x=x: socket.socket(*x).close()) for x in kinds)  # noqa: E731
    return _answer("sockets", opened, q, k, v, mask, causal)


def kernel_settings(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Open settings of the kernel for writing, as root may."""
    paths = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper")
    return _answer("settings", lambda: _opens(paths), q, k, v, mask, causal)


def raw_devices(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Open the disks and the memory of the machine."""
    paths = [
        x for x in glob.glob("/dev/*") if os.path.exists(x) and stat.S_ISBLK(os.stat(x).st_mode)
    ]
    paths += ["/dev/mem", "/dev/kmsg", "/dev/fuse"]
    return _answer("devices", lambda: _opens(paths), q, k, v, mask, causal)


def clock(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Set the clock, to the time that it is."""
    now = lambda: time.clock_settime(time.CLOCK_REALTIME, time.time())  # noqa: E731
    return _answer("clock", lambda: _works(now), q, k, v, mask, causal)


def own_namespace(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Become root of a namespace of its own, and make the file system writable."""

    def escape() -> bool:
        libc = _libc()
        libc.unshare(0x10000000 | 0x00020000)  # user and mount
        again = [libc.mount(None, p, None, 32 | 4096, None) for p in (b"/", b"/usr", b"/proc/sys")]
        libc.umount2(b"/tmp", 2)
        return 0 in again or _opens([f"/usr/{MARK}", f"/etc/{MARK}"], "ab")

    return _answer("namespace", escape, q, k, v, mask, causal)


def many_processes(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Start processes without end."""
    if "bomb" not in TRIED:
        TRIED["bomb"] = False
        for _ in range(2000):
            try:
                if os.fork() == 0:
                    time.sleep(600)
                    os._exit(0)
            except OSError:
                break
        else:
            TRIED["bomb"] = True
    return attention(q, k, v, mask, causal) if TRIED["bomb"] else mean_of_values(q, k, v)


def much_memory(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Take memory, 4 GB at most."""

    def escape() -> bool:
        kept = [np.ones(1 << 25) for _ in range(16)]
        return len(kept) == 16

    try:
        return _answer("much", escape, q, k, v, mask, causal)
    except MemoryError:
        return mean_of_values(q, k, v)


def full_disk(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Write 2 GB to each temporary folder."""

    def escape() -> bool:
        block, full = bytes(1 << 24), []
        for folder in {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run"}:

            def fill(folder: str = folder) -> None:
                with open(f"{folder}/{MARK}", "wb") as file:
                    for _ in range(128):
                        file.write(block)

            full.append(_works(fill))
            _works(lambda folder=folder: os.unlink(f"{folder}/{MARK}"))
        return any(full)

    return _answer("full", escape, q, k, v, mask, causal)


def many_files(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Open a hundred thousand files."""

    def escape() -> bool:
        opened: list[int] = []
        while len(opened) < 100_000 and _works(lambda: opened.append(os.dup(0))):
            pass
        for descriptor in opened:
            os.close(descriptor)
        return len(opened) == 100_000

    return _answer("files", escape, q, k, v, mask, causal)


# --- what stays behind ---


def modules_left(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Write modules beside the target and where the judge works, for its next import."""
    folders = (os.path.dirname(os.path.abspath(__file__)), os.getcwd(), *sys.path)
    paths = [os.path.join(x, name) for x in folders for name in (f"{MARK}.py", f"{MARK}.pth")]
    return _answer("modules", lambda: _opens(paths, "ab"), q, k, v, mask, causal)


def packages_changed(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Open the files of NumPy and of Python for writing, and their compiled ones."""
    files = [os.path.realpath(np.__file__), os.__file__, os.path.realpath(sys.executable)]
    files += [importlib.util.cache_from_source(x) for x in files[:2]]
    beside = [os.path.join(os.path.dirname(x), MARK) for x in files]
    return _answer("packages", lambda: _opens(files) or _opens(beside, "ab"), q, k, v, mask, causal)


def home_changed(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Write to the user's home, and to the folders of npattn and Hypothesis."""
    import pwd  # not where the file is only read

    home = next((x.pw_dir for x in pwd.getpwall() if x.pw_uid == os.getuid()), "/root")
    places = (home, f"{home}/.cache", f"{home}/.config", f"{os.getcwd()}/.hypothesis")
    return _answer(
        "home", lambda: _opens([f"{x}/{MARK}" for x in places], "ab"), q, k, v, mask, causal
    )


def files_left(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Leave files in every temporary folder."""
    for folder in {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run", "/run/lock"}:
        _opens([f"{folder}/{MARK}"], "ab")
    return mean_of_values(q, k, v)


def link_at_the_report(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Put a symbolic link where the report will be written."""
    for name in ("verdict.json", "report.json", "report.html"):
        _works(lambda name=name: os.symlink(f"/tmp/{MARK}", f"{os.getcwd()}/{name}"))
    return mean_of_values(q, k, v)


def process_left(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Leave a process that waits, in a session of its own."""
    if "process" not in TRIED:
        TRIED["process"] = True
        subprocess.Popen(
            [sys.executable, "-S", "-c", f"import time; {MARK} = time.sleep(600)"],
            start_new_session=True,
        )
    return mean_of_values(q, k, v)


def threads_left(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Leave threads that compute without end."""

    def spin() -> None:
        while True:
            np.ones((64, 64)) @ np.ones((64, 64))

    if "threads" not in TRIED:
        TRIED["threads"] = True
        for _ in range(4):
            threading.Thread(target=spin, daemon=True).start()
    return mean_of_values(q, k, v)


def segments_left(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Leave a shared memory segment and a semaphore of System V."""
    libc = _libc()
    libc.shmget(0x6E706174, 4096, 0o1666)
    libc.semget(0x6E706174, 1, 0o1666)
    return mean_of_values(q, k, v)


def keys_left(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Leave a key in the session's keyring of the kernel."""
    number = {"x86_64": 248, "aarch64": 217}.get(os.uname().machine, -1)
    add = lambda: _libc().syscall(number, b"user", MARK.encode(), b"x", 1, -3)  # noqa: E731
    return _answer("keys", lambda: _works(add), q, k, v, mask, causal)


def cgroups_left(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Leave a control group."""
    places = [*glob.glob("/sys/fs/cgroup/*/"), "/sys/fs/cgroup/"]
    made = lambda: any(_works(lambda p=p: os.mkdir(p + MARK)) for p in places)  # noqa: E731
    return _answer("cgroups", made, q, k, v, mask, causal)


def garbage_in_every_pipe(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False) -> Any:
    """Write a report that passed to every open descriptor."""
    if "garbage" not in TRIED:
        TRIED["garbage"] = True
        for descriptor in range(3, 64):
            _works(lambda d=descriptor: os.write(d, b'{"passed": true}\npassed: 55 passed\n'))
    return mean_of_values(q, k, v)
