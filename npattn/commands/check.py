"""Command npattn check: judge an implementation."""

from __future__ import annotations

import io
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from npattn.commands.target import (
    change_conventions,
    framework_option,
    list_options_beside,
    open_target,
    parse_features,
    parse_renames,
    refuse_beside_cluster,
    worker_options,
)
from npattn.errors import NpattnError, OptionError
from npattn.parsing import (
    INTERRUPTED,
    interruptible,
    parse_memory,
    parse_processes,
    parse_seconds,
    parse_seed,
    parse_sizes,
    path_to_write,
)
from npattn.profiles import PROFILES
from npattn.quantization import FORMATS
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.check import DTYPES, check
from npattn.testing.levels import LEVELS, REQUIRED
from npattn.testing.report.expected import read_expected
from npattn.testing.report.progress import ProgressBar
from npattn.testing.report.report import Report
from npattn.testing.runner.journal import Journal
from npattn.testing.units.blocks import check_in_units
from npattn.testing.worker.supervisor import Limits

__all__ = ["check_command"]


OUTPUTS = ("verbose", "json_path", "html_path", "script_path")
"""Parameters of `npattn check` that change nothing of what is asked."""


ALONE = (
    *("in_process", "command", "envs", "untrusted", "sweep", "budget", "journal_path"),
    *("resume_path", "fail_fast", "processes"),
)
"""Parameters of `npattn check` that do not go with a cluster."""


@click.command("check")
@click.argument("target", required=False)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar=f"[{'|'.join(DTYPES)}]",
    help="Dtype of q, k, v; may be given several times.  [default: float32]",
)
@click.option("--device", help="Device of torch tensors, for instance cuda.")
@click.option(
    "--backward", help="Gradient of a NumPy function: module:function or path/file.py:function."
)
@click.option(
    "--examples",
    default=200,
    show_default=True,
    type=click.IntRange(1),
    help="Problems of the rules of agreement, and of those of --only; most others have a tenth.",
)
@click.option(
    "--seed",
    metavar="N|random",
    callback=lambda _, __, text: parse_seed(text),
    help="Seed of everything random.  [default: 0; random with --untrusted]",
)
@framework_option
@click.option(
    "--layout",
    type=click.Choice(["BHTD", "BTHD"]),
    help="Axes of q, k, v and o.  [default: BHTD, or those of --like]",
)
@click.option(
    "--like",
    metavar="NAME",
    help=f"System that it stands in for: {', '.join(n for n in PROFILES if '@' not in n)}.",
)
@click.option(
    "--quantized",
    type=click.Choice(["fp8", *FORMATS]),
    help="Format of those of q, k, v, o that it has a factor for: q_descale, o_scale, ….",
)
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="THEIRS=OURS",
    help="Parameter that means an option of npattn, as cap=softcap; may be given several times.",
)
@click.option(
    "--features",
    metavar="NAMES",
    help="Its options and results, as mask,causal,return_lse: else those that its signature names.",
)
@click.option("--only", multiple=True, metavar="RULE", help="A rule, or a prefix of several.")
@click.option(
    "--sizes",
    multiple=True,
    metavar="D=64,128",
    help="Sample these sizes only (B H K T S D E); P is that of pages.",
)
@click.option(
    "--convention",
    "convention_words",
    multiple=True,
    metavar="NAME=VALUE",
    help="Convention where systems disagree, as causal=top_left; may be given several times.",
)
@click.option(
    "--rounding",
    type=click.Choice(["upcast", "fused", "eager", "fp8", "int8"]),
    help="Rounding model.",
)
@click.option(
    "-n",
    "--processes",
    metavar="N|auto",
    default="1",
    show_default=True,
    callback=lambda _, __, text: parse_processes(text),
    help="Processes that share the rules out; auto: one for each core.",
)
@click.option(
    "--sweep",
    default=0,
    metavar="N",
    type=click.IntRange(0),
    help="Also sample and judge N problems of every length on the device.",
)
@click.option(
    "-x", "--fail-fast", is_flag=True, help="Stop at the first failure of a required level."
)
@click.option("--strict", is_flag=True, help="Count suspects as failed.")
@click.option(
    "--must",
    metavar="NAMES",
    help="Options, results and gradients that must be tested, as mask,lse,dk: else exit code 2.",
)
@click.option(
    "--untrusted",
    is_flag=True,
    help="For code that nobody has read: a worker that finds no npattn, a random seed, --strict, "
    "and every option that it names and every gradient must be tested unless --must says "
    "otherwise.",
)
@worker_options
@click.option(
    "--require",
    "levels",
    multiple=True,
    type=click.Choice([*LEVELS, "all"]),
    help=f"Level that must pass, may be given several times; all: every level but reproducible. "
    f"[default: {', '.join(REQUIRED)}]",
)
@click.option("--verbose", is_flag=True, help="Print the whole table and every failure.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write the report to this file."
)
@click.option(
    "--html", "html_path", type=click.Path(dir_okay=False), help="Write the report as a web page."
)
@click.option(
    "--script",
    "script_path",
    type=click.Path(dir_okay=False),
    help="Write a Python file that shows the first failure.",
)
@click.option(
    "--expect",
    "expect_path",
    type=click.Path(exists=True, dir_okay=False),
    help='Expected failures, as TOML: "rule[dtype]" = "reason".',
)
@click.option(
    "--budget",
    metavar="TIME",
    callback=lambda _, __, text: parse_seconds(text),
    help="Ask as much as there is time for, as 60s, 10m or 2h, a few examples of every rule first.",
)
@click.option(
    "--journal",
    "journal_path",
    type=click.Path(dir_okay=False),
    help="New file that says what is being asked, if the check is ended, and to --resume it from.",
)
@click.option(
    "--resume",
    "resume_path",
    type=click.Path(exists=True, dir_okay=False),
    help="Go on with the check of a --journal; TARGET and options come from there.",
)
@click.option(
    "--cluster",
    metavar="WHERE",
    help="Ask in units of 200 examples, on a cluster of Dask: local:N for N workers here, or the "
    "address of a scheduler.",
)
def check_command(journal_path: str | None, resume_path: str | None, **options: Any) -> None:
    """Judge TARGET: module:function, path/file.py:function, or a name from npattn list.

    It runs in a worker, a process of its own, whose end costs one rule; --in-process and --sweep
    call it here.
    Exit code 0: passed; 1: failed; 2: wrong usage, or nothing could be tested; 130: interrupted,
    with a report of what is known.
    """
    if options["seed"] is None:
        options["seed"] = secrets.randbits(64) if options["untrusted"] else 0
    journal = None
    try:
        if resume_path is not None:
            journal, options = _resume(resume_path, click.get_current_context())
        elif journal_path is not None:
            asked = {name: x for name, x in options.items() if name not in OUTPUTS}
            journal = Journal.create(journal_path, asked)
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    _check(journal=journal, **options)


def _resume(path: str, context: click.Context) -> tuple[Journal, dict[str, Any]]:
    """Return the journal of an earlier check, and its options."""
    beside = list_options_beside((*OUTPUTS, "resume_path"))
    if beside:
        raise OptionError(f"got {', '.join(beside)} beside --resume: {path} has what is asked")
    journal = Journal.resume(path)
    if not journal.command:
        raise OptionError(f"{path} was begun in Python: pass resume= to npattn.testing.check")
    ended = f", ended in {journal.unanswered}" if journal.unanswered else ""
    click.echo(f"goes on with {path}: {len(journal.answers)} rules begun{ended}", err=True)
    return journal, journal.command | {name: context.params[name] for name in OUTPUTS}


def _check(
    journal: Journal | None,
    target: str | None,
    dtypes: tuple[str, ...],
    backward: str | None,
    layout: str | None,
    like: str | None,
    quantized: str | None,
    renames: tuple[str, ...],
    features: str | None,
    framework: str,
    sizes: tuple[str, ...],
    only: tuple[str, ...],
    levels: tuple[str, ...],
    verbose: bool,
    json_path: str | None,
    html_path: str | None,
    script_path: str | None,
    expect_path: str | None,
    convention_words: tuple[str, ...],
    in_process: bool,
    command: str | None,
    envs: str | None,
    timeout: float | None,
    memory: str | None,
    must: str | None,
    untrusted: bool,
    strict: bool,
    device: str | None,
    sweep: int,
    cluster: str | None = None,
    **options: Any,
) -> None:
    """Check, write the files, print the report and exit."""
    try:
        json_file, html_file, script_file = map(path_to_write, (json_path, html_path, script_path))
        expected = {} if expect_path is None else read_expected(expect_path)
        given: dict[str, Any] = {
            "backward": backward,
            "framework": framework,
            "layout": layout,
            "like": like,
            "rename": parse_renames(renames) or None,
            "features": parse_features(features),
            "quantized": quantized,
        }
        limits = Limits(timeout, parse_memory(memory))
        here = "--in-process" if in_process else "--sweep" if sweep else ""
        given |= {"envs": envs, "alone": options["processes"] == 1}
        implementation = open_target(target, here, command, limits, untrusted, device, **given)
        conventions = change_conventions(implementation.conventions, convention_words)
        arguments: dict[str, Any] = {
            "conventions": conventions,
            "must": must.split(",") if must else _everything(implementation) if untrusted else (),
            "strict": strict or untrusted,
            "sweep": sweep,
            "dtypes": dtypes or ("float32",),
            "sizes": parse_sizes(sizes),
            "only": only or None,
            "require": levels or REQUIRED,
            "expect": expected,
            "journal": journal,
            **options,
        }
        judge: Callable[..., Report] = check
        if cluster is not None:
            judge = _on_cluster(cluster, limits, {**given, "device": device})
        with ProgressBar() as bar, interruptible():
            report = judge(implementation, progress=bar.advance, **arguments)
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    except KeyboardInterrupt as err:
        if not hasattr(err, "report"):  # nothing was asked yet
            sys.exit(INTERRUPTED)
        report = err.report
    unwritten = _write_files(report, json_file, html_file, script_file)
    _print_anything()
    console = Console()
    report.print_to(console, verbose=verbose)
    if journal is not None and report.interrupted:
        console.print(f"npattn check --resume {journal.path} goes on", soft_wrap=True)
    for line in unwritten:
        click.echo(f"Error: {line}", err=True)
    if report.tested or report.interrupted:
        sys.exit(_exit_code(report) or 2 * bool(unwritten))
    console.print("nothing could be tested")
    sys.exit(2)


def _on_cluster(where: str, limits: Limits, given: dict[str, Any]) -> Callable[..., Report]:
    """Return a function that judges in units on a cluster, with arguments as of `check`."""
    from npattn.commands.cluster import open_cluster

    refuse_beside_cluster(*ALONE)
    calls = {name: value for name, value in given.items() if value not in (None, "auto")}
    own = {"timeout": limits.timeout, "memory": limits.memory, "folder": str(Path.cwd())}

    def check_on_cluster(implementation: Implementation, **arguments: Any) -> Report:
        for name in ("sweep", "budget", "journal", "processes", "fail_fast"):
            arguments.pop(name)  # they are not given: they are refused beside --cluster
        with open_cluster(where) as (executor, width):
            return check_in_units(
                implementation, executor, width, calls=calls, limits=own, **arguments
            )

    return check_on_cluster


def _write_files(
    report: Report, json_file: Path | None, html_file: Path | None, script_file: Path | None
) -> list[str]:
    """Write the files that were asked for, before anything is printed that nobody may read.

    Returns a line for each that cannot be written, so that the report is printed all the same.
    """
    writers: list[tuple[Path | None, Callable[[Path], object]]] = [
        (json_file, report.to_json),
        (html_file, report.to_html),
        (script_file, lambda path: path.write_text(report.script(), "utf-8")),
    ]
    unwritten = []
    for path, write in writers:
        try:
            if path is not None:
                write(path)
        except OSError as err:
            unwritten.append(f"{path} was not written: {err.strerror or err}")
    return unwritten


def _exit_code(report: Report) -> int:
    """Return the exit code of a report on something that was tested."""
    if report.interrupted:
        return INTERRUPTED
    if report.passed:
        return 0
    failed = any(report.counts(outcome) for outcome in report.outcomes)
    return 2 if report.missing and not failed else 1


def _everything(implementation: Implementation) -> tuple[str, ...]:
    """Return the options that it names, and the gradients of what it takes."""
    options = [f"d{name}" for name in ("bias", "sinks", "gate") if name in implementation.features]
    return (*sorted(implementation.features), "dq", "dk", "dv", *options)


def _print_anything() -> None:
    """Let standard output escape what its encoding lacks, instead of losing the report."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
