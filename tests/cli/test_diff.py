"""npattn diff on the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from npattn.cli import cli

KERNELS = Path(__file__).parent.parent / "testing" / "difference" / "kernels.py"
FEW = ("--examples", "2", "--sizes", "T=7", "--sizes", "S=13", "--sizes", "D=5")


def run(*words):
    return CliRunner().invoke(cli, ["diff", *words])


def test_profiles(tmp_path):
    result = run("onnx", "onnx@1.22", "--profiles", "--json", f"{tmp_path}/x.json")
    assert result.exit_code == 1
    assert "They differ in one convention: empty_row." in result.output
    assert json.loads((tmp_path / "x.json").read_text())["conventions"][0]["topic"] == "empty_row"
    assert run("onnx", "onnx", "--profiles").exit_code == 0


@pytest.mark.thorough
def test_implementations_are_the_same_in_workers():
    """In bfloat16 such weights are within the tolerance."""
    targets = (f"{KERNELS}:right", f"{KERNELS}:narrow_weights", "--dtype", "bfloat16")
    there, here = run(*targets, *FEW), run(*targets, *FEW, "--in-process")
    assert there.exit_code == here.exit_code == 0
    assert there.output == here.output
    text = " ".join(there.output.split())
    assert "is explained" in text
    assert "rounded to bfloat16" in text


def test_alike():
    result = run("numpy.naive", "numpy.naive", "--in-process", *FEW)
    assert result.exit_code == 0
    assert "They agree bit by bit in o" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("flash_attn", "numpy.flash"), "is a profile here"),
        (("onnx", "onnx", "--json", "no/such/x.json"), "create it first"),
        (("onnx", "onnx", "--in-process", "--timeout", "3"), "--timeout needs a worker"),
        (("onnx", "onnx", "--sizes", "D"), "--sizes is 'D'"),
        (("onnx",), "Missing argument 'B'"),
    ],
)
def test_wrong_usage(words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
