"""Command python -m benchmarks.speed: measure attention here, or the judge."""

from __future__ import annotations

import sys
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from npattn.cli import Command
from npattn.errors import NpattnError, OptionError
from npattn.testing.parsing import INTERRUPTED, path_to_write
from npattn.testing.report.progress import ProgressBar

OF_JUDGE = ("questions", "jobs", "every", "earlier_path")
"""Parameters that go with --judge alone."""
WITH_JUDGE = ("judge", "json_path", *OF_JUDGE)


@click.command("speed", cls=Command)
@click.option("--cases", help="Comma-separated: plain, causal, …  [default: all]")
@click.option("--lengths", help="Comma-separated T.  [default: 128,256,…,16384]")
@click.option("--contestants", help="Comma-separated.  [default: all that are installed]")
@click.option(
    "--dtype", "dtypes", multiple=True, help="float32, float64; may be given twice. [default: both]"
)
@click.option(
    "--rounds", default=7, show_default=True, help="Each contestant has one turn a round."
)
@click.option(
    "--seconds",
    default=240.0,
    show_default=True,
    help="Limit for one contestant at one length; it is skipped if it would take longer.",
)
@click.option(
    "--threads", type=int, help="Threads per contestant.  [default: as many as BLAS would use]"
)
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@click.option("--list", "lists", is_flag=True, help="List the cases and contestants and exit.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False),
    help="Write all figures to this file; with --judge, after those that are in it.",
)
@click.option(
    "--picture",
    "picture_path",
    type=click.Path(dir_okay=False),
    help="Draw seconds over T into this file.",
)
@click.option(
    "--judge", is_flag=True, help="Time npattn check and its like instead, each beside its goal."
)
@click.option(
    "--questions",
    metavar="NAMES",
    help="With --judge: comma-separated flash, sdpa, jax, first-red, mutants, suite.  "
    "[default: the first four]",
)
@click.option(
    "-n",
    "--processes",
    "jobs",
    type=click.IntRange(1),
    help="With --judge: worker processes of a check.  [default: 2]",
)
@click.option(
    "--every",
    metavar="N",
    type=click.IntRange(1),
    help="With --judge: time each N-th mutant.  [default: 1]",
)
@click.option(
    "--compare",
    "earlier_path",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="With --judge: show the times of the last run in this file, and the ratio to them.",
)
@click.pass_context
def bench_command(
    context: click.Context,
    /,
    judge: bool,
    cases: str | None,
    lengths: str | None,
    contestants: str | None,
    dtypes: tuple[str, ...],
    json_path: str | None,
    picture_path: str | None,
    lists: bool,
    **options: Any,
) -> None:
    """Measure time and memory of npattn beside NumPy, torch, JAX and ONNX, in one run.

    Exit code 0: measured; 2: wrong usage; 130: interrupted, with what is known.
    Wrong results are marked, and do not fail the run.
    """
    from benchmarks.speed import Settings, bench

    console = Console()
    _refuse_others(context, judge)
    of_judge = {name: options.pop(name) for name in OF_JUDGE}
    if judge:
        _bench_judge(console, json_path, **of_judge)
        return
    if lists:
        _list_bench(console)
        return
    names = {"cases": cases, "contestants": contestants}
    options |= {n: tuple(text.split(",")) for n, text in names.items() if text is not None}
    options |= {"dtypes": dtypes} if dtypes else {}
    try:
        if lengths is not None:
            options["lengths"] = _lengths(lengths)
        settings = Settings(**options)
        for path in (json_path, picture_path):
            path_to_write(path)
        if picture_path is not None:
            from benchmarks.speed import picture

            picture.check_path(picture_path)
        with ProgressBar() as bar:
            report = bench(
                settings,
                progress=lambda step, *at: bar.advance("bench", step, *at),
                save=None if json_path is None else lambda report: report.to_json(json_path),
            )
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if picture_path is not None:
        picture.draw(report).savefig(picture_path)
    if report.about["interrupted"]:
        sys.exit(INTERRUPTED)


def _refuse_others(context: click.Context, judge: bool) -> None:
    """Refuse options that say nothing with --judge, or nothing without it."""
    for parameter in context.command.params:
        name = str(parameter.name)
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and (name not in WITH_JUDGE if judge else name in OF_JUDGE):
            word = "be left out with" if judge else "come with"
            raise click.UsageError(f"{parameter.opts[-1]} must {word} --judge")


def _bench_judge(
    console: Console,
    json_path: str | None,
    *,
    questions: str | None,
    jobs: int | None,
    every: int | None,
    earlier_path: str | None,
) -> None:
    """Time the judge; print a table, and add the run to those in a file."""
    from benchmarks.speed.judge import History, ask, read_history

    try:
        path = path_to_write(json_path)
        kept = read_history(path).runs if path is not None and path.exists() else ()
        earlier = None if earlier_path is None else read_history(earlier_path).runs[-1]
        with ProgressBar() as bar:
            run = ask(
                () if questions is None else tuple(questions.split(",")),
                jobs=jobs,
                every=every or 1,
                progress=lambda name, *at: bar.advance("judge", name, *at),
            )
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    history = History((*kept, run))
    console.print(history.table(earlier), markup=False, highlight=False, soft_wrap=True)
    if path is not None:
        history.to_json(path)


def _list_bench(console: Console) -> None:
    from benchmarks.speed import CASES, CONTESTANTS

    table = Table("name", "here", "about", box=None, pad_edge=False)
    for name, case in CASES.items():
        table.add_row(name, "yes", case.about)
    for name, contestant in CONTESTANTS.items():
        here = escape(f"pip install 'npattn[{contestant.needs}]'")
        table.add_row(name, "yes" if contestant.runs_here else here, contestant.about)
    console.print(table)


def _lengths(text: str) -> tuple[int, ...]:
    """Parse "128,256" into (128, 256)."""
    try:
        return tuple(int(n) for n in text.split(","))
    except ValueError:
        raise OptionError(f"--lengths is {text!r}, must look like 128,256") from None


if __name__ == "__main__":
    bench_command(prog_name="python -m benchmarks.speed")
