"""Command npattn variant: judge linear or differential attention."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from npattn.commands.target import framework_option, report_import_errors
from npattn.errors import NpattnError, OptionError
from npattn.parsing import path_to_write
from npattn.testing.targets import load
from npattn.testing.variants.check import DTYPES, VARIANTS, check_variant

__all__ = ["variant_command"]


@click.command("variant")
@click.argument("variant", type=click.Choice(tuple(VARIANTS)))
@click.argument("target")
@click.option("--backward", help="Gradient of a NumPy function, as for check.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(DTYPES))
@click.option(
    "--value",
    "words",
    multiple=True,
    metavar="NAME=A,B",
    help="Values to sample from: D=16,32; or what TARGET means by an option that it does not name: "
    "causal=true, feature_map=relu.",
)
@click.option("--device", help="Device of torch tensors, for instance cuda.")
@framework_option
@click.option(
    "--examples",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    help="Number of problems.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@click.option(
    "--script",
    "script_path",
    type=click.Path(dir_okay=False),
    help="Write a script that shows the failure to this file.",
)
def variant_command(
    variant: str,
    target: str,
    backward: str | None,
    words: tuple[str, ...],
    script_path: str | None,
    **options: Any,
) -> None:
    """Judge TARGET, module:function or path/file.py:function, as VARIANT of attention.

    It is called in this process. Exit code 0: passed; 1: failed; 2: wrong usage; 130: interrupted.
    """
    try:
        path = path_to_write(script_path)
        with report_import_errors():
            f, known = load(target)
            known = known if backward is None else load(backward)[0]
        report = check_variant(
            f,
            variant,
            backward=known,
            values=_values(words),
            **options,
        )
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    click.echo(str(report))
    if path is not None and not report.passed:
        path.write_text(report.script(), "utf-8")
    sys.exit(0 if report.passed else 1)


def _values(words: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    """Parse ("D=16,32", "causal=true") into {"D": (16, 32), "causal": (True,)}."""
    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name or not equals or not text:
            raise OptionError(f"--value is {word!r}, must look like D=16,32 or causal=true")
        values[name] = tuple(map(_value, text.split(",")))
    return values


def _value(text: str) -> Any:
    """Parse a number, true, false or none; anything else is a name."""
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text
