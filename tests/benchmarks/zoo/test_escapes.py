"""Each escape is judged by the command: the judge lives, its verdict is right, nothing is left."""

import sys

import pytest

from benchmarks.zoo.cheats import CHEATS, judge
from tests.confined import why_not
from tests.testing.worker.test_confinement import listing

ESCAPES = [name for name, one in CHEATS.items() if one.is_escape]
COMMAND = (sys.executable, "-m", "npattn", "check", "--untrusted", "--memory", "1G", "--must", "o",
           "--examples", "1", "--seed", "3", "-x", "--only", "agreement-o")  # fmt: skip
"""With this seed the one problem has several keys: of a single key the mean of all values, which
an escape returns that was prevented, is right, and the report has no verdict."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("way", ["bwrap", "namespaces"])
def test_judge_lives_and_catches(way, name, monkeypatch):
    if reason := why_not(way):
        pytest.skip(f"nothing is confined by {way} here: {reason}")
    if way == "namespaces":
        monkeypatch.setenv("PATH", "/nowhere")  # where bwrap is not found
    before = listing()
    answer = judge(CHEATS[name], COMMAND)
    assert answer.verdict == "caught", answer.lines
    assert "FAILED: " in answer.lines  # by a report, not by a traceback
    assert listing() == before
