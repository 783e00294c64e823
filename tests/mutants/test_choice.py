"""Choice of the commands that run in forks of this process, and their ends."""

import sys

import pytest

from npattn.errors import OptionError
from npattn.mutants import runs


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Record what would run, and keep this process as it is."""
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["here"])
    monkeypatch.setattr(sys, "path", ["path"])
    monkeypatch.setattr(runs, "_run_pytest", lambda words: found.append(("pytest", words)))
    for name in ("run_module", "run_path"):
        monkeypatch.setattr(runs.runpy, name, lambda what, *_: found.append((what, sys.argv)))
    return found


@pytest.mark.every
@pytest.mark.parametrize(
    ("command", "what", "words"),
    [
        (["pytest", "a"], "pytest", ["a"]),
        (["python", "-m", "pytest", "a"], "pytest", ["a"]),
        ([sys.executable, "-m", "pytest", "a"], "pytest", ["a"]),
        (["python", "-m", "unittest", "a"], "unittest", ["unittest", "a"]),
        (["python3", "script.py", "a"], "script.py", ["script.py", "a"]),
    ],
)
def test_commands_of_this_python_run_here(ran, tmp_path, command, what, words):
    (tmp_path / "script.py").touch()
    runs.choose_runner(command)()
    assert ran == [(what, words)]
    assert sys.path == [str(tmp_path), "path"][what != "script.py" :]


@pytest.mark.parametrize("command", [["python3", "-c", "a"], ["true"], ["/bin/sh", "a"]])
def test_other_commands_do_not(command):
    assert runs.choose_runner(command) is None


def test_a_command_that_is_not_there_is_an_error():
    with pytest.raises(OptionError, match="there is no command '/nowhere/python'"):
        runs.choose_runner(["/nowhere/python", "a"])


def test_coverage_is_asked_for_in_a_command_or_a_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert [runs.covers(words) for words in (["pytest"], ["pytest", "--cov"])] == [False, True]
    (tmp_path / "tox.ini").write_text("[pytest]\naddopts = --cov")
    assert runs.covers(["pytest"])
    monkeypatch.setattr(runs, "find_spec", lambda name: None)
    assert not runs.covers(["pytest", "--cov"])


def test_an_end_by_a_signal_is_a_crash():
    codes = (0, 9, 1 << 8, runs.NOT_COLLECTED << 8)
    assert [*map(runs._status, codes)] == ["survived", "crashed", "failed", "not collected"]
