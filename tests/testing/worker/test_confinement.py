"""A confined worker cannot see, change or end the judge, and leaves nothing behind."""

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.zoo.cheats import CHEATS
from benchmarks.zoo.cheats.cheat import standalone
from npattn.cli import cli
from npattn.problem import Problem
from npattn.testing import check
from npattn.testing.adapters.base import Crash, ImplementationError
from npattn.testing.worker import confinement
from npattn.testing.worker.confinement import WAYS
from npattn.testing.worker.connect import CHILD, connect
from npattn.testing.worker.connection import _family
from npattn.testing.worker.seclude import Seclusion, shown_of
from npattn.testing.worker.supervisor import Limits
from tests.confined import why_not


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """One way after the other, where it works."""
    if reason := why_not(request.param):
        pytest.skip(f"nothing is confined by {request.param} here: {reason}")
    monkeypatch.setattr(confinement, "_found", {"way": request.param})
    return request.param


def run(way, path, *words, **kwargs):
    """Run a file as a worker is run, and return what it printed."""
    seclusion = Seclusion(CHILD)  # its folder is removed with it
    command = seclusion.walls([f"{path}:f"], kwargs.pop("memory", None)).command(
        way, [str(path), str(seclusion.packages), *words]
    )
    with subprocess.Popen(
        command,
        env=seclusion.environment(way),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        out = process.stdout.read().decode()
        errors = process.stderr.read().decode()
        code = process.wait()
    return code, out, errors


ALL = """
if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import json
    x = np.random.default_rng(0).standard_normal((1, 1, 4, 4))
    right, found = attention(x, x, x), []
    for name in sys.argv[2:]:
        if np.array_equal(globals()[name](x, x, x), right):
            found.append(name)
    print(json.dumps(found), flush=True)
    os._exit(0)
"""
APART = ("many_processes", "threads_left")
"""Escapes that would end the others, or take their time."""


def listing():
    """Return what escapes would leave on this machine."""
    folders = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/usr", "/etc", ".", Path.home())
    files = {str(p) for x in folders for p in Path(x).glob("npattn_escape_mark*")}
    for kind in ("shm", "sem"):
        with contextlib.suppress(OSError), open(f"/proc/sysvipc/{kind}") as file:
            files |= {line for line in file if str(0x6E706174) in line}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            files |= {entry.read_text()} if "npattn_escape_mark" in entry.read_text() else set()
    return files


def write_escapes(folder):
    """Write the escapes, and a program that tries those it is told; return it and their names."""
    source = standalone("escapes")
    path = folder / "escapes.py"
    numpy = "import numpy as np"
    path.write_text(source.replace(numpy, f"sys.path.insert(0, sys.argv[1])\n{numpy}", 1) + ALL)
    return path, [one.name for one in CHEATS.values() if one.is_escape and one.name not in APART]


@pytest.mark.thorough
def test_no_escape_succeeds_and_nothing_is_left(way, tmp_path, monkeypatch):
    monkeypatch.chdir("/")  # a folder below /tmp would be memory of its own, which it may write
    path, names = write_escapes(tmp_path)
    assert len(names) >= 25
    before = listing()
    code, out, errors = run(way, path, *names, memory=1 << 30)
    assert code == 0, errors
    assert json.loads(out) == []
    assert listing() == before
    assert [p.name for p in tmp_path.iterdir()] == ["escapes.py"]


@pytest.mark.thorough
def test_escapes_succeed_where_nothing_confines(tmp_path):
    """They are no test of the walls if they fail without."""
    path, _ = write_escapes(tmp_path)
    names = ["local_sockets", "modules_left"]
    code, out, errors = run("no", path, *names)
    assert code == 0, errors
    assert json.loads(out) == names


ACTS = """
import os, subprocess, sys, time
import numpy as np
CALLS = []

def right(q, k, v):
    if q.ndim != 4 or k.shape[1] != q.shape[1]:
        raise ValueError("rank 4, K = H")
    s = np.einsum("...td,...sd->...ts", q, k, dtype=float) / max(q.shape[-1], 1) ** 0.5
    p = np.exp(s - s.max(-1, keepdims=True, initial=-np.inf))
    return (p / p.sum(-1, keepdims=True) @ v).astype(q.dtype)

def killed(q, k, v):
    os.kill(os.getpid(), 11)

def exits(q, k, v):
    os._exit(3)

def bomb(q, k, v):
    for _ in range(1000):
        if os.fork() == 0:
            time.sleep(600)

def eats(q, k, v):
    CALLS.append(np.ones(1 << 28))

def sleeps(q, k, v):
    if not CALLS:
        CALLS.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    time.sleep(600 * (len(q) == 7))
    return right(q, k, v)
"""
Q = np.ones((1, 1, 2, 2), np.float32)


@pytest.fixture
def remote_of(way, tmp_path):
    (tmp_path / "acts.py").write_text(ACTS)
    made = []

    def connect_to(name, **kwargs):
        spec = f"{tmp_path}/acts.py:{name}"
        made.append(connect(spec, untrusted=True, framework="numpy", **kwargs))
        return made[-1]

    yield connect_to
    for remote in made:
        remote.worker.close()


def call(remote, q=Q):
    return remote.forward(Problem(q, Q, Q))


def test_right_function_passes_and_its_report_says_how_it_was_confined(way, remote_of):
    report = check(remote_of("right"), only=["agreement-o"], examples=2, diagnosis=False)
    assert report.passed
    assert report.as_dict()["confined"] == way


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("killed", "was killed by SIGSEGV"),
        ("exits", "ended with exit code 3"),
        ("bomb", "more than 256 processes"),
    ],
)
def test_end_of_a_confined_process_has_its_reason(remote_of, name, words):
    remote = remote_of(name)
    with pytest.raises(Crash, match=words):
        call(remote)


def test_memory_of_a_process_has_a_limit(remote_of):
    remote = remote_of("eats", limits=Limits(memory=1 << 30))
    with pytest.raises(ImplementationError, match=r"MemoryError|more than 1024 MiB"):
        call(remote)


@pytest.mark.thorough
def test_whatever_a_worker_started_ends_with_the_judge(way, tmp_path):
    """Also if the judge is killed, and can end nothing itself."""
    (tmp_path / "acts.py").write_text(ACTS)
    code = f"""
import numpy as np, sys
from npattn.problem import Problem
from npattn.testing.worker import confinement
from npattn.testing.worker.connect import connect
if __name__ == "__main__":
    confinement._found["way"] = {way!r}
    remote = connect({f"{tmp_path}/acts.py:sleeps"!r}, untrusted=True, framework="numpy")
    q = np.ones((1, 1, 2, 2), np.float32)
    remote.forward(Problem(q, q, q))
    print(remote.worker.connection.process.pid, flush=True)
    sys.stdin.read()
"""
    judge = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    family = _family(int(judge.stdout.readline()))
    assert len(family) >= 4  # two of the walls, the worker, and what that has started
    judge.kill()
    judge.communicate()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in family):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_other_process_reads_the_memory_of_the_judge(remote_of):
    remote_of("right")
    libc = ctypes.CDLL(None)
    try:
        assert libc.prctl(3, 0, 0, 0, 0) == 0  # PR_GET_DUMPABLE
    finally:
        libc.prctl(4, 1, 0, 0, 0)


def test_there_is_no_verdict_where_nothing_can_be_confined(monkeypatch, tmp_path):
    (tmp_path / "acts.py").write_text(ACTS)
    monkeypatch.setattr(confinement, "_found", {})
    monkeypatch.setattr(confinement, "_try", lambda _, way: f"{way} is forbidden")
    words = ["check", f"{tmp_path}/acts.py:right", "--untrusted", "--must", "o", "--examples", "1"]
    words += ["--only", "agreement-o"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "there is no verdict. bwrap: bwrap is forbidden; namespaces: " in done.output
    assert "apt install bubblewrap" in done.output
    done = CliRunner().invoke(cli, [*words, "--unconfined", f"--json={tmp_path}/verdict.json"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("not confined: untrusted code could")
    assert json.loads((tmp_path / "verdict.json").read_text())["confined"] == "no"


def test_unconfined_alone_is_wrong_usage():
    done = CliRunner().invoke(cli, ["check", "--unconfined"])
    assert done.exit_code == 2
    assert "got unconfined without untrusted" in done.output


@pytest.mark.parametrize("way", ["bwrap", "namespaces"])
def test_command_shows_what_lies_below_memory(way):
    """What a worker needs may lie in a temporary folder; of that folder it sees nothing else."""
    walls = confinement.surround(Path("/tmp/x/confine.py"), [Path("/tmp")], None)
    assert "/tmp" not in walls._list_shown()
    assert shown_of("/tmp/kernel.py:f") == Path("/tmp/kernel.py")
    assert shown_of("/tmp/own/kernel.py:f") == Path("/tmp/own")
    command = walls.command(way, ["worker.py"])
    assert command[-1] == "worker.py"
    assert (command[0] == "bwrap") == (way == "bwrap")


@pytest.mark.thorough
def test_judge_never_imports_from_the_working_folder(tmp_path):
    """`python -m` would, before anything can be checked."""
    (tmp_path / "acts.py").write_text(ACTS)
    for name in ("numpy", "click", "multiprocessing", "rich"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(0)")
    done = subprocess.run(
        [sys.executable, "-m", "npattn", "check", "nowhere.py:f", "--untrusted", "--unconfined"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout
    assert "nowhere.py" in done.stderr
