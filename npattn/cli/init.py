"""Command npattn init: settings, a test and a workflow, after asking what a function takes."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from npattn.cli.completion import complete_target
from npattn.cli.config import FILE
from npattn.cli.flags import GroupedCommand, add_flags
from npattn.cli.target import open_target
from npattn.errors import OptionError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.judging import check
from npattn.testing.parsing import parse_sizes
from npattn.testing.report.report import Report
from npattn.testing.report.words import headline
from npattn.testing.runner.untrusted import name_everything
from npattn.testing.settings import Settings, options
from npattn.testing.targets import TARGETS, spec_of

KEPT = ("backward", "layout", "like", "framework", "rounding", "dtypes")
"""Settings that the table has if they are given."""
EXAMPLES = 10
TEST = '''"""Attention is right: npattn check with the settings of pyproject.toml."""

import subprocess
import sys
from pathlib import Path


def test_attention():
    words = [sys.executable, "-m", "npattn", "check"]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
'''
WORKFLOW = """name: attention
on: [push, pull_request]
jobs:
  npattn:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12", cache: pip}}
      - run: pip install {packages}
      - run: npattn check --format github
"""


@click.command("init", cls=GroupedCommand)
@click.argument("target", shell_complete=complete_target)
@add_flags(*KEPT)
def init_command(target: str, **flags: Any) -> None:
    """Write settings, a test and a workflow for TARGET, after asking what it takes.

    TARGET is module:function or path/file.py:function. [tool.npattn] goes to pyproject.toml, after
    what stands there; then npattn check alone is the whole command. No file is overwritten.
    """
    if target in TARGETS:
        raise OptionError(f"TARGET is {target!r}, must be module:function or path/file.py:function")
    target = spec_of(target)
    typed = {name: value for name, value in flags.items() if value}
    table, framework = _ask(target, typed)
    path = Path(FILE)
    before = path.read_text("utf-8") if path.is_file() else ""
    if re.search(r"^\[tool\.npattn\]", before, re.M):
        click.echo(f"kept {FILE}: it has [tool.npattn]")
    else:
        path.write_text(f"{before}\n{table}" if before else table, "utf-8")
        click.echo(f"wrote {FILE}:\n{table}", nl=False)
    packages = " ".join(["npattn", *([framework] if framework != "numpy" else [])])
    _write(Path("test_attention.py"), TEST)
    _write(Path(".github/workflows/attention.yml"), WORKFLOW.format(packages=packages))
    click.echo("next: npattn check")


def _ask(target: str, typed: dict[str, Any]) -> tuple[str, str]:
    """Return [tool.npattn] with what the function takes, and the name of its framework."""
    keys = {
        name: one.flags[-1].lstrip("-") for name, (_, one) in options(Settings).items() if one.flags
    }
    rows: dict[str, Any] = {"target": target}
    rows |= {
        keys[name]: value if isinstance(value, str) else list(value)
        for name, value in typed.items()
    }
    implementation = open_target(target, typed)
    must = name_everything(implementation)
    asked: dict[str, Any] = {"dtypes": typed.get("dtypes", ("float32",)), "sizes": {}}
    report = _check(implementation, must, asked)
    if report.way_out:
        words = shlex.split(report.way_out[0][report.way_out[0].index("--") :])
        for flag, value in zip(words[::2], words[1::2], strict=True):
            letter, equals, sizes = value.partition("=")
            if equals:
                rows.setdefault("sizes", {})[letter] = sizes
                asked["sizes"] |= parse_sizes((value,))
            else:
                rows[flag.lstrip("-")] = value
                if flag == "--dtype":
                    asked["dtypes"] = (value,)
                else:
                    implementation.layout = value
        report = _check(implementation, must, asked)
    rows["must"] = [name for name in must if name not in report.missing]
    click.echo(f"asked {target}: {headline(report)}")
    lines = [f"{name} = {_toml(value)}" for name, value in rows.items() if value]
    return "\n".join(["[tool.npattn]", *lines, ""]), implementation.framework.name


def _check(implementation: Implementation, must: Sequence[str], asked: dict[str, Any]) -> Report:
    """Ask a few problems; what is not tested of `must` is missing in the report."""
    few: dict[str, Any] = {
        "only": "agreement", "examples": EXAMPLES, "shrink": False, "diagnosis": False,
    }  # fmt: skip
    return check(implementation, must=must, **few, **asked)


def _toml(value: Any) -> str:
    """Return a text, a list of texts or a table of texts as TOML has it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_toml(x)}' for name, x in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)


def _write(path: Path, text: str) -> None:
    """Write a new file, and say so; one that is there is kept."""
    if path.exists():
        click.echo(f"kept {path}: it is there")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    click.echo(f"wrote {path}")
