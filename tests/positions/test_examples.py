"""The examples in the docstrings of npattn.positions."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["absolute", "attention", "frequencies", "rotary"])
def test_the_examples_in_the_docstrings_are_true(module):
    result = doctest.testmod(importlib.import_module(f"npattn.positions.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
