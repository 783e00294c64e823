"""npattn check --watch on a real terminal, and --ff: what failed last is asked first."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from npattn.cli import cli
from npattn.cli.watch import Changed, Watcher, watch
from npattn.errors import OptionError
from tests.pages import ROOT

KERNEL = """import numpy as np
from helper import scale


def f(q, k, v):
    s = q @ k.swapaxes(-1, -2) * scale(q)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""
RIGHT = "def scale(q):\n    return q.dtype.type(q.shape[-1] ** -0.5)\n"
WRONG = "def scale(q):\n    return q.dtype.type(1)\n"
FEW = ("--only", "agreement-o", "--examples", "9")
WAITS = r"waits for a save"


class Terminal:
    """A command on a terminal of its own: what it has printed, and its end."""

    def __init__(self, words, folder):
        mine, its = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "npattn", *words],
            stdin=its, stdout=its, stderr=its, cwd=folder, env=environment, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # xdist ignores it
        )  # fmt: skip
        os.close(its)
        self.terminal, self.text = mine, ""

    def read_until(self, pattern, seconds=90):
        """Return what was printed up to a pattern, and forget it."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.text)):
            left = deadline - time.monotonic()
            assert left > 0, self.text
            if select.select([self.terminal], [], [], left)[0]:
                self.text += os.read(self.terminal, 1 << 16).decode("utf-8", "replace")
        printed, self.text = self.text[: match.end()], self.text[match.end() :]
        return printed

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "helper.py").write_text(WRONG)
    return tmp_path


@pytest.mark.thorough
def test_each_save_is_judged_and_what_failed_is_asked_first(folder):
    terminal = Terminal(("check", "kernel.py:f", "--watch", *FEW), folder)
    try:
        assert "FAILED" in terminal.read_until(WAITS)
        (folder / "helper.py").write_text(RIGHT)  # a module beside the target
        printed = terminal.read_until(WAITS)
        assert "fixed: agreement-o[float32]" in printed
        assert "helper.py saved" in printed
        (folder / "kernel.py").write_text("def f(q, k, v:\n")
        assert "SyntaxError" in terminal.read_until(WAITS)
        new = folder / "kernel.py~"  # as an editor replaces a file
        new.write_text(KERNEL.replace("@ v", "@ v * 2"))
        new.replace(folder / "kernel.py")
        assert "FAILED" in terminal.read_until(WAITS)
        (folder / "helper.py").write_text(WRONG)
        assert "still failing: agreement-o" in terminal.read_until(WAITS)
        assert terminal.interrupt() == 1  # the last verdict
    finally:
        terminal.process.kill()
        terminal.process.wait()


@pytest.mark.thorough
def test_a_save_during_a_check_begins_it_anew(folder):
    terminal = Terminal(("check", "kernel.py:f", "--watch", "--examples", "2000"), folder)
    try:
        time.sleep(4)
        (folder / "helper.py").write_text(RIGHT + "\n")
        terminal.read_until("begins anew")
        assert terminal.interrupt() in (1, 2)
    finally:
        terminal.process.kill()
        terminal.process.wait()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("kernel.py:f", "--in-process"), "got --in-process beside --watch"),
        (("kernel.py:f", "--ff"), "beside --watch"),
        ((), "--watch needs a TARGET"),
    ],
)
def test_wrong_usage_of_watch(folder, monkeypatch, words, message):
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(cli, ["check", *words, "--watch"])
    assert result.exit_code == 2
    assert message in result.output


def test_a_file_that_is_replaced_counts_once_it_is_there(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("1")
    watcher = Watcher()
    watcher.follow([path])
    path.unlink()
    assert watcher.list_changed() == []
    path.write_text("22")
    assert watcher.wait() == [path]
    with pytest.raises(Changed):
        watcher.interrupt()
    watcher.follow([path])
    watcher.interrupt()


def test_what_failed_last_is_asked_first(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    def check(*more):
        return CliRunner().invoke(cli, ["check", "kernel.py:f", *FEW, "--ff", *more])

    assert "still failing" not in check().output  # nothing is known yet
    result = check("-x")
    assert result.exit_code == 1
    assert "still failing: agreement-o[float32]" in result.output
    assert "nothing else was asked" in result.output
    (folder / "helper.py").write_text(RIGHT)
    result = check()
    assert result.exit_code == 0
    assert result.output.startswith("fixed: agreement-o[float32]")
    assert "fixed" not in check().output
    [file] = (folder / "cache" / "npattn" / "failed").iterdir()
    file.write_text("no JSON")
    assert check().exit_code == 0


# --- files ----------------------------------------------------------------------------------------


def test_a_save_in_parts_is_waited_for(monkeypatch):
    """Neither a file that still grows nor one that is gone for a moment has settled."""
    sizes = [(1, 1), (2, 2), (3, 3), None, None, None, (4, 4), (4, 4)]
    monkeypatch.setattr("npattn.cli.watch._stamp", lambda path: sizes.pop(0))
    monkeypatch.setattr("npattn.cli.watch.SETTLE_SECONDS", 0)
    watcher = Watcher()
    watcher.follow([Path("kernel.py")])
    watcher.stamps = {Path("kernel.py"): (0, 0)}
    assert watcher.wait() == [Path("kernel.py")]
    assert sizes == []


def test_a_save_that_cannot_be_imported_is_answered_once(tmp_path, monkeypatch):
    path, calls = tmp_path / "kernel.py", []
    path.write_text("one")

    def wait(watcher):
        changed = watcher.list_changed()
        if not changed or len(calls) > 4:
            raise KeyboardInterrupt
        return changed

    def check(watcher):
        calls.append(path.read_text())
        if len(calls) == 1:
            path.write_text("three")
        raise OptionError("invalid syntax")

    monkeypatch.setattr(Watcher, "wait", wait)
    assert watch(f"{path}:f", check) == 2
    assert calls == ["one", "three"]
