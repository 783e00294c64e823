"""The command line: its commands are imported when they are called."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from typing import Any

from npattn.errors import MissingExtraError

if any(find_spec(package) is None for package in ("click", "rich", "hypothesis")):
    raise MissingExtraError(
        "the npattn command needs hypothesis, rich and click: pip install 'npattn[check]'"
    )

import click

from npattn.parsing import INTERRUPTED

__all__ = ["cli"]

COMMANDS = {
    "bench": "bench",
    "check": "check",
    "diff": "diff",
    "fingerprint": "fingerprint",
    "list": "targets",
    "matrix": "matrix",
    "plot": "plot",
    "train": "train",
    "variant": "variant",
    "worker": "targets",
    "zoo": "zoo",
}
"""Names of commands → modules of `npattn.commands`."""


class _Commands(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"npattn.commands.{COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Let an interrupt have an exit code of its own: 1 is the verdict of most commands."""
        try:
            return super().invoke(ctx)
        except click.UsageError as err:
            if type(err) is not click.UsageError:  # click's own words
                raise
            raise click.UsageError(name_flags(err.message, err.ctx), err.ctx) from err
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)


def name_flags(message: str, ctx: click.Context | None) -> str:
    """Replace arguments of Python, framework='torch', by flags of the command, --framework torch.

    Arguments that the command has no flag for stay.
    """
    flags = {flag for p in ctx.command.params for flag in p.opts} if ctx else set()

    def name(match: re.Match[str]) -> str:
        argument, word, pair = match.groups()
        flag, value = "--" + argument.replace("_", "-"), word or (pair or "").replace("'", "")
        if flag not in flags:
            return match[0]
        return f"{flag} {value.replace(': ', '=')}" if value else flag

    return re.sub(r"(?<![\w-])([a-z_]+)=(?:'([^']*)'|{([^{}]*)})?", name, message)


@click.group(cls=_Commands)
@click.version_option(package_name="npattn")
def cli() -> None:
    """Judge whether an attention implementation is right."""
