"""npattn check F --reference G: exit codes, the files it writes, and its errors."""

import json

import pytest

from tests.test_cli import mine, run

NORMS = """
import numpy as np

def norm(x, w, flip=False):
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(1e-6)) * w
    return -y if flip else y

def other(x, w, flip=False):
    return norm(x, w) * (w.dtype.type(-1) if flip else w.dtype.type(1))

def forgets(x, w, flip=False):
    return norm(x, w)
"""
WORDS = ("--inputs", "x=B T C", "--inputs", "w=C", "--options", "flip=false,true")

__all__ = ["mine"]  # the fixture


@pytest.fixture
def norms(mine, tmp_path):
    (tmp_path / "norms.py").write_text(NORMS)
    return tmp_path


def test_right_function_passes(norms):
    output = run("check", "norms.py:other", "--reference", "norms.py:norm", *WORDS,
                 "--examples", 12)  # fmt: skip
    assert "passed: 1 passed" in output


def test_wrong_function_fails_and_is_written(norms):
    output = run("check", "norms.py:forgets", "--reference", "norms.py:norm", *WORDS,
                 "--examples", 12, "--json", "report.json", code=1)  # fmt: skip
    assert "it fails only where flip" in output
    report = json.loads((norms / "report.json").read_text())
    assert [o["rule"] for o in report["outcomes"]] == ["reference-out"]
    assert report["settings"]["reference"] == "norm"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("norms.py:other", "--inputs", "x=B T C"), "without --reference: pass both"),
        (("norms.py:other", "--reference", "norms.py:none", *WORDS), "no callable 'none'"),
        (("norms.py:other", "--reference", "norms.py:norm", "--inputs", "x"), "must look like"),
        (("norms.py:other", "--reference", "norms.py:norm", "--options", "flip"), "must look like"),
        (
            ("norms.py:other", "--reference", "norms.py:norm", *WORDS, "--strict"),
            "got --strict beside --reference",
        ),
    ],
)
def test_wrong_usage(norms, words, message):
    assert message in run("check", *words, code=2)
