"""The command line: its commands are imported when they are called."""

from __future__ import annotations

import importlib
import io
import re
import sys
from importlib.util import find_spec
from typing import Any

from npattn.errors import MissingExtraError, NpattnError

if any(find_spec(package) is None for package in ("click", "rich", "hypothesis")):
    raise MissingExtraError(
        "the npattn command needs hypothesis, rich and click: pip install 'npattn[check]'"
    )

import click

from npattn.parsing import INTERRUPTED

__all__ = ["cli"]

COMMANDS = {
    "bench": "npattn.commands.bench",
    "check": "npattn.cli.check",
    "diff": "npattn.cli.diff",
    "explain": "npattn.cli.explain",
    "fingerprint": "npattn.cli.fingerprint",
    "list": "npattn.cli.lists",
    "matrix": "npattn.commands.matrix",
    "plot": "npattn.cli.plot",
    "train": "npattn.commands.train",
    "variant": "npattn.cli.variant",
    "worker": "npattn.cli.worker",
    "zoo": "npattn.commands.zoo",
}
"""Names of commands → their modules."""


class _Commands(click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name])
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Report what npattn refuses as wrong usage, in the words of the command line.

        An interrupt has an exit code of its own: 1 is the verdict of most commands.
        """
        if isinstance(sys.stdout, io.TextIOWrapper):  # escape what its encoding lacks
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except click.UsageError as err:
            if type(err) is not click.UsageError:  # click's own words
                raise
            raise click.UsageError(name_flags(err.message, err.ctx), err.ctx) from err
        except NpattnError as err:
            name = ctx.invoked_subcommand or ""
            command = self.get_command(ctx, name)
            here = ctx if command is None else click.Context(command, ctx, name)
            raise click.UsageError(name_flags(str(err), here), here) from err
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
