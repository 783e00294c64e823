"""Plugin of pytest: options, and tests of npattn's rules; it does nothing until a test asks for it.

pytest loads it by the entry point of its own name, so that ``-p npattn.testing.pytest_plugin``, or
a conftest.py that names it too, changes nothing. `npattn.testing.suite` has the rest, and is loaded
when a test is marked: before that, coverage may not have begun.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

HELP = {
    "target": "Judge TARGET, as of npattn check, in place of the functions that tests name.",
    "dtype": "Dtype of q, k and v, in place of those that tests name; may be given several times.",
    "examples": "Number of problems, in place of those that tests name.",
    "seed": "Seed of everything random: a number, or random.",
    "artifacts": "Folder of reports and scripts of what fails [default: that of the run].",
}


def seed(text: str) -> int | None:
    """Parse the seed; its name is in the error of an option that is not legal."""
    from npattn.testing.parsing import parse_seed

    return parse_seed(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("npattn", "npattn, which judges attention implementations")
    details: dict[str, dict[str, Any]] = {
        "target": {"metavar": "TARGET"},
        "dtype": {"metavar": "DTYPE", "action": "append"},
        "examples": {"metavar": "N", "type": int},
        "seed": {"metavar": "N|random", "type": seed},
        # At once, since what is judged may change the folder.
        "artifacts": {"metavar": "DIR", "type": os.path.abspath},
    }
    for name, more in details.items():
        group.addoption(f"--npattn-{name}", help=HELP[name], **more)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and take a random seed from the process that has drawn it."""
    line = "npattn(f, **settings): a test of each rule of f (npattn.testing.parametrize)"
    config.addinivalue_line("markers", line)
    config.option.npattn_seed = _input_of(config).get("npattn_seed", config.option.npattn_seed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed on to a worker of pytest-xdist, which would draw another."""
    node.workerinput["npattn_seed"] = node.config.option.npattn_seed


def _input_of(config: pytest.Config) -> dict[str, Any]:
    """Return what a worker of pytest-xdist was given; {} in any other process."""
    return getattr(config, "workerinput", {})


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print the seed if one is given: it may be random."""
    seed = config.getoption("npattn_seed")
    return [] if seed is None else [f"npattn: seed {seed}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each rule and dtype of a function that is marked."""
    if metafunc.definition.get_closest_marker("npattn") is not None:
        from npattn.testing.suite import generate_tests

        generate_tests(metafunc)


@pytest.fixture(scope="session")
def _npattn_plugin(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the folder that all processes of this run share; without the plugin, tests miss it."""
    from npattn.testing.suite import FOLDER

    folder = tmp_path_factory.getbasetemp()
    # A worker of pytest-xdist has its own folder in that of the run.
    pytestconfig.stash[FOLDER] = folder.parent if _input_of(pytestconfig) else folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the script to the report of a rule that fails."""
    report = yield
    if item.get_closest_marker("npattn") is not None and isinstance(item, pytest.Function):
        from npattn.testing.suite import improve

        improve(report, item)
    return report
