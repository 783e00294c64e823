"""The command npattn compare: flags, files and exit codes."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import npattn
from npattn.cli import cli

B, H, K, T, S, D, E = 2, 6, 3, 7, 13, 11, 5


@pytest.fixture
def path(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"q": (B, H, T, D), "k": (B, K, S, D), "v": (B, K, S, E)}
    arrays = {n: rng.standard_normal(x).astype(np.float32) for n, x in shapes.items()}
    fwd = npattn.forward(*arrays.values(), causal="top_left", window=(3, None), scale=0.3)
    np.savez(tmp_path / "call.npz", **arrays, got=fwd.out.astype(np.float32), junk=np.zeros(3))
    return tmp_path / "call.npz"


NAMES = ("--rename", "got=o", "--rename", "junk=")
RIGHT = (*NAMES, "--causal", "top_left", "--window", "3,none", "--scale", "0.3")


def run(*words):
    return CliRunner().invoke(cli, ["compare", *map(str, words)])


def test_a_right_dump_exits_with_0(path, tmp_path):
    result = run(path, *RIGHT, "--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    assert result.output.endswith("call.npz: passed\n")
    assert json.loads((tmp_path / "r.json").read_text())["verdict"] == "passed"
    assert (tmp_path / "r.html").exists()


def test_a_wrong_dump_exits_with_1_and_names_the_cure(path):
    result = run(path, *RIGHT, "--convention", "window=inclusive")
    assert result.exit_code == 1
    assert "passes with --convention window=exclusive" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "is no name of attention"),
        (("--rename", "got"), "must look like output=o"),
        ((*NAMES, "--window", "3"), "--window is '3'"),
        ((*NAMES, "--causal", "true"), "top_left"),
    ],
)
def test_wrong_usage_exits_with_2(path, words, message):
    result = run(path, *words)
    assert result.exit_code == 2
    assert message in result.output
