"""Runs of tests with something in the place of a function."""

import os
import sys
from types import SimpleNamespace

import pytest

from npattn.errors import OptionError
from npattn.mutants.patch import Patch, replace_everywhere
from npattn.mutants.runs import choose_runner, covers, run_all

TESTS = {
    "survived": "def test(): f(1, 2, 3)",
    "failed": "def test(): assert f(1, 2, 3) != 1",
    "crashed": "import os\ndef test(): os.abort()",
    "timed out": "import time\ndef test(): time.sleep(67)",
    "not collected": "raise RuntimeError",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_f.py").write_text("def f(q, k, v):\n    return q\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    yield tmp_path
    sys.modules.pop("own_f", None)


def run(folder, command, timeout=None):
    patch = Patch("own_f:f", None, None, str(folder / "record"))
    ((same, one),) = run_all([patch], command, folder=folder, timeout=timeout)
    assert same == patch
    return one


@pytest.mark.thorough
@pytest.mark.parametrize("status", TESTS)
def test_statuses_are_told_apart(folder, status):
    (folder / "test_own.py").write_text(f"from own_f import f\n{TESTS[status]}\n")
    one = run(folder, ["pytest", "-q", "test_own.py"], 7 if status == "timed out" else 61)
    assert one.status == status
    assert one.calls == (status in ("survived", "failed"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command", [["python", "script.py", "x"], ["python", "-m", "script"], ["sh", "run.sh"]]
)
def test_other_commands(folder, command):
    """A shell script is a process of its own, in which pytest loads the patch as a plugin."""
    (folder / "script.py").write_text(
        "import sys, own_f\nsys.exit(own_f.f(len(sys.argv), 2, 3) > 2)"
    )
    (folder / "test_own.py").write_text(f"from own_f import f\n{TESTS['survived']}\n")
    (folder / "run.sh").write_text(f"{sys.executable} -m pytest -q -p no:cacheprovider -n 0")
    one = run(folder, command, 61)
    assert (one.status, one.calls) == ("survived", 1), one.output


def test_unknown_commands_are_refused():
    with pytest.raises(OptionError, match="no command 'no-such-command'"):
        choose_runner(["no-such-command"])
    with pytest.raises(OptionError, match="no command is given"):
        choose_runner([])


def test_every_name_of_a_function_is_replaced(monkeypatch):
    this = sys.modules[__name__]
    monkeypatch.setattr(this, "one", run, raising=False)
    own, other = run, object()
    replace_everywhere(this.one, other)
    assert run is this.one is other
    replace_everywhere(other, own)


def test_what_a_namespace_a_class_and_a_dict_hold_is_replaced(folder):
    import own_f

    old = own_f.f
    own_f.space, own_f.table = SimpleNamespace(f=old), {"f": old}
    own_f.Kind = type("Kind", (), {"f": staticmethod(old)})
    replace_everywhere(old, len)
    assert [own_f.f, own_f.space.f, own_f.table["f"], own_f.Kind.f] == [len] * 4


def test_coverage_is_seen_in_the_command_and_the_configuration(folder):
    pytest.importorskip("pytest_cov")
    assert covers(["pytest", "--cov=mine"])
    assert not covers(["pytest"])
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --cov-fail-under=80\n")
    assert covers(["pytest"])


@pytest.mark.thorough
def test_a_threshold_of_coverage_fails_no_run(folder):
    pytest.importorskip("pytest_cov")
    (folder / "test_own.py").write_text(f"from own_f import f\n{TESTS['survived']}\n")
    command = ["pytest", "-q", "--cov=own_f", "--cov-fail-under=100", "test_own.py"]
    one = run(folder, command, 61)
    assert one.status == "survived", one.output
