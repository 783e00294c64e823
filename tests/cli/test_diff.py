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


MODULES = """import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, eager, heads=3, width=15):
        super().__init__()
        self.num_heads, self.eager = heads, eager
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.num_heads, -1)).transpose(1, 2).chunk(3, 1)
        if mask is not None and mask.ndim == 3:
            mask = mask[:, None]
        if self.eager:
            s = q @ k.mT / q.shape[-1] ** 0.5
            p = (s if mask is None else s.masked_fill(~mask, -torch.inf)).softmax(-1)
            o = p.nan_to_num() @ v
        else:
            o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(o.transpose(1, 2).flatten(2))


torch.manual_seed(0)
sdpa, eager, wide = Attention(False), Attention(True), Attention(True, 5, 35)


def function(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
"""


@pytest.mark.thorough
@pytest.mark.parametrize("flag", [(), ("--module",)])
def test_modules_are_compared_inside(flag, tmp_path):
    """Two are seen to be modules; their weights, which are not the same, do not matter."""
    (tmp_path / "m.py").write_text(MODULES)
    names = [f"{tmp_path}/m.py:{name}" for name in ("sdpa", "eager", "wide", "function")]
    result = run(names[0], names[1], *flag, "--examples", "5")
    assert result.exit_code == 0, result.output
    assert f"A is {names[0]}, B is {names[1]}" in " ".join(result.output.split())
    other = run(names[0], names[2], *flag)
    assert other.exit_code == 2
    assert "the modules have different heads" in " ".join(other.output.split())
    assert run(names[0], names[3]).exit_code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("flash_attn", "numpy.flash"), "is a profile here"),
        (("onnx", "onnx", "--json", "no/such/x.json"), "create it first"),
        (("onnx", "onnx", "--in-process", "--timeout", "3"), "--timeout needs a worker"),
        (("onnx", "onnx", "--sizes", "D"), "--sizes is 'D'"),
        (("onnx",), "Missing argument 'B'"),
        (("a:f", "b:f", "--module", "--sizes", "D=3"), "got --sizes beside --module"),
    ],
)
def test_wrong_usage(words, message):
    result = run(*words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
