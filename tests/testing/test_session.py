"""Sessions: many candidates one after another, each in a process and a time of its own."""

import gc
import os
import tempfile
import threading
from pathlib import Path

import pytest

from npattn.errors import OptionError
from npattn.testing import Session, judge

RIGHT = """
import numpy as np

def attention(q, k, v):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""
WRONG = RIGHT.replace("/ np.sqrt(q.shape[-1]).astype(q.dtype)", "")
FEW = {"untrusted": False, "only": ["agreement-o"], "examples": 9, "diagnosis": False}


def children():
    """Return the processes that this one has started and that run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.append(entry.parent.name)
    return found


def resources_held():
    """Return what this process holds: open files, threads, and bytes in use by Python."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize(
    "count",
    [5, pytest.param(23, marks=pytest.mark.thorough), pytest.param(200, marks=pytest.mark.nightly)],
)
def test_each_candidate_has_its_own_verdict_and_leaves_nothing(count, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(children())
    with Session(**FEW) as session:
        session.judge(RIGHT)
        waiting, holds = set(children()) - before, resources_held()
        assert len(waiting) == 1
        kept = {*tmp_path.iterdir()} - {session.folder}  # of the whole process: its caches
        resident = memory()
        for n in range(count):
            report = session.judge(WRONG if n % 2 else RIGHT)
            assert report.verdict == ("failed" if n % 2 else "passed")
            if n >= count - 2:  # after all the others
                assert findings(report) == findings(judge(WRONG if n % 2 else RIGHT, **FEW))
            assert not list(session.folder.iterdir())
            (waits,) = set(children()) - before
            assert waits not in waiting  # who has run a candidate never runs another
            waiting.add(waits)
        assert resources_held() == holds
        assert memory() < resident + 64 * 2**20
    gc.collect()
    assert set(children()) <= before
    assert {*tmp_path.iterdir()} == kept


def findings(report):
    """Return what a report says of each rule: all that does not depend on the time."""
    return [(o.id, o.status, o.worst, o.examples, o.message, o.recipe) for o in report.outcomes]


def memory():
    """Return the bytes of this process that are resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


COUNTS = RIGHT.replace(
    "import numpy as np\n",
    """import numpy as np
import os, sys
np.seen = getattr(np, "seen", 0) + 1
if np.seen > 1 or os.path.exists("left") or "left" in os.environ:
    raise ImportError("somebody was here before")
os.environ["left"] = "1"
""",
)


@pytest.mark.parametrize("untrusted", [False, True])
def test_no_candidate_meets_what_another_has_changed(untrusted):
    accept = {"must": ["o"], "strict": False} if untrusted else {}
    with Session(**FEW | accept | {"untrusted": untrusted, "seconds": 60}) as session:
        verdicts = [session.judge(COUNTS).verdict for _ in range(3)]
        assert verdicts == ["passed"] * 3
        assert session.judge(COUNTS.replace(" / p.sum", " * p.sum")).verdict == "failed"


def test_a_process_that_waits_for_another_name_is_ended():
    both = RIGHT + WRONG.replace("attention", "wrong").replace("import numpy as np", "")
    gc.collect()
    before = set(children())
    with Session(**FEW) as session:
        verdicts = [session.judge(both, name).verdict for name in ("wrong", "attention", "wrong")]
        assert verdicts == ["failed", "passed", "failed"]
        assert len(set(children()) - before) == 1


def test_judge_is_one_call_of_a_session(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(WRONG)
    gc.collect()
    before = set(children())
    assert judge(path, **FEW).verdict == judge(WRONG, "attention", **FEW).verdict == "failed"
    assert judge(RIGHT, **FEW).verdict == "passed"
    assert set(children()) <= before


def test_a_right_candidate_ends_before_its_time():
    with Session(**FEW | {"seconds": 30}) as session:  # it would ask more meanwhile
        report = session.judge(RIGHT)
    assert report.verdict == "passed"
    assert [o.examples for o in report.outcomes if o.rule == "agreement-o"] == [9]


def test_a_candidate_is_a_file_or_text_with_a_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(RIGHT)
    both = RIGHT + WRONG.replace("attention", "wrong").replace("import numpy as np", "")
    with Session(**FEW) as session:
        assert session.judge(f"{path}:attention").passed
        assert session.judge(path).passed
        assert session.judge(both, "wrong").verdict == "failed"
        with pytest.raises(OptionError, match="2 public functions"):
            session.judge(both)
        with pytest.raises(OptionError, match="SyntaxError"):
            session.judge("def attention(q, k, v):\n    return (\n")


def test_a_report_is_plain_data():
    with Session(**FEW) as session:
        content = session.judge(WRONG).as_dict()
    assert content["verdict"] == "failed"


@pytest.mark.thorough
def test_a_slow_candidate_has_no_verdict_in_time():
    slow = RIGHT.replace("    s = q", "    import time; time.sleep(0.3)\n    s = q")
    with Session(untrusted=False, seconds=5) as session:
        report = session.judge(slow)
    assert report.verdict == "no verdict"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 3}, "got budget, must be a setting among"),
        ({"seconds": 0}, "seconds is 0, must be > 0"),
        ({"dtypes": "float31"}, "float31"),
    ],
)
def test_wrong_settings_are_errors_at_once(settings, message):
    with pytest.raises(Exception, match=message):
        Session(**settings)
