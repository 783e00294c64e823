"""The bar of a check: on a terminal and in a notebook after a while, and nowhere else."""

import builtins
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.testing import check
from npattn.testing.report import progress
from npattn.testing.targets.numpy import naive

FEW = {"examples": 2, "only": ["agreement-o"], "diagnosis": False, "framework": "numpy"}


def slow(q, k, v):
    time.sleep(0.01)
    with np.errstate(all="ignore"):
        return naive(q, k, v)


@contextmanager
def terminal():
    """Let standard error be a terminal; gives a list of what it has shown in the end."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    shown = []

    def read():
        with suppress(OSError):  # the other end is closed
            while text := os.read(ours, 4096):
                shown.append(text.decode())

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("NO_COLOR", "1")
        patch.setattr(sys, "stderr", stream)
        yield shown
    reader.join()
    os.close(ours)


class ZMQInteractiveShell:
    """Shell of a notebook, which rich knows by this name."""


@pytest.fixture
def notebook(monkeypatch):
    """A notebook: a list of what it is told to show."""
    shown = []

    def display(thing, *, display_id):
        assert display_id
        shown.append(thing)
        return SimpleNamespace(update=lambda thing, **_: shown.append(thing))

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    return shown


def test_terminal_shows_a_bar_that_goes_at_the_end(monkeypatch, capfd):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    with terminal() as shown:
        check(slow, **FEW)
    text = "".join(shown)
    assert "float32" in text
    assert text.endswith("\x1b[2K")  # the line is erased
    assert capfd.readouterr() == ("", "")


def test_notebook_shows_a_bar_that_goes_at_the_end(notebook, monkeypatch, capfd):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    check(slow, **FEW)
    *pictures, last = notebook
    assert "float32 agreement-o" in str([[c._cells for c in one.columns] for one in pictures])
    assert last == {"text/plain": ""}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("asked", [False, True])
def test_no_bar_where_progress_says_otherwise(asked, notebook, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    calls = []
    with terminal() as shown:
        check(slow, **FEW, progress=(lambda *at: calls.append(at)) if asked else False)
    assert (notebook, shown, bool(calls)) == ([], [], asked)


def test_no_bar_before_two_seconds(notebook, monkeypatch):
    assert progress.DELAY == 2
    monkeypatch.setattr(progress, "DELAY", 1000)
    with terminal() as shown:
        check(slow, **FEW)
    assert (notebook, shown) == ([], [])


@pytest.mark.parametrize("colour", [{"FORCE_COLOR": "1"}, {}], ids=str)
def test_nothing_is_shown_in_a_pipe(colour, monkeypatch, capfd):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for name, value in colour.items():
        monkeypatch.setenv(name, value)
    check(slow, **FEW, progress=True)
    assert capfd.readouterr() == ("", "")


def test_what_is_printed_meanwhile_stays_in_its_pipe(monkeypatch, capfd):
    monkeypatch.setattr(progress, "DELAY", 0.0)

    def talkative(q, k, v):
        print("computing")
        return slow(q, k, v)

    with terminal() as shown:
        check(talkative, **FEW)
    assert "float32" in "".join(shown)
    assert "computing" not in "".join(shown)
    assert "computing" in capfd.readouterr().out


@pytest.mark.parametrize("wrong", ["bar", 1, 0.5])
def test_other_values_of_progress_are_errors(wrong):
    with pytest.raises(OptionError, match="must be True, False or a function"):
        check(naive, **FEW, progress=wrong)
