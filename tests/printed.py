"""Printed reports of the pages: how each is made again, to be held by tests or rewritten.

A block that follows ``<!-- printed: NAME -->`` in a page shows what `EXAMPLES` makes under that
name. ``python -m tests.printed`` makes all of them and writes them into the pages, ``python -m
tests.printed NAME ...`` these alone.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.pages import ROOT, block, run

FIRST, ADAPTING, READING = (f"docs/{page}.md" for page in ("first_check", "adapting", "reading"))
OTHERS = ("README.md", *(f"docs/{page}.md" for page in ("diagnosis", "diff", "findings", "train")))
PAGES = (FIRST, ADAPTING, READING, *OTHERS)
BLOCK = re.compile(
    r"(<!-- printed: ([\w-]+) -->\n```\w+\n(?:\$ [^\n]*\n)?)(.*?)(^\$ .*?)?(^```\n)", re.M | re.S
)


def printed_blocks():
    """Map the name of each printed block to its page and its text."""
    matches = ((page, m) for page in PAGES for m in BLOCK.finditer((ROOT / page).read_text()))
    return {match[2]: (page, match[3]) for page, match in matches}


def write(name, printed):
    """Replace what a page shows under this name."""
    page, _ = printed_blocks()[name]
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    new = "\n".join([*lines, ""])

    def replace(match):
        if match[2] != name:
            return match[0]
        return match[1] + new + (match[4] or "") + match[5]

    (ROOT / page).write_text(BLOCK.sub(replace, (ROOT / page).read_text()))


# --- how each is made, in a folder of its own -----------------------------------------------------


def command(words, folder):
    """Run a command of a page; return what it prints."""
    first, *rest = shlex.split(words)
    return run(*(["-m", "npattn"] if first == "npattn" else []), *rest, cwd=folder)


def command_of(name, folder):
    """Run the command that the block itself shows."""
    page = next(page for page in PAGES if f"<!-- printed: {name} -->" in (ROOT / page).read_text())
    text = (ROOT / page).read_text().split(f"<!-- printed: {name} -->\n")[1]
    return command(text.split("\n")[1].removeprefix("$ "), folder)


def my_kernel(folder):
    """Make the cause and the verdict."""
    (folder / "my_kernel.py").write_text(block("README.md", "python", "# my_kernel.py"))
    printed = command_of("my-kernel", folder)
    cause, _, _ = printed.partition("\n\n")
    return f"{cause}\n...\n{printed.splitlines()[-1]}\n"


def two_mistakes(folder):
    """The module of docs/first_check.md, by its command."""
    (folder / "mykernels.py").write_text(block(FIRST, "python", "def attention_backward("))
    return command_of("two-mistakes", folder)


def script(folder):
    """The script that the program of docs/first_check.md writes."""
    (folder / "mykernels.py").write_text(block(FIRST, "python", "def attention_backward("))
    run("-c", block(FIRST, "python", '"dk.py"'), cwd=folder)
    return command_of("script", folder)


def attend(folder):
    answer, _, _ = run("-c", block(ADAPTING, "python", "def attend("), cwd=folder).partition("\n\n")
    return f"{answer}\n...\n"


def cause(place, folder):
    """Make the first lines of a report: the causes, each with its failure."""
    (folder / "wrong.py").write_text(block("docs/diagnosis.md", "python", "# wrong.py"))
    answer, _, _ = command_of(f"cause-{place}", folder).partition("\n\n")
    return f"{answer}\n...\n"


def expected_failures(folder):
    """Make the last lines of a report: each failure with its reason, and the verdict."""
    (folder / "expected.toml").write_text(block(READING, "toml", "D = 0"))
    _, place, reasons = command_of("expected", folder).partition("expected: ")
    return f"...\n{place}{reasons}"


def fingerprint(folder):
    return command_of("fingerprint", folder)


def diff_profiles(folder):
    return command_of("diff-profiles", folder)


def diff_kernels(folder):
    """Make the lines that do not depend on the order of sums in BLAS."""
    (folder / "kernels.py").write_text(block("docs/diff.md", "python", "def rollout("))
    answer, _, _ = command_of("diff-kernels", folder).partition("The bits of ")
    return f"{answer}...\n"


def shown_command(name):
    """Return the words that follow the command which the block shows."""
    page, _ = printed_blocks()[name]
    shown = (ROOT / page).read_text().split(f"<!-- printed: {name} -->\n")[1]
    return shown.split("\n")[1].removeprefix("$ python docs/examples/train ").split()


def train_interactive(_):
    """A run, and the answers to what a user types."""
    return train_with("train-interactive", input="17\n17 2\nwrong\nquit\n").stdout


def train_compare(_):
    return train_with("train-compare").stdout


def train_wrong(_):
    return train_with("train-wrong").stderr


def train_with(name, **options):
    words = [sys.executable, ROOT / "docs" / "examples" / "train", *shown_command(name)]
    environment = {**os.environ, "COLUMNS": "160"}
    return subprocess.run(
        words, capture_output=True, text=True, check=False, env=environment, **options
    )


EXAMPLES = {
    "torch-sdpa": partial(command_of, "torch-sdpa"),
    "my-kernel": my_kernel,
    "two-mistakes": two_mistakes,
    "script": script,
    "attend": attend,
    **{f"cause-{n}": partial(cause, n) for n in ("forward", "backward", "storage", "state")},
    "expected": expected_failures,
    "fingerprint": fingerprint,
    "diff-profiles": diff_profiles,
    "diff-kernels": diff_kernels,
    "train-interactive": train_interactive,
    "train-compare": train_compare,
    "train-wrong": train_wrong,
}


def make(name):
    """Return what the example prints, made in a fresh folder."""
    with tempfile.TemporaryDirectory() as folder:
        return EXAMPLES[name](Path(folder))


def main():
    for name in sys.argv[1:] or EXAMPLES:
        print(f"making {name}", flush=True)
        write(name, make(name))


if __name__ == "__main__":
    main()
