"""npattn check --module: a module of a file, its report, files and exit codes."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from npattn.cli import cli

FILE = """
import torch
from tests.testing.modules import lessons

torch.manual_seed(0)
right, wrong = lessons.Notebook(), lessons.Notebook(mistake="merge")
odd = lessons.OddNames()


def function(q, k, v):
    return q
"""
FEW = ("--module", "--examples", "3", "--only", "agreement")


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)

    def invoke(name, *arguments):
        return CliRunner().invoke(cli, ["check", f"{path}:{name}", *arguments])

    return invoke


def test_a_right_module_passes(run):
    result = run("right", *FEW)
    assert result.exit_code == 0, result.output
    assert "passed: 4 passed" in result.output


@pytest.mark.thorough
def test_a_wrong_one_fails_with_files(run, tmp_path):
    files = tmp_path / "report.json", tmp_path / "shows.py"
    result = run("wrong", *FEW, "--json", str(files[0]), "--script", str(files[1]))
    assert result.exit_code == 1
    assert "heads are merged without moving the head axis back" in result.output.splitlines()[1]
    assert not json.loads(files[0].read_text())["passed"]
    done = subprocess.run(
        [sys.executable, files[1]], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.startswith("out[0, 1, ")


def test_roles_are_given_by_flags(run):
    roles = ("wq=alpha", "wk=beta", "wv=gamma", "wo=delta")
    flags = [word for role in roles for word in ("--role", role)]
    result = run("odd", *FEW, *flags, "--num-heads", "6")
    assert result.exit_code == 0, result.output
    assert "6 heads of 2, 2 of keys" in result.output


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("right", ("--num-heads", "3"), "got --role or --num-heads without --module"),
        ("right", ("--module", "--untrusted"), "got --untrusted beside --module"),
        ("right", ("--module", "--role", "wq"), "--role is 'wq', must look like ROLE=NAME"),
        ("function", ("--module",), "must be a torch.nn.Module"),
        ("odd", ("--module",), "found no projection wk, wq, wv"),
    ],
)
def test_wrong_usage_says_what_to_do(run, name, flags, words):
    result = run(name, *flags)
    assert result.exit_code == 2
    assert words in result.output.replace("\n", " ")


def test_a_module_has_to_be_named():
    result = CliRunner().invoke(cli, ["check", "--module"])
    assert result.exit_code == 2
    assert "--module needs TARGET" in result.output
