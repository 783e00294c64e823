"""Command npattn diff: compare two profiles, or two implementations."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import click

from npattn.commands.target import report_import_errors
from npattn.errors import NpattnError, OptionError
from npattn.parsing import parse_sizes, path_to_write
from npattn.testing.difference.diff import DTYPES, EXAMPLES, diff
from npattn.testing.difference.names import choose_kind
from npattn.testing.targets import load_implementation

__all__ = ["diff_command"]


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--profiles", is_flag=True, help="Compare the profiles of both; nothing is run.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(DTYPES))
@click.option(
    "--examples",
    default=EXAMPLES,
    show_default=True,
    type=click.IntRange(1),
    help="Number of problems.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@click.option(
    "--sizes", multiple=True, metavar="D=64,128", help="Sample these sizes only (B H K T S D E)."
)
@click.option("--in-process", is_flag=True, help="Call A and B in this process, without workers.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds a call in a worker."
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write all of it to this file."
)
def diff_command(
    a: str,
    b: str,
    sizes: tuple[str, ...],
    in_process: bool,
    timeout: float | None,
    json_path: str | None,
    **options: Any,
) -> None:
    """Say how A and B differ: two profiles, or two implementations of the same function.

    Each is a known name, module:function or path/file.py:function. A name that is both a profile
    and a target is run if both can run here, unless --profiles asks for profiles.
    Exit code 0: alike (the same conventions, results within a tolerance of each other); 1:
    different; 2: wrong usage; 130: interrupted.
    """
    try:
        json_file = path_to_write(json_path)
        sides: list[Any] = [a, b]
        if in_process and timeout is not None:
            raise OptionError("--timeout needs a worker, and --in-process calls A and B here")
        if in_process and choose_kind(a, b, options["profiles"])[0] == "implementations":
            with report_import_errors():
                sides = [load_implementation(name) for name in sides]
        difference = diff(*sides, sizes=parse_sizes(sizes), timeout=timeout, **options)
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    if json_file is not None:
        text = json.dumps(difference.as_dict(), allow_nan=False, indent=1)
        json_file.write_text(text + "\n", "utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    click.echo(str(difference))
    sys.exit(0 if difference.alike else 1)
