"""Functions of q, k and v that come as implementations, or answer nothing."""

import inspect

import numpy as np
import pytest

from npattn.errors import OptionError
from npattn.testing import Implementation, check
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.cases.recipe import Recipe
from npattn.testing.reference.check import replay
from tests.test_cli import mine, run

__all__ = ["mine"]  # the fixture

SMALL = {"sizes": {"T": (3,), "S": (5,), "D": (2,)}, "examples": 2, "budget": 1}


def textbook(q, k, v):
    s = q @ k.swapaxes(-1, -2) / q.dtype.type(q.shape[-1]) ** q.dtype.type(0.5)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def empty_handed(q, k, v):
    pass


def test_implementations_are_compared_as_they_are():
    right, twice = (
        Implementation(f, framework="numpy") for f in (textbook, lambda *x: 2 * textbook(*x))
    )
    assert check(right, reference=textbook, **SMALL).verdict != "failed"
    report = check(twice, reference=right, shrink=False, diagnosis=False, **SMALL)
    assert report.verdict == "failed"
    with pytest.raises(OptionError, match="got backward beside an Implementation"):
        check(right, reference=textbook, backward=textbook)


def test_a_function_that_answers_nothing_says_why():
    report = check(empty_handed, reference=textbook, framework="numpy", **SMALL)
    assert report.verdict == "no verdict"
    assert "returned builtins.NoneType" in str(report)
    with pytest.raises(ImplementationError, match="returned builtins"):
        replay(empty_handed, textbook, Recipe(), framework="numpy")


@pytest.mark.thorough
def test_a_command_judges_attention_by_another(mine, tmp_path):
    (tmp_path / "two.py").write_text(f"import numpy as np\n{inspect.getsource(textbook)}")
    words = ("two.py:textbook", "--reference", "two.py:textbook", "--framework", "numpy")
    sizes = ("--sizes", "T=3", "--sizes", "S=5", "--sizes", "D=2", "--examples", 2)
    assert "passed" in run("check", *words, *sizes)
    assert "needs a TARGET" in run("check", *words[1:], code=2)
