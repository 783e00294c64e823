"""The examples in docstrings are true; those of the judge and of weights are tested with them."""

import doctest
import importlib
from pathlib import Path

import pytest

import npattn

ROOT = Path(npattn.__file__).parent
NEEDS = {"plot": "matplotlib", "torch": "torch"}
ELSEWHERE = ("bench", "matrix", "testing", "train", "weights", "zoo")


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] not in ELSEWHERE and "\n    >>> " in path.read_text():
            yield ".".join(p for p in parts if p != "__init__")


@pytest.mark.parametrize("module", list(modules()))
def test_examples_are_true(module):
    pytest.importorskip(NEEDS.get(module.split(".")[0], "numpy"))
    result = doctest.testmod(importlib.import_module(f"npattn.{module}"))
    assert result.attempted > 0 == result.failed
