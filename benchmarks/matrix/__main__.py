"""Command python -m benchmarks.matrix: judge many targets, and write a table and a page."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.journal import Journal
from benchmarks.matrix.device import VARIABLES
from benchmarks.matrix.markdown import write_table
from benchmarks.matrix.plan import choose_targets
from benchmarks.matrix.progress import ProgressLines
from benchmarks.matrix.result import Matrix, merge_matrices, read_matrix
from benchmarks.matrix.run import run_matrix
from benchmarks.options import list_flags_beside, open_journal
from npattn.cli import Command
from npattn.cli.cluster import open_cluster
from npattn.cli.flags import add_flags
from npattn.errors import NpattnError, OptionError
from npattn.testing.judging import DTYPES
from npattn.testing.parsing import INTERRUPTED, interruptible, parse_seconds, path_to_write

OUTPUTS = ("json_path", "markdown_path", "html_path")
"""Parameters that name what is written: they may stand beside --read."""
ELSEWHERE = (*OUTPUTS, "processes", "cluster", "budget")
"""Parameters of where and how long it runs, which may stand beside --resume."""


@click.command("matrix", cls=Command)
@click.option(
    "--targets",
    metavar="A,B",
    help="Names that npattn list shows, beginnings of them, or specs.  [default: all]",
)
@click.option(
    "--blocks",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Parts into which the rules of a target are split, for more machines than targets.",
)
@click.option(
    "--limit",
    metavar="TIME",
    default="30m",
    show_default=True,
    callback=lambda _, __, text: parse_seconds(text),
    help="Time for one target in one dtype, as 60s, 10m or 2h.",
)
@add_flags(
    *("dtypes", "examples", "seed", "only", "timeout", "memory", "device", "budget", "processes"),
    *("envs", "cluster"),
    dtypes={"choices": DTYPES, "default": "float32, and float64 where it is native"},
    examples={"value": 20, "help": "Per rule."},
    seed={"value": "0"},
    device={"help": "Device of the targets' arrays, as cuda: by default those of GPUs."},
    budget={"help": "Ask no more after this time, as 12m; the most telling rules come first."},
    processes={"value": "1", "help": "Targets that are judged at once; auto: one for each core."},
    envs={"help": "Folder of virtual environments: pip installs there what a target lacks."},
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write everything to this file."
)
@click.option(
    "--markdown",
    "markdown_path",
    type=click.Path(dir_okay=False),
    help="Write the table to this file.",
)
@click.option(
    "--html", "html_path", type=click.Path(dir_okay=False), help="Write the page to this file."
)
@click.option(
    "--read",
    "read_paths",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Judge nothing: take the matrix from a file of --json, for its table and page; from "
    "several, of several devices.",
)
@click.option(
    "--journal",
    "journal_path",
    type=click.Path(dir_okay=False),
    help="New file that takes each result as it comes, to --resume from.",
)
@click.option(
    "--resume",
    "resume_path",
    type=click.Path(exists=True, dir_okay=False),
    help="Go on with the matrix of a --journal; all that is asked comes from there.",
)
def matrix_command(
    targets: str | None,
    json_path: str | None,
    markdown_path: str | None,
    html_path: str | None,
    read_paths: tuple[str, ...],
    journal_path: str | None,
    resume_path: str | None,
    processes: int,
    cluster: str | None,
    **asked: Any,
) -> None:
    """Judge many targets in their dtypes by every rule, and print a table.

    Each target is judged in a process of its own, and runs in a worker: what crashes or hangs
    costs its row. Whoever cannot run here has a row that says what it lacks.
    Exit code 0: all were judged, whatever their rules say; 1: the judging of one crashed or ran
    out of time; 2: wrong usage; 130: interrupted, with a table of what is known.
    """
    try:
        paths = (json_path, markdown_path, html_path)
        json_file, markdown_file, html_file = map(path_to_write, paths)
        asked |= {"targets": None if targets is None else targets.split(",")}
        lists = {name: asked[name] for name in ("dtypes", "only")}
        asked |= {name: None if x is None else list(x) for name, x in lists.items()}
        new, budget = (None if read_paths else journal_path), asked["budget"]
        journal = open_journal("matrix", new, resume_path, asked, ELSEWHERE)
        asked = asked if journal is None else journal.question
        asked = asked if budget is None else {**asked, "budget": budget}
        if not read_paths:
            device = asked.get("device")
            choose_targets(asked["targets"], asked["envs"], device)  # before a cluster is begun
            for name, value in VARIABLES.items() if device not in (None, "cpu") else ():
                os.environ.setdefault(name, value)
            here = nullcontext((ThreadPoolExecutor(processes), processes))
            with here if cluster is None else open_cluster(cluster) as (executor, width):
                save = None if json_file is None else lambda matrix: matrix.to_json(json_file)
                where = {"executor": executor, "processes": width, "save": save}
                matrix, interrupted = _run(journal, {**asked, **where})
        else:
            matrix, interrupted = _read(read_paths), False
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    if json_file is not None:
        matrix.to_json(json_file)
    table = write_table(matrix)
    if markdown_file is not None:
        Path(markdown_file).write_text(table, "utf-8")
    if html_file is not None:
        matrix.to_html(html_file)
    Console().print(table, end="", markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        if journal is not None:
            click.echo(f"python -m benchmarks.matrix --resume {journal.path} goes on", err=True)
        sys.exit(INTERRUPTED)
    sys.exit(any(run.state in ("crashed", "timed out") for run in matrix.runs))


def _read(paths: tuple[str, ...]) -> Matrix:
    """Return the matrix of files; nothing that is asked may stand beside them."""
    beside = list_flags_beside((*OUTPUTS, "read_paths"))
    if beside:
        raise OptionError(f"got {', '.join(beside)} beside --read: {paths[0]} has what was asked")
    return merge_matrices([read_matrix(path) for path in paths])


def _run(journal: Journal | None, asked: dict[str, Any]) -> tuple[Matrix, bool]:
    """Run the matrix; return it, and True if it was interrupted."""
    try:
        with ProgressLines() as progress, interruptible():
            return run_matrix(**asked, journal=journal, progress=progress), False
    except KeyboardInterrupt as err:
        if not hasattr(err, "matrix"):  # nothing was begun
            sys.exit(INTERRUPTED)
        matrix: Matrix = err.matrix
        return matrix, True


if __name__ == "__main__":
    matrix_command(prog_name="python -m benchmarks.matrix")
