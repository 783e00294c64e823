"""README.md shows what happens."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unmeasured  # other tests run these lines

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def printed(*arguments, cwd):
    run = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    return run.stdout


def test_the_oracle_gives_the_shapes_shown(tmp_path):
    code, shown = re.search(
        r"```python\n(import numpy.*?)```\n```text\n(.*?)```", README, re.S
    ).groups()
    assert printed("-W", "error", "-c", code, cwd=tmp_path) == shown


def test_there_is_one_main_and_one_test_command():
    for name in ("main", "tests"):
        assert len(re.findall(rf"<!-- ci: {name} -->\n```bash\n.*\n```", README)) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "cache.md",
        "check_module.md",
        "checking.md",
        "extended.md",
        "masks.md",
        "multihead.md",
        "positions.md",
        "spot.md",
        "variants.md",
        "weights.md",
    ],
)
def test_the_examples_of_a_page_give_what_they_show(name):
    page = ROOT / "docs" / name
    text = page.read_text().replace("```", "")
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert len(examples.examples) >= 4
    assert doctest.DocTestRunner().run(examples).failed == 0
