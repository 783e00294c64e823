"""Command npattn fingerprint: find out the conventions of an implementation."""

from __future__ import annotations

import sys
from typing import Any

import click

from npattn.commands.target import framework_option, open_target, parse_renames, worker_options
from npattn.errors import NpattnError
from npattn.parsing import (
    parse_memory,
)
from npattn.testing.check import DTYPES
from npattn.testing.diagnosis.fingerprint import LAYOUTS, fingerprint_first, in_layouts
from npattn.testing.worker.supervisor import Limits

__all__ = ["fingerprint_command"]


@click.command("fingerprint")
@click.argument("target", required=False)
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(DTYPES[:4]))
@click.option("--device", help="Device of torch tensors, for instance cuda.")
@click.option("--backward", help="Gradient of a NumPy function, as for check.")
@framework_option
@click.option("--layout", type=click.Choice(LAYOUTS), help="Axes of q, k, v.  [default: found out]")
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="THEIRS=OURS",
    help="Name of a parameter of TARGET, and of the option that it is.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@worker_options
def fingerprint_command(
    target: str | None,
    dtype: str,
    seed: int,
    device: str | None,
    renames: tuple[str, ...],
    in_process: bool,
    command: str | None,
    timeout: float | None,
    memory: str | None,
    **given: Any,
) -> None:
    """Find out the conventions of TARGET, its layout, its precision and its refusals.

    It runs in a worker, a process of its own; what ends that is not determined.
    Exit code 0: determined; 1: its output disagrees on problems of several options under the
    conventions found, or its process ended; 2: wrong usage, or it is not attention; 130:
    interrupted.
    """
    try:
        limits, here = Limits(timeout, parse_memory(memory)), "--in-process" if in_process else ""
        given["rename"] = parse_renames(renames) or None
        implementation = open_target(target, here, command, limits, False, device, **given)
        candidates = in_layouts(implementation) if given["layout"] is None else [implementation]
        found = fingerprint_first(candidates, dtype=dtype, seed=seed)
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    click.echo(str(found))
    sys.exit(0 if found.holds else 1)
