"""The lessons: that each is complete and listed. The build of the site runs them."""

import ast
import os
import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")  # the extra npattn[plot]

pytestmark = pytest.mark.unmeasured  # other tests run these lines

ROOT = Path(__file__).parent.parent
LESSONS = sorted((ROOT / "docs" / "lessons").glob("*.py"))


def blocks(source):
    """Return the code between the texts of a lesson."""
    return re.split(r"^# %%\n", source, flags=re.M)


def solution(source):
    """Return the code of the hidden solution at the end of a lesson."""
    _, hidden = source.split("# .. dropdown:: Solution\n")
    _, code = hidden.split(".. code-block:: python\n")
    return "\n".join(line.removeprefix("#       ") for line in code.splitlines()[1:])


def draws(block):
    """True if a block makes a figure, or has one as its last line."""
    calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(block)) if isinstance(n, ast.Call)]
    last = ast.parse(block).body[-1:]
    shown = last and isinstance(last[0], ast.Expr) and ast.unparse(last[0]).startswith("plot.")
    return "plt.subplots" in calls or bool(shown)


def test_lessons_are_numbered_in_order():
    assert [int(path.name[:2]) for path in LESSONS] == list(range(1, 14))
    assert "<lessons_built/index>" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.every
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson_has_title_text_picture_and_claim(path):
    source = path.read_text()
    title, line = ast.get_docstring(ast.parse(source)).splitlines()[:2]
    assert title.startswith(f"{int(path.name[:2])}. ")
    assert set(line) == {"="}
    assert len(line) == len(title)
    assert any(draws(block) for block in blocks(source))
    assert len(re.findall(r"^ *assert ", source, re.M)) >= 2
    assert len(source.splitlines()) <= 150
    parts = ("# What you learned\n", "# .. admonition:: Exercise\n", "# .. dropdown:: Solution\n")
    places = [source.index(part) for part in parts]
    assert places == sorted(places)
    assert "assert " in solution(source)


def test_block_without_picture_is_seen():
    assert draws("x = 1\nplot.head(x)")
    assert draws("figure, ax = plt.subplots()")
    assert not draws("plot.head(x)\nx = 1")
    assert not draws("print(plot)")


@pytest.mark.nightly
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson_runs(path, monkeypatch):
    """The gate runs them, too, when it builds the site; the solution goes on with its names."""
    import matplotlib.pyplot as plt

    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(os.fspath(ROOT / "docs" / "examples"))
    names = runpy.run_path(str(path))
    exec(solution(path.read_text()), names)
    plt.close("all")
