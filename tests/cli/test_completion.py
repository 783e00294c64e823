"""Completion, as a shell asks for it."""

import os
import subprocess
import sys

import pytest

from npattn.profiles import PROFILES
from npattn.testing.rules import RULES
from npattn.testing.targets import TARGETS


def complete(*words):
    """Return what bash is offered for the last word: type and value of each."""
    asked = {"COMP_WORDS": " ".join(("npattn", *words)), "COMP_CWORD": str(len(words))}
    line = "from npattn.__main__ import cli; cli(prog_name='npattn')"
    done = subprocess.run(
        [sys.executable, "-c", line],
        env=os.environ | asked | {"_NPATTN_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(line.split(",", 1)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("check", "torch."), [n for n in TARGETS if n.startswith("torch.")]),
        (("diff", "numpy.flash", "numpy."), [n for n in TARGETS if n.startswith("numpy.")]),
        (("check", "x.py:f", "--only", "agree"), [n for n in RULES if n.startswith("agree")]),
        (("explain", "hidden-n"), [n for n in RULES if n.startswith("hidden-n")]),
        (("check", "x.py:f", "--like", "onnx"), [n for n in PROFILES if n.startswith("onnx")]),
        (("check", "x.py:f", "--rounding", "f"), ["fused", "fp8"]),
        (("in",), ["init"]),
    ],
)
def test_names_are_completed(words, names):
    offered = complete(*words)
    assert names
    assert sorted(name for _, name in offered) == sorted(names)


def test_what_is_no_name_is_a_file():
    assert complete("check", "my_ker") == [("file", "my_ker")]
