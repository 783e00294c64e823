"""The command line: its commands are imported when they are called."""

import importlib
import io
import re
import sys
from typing import Any

import click

from npattn.errors import NpattnError
from npattn.testing.parsing import INTERRUPTED

__all__ = ["Command", "cli"]

COMMANDS = {
    "check": ("check", "Judge TARGET, an attention implementation."),
    "compare": ("compare", "Judge the results in DUMP, written by a kernel elsewhere."),
    "diff": ("diff", "Say how A and B differ: two profiles, or two implementations."),
    "explain": ("explain", "Say what RULE demands, why, and which real bug broke it."),
    "fingerprint": ("fingerprint", "Find out the conventions of TARGET, its layout and options."),
    "init": ("init", "Write settings, a test and a workflow for the function in TARGET."),
    "list": ("lists", "List the targets known by name, or profiles, rules, levels."),
    "mutants": ("mutants", "Say how many known mistakes the tests of a function find."),
    "plot": ("plot", "Draw FILE, an .npz, as a heat map."),
    "variant": ("variant", "Judge TARGET as a variant of attention, as linear attention."),
    "worker": ("worker", "Serve TARGET on standard input and output, as a process."),
}
"""Names of commands → their modules in `npattn.cli`, and a line for ``npattn --help``.

The lines stand here because their modules load the judge.
"""


class Command(click.Command):
    """Command whose errors name flags, and that has an exit code of its own for an interrupt."""

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
            here = self.context_of(ctx)
            raise click.UsageError(name_flags(str(err), here), here) from err
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except NpattnError as err:
            raise click.UsageError(name_flags(str(err), ctx), ctx) from err

    def context_of(self, ctx: click.Context) -> click.Context:
        """Return the context whose flags an error is about."""
        return ctx


class _Commands(Command, click.Group):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"npattn.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, none of which is imported for that."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_, about) in COMMANDS.items()])

    def context_of(self, ctx: click.Context) -> click.Context:
        """Return the context of the command that was called."""
        name = ctx.invoked_subcommand or ""
        command = self.get_command(ctx, name)
        return ctx if command is None else click.Context(command, ctx, name)


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


def _print_versions(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked:
        versions = importlib.import_module("npattn.cli.versions")
        click.echo(versions.describe_versions())
        ctx.exit()


@click.group(cls=_Commands)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    callback=_print_versions,
    expose_value=False,
    help="Print the versions and the machine, for a report of a bug.",
)
def cli() -> None:
    """Judge whether an attention implementation is right."""
