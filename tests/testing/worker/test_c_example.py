"""The worker in C is judged right, and wrong where its kernel is."""

import shutil
import subprocess
from pathlib import Path

import pytest

import npattn
from npattn.testing import check
from npattn.testing.worker.connect import connect

SOURCE = Path(npattn.__file__).parents[1] / "docs" / "examples" / "c"
FLAGS = ("-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic")
RULES = ("shape-dtype", "agreement", "empty-row", "hidden-nan-kv")

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
    pytest.mark.skipif(not SOURCE.exists(), reason="needs the repository"),
]


def judge(folder, text=None, wrong=None):
    """Return the report on the example, with some of its text replaced."""
    source = (SOURCE / "attention.c").read_text()
    if text is not None:
        assert source.count(text) == 1
        source = source.replace(text, wrong)
    (folder / "attention.c").write_text(source)
    command = ["gcc", *FLAGS, "-I", str(SOURCE), "-o", "attention", "attention.c", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    worker = connect("c", command=str(folder / "attention"))
    try:
        return check(worker, examples=7, diagnosis=False, shrink=False, only=RULES)
    finally:
        worker.worker.close()


@pytest.mark.thorough
def test_example_is_right(tmp_path):
    report = judge(tmp_path)
    assert report.passed, str(report)


@pytest.mark.thorough
def test_example_without_its_scale_fails(tmp_path):
    text, wrong = "score = p->scale * dot(", "score = dot("
    assert not judge(tmp_path, text, wrong).passed
