"""Defaults of npattn check in pyproject.toml, and the forms in which it prints."""

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from npattn.cli import cli
from npattn.cli.check import check_command
from npattn.cli.config import read_config
from npattn.errors import OptionError
from npattn.testing.report.place import find_place
from tests.pages import ROOT

KERNELS = """import numpy as np


def good(q, k, v):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def bad(q, k, v):
    return good(q + k.mean(), k, 2 * v)


class Holder:
    @staticmethod
    def method(q, k, v):
        return good(q, k, v)


alias = good
"""
FEW = ("--only", "agreement-o", "--examples", "9", "--in-process")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return tmp_path


def check(*words):
    return CliRunner().invoke(cli, ["check", *words])


def configure(folder, text):
    (folder / "pyproject.toml").write_text(f"[tool.npattn]\n{text}\n")


def test_the_targets_of_a_project_are_checked(folder):
    configure(folder, 'target = ["kernels.py:good", "kernels.py:bad"]\nexamples = 3')
    result = check(*FEW)
    assert result.exit_code == 1
    assert "npattn check kernels.py:good" in result.output
    assert "npattn check kernels.py:bad" in result.output
    assert check("kernels.py:good", *FEW).exit_code == 0
    configure(folder, 'target = "kernels.py:good"')
    assert check(*FEW).exit_code == 0


def test_flags_become_defaults_and_the_command_line_wins(folder):
    text = """
    target = "kernels.py:good"
    only = "agreement-o"
    examples = 3
    in-process = true
    sizes = {D = [5, 7], T = 3}
    dtype = ["float32", "float64"]
    """
    configure(folder, text)
    result = check("--sizes", "D=11", "--seed", "1")
    assert result.exit_code == 0, result.output
    assert "D 11" in result.output
    assert "examples 3" in result.output
    assert "float64" in result.output
    assert "float64" not in check("kernels.py:good", *FEW, "--no-config").output


def test_a_key_may_have_underscores_as_in_python(folder):
    configure(folder, "in_process = true\nnum_heads = 3")
    assert read_config(check_command, folder) == {"in_process": True, "num_heads": "3"}


@pytest.mark.parametrize("name", ["seed", "resume", "journal", "fail-fast", "watch", "ff"])
def test_what_belongs_to_one_run_is_no_key(name, folder):
    configure(folder, f"{name} = true")
    with pytest.raises(OptionError, match=re.escape(f"has {name!r}")):
        read_config(check_command, folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('targets = "x"', "has 'targets'; did you mean target"),
        ("zzz = 1", "has 'zzz', must be one of"),
        ("seed = 1", "has 'seed'"),
        ('strict = "yes"', "must be true or false"),
        ("= 3", "is no TOML"),
        ('dtype = "float31"', "float31"),
    ],
)
def test_a_wrong_table_is_wrong_usage(folder, text, message):
    configure(folder, text)
    result = check("kernels.py:good", *FEW)
    assert result.exit_code == 2
    assert message in result.output


def test_without_a_table_nothing_is_set(tmp_path):
    assert read_config(check_command, tmp_path) == {}
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert read_config(check_command, tmp_path) == {}
    (tmp_path / "pyproject.toml").write_bytes(b"\xff")
    with pytest.raises(OptionError, match="is no TOML"):
        read_config(check_command, tmp_path)


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("kernels.py:bad", ("kernels.py", 10)),
        ("kernels:good", ("kernels.py", 4)),
        ("kernels.py:Holder.method", ("kernels.py", 16)),
        ("kernels.py:alias", ("kernels.py", 20)),
        ("kernels.py:none", None),
        ("none.py:good", None),
        ("a.b:good", None),
        ("numpy.flash", None),
        (None, None),
    ],
)
def test_the_place_of_a_function(folder, target, place):
    assert find_place(target) == place


def test_github_annotates_the_function_and_writes_a_summary(folder, monkeypatch):
    summary = folder / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = check("kernels.py:bad", *FEW, "--format", "github")
    assert result.exit_code == 1
    last = result.stdout.splitlines()[-1]
    assert re.match(r"::error file=kernels\.py,line=10,title=npattn%3A [^:]*::agreement-o", last)
    assert "FAILED" in result.output  # the report stands before it
    assert summary.read_text().startswith("### npattn check `kernels.py:bad`\n")
    result = check("kernels.py:good", *FEW, "--format", "github")
    assert "::error" not in result.output


def test_an_annotation_of_what_could_not_be_tested(folder):
    (folder / "refuses.py").write_text("def f(q, k, v):\n    raise NotImplementedError('no')\n")
    result = check("refuses.py:f", *FEW, "--framework", "numpy", "--format", "github")
    assert result.exit_code == 2
    assert "::error title=npattn::" in result.output


def test_markdown(folder):
    result = check("kernels.py:bad", *FEW, "--format", "markdown")
    assert result.stdout.startswith("### npattn check `kernels.py:bad`\n\nFAILED: ")
    assert "| values | 1 of 1 failed |" in result.output


def test_sarif(folder):
    log = json.loads(check("kernels.py:bad", *FEW, "--format", "sarif").stdout)
    [run] = log["runs"]
    [result] = run["results"]
    assert result["ruleId"] == "agreement-o"
    [location] = result["locations"]
    assert location["physicalLocation"]["region"] == {"startLine": 10}
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["agreement-o"]
    log = json.loads(check("kernels.py:good", *FEW, "--format", "sarif").stdout)
    assert log["runs"][0]["results"] == []


def test_the_steps_of_the_action(folder):
    """Run the last step of action.yml as the runner does, with its inputs as variables."""
    steps = re.findall(r"^      run: (.*)$", (ROOT / "action.yml").read_text(), re.M)
    assert steps[0] == 'python3 -m pip install "$ACTION" $EXTRAS'
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(sys.executable)
    inputs = {
        "TARGET": "kernels.py:bad",
        "ARGS": " ".join(FEW),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", steps[1]],
        env={**os.environ, **inputs}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "::error file=kernels.py,line=10" in done.stdout
    assert (folder / "summary.md").exists()


def test_a_file_of_one_function_is_enough(folder):
    (folder / "one.py").write_text(
        "from kernels import good\n\n\ndef f(q, k, v):\n    return good(q, k, v)\n"
    )
    result = check("one.py", *FEW)
    assert result.exit_code == 0, result.output
    assert "npattn check one.py:f" in result.output
    result = check("kernels.py", *FEW)
    assert result.exit_code == 2
    assert "2 public functions of three or more arguments" in result.output
    assert "kernels.py:good or kernels.py:bad" in result.output.replace("\n", " ")
