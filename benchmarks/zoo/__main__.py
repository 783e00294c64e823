"""Command python -m benchmarks.zoo: judge the judge."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.options import open_journal
from npattn.cli import Command
from npattn.cli.cluster import open_cluster
from npattn.cli.flags import add_flags, refuse_beside_cluster
from npattn.engines.threads import one_thread_in_children
from npattn.errors import NpattnError
from npattn.testing.parsing import INTERRUPTED, interruptible, path_to_write
from npattn.testing.report.progress import ProgressBar

ELSEWHERE = ("json_path", "processes", "cluster")
"""Parameters that change nothing of the rows, and may stand beside --resume."""


@click.command("zoo", cls=Command)
@click.argument("names", nargs=-1)
@add_flags(
    *("examples", "seed", "processes", "cluster"),
    examples={"value": 200, "help": "As of npattn check."},
    seed={"value": "0"},
    processes={"value": "1", "flags": ("-j", "--jobs"), "help": "Processes; auto: all cores."},
)
@click.option(
    "--rules",
    default="all",
    show_default=True,
    type=click.Choice(["all", "killers"]),
    help="Every rule, or for a mutant only those that must find it.",
)
@click.option(
    "--kind",
    default="all",
    show_default=True,
    type=click.Choice(["all", "mutant", "correct"]),
    help="Mutants, correct implementations, or both.",
)
@click.option("--list", "lists", is_flag=True, help="List the zoo and exit.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write the matrix to this file."
)
@click.option(
    "--journal",
    "journal_path",
    type=click.Path(dir_okay=False),
    help="New file that takes each row as it comes, to --resume from.",
)
@click.option(
    "--resume",
    "resume_path",
    type=click.Path(exists=True, dir_okay=False),
    help="Go on with the zoo of a --journal; all that is asked comes from there.",
)
def zoo_command(
    names: tuple[str, ...],
    lists: bool,
    json_path: str | None,
    cluster: str | None,
    processes: int,
    journal_path: str | None,
    resume_path: str | None,
    **options: Any,
) -> None:
    """Judge the judge: every mutant must fail, and every correct implementation pass.

    NAMES are names of mutants or correct implementations, or prefixes of them; default: all.
    Exit code 0: all mutants killed, no false alarm; 1: otherwise; 2: wrong usage; 130:
    interrupted.
    """
    from benchmarks.zoo.correct import CORRECT
    from benchmarks.zoo.mutants import MUTANTS
    from benchmarks.zoo.score import zoo

    console = Console()
    if lists:
        table = Table("name", "family", "what is wrong", "source", box=None, pad_edge=False)
        for mutant in MUTANTS.values():
            table.add_row(mutant.name, mutant.family, escape(mutant.sentence), mutant.source)
        for right in CORRECT.values():
            table.add_row(right.name, "correct", escape(right.sentence), "")
        console.print(table)
        return
    asked = {"only": list(names), **options}
    try:
        json_file = path_to_write(json_path)
        if cluster is not None:
            refuse_beside_cluster("processes")
        journal = open_journal("zoo", journal_path, resume_path, asked, ELSEWHERE)
        asked = asked if journal is None else journal.question
        with ProgressBar() as bar, interruptible(), _open_executor(processes, cluster) as executor:
            score = zoo(
                **asked,
                executor=executor,
                journal=journal,
                progress=lambda name, *at: bar.advance("zoo", name, *at),
            )
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    except KeyboardInterrupt:
        if journal is not None:
            click.echo(f"python -m benchmarks.zoo --resume {journal.path} goes on", err=True)
        sys.exit(INTERRUPTED)
    console.print(str(score), markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        score.to_json(json_file)
    sys.exit(0 if score.passed else 1)


@contextmanager
def _open_executor(jobs: int, cluster: str | None) -> Iterator[Executor | None]:
    """Give the executor that judges; None for this process."""
    if cluster is not None:
        with open_cluster(cluster) as (executor, _):
            yield executor
    elif jobs == 1:
        yield None
    else:
        context = get_context("spawn")
        with one_thread_in_children(), ProcessPoolExecutor(jobs, mp_context=context) as pool:
            yield pool


if __name__ == "__main__":
    zoo_command(prog_name="python -m benchmarks.zoo")
