"""The pages of docs/how-to show what happens.

Code with prompts is a doctest. A block that begins with a comment of a file's name is that file;
any other Python block runs beside these files, and prints the block of text that follows. A
console block is run, and must print what it shows. Commands of a bash block need not run here (they
install, or take a GPU), but must have the flags that they name.
"""

import doctest
import os
import re
import shlex
import subprocess
import sys

import click
import pytest

from npattn.cli import cli
from tests.pages import ROOT, blocks, difference, run

pytestmark = pytest.mark.unmeasured  # other tests run these lines

HOW_TO = ROOT / "docs" / "how-to"
PAGES = sorted(path.name for path in HOW_TO.glob("*.md") if path.name != "index.md")
HELD_ELSEWHERE = ("pytest.md", "score-my-tests.md")  # by tests of the plugin and of the command
FILE = re.compile(r"(?:# |/\* )([\w-]+\.\w+)(?: \*/)?\n")
EACH_PAGE = pytest.mark.parametrize("name", PAGES)


def needs(name):
    """Skip a page whose frameworks are not installed."""
    for package in re.findall(r"<!-- needs: (\w+) -->", (HOW_TO / name).read_text()):
        pytest.importorskip(package)


def write_files(name, folder):
    for language in ("python", "c"):
        for text in blocks(HOW_TO / name, language):
            if match := FILE.match(text):
                (folder / match[1]).write_text(text)


def environment(folder):
    """Return the variables of a shell that finds this npattn as a command."""
    command = folder / "bin" / "npattn"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m npattn "$@"\n')
    command.chmod(0o755)
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": python_path}


def commands(text):
    """Split a console block into commands, each with the lines that it prints."""
    return re.findall(r"^\$ ([^\n]*)\n((?:(?!\$ )[^\n]*\n)*)", text, re.M)


@EACH_PAGE
def test_page_is_short_and_listed_and_says_what_to_do_when_it_fails(name):
    index, text = (HOW_TO / "index.md").read_text(), (HOW_TO / name).read_text()
    assert f"]({name})" in index
    assert name.removesuffix(".md") in index.splitlines()
    assert "## When it does not work\n" in text
    words = re.sub(r"```.*?```", "", text, flags=re.S).split()  # without code
    assert 200 <= len(words) <= 700


@EACH_PAGE
def test_commands_have_the_flags_that_they_name(name):
    text = "".join(blocks(HOW_TO / name, "bash")).replace("\\\n", " ")
    for line in re.findall(r"(?:^|&& |\bimage )npattn ([^\n]*?)(?: \|\| .*)?$", text, re.M):
        parse(line)


def parse(line):
    """Read a command as click does, without running it."""
    name, *words = shlex.split(line)
    command = cli.get_command(click.Context(cli), name)
    command.make_parser(click.Context(command)).parse_args(words)


def test_a_flag_that_does_not_exist_is_seen():
    with pytest.raises(click.NoSuchOption):
        parse("check a.py:f --sizez T=1")


@pytest.mark.thorough
@pytest.mark.every
@EACH_PAGE
def test_code_gives_what_is_shown(name, tmp_path):
    needs(name)
    write_files(name, tmp_path)
    text = (HOW_TO / name).read_text()
    code = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.M | re.S)
    for source, shown in code:
        if not FILE.match(source) and not source.startswith(">>> "):
            (tmp_path / "page_.py").write_text(source)  # in a file, for the source of its functions
            assert difference(shown, run("-W", "error", "page_.py", cwd=tmp_path)) is None
    examples = doctest.DocTestParser().get_doctest(text.replace("```", ""), {}, name, name, 0)
    assert doctest.DocTestRunner().run(examples).failed == 0


@pytest.mark.thorough
@pytest.mark.every
@pytest.mark.parametrize("name", [p for p in PAGES if p not in HELD_ELSEWHERE])
def test_console_prints_what_is_shown(name, tmp_path):
    needs(name)
    write_files(name, tmp_path)
    variables = environment(tmp_path)
    for text in blocks(HOW_TO / name, "console"):
        assert commands(text)
        for command, shown in commands(text):
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=tmp_path, env=variables, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert difference(shown, done.stdout) is None, done.stdout + done.stderr


def test_another_print_is_seen():
    text = "$ cc a.c\n$ npattn check a\nwrong\n...\nFAILED\n"
    [(first, nothing), (second, shown)] = commands(text)
    assert (first, nothing, second) == ("cc a.c", "", "npattn check a")
    assert difference(shown, "wrong\nseed 0\nFAILED\n") is None
    assert difference(shown, "right\nseed 0\nFAILED\n") == "wrong"
