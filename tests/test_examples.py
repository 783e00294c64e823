"""The examples in docstrings are true; those of weights are tested with them."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

import npattn

ROOT = Path(npattn.__file__).parent
NEEDS = {"plot": "matplotlib", "torch": "torch"}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "weights" and "\n    >>> " in path.read_text():
            yield ".".join(p for p in parts if p != "__init__")


@pytest.mark.every
@pytest.mark.parametrize("module", list(modules()))
def test_examples_are_true(module):
    pytest.importorskip(NEEDS.get(module.split(".")[0], "numpy"))
    importlib.import_module(name := f"npattn.{module}")
    result = doctest.testmod(sys.modules[name])  # not the function that its room names alike
    assert result.attempted > 0 == result.failed
