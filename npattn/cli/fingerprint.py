"""Command npattn fingerprint: find out the conventions of an implementation."""

import sys
from typing import Any

import click

from npattn.cli.completion import complete_target
from npattn.cli.flags import GroupedCommand, add_flags
from npattn.cli.target import open_target
from npattn.testing.diagnosis.fingerprint import LAYOUTS, fingerprint_first, in_layouts
from npattn.testing.settings import DTYPES


@click.command("fingerprint", cls=GroupedCommand)
@click.argument("target", shell_complete=complete_target, required=False)
@add_flags(
    *("dtypes", "framework", "backward", "layout", "rename", "seed", "device"),
    *("in_process", "worker", "envs", "timeout", "memory"),
    dtypes={"value": "float32", "choices": DTYPES[:4], "multiple": False},
    layout={"choices": LAYOUTS, "default": "found out"},
    seed={"value": "0"},
)
def fingerprint_command(target: str | None, dtypes: str, seed: int, **flags: Any) -> None:
    """Find out the conventions of TARGET, its layout, its precision and its refusals.

    It runs in a worker, a process of its own; what ends that is not determined.
    Exit code 0: determined; 1: its output disagrees on problems of several options under the
    conventions found, or its process ended; 2: wrong usage, or it is not attention; 130:
    interrupted.
    """
    implementation = open_target(target, flags)
    candidates = in_layouts(implementation) if flags["layout"] is None else [implementation]
    found = fingerprint_first(candidates, dtype=dtypes, seed=seed)
    click.echo(str(found))
    sys.exit(0 if found.holds else 1)
