"""Commands npattn list and npattn worker: the known targets, and one that is served."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from npattn.testing.rules import RULES
from npattn.testing.targets import TARGETS, spec_of
from npattn.testing.worker.connect import CHILD

__all__ = ["list_command", "worker_command"]


@click.command("list")
def list_command() -> None:
    """List the targets known by name, with what they need to run here, and the rules."""
    console = Console()
    table = Table("target", "here", "about", box=None, pad_edge=False)
    table.columns[0].min_width = max(map(len, TARGETS))  # a name that is cut off cannot be copied
    for target in TARGETS.values():
        table.add_row(target.name, escape(target.lacks or "yes"), target.about)
    console.print(table)
    console.print()
    rules = Table("rule", "§", "about", box=None, pad_edge=False)
    for rule in RULES.values():
        rules.add_row(rule.rule, rule.section, rule.about)
    console.print(rules)


@click.command("worker")
@click.argument("target", required=False)
@click.option("--path", is_flag=True, help="Print where the worker's file is, and exit.")
def worker_command(target: str | None, path: bool) -> None:
    """Serve TARGET on standard input and output, as docs/protocol.md says.

    The judge starts it, maybe on another machine: npattn check NAME --worker
    "ssh HOST npattn worker TARGET". The file that --path prints needs NumPy alone.
    Exit code 0: the judge has closed its end; 2: wrong usage.
    """
    if path:
        click.echo(CHILD)
    elif target is None:
        raise click.UsageError("TARGET is missing")
    else:
        command = [sys.executable, str(CHILD), spec_of(target), str(Path.cwd())]
        os.execv(sys.executable, command)
