"""Command npattn variant: judge linear or differential attention."""

import sys
from pathlib import Path
from typing import Any

import click

from npattn.cli.flags import GroupedCommand, add_flags
from npattn.cli.target import report_import_errors
from npattn.testing.parsing import parse_values
from npattn.testing.targets import load
from npattn.testing.variants.check import DTYPES, VARIANTS, check_variant


@click.command("variant", cls=GroupedCommand)
@click.argument("variant", type=click.Choice(tuple(VARIANTS)))
@click.argument("target")
@click.option(
    "--value",
    "values",
    multiple=True,
    metavar="NAME=A,B …",
    callback=lambda _, __, words: parse_values(words, "--value"),
    help="Values to sample from: D=16,32; or what TARGET means by an option that it does not name: "
    "causal=true, feature_map=relu.",
)
@add_flags(
    *("dtypes", "framework", "backward", "seed", "examples", "accept", "device", "script"),
    dtypes={"value": "float32", "choices": DTYPES, "multiple": False},
    framework={"value": "auto"},
    seed={"value": "0"},
    examples={"value": 100, "help": "Number of problems."},
)
def variant_command(
    variant: str, target: str, backward: str | None, dtypes: str, script: Path | None,
    accept: tuple[str, ...] | None,
    **options: Any,
) -> None:  # fmt: skip
    """Judge TARGET, module:function or path/file.py:function, as VARIANT of attention.

    It is called in this process. Exit code 0: passed; 1: failed; 2: no verdict, or wrong usage;
    130: interrupted.
    """
    with report_import_errors():
        f, gradient = load(target)
        gradient = gradient if backward is None else load(backward)[0]
    accepted = accept or ()
    report = check_variant(f, variant, backward=gradient, dtype=dtypes, accept=accepted, **options)
    click.echo(str(report))
    if script is not None and report.script():
        script.write_text(report.script(), "utf-8")
    sys.exit(report.conclusion.exit_code)
