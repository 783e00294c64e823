"""Command npattn check: judge an implementation."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from npattn.cli.cluster import open_cluster
from npattn.cli.flags import GroupedCommand, add_flags, given_flags, refuse_beside_cluster
from npattn.cli.target import change_conventions, open_target, report_import_errors
from npattn.errors import OptionError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.load import load_callable
from npattn.testing.check import OF_IMPLEMENTATION, OF_REFERENCE, check
from npattn.testing.modules import check_module
from npattn.testing.parsing import INTERRUPTED, interruptible
from npattn.testing.report.progress import ProgressBar
from npattn.testing.report.report import Report
from npattn.testing.runner.journal import Journal
from npattn.testing.settings import WRITTEN, CommandSettings, Settings, options
from npattn.testing.targets import load
from npattn.testing.units.blocks import check_in_units
from npattn.testing.worker.supervisor import Limits

SETTINGS = options(CommandSettings)
OF_WORKER = ("in_process", "timeout", "memory", "envs")
"""Settings of the process in which attention is judged by a reference."""
OUTPUTS = [name for name, (_, one) in SETTINGS.items() if one.group == WRITTEN and one.flags]
"""Settings that change nothing of what is asked."""
APART = ("device", "timeout", "resume", "reference", "inputs", "options")
"""Settings that `_check` reads itself."""
ARGUMENTS = {
    name: own.default
    for name, (own, one) in options(Settings).items()
    if one.flags and name not in (*OF_IMPLEMENTATION, *APART)
}
"""Arguments of a judge, with their defaults."""
OF_MODULE = ("module", "roles", "num_heads")
WITH_MODULE = (
    *(*OF_MODULE, "dtypes", "sizes", "examples", "seed", "only", "require", "must", "expect"),
    *("verbose", *OUTPUTS),
)
"""Settings that go with a module."""
ALONE = (
    *("in_process", "worker", "envs", "untrusted", "sweep", "budget", "journal"),
    *("resume", "fail_fast", "processes"),
)
"""Settings that do not go with a cluster."""


@click.command("check", cls=GroupedCommand)
@click.argument("target", required=False)
@add_flags()
def check_command(target: str | None, **flags: Any) -> None:
    """Judge TARGET, an attention implementation.

    \b
    npattn check mykernels:attention --backward mykernels:attention_backward
    npattn check path/file.py:flash --like flash_attn --device cuda
    npattn check path/file.py:mha --module
    npattn check path/file.py:fused --reference path/file.py:slow
    npattn check torch.sdpa --only agreement --only empty-row --budget 60s

    TARGET is module:function, path/file.py:function, or a name from npattn list. It runs in a
    worker, a process of its own, whose end costs one rule; --in-process and --sweep call it here.
    What ends in … may be given several times.
    Exit code 0: passed; 1: failed; 2: no verdict, or wrong usage; 130: interrupted, with a report
    of what is known.
    """  # noqa: D301  click keeps the lines of a paragraph that begins with a backspace
    given = {n: x for n, x in flags.items() if x is not None and x is not False}
    if "seed" not in given and "untrusted" in given:
        given["seed"] = secrets.randbits(64)
    journal = None
    if "resume" in given:
        journal = _resume(given["resume"])
        target, kept = journal.command["target"], journal.command
        given = kept | {name: value for name, value in given.items() if name in OUTPUTS}
    elif "journal" in given:
        asked = {name: value for name, value in given.items() if name not in OUTPUTS}
        journal = Journal.create(given["journal"], {"target": target, **asked})
    _check(target, given, journal)


def _resume(path: str) -> Journal:
    """Return the journal of an earlier check, which has what is asked."""
    allowed = {flag for name in OUTPUTS for flag in SETTINGS[name][1].flags} - {"--journal"}
    beside = [flag for flag in given_flags() if flag not in allowed]
    if beside:
        raise OptionError(f"got {', '.join(beside)} beside --resume: {path} has what is asked")
    journal = Journal.resume(path)
    if not journal.command:
        raise OptionError(f"{path} was begun in Python: pass resume= to npattn.testing.check")
    ended = f", ended in {journal.unanswered}" if journal.unanswered else ""
    click.echo(f"goes on with {path}: {len(journal.answers)} rules begun{ended}", err=True)
    return journal


def _check(target: str | None, given: dict[str, Any], journal: Journal | None) -> None:
    """Check, write the files, print the report and exit."""
    if "reference" in given:
        _check_reference(target, given)
    if "inputs" in given or "options" in given:
        raise OptionError("got --inputs or --options without --reference: pass both")
    untrusted = given.get("untrusted", False)
    if given.keys() & set(OF_MODULE):
        _check_module(target, given)
    implementation = open_target(target, given)
    conventions = change_conventions(implementation.conventions, given.get("conventions", ()))
    arguments = {name: given.get(name, default) for name, default in ARGUMENTS.items()}
    arguments |= {"conventions": conventions, "sizes": given.get("sizes", {}), "journal": journal}
    arguments["strict"] |= untrusted
    if untrusted and not arguments["must"]:
        arguments["must"] = _everything(implementation)
    judge: Callable[..., Report] = check
    if "cluster" in given:
        limits = Limits(given.get("timeout"), given.get("memory"))
        calls = {name: given[name] for name in (*OF_IMPLEMENTATION, "device") if name in given}
        judge = _on_cluster(given["cluster"], limits, calls)
    try:
        with ProgressBar() as bar, interruptible():
            report = judge(implementation, progress=bar.advance, **arguments)
    except KeyboardInterrupt as err:
        if not hasattr(err, "report"):  # nothing was asked yet
            sys.exit(INTERRUPTED)
        report = err.report
    _finish(report, given, journal)


def _check_module(target: str | None, given: dict[str, Any]) -> None:
    """Judge a module, called in this process."""
    if "module" not in given:
        raise OptionError("got --role or --num-heads without --module")
    others = [name for name in SETTINGS if name not in WITH_MODULE]
    if beside := given_flags(*others):
        raise OptionError(f"got {', '.join(beside)} beside --module, which has no such setting")
    if target is None:
        raise OptionError("--module needs TARGET: module:name or path/file.py:name")
    with report_import_errors():
        module = load_callable(target)
    arguments = {n: given[n] for n in WITH_MODULE if n in given and n not in OUTPUTS}
    for name in ("module", "verbose"):
        arguments.pop(name, None)
    with ProgressBar() as bar, interruptible():
        report = check_module(module, spec=target, progress=bar.advance, **arguments)
    _finish(report, given)


def _finish(report: Report, given: dict[str, Any], journal: Journal | None = None) -> None:
    """Write the files, print the report and exit."""
    unwritten = _write_files(report, given)
    console = Console()
    report.print_to(console, verbose="verbose" in given)
    if journal is not None and report.interrupted:
        console.print(f"npattn check --resume {journal.path} goes on", soft_wrap=True)
    for line in unwritten:
        click.echo(f"Error: {line}", err=True)
    code = INTERRUPTED if report.interrupted else report.conclusion.exit_code
    sys.exit(code or 2 * bool(unwritten))


def _check_reference(target: str | None, given: dict[str, Any]) -> None:
    """Check by a reference, write the files, print the report and exit.

    The reference is called in this process, which sees its operations; so is a target of arrays
    by letters. Attention lives in a worker.
    """
    if target is None:
        raise OptionError("--reference needs a TARGET to judge")
    beside = [name for name in given if name not in (*OF_REFERENCE, *OUTPUTS, *OF_WORKER)]
    if beside:
        flags = ", ".join(SETTINGS[name][1].flags[-1] for name in beside)
        raise OptionError(f"got {flags} beside --reference, which alone says what is right")
    asked = {n: x for n, x in given.items() if n in OF_REFERENCE}
    judged: Any
    with report_import_errors():
        asked["reference"] = load(given["reference"])
        if "inputs" in given:
            f, known = load(target)
            known = load(given["backward"])[0] if "backward" in given else known
            judged, asked["backward"] = f, known
    if "inputs" not in given:
        judged = open_target(target, given)
        for name in ("backward", "framework", "device"):
            asked.pop(name, None)
    _finish(check(judged, **asked), given)


def _on_cluster(where: str, limits: Limits, given: dict[str, Any]) -> Callable[..., Report]:
    """Return a function that judges in units on a cluster, with arguments as of `check`."""
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


def _write_files(report: Report, given: dict[str, Any]) -> list[str]:
    """Write the files that were asked for, before anything is printed that nobody may read.

    Returns a line for each that cannot be written, so that the report is printed all the same.
    """
    writers: dict[str, Callable[[Path], object]] = {
        "json": report.to_json,
        "html": report.to_html,
        "script": lambda path: path.write_text(report.script(), "utf-8"),
    }
    unwritten = []
    for name, write in writers.items():
        try:
            if name in given:
                write(given[name])
        except OSError as err:
            unwritten.append(f"{given[name]} was not written: {err.strerror or err}")
    return unwritten


def _everything(implementation: Implementation) -> tuple[str, ...]:
    """Return the options that it names, and the gradients of what it takes."""
    options = [f"d{name}" for name in ("bias", "sinks", "gate") if name in implementation.features]
    return (*sorted(implementation.features), "dq", "dk", "dv", *options)
