"""README.md shows what happens."""

import doctest
import re
from pathlib import Path

import pytest

from npattn.testing import check
from tests.pages import block, run
from tests.test_howto import parse

pytestmark = pytest.mark.unmeasured  # other tests run these lines

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES_WITH_EXAMPLES = [p for p in sorted(ROOT.glob("docs/*.md")) if "\n>>> " in p.read_text()]


def test_the_oracle_gives_the_shapes_shown(tmp_path):
    code, shown = re.search(
        r"```python\n(import numpy.*?)```\n```text\n(.*?)```", README, re.S
    ).groups()
    assert run("-W", "error", "-c", code, cwd=tmp_path) == shown


def test_there_is_one_main_and_one_test_command():
    for name in ("main", "tests"):
        assert len(re.findall(rf"<!-- ci: {name} -->\n```bash\n.*\n```", README)) == 1


@pytest.mark.thorough
def test_the_fix_of_the_kernel_makes_it_pass():
    kernel = block("README.md", "python", "# my_kernel.py")
    [fix] = re.findall(r"\*\*The fix\*\*: `(.*?)`", README)
    wrong = next(line.strip() for line in kernel.splitlines() if line.lstrip().startswith("out = "))
    names = {}
    exec(kernel.replace(wrong, fix), names)
    assert check(names["attention"], only="agreement", examples=40).passed


def test_the_readme_stays_short():
    words = re.sub(r"```.*?```", "", README, flags=re.S).split()
    assert len(words) <= 1000


@pytest.mark.thorough
@pytest.mark.parametrize(
    "example", ["torch_module.py:mha --module", "paged_attention.py:decode --examples 5"]
)
def test_commands_on_the_examples_pass(example):
    if "torch" in example:
        pytest.importorskip("torch")
    words = ["check", *f"docs/examples/{example}".split()]
    assert f"npattn check ../npattn/{words[1]}" in README
    assert run("-m", "npattn", *words, cwd=ROOT).splitlines()[-1].startswith("passed: ")


@pytest.mark.parametrize("line", re.findall(r"\| `npattn ([^`]*)`", README))
def test_commands_of_the_table_have_the_flags_that_they_name(line):
    parse(line)


@pytest.mark.thorough
@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_give_what_they_show(page):
    if "torch" in page.stem:
        pytest.importorskip("torch")
    text = page.read_text().replace("```", "")
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert examples.examples
    assert doctest.DocTestRunner().run(examples).failed == 0
