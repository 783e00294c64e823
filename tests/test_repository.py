"""Files that other services read: they run what the repository has, and say the same."""

import re

import pytest

import npattn
from tests.pages import ROOT
from tests.test_howto import parse

pytestmark = pytest.mark.unmeasured  # nothing of the package runs here

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_is_there(path):
    text = path.read_text()
    scripts = re.findall(r"(?:bash|-f) (\.ci/\w+(?:\.py)?)", text)
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


def test_workflows_have_the_sessions_of_nox():
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    [pythons] = re.findall(r"python: \[(.*)\]", text)
    sessions = (ROOT / ".ci" / "noxfile.py").read_text()
    assert f"python=[{pythons}]" in sessions
    assert '"numpy", ["newest"' in sessions


def test_hooks_call_commands_with_flags_that_exist():
    text = (ROOT / ".pre-commit-hooks.yaml").read_text()
    entries = re.findall(r"entry: npattn (.*)", text)
    assert entries
    for entry in entries:
        parse(entry)


def test_the_conda_recipe_has_the_version_and_the_requirements():
    recipe = (ROOT / ".ci" / "recipe.yaml").read_text()
    assert f"version: {npattn.__version__}\n" in recipe
    setup = (ROOT / "setup.cfg").read_text()
    block = re.search(r"^install_requires =\n((?:    .*\n)*)", setup, re.M)[1]
    wanted = [line.strip() for line in block.splitlines() if not line.strip().startswith("#")]
    listed = [line.replace(" ", "") for line in re.findall(r"^    - (\w+ >=[\d.]+)$", recipe, re.M)]
    assert set(wanted) <= set(listed)


def test_yaml_files_can_be_read():
    yaml = pytest.importorskip("yaml")
    names = ("action.yml", ".pre-commit-config.yaml", ".pre-commit-hooks.yaml", ".ci/recipe.yaml")
    for path in (*WORKFLOWS, *map(ROOT.joinpath, names), *ROOT.glob(".github/*/*.yml")):
        assert yaml.safe_load(path.read_text()), path
