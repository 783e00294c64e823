"""The pages in docs/ and CONTRIBUTING.md say what is true now."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GONE = ("CHANGELOG.md",)  # it names what was renamed


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", generator().PAGES)
def test_generated_parts_are_current(page):
    current = generator().update(page)
    assert (ROOT / page).read_text() == current, "run: python docs/generate.py --write"


def test_every_module_is_in_the_map():
    names = [p.name for p in (ROOT / "npattn").rglob("*.py") if p.name != "__init__.py"]
    listed = re.findall(r"^ *(\w+\.py) ", generator().module_map(), re.M)
    assert sorted(listed) == sorted([*names, "__init__.py"])


def test_the_map_follows_the_layers():
    text = generator().module_map()
    assert text.index("\nerrors.py") < text.index("\nproblem.py") < text.index("\ndense.py")
    assert text.index("\n  cases/") < text.index("\n  trial.py") < text.index("\n  runner/")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_and_modules_named_exist(page):
    if page.name in GONE:
        pytest.skip("it names what was renamed")
    text = page.read_text()
    paths = re.findall(r"`((?:npattn|tests|docs|benchmarks)/[\w/.]*)`", text)
    assert [p for p in paths if not (ROOT / p).exists()] == []
    modules = re.findall(r"\bnpattn(?:\.[a-z_]+)+", text)
    assert sorted({name for name in modules if not importable(name)}) == []


def importable(name):
    """True for a module, or an attribute of one."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
