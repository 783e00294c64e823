"""The examples in docstrings are true."""

import doctest
import importlib
import os
import sys
from pathlib import Path

import pytest

import npattn

os.environ.setdefault("KERAS_BACKEND", "torch")
ROOT = Path(npattn.__file__).parent
NEEDS = {
    "plot": "matplotlib", "torch": "torch", "weights.torch": "torch", "weights.keras": "keras",
    "weights.flax": "flax.nnx", "weights.equinox": "equinox", "weights.files": "safetensors",
    "weights.checkpoint": "safetensors",
}  # fmt: skip


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "\n    >>> " in path.read_text():
            yield ".".join(p for p in parts if p != "__init__")


@pytest.mark.every
@pytest.mark.parametrize("module", list(modules()))
def test_examples_are_true(module):
    pytest.importorskip(NEEDS.get(module) or NEEDS.get(module.split(".")[0], "numpy"))
    importlib.import_module(name := f"npattn.{module}")
    result = doctest.testmod(sys.modules[name])  # not the function that its room names alike
    assert result.attempted > 0 == result.failed
