"""npattn init: what it asks, writes and keeps."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from npattn.cli import cli
from npattn.cli.check import check_command
from npattn.cli.config import read_config
from tests.pages import block

TILED = """import numpy as np


def attention(q, k, v, causal=False):
    assert q.shape[-2] % 64 == 0 and k.shape[-2] % 64 == 0
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1], dtype=q.dtype)
    if causal:
        s = np.where(np.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""
WORKFLOW = ".github/workflows/attention.yml"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiled.py").write_text(TILED)
    (tmp_path / "plain.py").write_text(TILED.replace("    assert", "    # assert"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words):
    result = CliRunner().invoke(cli, ["init", *words])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.thorough
def test_settings_have_what_a_restricted_function_takes(folder):
    output = init("tiled.py", "--dtype", "bf16", "--rounding", "fused")
    assert read_config(check_command, folder) == {
        "target": ["tiled.py:attention"],
        "dtypes": ["float32"],  # NumPy multiplies no bfloat16
        "rounding": "fused",
        "sizes": ["T=64x", "S=64x"],
        "must": "causal",
    }
    for name in ("pyproject.toml", "test_attention.py", WORKFLOW):
        assert f"wrote {name}" in output
        assert (folder / name).is_file()


def test_nothing_is_overwritten(folder):
    (folder / "test_attention.py").write_text("# mine\n")
    (folder / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    output = init("plain.py:attention")
    assert "kept test_attention.py" in output
    assert (folder / "test_attention.py").read_text() == "# mine\n"
    before = (folder / "pyproject.toml").read_text()
    assert before.startswith("[project]\nname = 'mine'\n\n[tool.npattn]\n")
    assert read_config(check_command, folder)["must"] == "causal"
    again = init("tiled.py:attention")
    assert again.count("kept") == 3
    assert "wrote" not in again
    assert (folder / "pyproject.toml").read_text() == before


@pytest.mark.thorough
def test_the_written_test_passes_and_fails_with_the_check(folder):
    init("plain.py:attention")
    settings = folder / "pyproject.toml"
    settings.write_text(settings.read_text() + 'only = "agreement-o"\nexamples = 3\n')
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert subprocess.run(words, cwd=folder, check=False).returncode == 0
    kernel = folder / "plain.py"
    kernel.write_text(kernel.read_text().replace("@ v", "@ v * 2"))
    assert subprocess.run(words, cwd=folder, check=False).returncode == 1


def test_the_workflow_is_that_of_the_page(folder):
    """It has the steps that docs/how-to/continuous-integration.md shows."""
    init("plain.py:attention")
    assert (folder / WORKFLOW).read_text() == block(
        "docs/how-to/continuous-integration.md", "yaml", "setup-python"
    ).partition("\n")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("numpy.flash",), "must be module:function or path/file.py:function"),
        (("absent.py:f",), "absent.py"),
        (("plain.py:nothing",), "nothing"),
    ],
)
def test_wrong_targets_write_nothing(folder, words, message):
    result = CliRunner().invoke(cli, ["init", *words])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (folder / "pyproject.toml").exists()
