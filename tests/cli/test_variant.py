"""npattn variant: linear and differential attention on the command line."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from npattn.cli import cli

KERNELS = """
import numpy as np

def relu(q, k, v):
    weights = np.maximum(q, 0) @ np.maximum(k, 0).swapaxes(-1, -2)
    return weights @ v / np.float32(np.sqrt(q.shape[-1]))

def doubled(q, k, v):
    return 2 * relu(q, k, v)

def relu_backward(dout, q, k, v):
    scale = np.float32(1 / np.sqrt(q.shape[-1]))
    f, g = np.maximum(q, 0), np.maximum(k, 0)
    dw = dout @ v.swapaxes(-1, -2) * scale
    dv = (f @ g.swapaxes(-1, -2)).swapaxes(-1, -2) @ dout * scale
    return dw @ g * (q > 0), dw.swapaxes(-1, -2) @ f * (k > 0), dv

def attend_unweighted(q, k, v):
    wide = [x.astype(np.float32) for x in (q, k, v)]
    return (wide[0] @ wide[1].swapaxes(-1, -2) @ wide[2] / np.sqrt(q.shape[-1])).astype(q.dtype)

def wrong_backward(dout, q, k, v):
    dq, dk, dv = relu_backward(dout, q, k, v)
    return dq, 3 * dk, dv
"""
MEANS = ("--value", "feature_map=relu", "--value", "normalise=false", "--value", "G=1")
FEW = ("--examples", "7")


@pytest.fixture
def kernels(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    return tmp_path / "kernels.py"


def run(*words):
    return CliRunner().invoke(cli, ["variant", *map(str, words)])


def test_right_kernel_passes(kernels):
    result = run("linear", f"{kernels}:relu", *MEANS, *FEW)
    assert result.exit_code == 0, result.output
    assert "examples 7; variant linear" in result.output
    assert "gradients, for there is no backward=" in result.output


@pytest.mark.thorough
def test_right_gradient_passes_and_a_wrong_one_fails(kernels):
    right = run("linear", f"{kernels}:relu", *MEANS, *FEW, "--backward", f"{kernels}:relu_backward")
    assert right.exit_code == 0, right.output
    assert "not tested: gradients" not in right.output
    wrong = run(
        "linear", f"{kernels}:relu", *MEANS, *FEW, "--backward", f"{kernels}:wrong_backward"
    )
    assert wrong.exit_code == 1
    assert "dk" in wrong.output.partition("FAILED")[2]


@pytest.mark.thorough
def test_wrong_kernel_fails_and_its_script_shows_it(kernels, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "kernels", raising=False)  # one of another test
    monkeypatch.syspath_prepend(tmp_path)
    result = run("linear", "kernels:doubled", *MEANS, *FEW, "--script", tmp_path / "show.py")
    assert result.exit_code == 1
    assert "sampled as LinearCase" in result.output
    done = subprocess.run(
        [sys.executable, "show.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "out" in done.stdout


def test_a_result_that_could_be_doubled_unseen_has_no_verdict(kernels):
    values = ("feature_map=identity", "normalise=false", "G=1", "T=7", "S=70", "D=64")
    words = [f"{kernels}:attend_unweighted", "--dtype", "bfloat16", "--examples", "3"]
    words += [word for value in values for word in ("--value", value)]
    result = run("linear", *words)
    assert result.exit_code == 2
    assert "no verdict: not judged: out" in result.output
    assert run("linear", *words, "--accept", "out").exit_code == 0


def test_sizes_are_restricted(kernels):
    result = run("linear", f"{kernels}:doubled", *MEANS, *FEW, "--value", "D=5", "--value", "E=11")
    assert "D=5" in result.output
    assert "E=11" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--value", "D"), "--value is 'D', must look like D=16,32 or causal="),
        (("--value", "D="), "--value is 'D=', must look like"),
        (("--value", "size=3"), "size"),
        (("--seed", "-1"), "seed"),
        (("--script", "/no/such/folder/x.py"), "does not exist"),
    ],
)
def test_wrong_usage_is_said(kernels, words, message):
    result = run("linear", f"{kernels}:relu", *words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_unknown_target_is_wrong_usage():
    result = run("differential", "no.such.module:kernel")
    assert result.exit_code == 2
    assert "no.such" in result.output
