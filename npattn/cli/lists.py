"""Command npattn list: the known targets and profiles, the rules, and what runs here."""

from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from npattn.cli.versions import find_version
from npattn.profiles import PROFILES
from npattn.testing.levels import LEVELS, REQUIRED
from npattn.testing.rules import RULES
from npattn.testing.targets import TARGETS


def count_all() -> str:
    """Return how many rules, implementations and profiles there are, as every page says it."""
    return (
        f"{len(RULES)} rules, {len(TARGETS)} known implementations, {len(PROFILES)} profiles of "
        "systems"
    )


@click.group("list", invoke_without_command=True)
@click.pass_context
def list_command(context: click.Context) -> None:
    """List the targets known by name, or the profiles, the rules, or what runs here."""
    if context.invoked_subcommand is None:
        _list_targets()
        click.echo(f"\n{count_all()}")
        click.echo("npattn list profiles, rules and installed list the others")


@list_command.command("targets")
def _list_only_targets() -> None:
    """List the targets known by name, and what they need to run here."""
    _list_targets()


def _list_targets() -> None:
    _print_table(("target", "about"), [(x.name, x.about) for x in TARGETS.values()])
    lacks: dict[str, list[str]] = {}
    for target in TARGETS.values():
        if target.lacks:
            lacks.setdefault(target.lacks, []).append(target.name)
    for need, names in lacks.items():
        text = f"not here: {', '.join(names)}"
        click.echo("\n" + click.wrap_text(text, Console().width, "", "  "))
        click.echo(f"  lacks: {need}")  # on a line of its own, to be copied


@list_command.command("profiles")
def _list_profiles() -> None:
    """List the systems that a TARGET may stand in for, by --like."""
    _print_table(("profile", "about"), [(name, x.about) for name, x in PROFILES.items()])


@list_command.command("rules")
def _list_rules() -> None:
    """List the rules by level; npattn explain RULE says why, and which real bug broke it."""
    for level, about in LEVELS.items():
        text = f"{level}: {about}{'' if level in REQUIRED else ' (not required)'}"
        click.echo(click.wrap_text(text, Console().width, "", "  "))
        rows = [(f"  {x.rule}", x.section, x.about) for x in RULES.values() if x.level == level]
        _print_table(("  rule", "§", "about"), rows)


@list_command.command("installed")
def _list_installed() -> None:
    """List the targets that run here, with the versions of their packages."""
    versions = {  # some distributions have another name than their package
        x.name: ", ".join(f"{n} {find_version(n)}".strip() for n in x.needs)
        for x in TARGETS.values()
        if not x.lacks
    }
    _print_table(("target", "packages"), [(n, packages or "–") for n, packages in versions.items()])


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose names are whole: a name that is cut off cannot be copied."""
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[-1].overflow = "fold"
    for row in rows:
        table.add_row(*map(escape, row))
    Console(highlight=False).print(table)
