"""The program that begins a confined worker: it makes the walls, and runs the worker inside.

    python confine.py PLAN WORKER [ARGUMENT ...]

PLAN is JSON of `npattn.testing.worker.confinement`. This is one file for Linux that imports nothing
of npattn. With the way "namespaces" it makes the namespaces and the file system itself; with
"bwrap" it is started within those of bubblewrap. In both it then divides:

- the first process of the namespace waits for the other. When that ends, when the judge has
  closed its pipe (or is gone), or when there are too many processes, it ends, and the kernel ends
  everything else in the namespace with it. No process within can send it a signal.
- the other gives up its rights, takes its limits and a filter of system calls, and becomes
  the worker.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
from types import ModuleType
from typing import Any

FAILED = 125
"""Exit code where the walls cannot be made."""
DONE = "--try"
"""In the place of WORKER: end with code 0 where it would begin."""
GRACE = 1.0
"""Seconds for the worker to end by itself once the judge has closed its pipe."""
LOOK_SECONDS = 0.1
"""Time between two counts of the processes."""

# <sched.h>, <sys/mount.h>, <linux/mount.h>, <sys/prctl.h>, <linux/keyctl.h>
NAMESPACES = sum(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))
"""Mount, cgroup, UTS, IPC, user, PID and network."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = -100, 0x8000, 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
CAP_VERSION, LAST_CAP, KEYCTL_JOIN_SESSION_KEYRING = 0x20080522, 63, 1
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10

_NAMES = (
    *("arch", "pivot_root", "keyctl", "socket", "add_key", "request_key", "bpf"),
    *("perf_event_open", "userfaultfd", "memfd_create", "shmget"),
)
_NUMBERS = {
    "x86_64": (0xC000003E, 155, 250, 41, 248, 249, 321, 298, 323, 319, 29),
    "aarch64": (0xC00000B7, 41, 219, 198, 217, 218, 280, 241, 282, 279, 194),
}
CALLS = {name: dict(zip(_NAMES, row, strict=True)) for name, row in _NUMBERS.items()}
"""Numbers of system calls by processor, and its name in <linux/audit.h>."""
MOUNT_SETATTR, IO_URING_SETUP, MEMFD_SECRET = 442, 425, 447
REFUSED = (
    # Keys outlive the process; memory that no limit counts; sockets by another way; the kernel's
    # tracing. The call `socket` is refused but for the internet, of which there is none.
    *("keyctl", "add_key", "request_key", "memfd_create", "shmget"),
    *("bpf", "perf_event_open", "userfaultfd"),
)

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Return the result of a call of the C library; raise OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [None if x is None else os.fsencode(x) for x in (source, target, kind)]
    check(libc.mount(*encoded, ctypes.c_ulong(flags), data.encode()), f"mount on {target}")


def make_read_only(target: str) -> None:
    """Let nothing be written in a folder, nor in what is mounted below it."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    where = os.fsencode(target)
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, where, AT_RECURSIVE, attributes, 32)
    check(result, f"mount_setattr of {target} (Linux 5.12)")


# --- the namespaces -------------------------------------------------------------------------------


def enter_namespaces() -> None:
    """Become the first process of new namespaces; the one before waits, and ends like it."""
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(NAMESPACES), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    child = os.fork()
    if child:
        for descriptor in range(3):  # the judge waits for the end of the worker's
            os.close(descriptor)
        os._exit(exit_code(os.waitpid(child, 0)[1]))
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def exit_code(status: int) -> int:
    """Return the code of a process that ended; 128 and the signal's number if one ended it."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def make_root(plan: dict[str, Any]) -> None:
    """Make the file system: what there is, read-only; what is hidden, empty memory."""
    root = "/proc"  # what is there is below nothing that is shown, and has a new one
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("/", root, None, MS_BIND | MS_REC)
    make_read_only(root)
    for folder, size in plan["memory_folders"].items():
        mount_memory(root + folder, size)
    make_devices(root, plan)
    for path in plan["shown"]:
        show(path, root + path)
        make_read_only(root + path)
    for path in plan["hidden"]:
        if os.path.isdir(root + path):
            mount_memory(root + path, 0)
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    with open(f"{root}/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # the rights within another one are more than none
    for name in plan["settings"]:
        path = f"{root}/proc/{name}"
        if os.path.exists(path):
            mount(path, path, None, MS_BIND | MS_REC)
            make_read_only(path)
    os.chdir(root)
    pivot = CALLS[os.uname().machine]["pivot_root"]
    check(libc.syscall(pivot, b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def mount_memory(target: str, size: int) -> None:
    """Mount memory of so many bytes at most; an empty folder if there are none."""
    room = f"size={size},nr_inodes=16384" if size else "size=4k,nr_inodes=1"
    flags = MS_NOSUID | MS_NODEV | (0 if size else MS_RDONLY)
    mount("tmpfs", target, "tmpfs", flags, f"mode=1777,{room}")


def show(source: str, target: str) -> None:
    """Show a file or folder at a place where there may be none."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    mount(source, target, None, MS_BIND | MS_REC)


def make_devices(root: str, plan: dict[str, Any]) -> None:
    """Make a folder of devices with those of a GPU, and the few that everybody has."""
    folder = f"{root}/dev"
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k")
    for path in plan["devices"]:
        show(path, root + path)
    os.mkdir(f"{folder}/shm")
    for link, place in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"),
                        ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")):  # fmt: skip
        os.symlink(place, f"{folder}/{link}")
    mount_memory(f"{folder}/shm", plan["shared_memory"])
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC
    mount(None, folder, None, flags)


# --- the two processes inside ---------------------------------------------------------------------


def divide(most: int) -> None:
    """Return in the process that becomes the worker; the first one waits for it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # from within none reaches the first process
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")  # its memory is its own
    worker = os.fork()
    if worker == 0:
        return
    os.close(1)
    poller, judge = select.poll(), 0
    poller.register(judge, 0)  # its end, and nothing else, wakes
    ended = os.pidfd_open(worker)
    poller.register(ended, select.POLLIN)
    while True:
        woken = dict(poller.poll(LOOK_SECONDS * 1000))
        if judge in woken:
            poller.unregister(judge)
            poller.poll(GRACE * 1000)
        while True:  # orphans end as children of this one
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == worker:
                os._exit(exit_code(status))
            if pid == 0:
                break
        if judge in woken:
            os._exit(FAILED)
        if sum(name.isdigit() for name in os.listdir("/proc")) > most:
            os.write(2, b"more than %d processes\n" % most)
            os._exit(FAILED)


def restrict(plan: dict[str, Any]) -> None:
    """Take the limits, give up all rights, and filter the system calls."""
    for name, wanted in plan["limits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(number, (limit, limit))
    calls = CALLS[os.uname().machine]
    check(libc.syscall(calls["keyctl"], KEYCTL_JOIN_SESSION_KEYRING, None), "keyctl")
    for capability in range(LAST_CAP + 1):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) and ctypes.get_errno() not in (
            *(errno.EINVAL, errno.EPERM),  # the kernel has no more; bwrap has taken the right
        ):
            check(-1, "prctl")
    check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "prctl")
    none = struct.pack("IiIIIIII", CAP_VERSION, 0, 0, 0, 0, 0, 0, 0)
    check(libc.capset(none[:8], none[8:]), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    program = seccomp_program(calls)
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    check(libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(head), 0, 0), "seccomp")
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")


def seccomp_program(calls: dict[str, int]) -> bytes:
    """Return the filter, in classic BPF: what is refused fails with EPERM, all else is allowed."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    refuse, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    nr, arch, first = 0, 4, 16  # of struct seccomp_data
    numbers = [*(calls[name] for name in REFUSED), IO_URING_SETUP, MEMFD_SECRET]
    block = [
        *((equal, 0, 1, number, refuse) for number in numbers),
        (at_least, 0, 1, 0x40000000, refuse),  # the other calls of an x86-64
    ]
    program = [(load, 0, 0, arch), (equal, 1, 0, calls["arch"]), (give, 0, 0, refuse)]
    program.append((load, 0, 0, nr))
    for code, hit, miss, number, answer in block:
        program += [(code, hit, miss, number), (give, 0, 0, answer)]
    program += [
        (equal, 0, 4, calls["socket"]),
        (load, 0, 0, first),
        (equal, 2, 0, AF_INET),
        (equal, 1, 0, AF_INET6),
        (give, 0, 0, refuse),
        (give, 0, 0, allow),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in program)


def main() -> None:
    """Make the walls, and run the worker; exit code `FAILED` if they cannot be made."""
    plan, worker = json.loads(sys.argv[1]), sys.argv[2]
    try:
        if plan["way"] == "namespaces":
            enter_namespaces()
            make_root(plan)
        divide(plan["processes"])
        restrict(plan)
        seen = os.path.isdir(plan["folder"])
        os.chdir(plan["folder"] if seen else plan["home"])
    except (OSError, AttributeError, KeyError) as err:  # an old kernel, C library or processor
        print(f"{type(err).__name__}: {err}", file=sys.stderr, flush=True)
        os._exit(FAILED)
    if worker == DONE:
        os._exit(0)
    sys.argv = sys.argv[2:]
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = worker
    with open(worker, "rb") as file:
        code = compile(file.read(), worker, "exec")
    exec(code, vars(module))


if __name__ == "__main__":
    main()
