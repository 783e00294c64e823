"""Command npattn worker: serve a target on standard input and output."""

import os
import sys
from pathlib import Path

import click

from npattn.testing.targets import spec_of
from npattn.testing.worker.connect import CHILD


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
