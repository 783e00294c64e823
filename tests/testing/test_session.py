"""Sessions: many candidates one after another, each in a process and a time of its own."""

import gc
import os
from pathlib import Path

import pytest

from npattn.errors import OptionError
from npattn.testing import Session

RIGHT = """
import numpy as np

def attention(q, k, v):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""
WRONG = RIGHT.replace("/ np.sqrt(q.shape[-1]).astype(q.dtype)", "")
FEW = {"untrusted": False, "only": ["agreement-o"], "examples": 9}


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


def test_each_candidate_has_its_own_verdict_and_leaves_nothing():
    gc.collect()
    before = set(children())
    with Session(**FEW) as session:
        verdicts = [session.judge(source).verdict for source in (WRONG, RIGHT, WRONG, RIGHT)]
        assert verdicts == ["failed", "passed", "failed", "passed"]
        assert not list(session.folder.iterdir())
        assert set(children()) <= before
        folder = session.folder
    assert not folder.exists()


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
