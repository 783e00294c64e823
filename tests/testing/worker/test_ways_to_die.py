"""Whatever an implementation does to its process, the check goes on and says so."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from npattn.problem import Problem
from npattn.testing import Implementation, check
from npattn.testing.targets import load_implementation
from npattn.testing.worker.connect import connect
from npattn.testing.worker.supervisor import Limits

RIGHT = """
import ctypes, os, signal, subprocess, sys, threading, time
import numpy as np

def right(q, k, v, mask=None):
    s = q.astype(float) @ np.swapaxes(k, -1, -2).astype(float) / max(q.shape[-1], 1) ** 0.5
    s = s if mask is None else np.where(mask, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    return (p @ v.astype(float)).astype(q.dtype)

def f(q, k, v, mask=None):
    if q.ndim != 4 or k.shape[1] != q.shape[1]:
        raise ValueError("rank 4, and K = H")
    if mask is not None:
        die()
    return right(q, k, v, mask)

class Panic(BaseException):
    pass

class Odd(KeyError):
    def __str__(self):
        raise ValueError("no words")

"""
CRASHES = {
    "segfault": ("ctypes.string_at(0)", "SIGSEGV"),
    "abort": ("os.abort()", "SIGABRT"),
    "division": ("os.kill(os.getpid(), signal.SIGFPE)", "SIGFPE"),
    "exit 0": ("os._exit(0)", "exit code 0"),
    "panic": ("raise Panic('index out of bounds')", "Panic: index out of bounds"),
    "closed pipes": ("os.closerange(3, 32)", "exit code"),
    "garbage": ("write_to_pipes(b'\\xff' * 99)", "garbage"),
    "a wrong header": ("write_to_pipes(HEADER)", "garbage"),
}
HELP = """
HEADER = (40).to_bytes(8, "little") + (99).to_bytes(8, "little") + b"{" * 32
def write_to_pipes(data):
    for number in range(3, 9):
        try:
            os.write(number, data)
        except OSError:
            pass  # not one that can be written to
"""
QUIET = {
    "error state": "np.seterr(all='raise', under='ignore')",
    "standard output": "print('x' * 100_000, flush=True)",
    "no standard output": "sys.stdout = None; os.close(1)",
    "patched NumPy": "np.testing.assert_allclose = np.allclose = lambda *_, **__: True",
    "threads": "os.environ['OMP_NUM_THREADS'] = '7'",
}


@pytest.fixture
def target(tmp_path):
    """Write a target that does something where it is given a mask, and connect to it."""
    connected = []

    def make(deed, **limits):
        path = tmp_path / f"target_{len(connected)}.py"
        path.write_text(f"{RIGHT}{HELP}\ndef die():\n    {deed}\n")
        connected.append(connect(f"{path}:f", limits=Limits(**limits)))
        return connected[-1]

    yield make
    for remote in connected:
        remote.worker.close()


def judge(remote, *only):
    only = only or ("agreement-o",)
    report = check(remote, only=only, examples=2, diagnosis=False, shrink=False)
    return {outcome.rule: outcome for outcome in report.outcomes}, report


@pytest.mark.thorough
@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_costs_one_rule_and_is_named(target, name):
    deed, said = CRASHES[name]
    outcomes, report = judge(target(deed))
    assert outcomes["option-mask"].status == "crashed"
    assert said in outcomes["option-mask"].message
    assert outcomes["agreement-o"].status == "passed"
    assert not report.passed


def test_an_exception_without_words_is_an_error(target):
    outcomes, _ = judge(target("raise Odd()"))
    assert outcomes["option-mask"].status == "error"
    assert "Odd: (its message raised ValueError)" in outcomes["option-mask"].message


LOSES_ITS_DEVICE = """
import sys
import torch

def f(q, k, v, mask=None):
    if q.ndim != 4 or k.shape[1] != q.shape[1]:
        raise ValueError("rank 4, and K = H")
    if mask is not None:
        sys.modules["__main__"].Torch.device_works = lambda self: False
        raise RuntimeError("CUDA error: misaligned address")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_a_lost_device_ends_the_process_and_not_the_check(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "loses_its_device.py"
    path.write_text(LOSES_ITS_DEVICE)
    remote = connect(f"{path}:f")
    outcomes, _ = judge(remote)
    remote.worker.close()
    assert outcomes["option-mask"].status == "crashed"
    said = "the device is lost: RuntimeError: CUDA error: misaligned address"
    assert said in outcomes["option-mask"].message
    assert outcomes["agreement-o"].status == "passed"


def test_an_exit_is_an_error(target):
    outcomes, _ = judge(target("sys.exit(0)"))
    assert outcomes["option-mask"].status == "error"


@pytest.mark.thorough
@pytest.mark.unmeasured
@pytest.mark.parametrize("deed", ["while True: pass", "time.sleep(60)"])
def test_a_hang_is_ended_and_not_asked_a_third_time(target, tmp_path, deed):
    hung = tmp_path / "hung"
    note = f"print('once', file=open({str(hung)!r}, 'a'), flush=True)"
    outcomes, report = judge(target(f"{note}; exec({deed!r})", timeout=4.0))
    assert outcomes["option-mask"].status == "timed out"
    assert "no answer within 4 s" in outcomes["option-mask"].message
    assert any(line.startswith("mask") for line in report.refused)
    assert not [o for o in report.outcomes if o.status == "error"]
    assert hung.read_text().split() == ["once"] * 2


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.broad
def test_what_changes_the_process_alone_changes_no_verdict(target, name):
    outcomes, report = judge(target(QUIET[name]))
    assert report.passed
    assert outcomes["agreement-o"].status == "passed"


@pytest.mark.parametrize("at_import", [True, False])
@pytest.mark.parametrize("isolated", [True, False])
def test_a_changed_error_state_is_noted(tmp_path, at_import, isolated):
    change = "np.seterr(all='raise', under='ignore')"
    path = tmp_path / f"noted_{at_import}_{isolated}.py"
    path.write_text(f"{RIGHT}\ndef die():\n    {'pass' if at_import else change}\n")
    before = np.geterr()
    try:
        if at_import:
            path.write_text(path.read_text() + change)
        remote = connect(f"{path}:f") if isolated else load_implementation(f"{path}:f")
        report = check(remote, only=["agreement-o"], examples=2, diagnosis=False)
    finally:
        np.seterr(**before)
    assert report.passed
    assert report.settings["error state"].startswith("changed by np.seterr")
    assert "error state changed by np.seterr" in " ".join(str(report).split())


@pytest.mark.thorough
def test_memory_is_watched(target):
    hoard = "kept = [np.ones(1 << 21) for _ in range(400)]; time.sleep(300)"
    outcomes, _ = judge(target(hoard, memory=1 << 29))
    assert outcomes["option-mask"].status == "crashed"
    assert "more than 512 MiB (--memory)" in outcomes["option-mask"].message


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system does not tell")
def test_children_end_with_the_worker(target):
    sleeper = [sys.executable, "-c", "import time; time.sleep(300)"]
    remote = target(f"[subprocess.Popen({sleeper!r}) for _ in range(5)]; os._exit(3)")
    outcomes, _ = judge(remote)
    assert outcomes["option-mask"].status == "crashed"
    leader = remote.worker.connection.process.pid
    remote.worker.close()
    listed = subprocess.run(["ps", "-eo", "sess=,args="], capture_output=True, text=True).stdout
    sessions = [line.split(None, 1)[0] for line in listed.splitlines() if "time.sleep(300)" in line]
    assert str(leader) not in sessions
    assert not sessions


BOMB = """
if not os.path.exists(NOTES):
        open(NOTES, "w").close()
        if os.fork() == 0:
            born = [os.fork() for _ in range(6)]
            if LEAVES:
                os.setsid()
            with open(NOTES, "a") as notes:
                notes.write(f"{os.getpid()}\\n")
            time.sleep(300)
"""


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.thorough
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system does not tell")
@pytest.mark.parametrize("leaves", [False, True], ids=["of its session", "of their own sessions"])
def test_a_fork_bomb_ends_with_the_worker(target, tmp_path, leaves):
    """64 processes, each with a living parent, beside calls that are answered rightly."""
    notes = tmp_path / "notes"
    deed = BOMB.strip().replace("NOTES", repr(str(notes))).replace("LEAVES", str(leaves))
    remote = target(deed)
    _, report = judge(remote)
    assert report.passed
    deadline = time.monotonic() + 300
    while len(pids := notes.read_text().split()) < 64 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(set(pids)) == 64
    assert all(map(is_running, pids))
    remote.worker.close()
    assert not any(map(is_running, pids))


@pytest.mark.thorough
def test_a_crash_on_the_plainest_problem_fails(tmp_path):
    path = tmp_path / "exits.py"
    path.write_text("import os\ndef f(q, k, v):\n    os._exit(0)\n")
    outcomes, report = judge(connect(f"{path}:f"))
    assert outcomes["structure"].status == "crashed"
    assert report.tested
    assert not report.passed


def test_an_interrupt_leaves_a_report(target):
    calls = []

    def interrupt(dtype, rule, done, total):
        calls.append(rule)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        check(target("pass"), examples=2, progress=interrupt)
    assert caught.value.report.interrupted
    assert not caught.value.report.passed
    assert "what was not asked yet (interrupted)" in caught.value.report.untested
    assert str(caught.value.report).rstrip().splitlines()[-1].startswith("no verdict: interrupted")
    assert caught.value.report.as_dict()["interrupted"]


@pytest.mark.thorough
def test_a_terminated_check_prints_what_it_knows(tmp_path):
    path, asked = tmp_path / "slow.py", tmp_path / "asked"
    deed = f"open({str(asked)!r}, 'w').close(); time.sleep(0.05)"
    path.write_text(f"{RIGHT}\ndef die():\n    {deed}\n")
    command = [sys.executable, "-m", "npattn", "check", f"{path}:f", "--json", tmp_path / "r.json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not asked.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output.count("no verdict: interrupted") == 2
    assert (tmp_path / "r.json").exists()


def test_an_exit_on_the_plainest_problem_fails(tmp_path):
    path = tmp_path / "leaves.py"
    path.write_text("import sys\ndef f(q, k, v):\n    sys.exit(0)\n")
    outcomes, report = judge(connect(f"{path}:f", framework="numpy"))
    assert outcomes["structure"].status == "error"
    assert report.tested
    assert not report.passed


@pytest.mark.thorough
def test_a_crash_in_one_of_two_threads_costs_one_rule(tmp_path):
    path = tmp_path / "threads.py"
    deed = "threading.current_thread() is not threading.main_thread() and os._exit(7)"
    text = RIGHT.replace("    if mask is not None:\n        die()", f"    {deed}")
    assert deed in text
    path.write_text(text)
    remote = connect(f"{path}:f")
    outcomes, _ = judge(remote, "two-threads", "agreement-o")
    assert outcomes["two-threads"].status == "crashed"
    assert "exit code 7" in outcomes["two-threads"].message
    assert outcomes["agreement-o"].status == "passed"
    starter = threading.Thread(target=remote.worker.start)
    starter.start()
    starter.join()
    q = np.ones((1, 1, 2, 2), np.float32)
    assert remote.forward(Problem(q, q, q))["o"].shape == q.shape  # by the main thread there
    remote.worker.close()


TORCH = """
import torch

def f(q, k, v, mask=None):
    if q.ndim != 4 or k.shape[1] != q.shape[1]:
        raise ValueError("rank 4, and K = H")
    if mask is not None:
        {deed}
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    return {factor} * o
"""
SETTINGS = {
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "thread count": "torch.set_num_threads(torch.get_num_threads() + 2)",
}


@pytest.fixture
def settings_of_torch():
    torch = pytest.importorskip("torch")
    before = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(before[0])
    torch.set_num_threads(before[1])


@pytest.mark.parametrize("factor", [1, 1.001])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_torch_change_no_verdict(settings_of_torch, name, factor):
    """Neither that of the rule in which they change, nor of the next ones."""
    space = {}
    exec(TORCH.format(deed=SETTINGS[name], factor=factor), space)
    only = ("mask-as-bias", "agreement-o", "agreement-dq")
    outcomes, report = judge(Implementation(space["f"], framework="torch"), *only)
    expected = "passed" if factor == 1 else "failed"
    assert [outcomes[rule].status for rule in only[1:]] == [expected] * 2
    assert report.passed == (factor == 1)


@pytest.mark.nightly  # torch is imported once more
def test_settings_of_torch_in_a_worker_change_no_verdict(tmp_path, settings_of_torch):
    path = tmp_path / "settings_of_torch.py"
    path.write_text(TORCH.format(deed="; ".join(SETTINGS.values()), factor=1))
    remote = connect(f"{path}:f", framework="torch")
    outcomes, report = judge(remote, "agreement-o", "agreement-dq")
    remote.worker.close()
    assert report.passed
    assert {outcomes[rule].status for rule in ("agreement-o", "agreement-dq")} == {"passed"}
