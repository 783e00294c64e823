"""npattn mutants on the command line."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from npattn.cli import cli
from tests.pages import ROOT, block, blocks, difference
from tests.pages import run as run_python

PAGE = "docs/how-to/score-my-tests.md"

KERNEL = """
import numpy as np

def attention(q, k, v, mask=None, *, causal=False, power=1):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1], dtype=q.dtype)
    if causal:
        s = np.where(np.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2]) > 0, s, -np.inf)
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True)).astype(v.dtype) @ v
"""
TESTS = """
import numpy as np
from {module} import attention

def test_causal():
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 7)).astype(np.float32)
    s = np.where(np.tri(5) > 0, np.einsum("htd,hsd->hts", q, k) / 7**0.5, -np.inf)
    p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    got, exact = attention(q, k, v, causal=True), {factor} * p @ v
    np.testing.assert_allclose(got, exact, rtol=1e-3, atol=1e-5)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command on a module of the given name, with tests of it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = {*sys.modules}

    def call(*words, module, factor=1, tests=TESTS):
        (tmp_path / f"{module}.py").write_text(KERNEL)
        (tmp_path / f"test_{module}.py").write_text(tests.format(module=module, factor=factor))
        patch = ("--patch", f"{module}:attention", *words)
        return CliRunner().invoke(cli, ["mutants", *patch, "--", "pytest", f"test_{module}.py"])

    yield call
    for name in {*sys.modules} - before:
        if name.startswith("own_"):
            del sys.modules[name]


@pytest.mark.thorough
def test_score_and_its_tests(run, tmp_path):
    """The test that is printed for a survivor fails on it, and passes on the function."""
    names = ("causal-ignored", "mask-transposed", "sinks-ignored", "nan-of-query-zeroed")
    words = [word for name in names for word in ("--only", name)]
    result = run(*words, "--json", "score.json", "-n", "2", module="own_kernel")
    assert result.exit_code == 1, result.output
    assert "found 1 of 3 mistakes (1 failed)\n1 others do not apply" in result.output
    score = json.loads((tmp_path / "score.json").read_text())
    found = {one["name"]: one["status"] for one in score["mistakes"]}
    assert found == dict(zip(names[:2], ("failed", "survived"), strict=True)) | {
        "nan-of-query-zeroed": "survived"
    }
    assert score["families"]["mask"] == {"found": 0, "applicable": 1}
    tests = {one["name"]: one["test"] for one in score["mistakes"] if "test" in one}
    assert {*tests} == {"mask-transposed", "nan-of-query-zeroed"}
    (tmp_path / "test_more.py").write_text("\n\n".join(tests.values()))
    (tmp_path / "test_own_kernel.py").write_text("from test_more import *")
    words = [word for name in tests for word in ("--only", name)]
    more = CliRunner().invoke(
        cli, ["mutants", "--patch", "own_kernel:attention", *words, "--", "pytest", "test_more.py"]
    )
    assert more.exit_code == 0, more.output
    assert "found 2 of 2 mistakes (2 failed)" in more.output


HANGING = """
import pathlib, time, numpy
from own_slow import attention

def test_shapes():
    calls = pathlib.Path("calls")
    with calls.open("a") as file:
        file.write("x")
    if len(calls.read_text()) > 4:  # the function, one that is right, and two mistakes
        time.sleep(600)
    assert attention is not None
    attention(*[numpy.ones((1, 2, 3))] * 3)
"""


@pytest.mark.thorough
def test_an_interrupt_prints_the_score_so_far(tmp_path):
    """Ctrl-C reaches every process of the terminal's group."""
    (tmp_path / "own_slow.py").write_text(KERNEL)
    (tmp_path / "test_own_slow.py").write_text(HANGING)
    names = ("causal-ignored", "mask-transposed", "nan-of-query-zeroed", "causal-strict")
    words = [word for name in names for word in ("--only", name)]
    command = ["-m", "npattn", "mutants", "--patch", "own_slow:attention", *words, "-n", "1",
               "--json", "score.json", "--", "pytest", "-q", "test_own_slow.py"]  # fmt: skip
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        for line in process.stderr:
            if line.startswith("2/4 "):
                break
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, out + err
    assert "interrupted, with 2 mistakes left" in out
    assert re.search(r"found \d of 2 mistakes", out)
    written = json.loads((tmp_path / "score.json").read_text())
    assert len(written["mistakes"]) == 2
    assert "Traceback" not in err


@pytest.mark.thorough
def test_red_tests_are_refused(run):
    result = run(module="own_red", factor=2)
    assert result.exit_code == 2
    assert "with own_red:attention itself, pytest test_own_red.py failed" in result.output
    unused = "from {module} import attention\ndef test(): assert attention\n"
    result = run(module="own_unused", tests=unused)
    assert result.exit_code == 2
    assert "never calls it" in result.output


@pytest.mark.thorough
def test_other_conventions_are_named(run):
    result = run("--convention", "causal=top_left", module="own_square", tests=SQUARE)
    assert result.exit_code == 2
    assert "attention that is right in its place, pytest test_own_square.py failed" in result.output
    assert "npattn.Conventions(causal='top_left'" in result.output


@pytest.mark.thorough
def test_refusal_of_an_argument_is_the_last_line(run):
    """The default is that of an object that no mistake knows."""
    tests = "from {module} import attention\n" + UNKNOWN
    result = run(module="own_unknown", tests=tests)
    assert result.exit_code == 2
    last = result.output.strip().splitlines()[-1]
    assert last.endswith("OptionError: no mistake takes power=3: its meaning is unknown")


UNKNOWN = """
import numpy as np
import {module}

def test_power():
    own = {module}.attention
    assert own(*np.ones((3, 2, 5, 7), np.float32), power=3).shape == (2, 5, 7)
"""
SQUARE = """
import numpy as np
from {module} import attention

def test_last_query():
    q, k, v = np.ones((3, 1, 5, 7), np.float32) * np.arange(5, dtype=np.float32)[:, None]
    whole = attention(q[:, 3:], k, v, causal=True)[:, -1]
    np.testing.assert_array_equal(whole, attention(q[:, 4:], k, v)[:, 0])
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--patch", "os.py:f", "--", "pytest"), "must be module:function"),
        (
            ("--patch", "os:f", "--only", "no-such", "--", "pytest"),
            "no mistake or family 'no-such'",
        ),
        (("--patch", "os:no_such", "--", "pytest"), "no_such"),
        (("--patch", "os:getcwd", "--", "no-such-command"), "no command 'no-such-command'"),
        (("--patch", "os:getcwd"), "Missing argument"),
    ],
)
def test_wrong_usage(words, message):
    result = CliRunner().invoke(cli, ["mutants", *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_help_has_the_flags():
    text = CliRunner().invoke(cli, ["mutants", "--help"], terminal_width=100).output
    assert all(
        flag in text for flag in ("--patch", "--convention", "--rename", "--limit", "--json")
    )
    assert "[default: ten times a green run" in text
    assert "float8" not in text


@pytest.mark.thorough
def test_the_page_shows_what_is_printed(tmp_path, monkeypatch):
    for text in blocks(PAGE, "python"):
        (tmp_path / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command, shown = block(PAGE, "console", "$ npattn mutants").split("\n", 1)
    printed = run_python("-m", *command.split()[1:], cwd=tmp_path)
    assert difference(shown, printed) is None, printed
