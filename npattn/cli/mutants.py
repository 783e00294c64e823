"""Command npattn mutants: say how many known mistakes the tests of a function find."""

import json
import sys
from functools import partial
from typing import Any

import click

from npattn.cli.flags import GroupedCommand, add_flags
from npattn.cli.target import change_conventions, report_import_errors
from npattn.mutants.score import score
from npattn.testing.parsing import INTERRUPTED
from npattn.testing.settings import DTYPES


@click.command("mutants", cls=GroupedCommand, context_settings={"ignore_unknown_options": False})
@click.argument("command", nargs=-1, required=True)
@click.option("--patch", required=True, metavar="MODULE:FUNCTION", help="Function to replace.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Most mistakes, evenly chosen.")
@add_flags(
    *("layout", "conventions", "rename", "dtypes", "only", "processes", "timeout", "json"),
    layout={"default": "found out"},
    conventions={"help": "What its words mean, beside what is found out."},
    dtypes={
        "value": "float32",
        "choices": DTYPES[:4],
        "multiple": False,
        "help": f"Dtype of q, k and v: {', '.join(DTYPES[:4])}.",
    },
    only={"metavar": "NAME", "help": "Mistakes, or families of mistakes."},
    processes={"value": "auto", "help": "Runs at a time."},
    timeout={
        "help": "Seconds that a run may take.",
        "default": "ten times a green run, and five seconds",
    },
    json={"help": "Write all of it to this file."},
)
def mutants_command(
    command: tuple[str, ...], patch: str, conventions: Any, dtypes: str, **flags: Any
) -> None:
    """Say how many known mistakes the tests of a function find.

    COMMAND, behind --, runs the tests, once with each mistake in the place of the function:

    npattn mutants --patch my.module:attention -- pytest tests/test_mine.py

    Exit code 0: all mistakes that apply are found; 1: some are not; 2: wrong usage, or the
    tests are red as they are; 130: interrupted.
    """
    json_file, only = flags.pop("json"), flags.pop("only") or ()
    change = partial(change_conventions, words=conventions) if conventions else None
    with report_import_errors():
        result = score(
            patch, command, conventions=change, dtype=dtypes, only=only,
            progress=lambda line: click.echo(line, err=True), **flags,
        )  # fmt: skip
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=1) + "\n", "utf-8")
    click.echo(str(result))
    found, applicable = result.count(result.runs)
    if result.not_run is not None:
        sys.exit(INTERRUPTED)
    sys.exit(0 if found == applicable else 1)
