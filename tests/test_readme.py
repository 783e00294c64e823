"""What README.md shows is what happens."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import block, difference

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ROW = re.compile(
    r"^([a-z-]+) +[\d, -]+ +(passed|failed|error|suspect|–.*?)(?: [\d.e+-]+)? *$", re.M
)


def printed(*arguments, cwd):
    run = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    return run.stdout


@pytest.mark.nightly
def test_the_report_of_torch_is_the_one_that_it_prints(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the README shows PyTorch 2.13")
    shown = README.split("<!-- report: torch.sdpa -->\n```text\n")[1].split("```")[0]
    now = printed("-m", "npattn", "check", "torch.sdpa", cwd=tmp_path)
    assert ROW.findall(shown) == ROW.findall(now)
    assert len(ROW.findall(shown)) > 15
    assert difference(shown, now) is None


def test_the_kernel_fails_as_shown(tmp_path):
    (tmp_path / "my_kernel.py").write_text(block("README.md", "python", "# my_kernel.py"))
    shown = block("README.md", "text", "agreement-o[float32] failed: o agrees")
    rules = re.findall(r"^([a-z-]+)\[float32\] failed", shown, re.M)
    # The others do not change these, but for empty-row: its rows are left to it alone.
    only = [x for rule in (*rules, "empty-row") for x in ("--only", rule)]
    now = printed("-m", "npattn", "check", "my_kernel.py:attention", *only, cwd=tmp_path)
    assert len(rules) == 2
    assert difference(f"...\n{shown}\n...", now) is None


def test_the_oracle_gives_the_shapes_shown(tmp_path):
    code, shown = re.search(
        r"```python\n(import numpy.*?)```\n```text\n(.*?)```", README, re.S
    ).groups()
    assert printed("-W", "error", "-c", code, cwd=tmp_path) == shown


def test_there_is_one_main_and_one_test_command():
    for name in ("main", "tests"):
        assert len(re.findall(rf"<!-- ci: {name} -->\n```bash\n.*\n```", README)) == 1


@pytest.mark.parametrize("name", ["checking.md", "masks.md", "multihead.md", "spot.md"])
def test_the_examples_of_a_page_give_what_they_show(name):
    page = ROOT / "docs" / name
    text = page.read_text().replace("```", "")
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert len(examples.examples) >= 4
    assert doctest.DocTestRunner().run(examples).failed == 0
