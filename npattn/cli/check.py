"""Command npattn check: judge an implementation."""

import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from npattn import __version__
from npattn.cli.completion import complete_target
from npattn.cli.config import read_config
from npattn.cli.flags import GroupedCommand, add_flags, given_flags, refuse_beside_cluster
from npattn.cli.target import change_conventions, open_target, report_import_errors
from npattn.cli.watch import Watcher, watch
from npattn.errors import OptionError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.load import load_callable
from npattn.testing.judging import OF_IMPLEMENTATION, OF_REFERENCE, check
from npattn.testing.parsing import INTERRUPTED, interruptible
from npattn.testing.report.formats import annotate, markdown, sarif
from npattn.testing.report.place import Place, find_place
from npattn.testing.report.progress import ProgressBar
from npattn.testing.report.report import Report
from npattn.testing.runner import failed_first
from npattn.testing.runner.journal import Journal
from npattn.testing.runner.untrusted import name_everything
from npattn.testing.settings import WRITTEN, CommandSettings, Settings, options
from npattn.testing.targets import load, spec_of
from npattn.testing.worker.remote import Remote
from npattn.testing.worker.supervisor import Limits, Spare

SETTINGS = options(CommandSettings)
OF_WORKER = ("in_process", "timeout", "memory", "envs")
"""Settings of the process in which attention is judged by a reference."""
OUTPUTS = [name for name, (_, one) in SETTINGS.items() if one.group == WRITTEN and one.flags]
"""Settings that change nothing of what is asked."""
APART = ("device", "timeout", "resume", "reference", "inputs", "options")
"""Settings that `_check` reads itself."""
ARGUMENTS = {
    name: spec.default
    for name, (spec, one) in options(Settings).items()
    if one.flags and name not in (*OF_IMPLEMENTATION, *APART)
}
"""Arguments of a judge, with their defaults."""
OF_MODULE = ("module", "roles", "num_heads")
WITH_MODULE = (
    *(*OF_MODULE, "dtypes", "sizes", "examples", "seed", "only", "require", "must", "expect"),
    *("accept", "budget", "verbose", *OUTPUTS),
)
"""Settings that go with a module."""
ALONE = (
    *("in_process", "worker", "envs", "untrusted", "unconfined", "sweep", "budget", "journal"),
    *("resume", "fail_fast", "processes"),
)
"""Settings that do not go with a cluster."""


CONFIGURED = "npattn.targets"
"""Key under which the context of a command has the targets of pyproject.toml."""


class _CheckCommand(GroupedCommand):
    """Command whose defaults a project may set."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--no-config" not in args:
            defaults = read_config(self, Path.cwd())
            ctx.meta[CONFIGURED] = defaults.pop("target", [])
            ctx.default_map = defaults
        return super().parse_args(ctx, args)


@click.command("check", cls=_CheckCommand)
@click.argument("target", required=False, shell_complete=complete_target)
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
    What ends in … may be given several times. Defaults stand in [tool.npattn] of pyproject.toml.
    Exit code 0: passed; 1: failed; 2: no verdict, or wrong usage; 130: interrupted, with a report
    of what is known.
    """  # noqa: D301  click keeps the lines of a paragraph that begins with a backspace
    typed = {n: x for n, x in flags.items() if x is not None and x is not False}
    typed.pop("no_config", None)  # read already
    configured: list[str] = click.get_current_context().meta.get(CONFIGURED, [])
    if target is None and "resume" not in typed and configured:
        target, *others = configured
        if others:
            codes = [_exit_code_of(one, dict(typed)) for one in configured]
            sys.exit(max(codes, key=CODES.index))
    _begin(target, typed)


CODES = (0, 2, 1, INTERRUPTED)
"""Exit codes, the gravest last."""


def _exit_code_of(target: str, typed: dict[str, Any]) -> int:
    """Check one target of several, and return its exit code."""
    try:
        _begin(target, typed)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _begin(target: str | None, typed: dict[str, Any]) -> None:
    """Check one target, with a journal if one is asked for; exit with the verdict."""
    if "seed" not in typed and "untrusted" in typed:
        typed["seed"] = secrets.randbits(64)
    journal = None
    if "resume" in typed:
        journal = _resume(typed["resume"])
        target, kept = journal.command["target"], journal.command
        typed = kept | {name: value for name, value in typed.items() if name in OUTPUTS}
    elif "journal" in typed:
        asked = {name: value for name, value in typed.items() if name not in OUTPUTS}
        journal = Journal.create(typed["journal"], {"target": target, **asked})
    _check(target, typed, journal)


def _resume(path: str) -> Journal:
    """Return the journal of an earlier check, which has what is asked."""
    allowed = {flag for name in OUTPUTS for flag in SETTINGS[name][1].flags} - {"--journal"}
    refused = [flag for flag in given_flags() if flag not in allowed]
    if refused:
        raise OptionError(f"got {', '.join(refused)} beside --resume: {path} has what is asked")
    journal = Journal.resume(path)
    if not journal.command:
        raise OptionError(f"{path} was begun in Python: pass resume= to npattn.testing.check")
    ended = f", ended in {journal.unanswered}" if journal.unanswered else ""
    click.echo(f"goes on with {path}: {len(journal.answers)} rules begun{ended}", err=True)
    return journal


def _check(target: str | None, typed: dict[str, Any], journal: Journal | None) -> None:
    """Check, write the files, print the report and exit."""
    if "reference" in typed:
        _check_reference(target, typed)
    if "inputs" in typed or "options" in typed:
        raise OptionError("got --inputs or --options without --reference: pass both")
    if typed.keys() & set(OF_MODULE):
        _check_module(target, typed)
    if typed.get("watch"):
        _watch(target, typed)
    implementation = open_target(target, typed)
    arguments = _read_arguments(implementation, typed) | {"journal": journal}
    file = failed_first.find_file(f"{target} {typed.get('backward')}") if "ff" in typed else None
    if file is not None and _fails_again(implementation, failed_first.read_failed(file), typed):
        sys.exit(1)
    judge: Callable[..., Report] = check
    if "cluster" in typed:
        limits = Limits(typed.get("timeout"), typed.get("memory"))
        calls = {name: typed[name] for name in (*OF_IMPLEMENTATION, "device") if name in typed}
        judge = _on_cluster(typed["cluster"], limits, calls)
    try:
        with ProgressBar(announces=True) as bar, interruptible():
            report = judge(implementation, progress=bar.advance, **arguments)
    except KeyboardInterrupt as err:
        if not hasattr(err, "report"):  # nothing was asked yet
            sys.exit(INTERRUPTED)
        report = err.report
    if file is not None:
        failed_first.write_failed(
            file, failed_first.list_failed(o for o in report.outcomes if report.counts(o))
        )
    sys.exit(_conclude(report, target, typed, journal))


def _read_arguments(implementation: Implementation, typed: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a judge of attention; the implementation gets its conventions."""
    conventions = change_conventions(implementation.conventions, typed.get("conventions", ()))
    implementation.conventions = conventions
    arguments = {name: typed.get(name, default) for name, default in ARGUMENTS.items()}
    arguments |= {"conventions": conventions, "sizes": typed.get("sizes", {})}
    untrusted = typed.get("untrusted", False)
    arguments["strict"] |= untrusted
    if untrusted and not arguments["must"]:
        arguments["must"] = name_everything(implementation)
    return arguments


def _fails_again(
    implementation: Implementation,
    failed: Sequence[failed_first.FailedProblem],
    typed: dict[str, Any],
) -> bool:
    """Ask first what failed last, and say what came of it; True if the check ends here."""
    still = []
    for one, message in failed_first.ask_again(implementation, failed, typed.get("rounding")):
        first = message.partition("\n")[0]
        click.echo(f"still failing: {one.id}: {first}" if message else f"fixed: {one.id}")
        still += [one.id] if message else []
    if not still or not typed.get("fail_fast"):
        return False
    click.echo(f"FAILED: {', '.join(still)} (-x: nothing else was asked)")
    return True


WITHOUT_WATCH = (
    *("in_process", "sweep", "cluster", "journal", "resume", "untrusted", "worker", "module"),
    *("reference", "ff"),
)
"""Settings that do not go with --watch."""


def _watch(target: str | None, typed: dict[str, Any]) -> NoReturn:
    """Check whenever a file of the target is saved; what failed last is asked first."""
    if refused := given_flags(*WITHOUT_WATCH):
        raise OptionError(f"got {', '.join(refused)} beside --watch: leave out one of them")
    if target is None or ":" not in spec_of(target):
        raise OptionError("--watch needs a TARGET in a file: module:name or path/file.py:name")
    failed: list[failed_first.FailedProblem] = []
    spare = Spare()

    def check_once(watcher: Watcher) -> int:
        """Return the exit code of one check; 1 at once if what failed last fails again."""
        implementation = open_target(target, typed, spare.take(target))
        assert isinstance(implementation, Remote)
        worker = implementation.worker
        try:
            watcher.follow(worker.description["files"])
            spare.start(target, worker)
            arguments = _read_arguments(implementation, typed)
            if _fails_again(implementation, failed, typed):
                return 1
            report = check(implementation, progress=watcher.interrupt, **arguments)
        finally:
            worker.close()
        failed[:] = failed_first.list_failed(o for o in report.outcomes if report.counts(o))
        return _conclude(report, target, typed)

    try:
        sys.exit(watch(target, check_once))
    finally:
        spare.close()


def _check_module(target: str | None, typed: dict[str, Any]) -> None:
    """Judge a module, called in this process."""
    from npattn.testing.modules.check import check_module  # seldom needed, as below

    if "module" not in typed:
        raise OptionError("got --role or --num-heads without --module")
    others = [name for name in SETTINGS if name not in WITH_MODULE]
    if refused := given_flags(*others):
        raise OptionError(f"got {', '.join(refused)} beside --module, which has no such setting")
    if target is None:
        raise OptionError("--module needs TARGET: module:name or path/file.py:name")
    with report_import_errors():
        module = load_callable(target)
    arguments = {n: typed[n] for n in WITH_MODULE if n in typed and n not in OUTPUTS}
    for name in ("module", "verbose"):
        arguments.pop(name, None)
    with ProgressBar() as bar, interruptible():
        report = check_module(module, spec=target, progress=bar.advance, **arguments)
    sys.exit(_conclude(report, target, typed))


def _conclude(
    report: Report, target: str | None, typed: dict[str, Any], journal: Journal | None = None
) -> int:
    """Write the files, print the report, and return the exit code."""
    unwritten = _write_files(report, typed)
    console = Console()
    _print(report, find_place(target), typed, console)
    if journal is not None and report.interrupted:
        console.print(f"npattn check --resume {journal.path} goes on", soft_wrap=True)
    for line in unwritten:
        click.echo(f"Error: {line}", err=True)
    code = INTERRUPTED if report.interrupted else report.conclusion.exit_code
    return code or 2 * bool(unwritten)


def _print(report: Report, place: Place | None, typed: dict[str, Any], console: Console) -> None:
    """Print the report in the form that was asked for."""
    form = typed.get("format", "text")
    if form == "sarif":
        text = json.dumps(sarif(report, place, __version__), indent=1, ensure_ascii=False)
        click.echo(text)
        return
    if form == "markdown":
        click.echo(markdown(report))
        return
    report.print_to(console, verbose="verbose" in typed)
    if form == "github":
        if text := annotate(report, place):
            click.echo(text)
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(markdown(report) + "\n")


def _check_reference(target: str | None, typed: dict[str, Any]) -> None:
    """Check by a reference, write the files, print the report and exit.

    The reference is called in this process, which sees its operations; so is a target of arrays
    by letters. Attention lives in a worker.
    """
    if target is None:
        raise OptionError("--reference needs a TARGET to judge")
    refused = [name for name in typed if name not in (*OF_REFERENCE, *OUTPUTS, *OF_WORKER)]
    if refused:
        flags = ", ".join(SETTINGS[name][1].flags[-1] for name in refused)
        raise OptionError(f"got {flags} beside --reference, which alone says what is right")
    asked = {n: x for n, x in typed.items() if n in OF_REFERENCE}
    judged: Any
    with report_import_errors():
        asked["reference"] = load(typed["reference"])
        if "inputs" in typed:
            f, backward = load(target)
            backward = load(typed["backward"])[0] if "backward" in typed else backward
            judged, asked["backward"] = f, backward
    if "inputs" not in typed:
        judged = open_target(target, typed)
        for name in ("backward", "framework", "device"):
            asked.pop(name, None)
    sys.exit(_conclude(check(judged, **asked), target, typed))


def _on_cluster(where: str, limits: Limits, typed: dict[str, Any]) -> Callable[..., Report]:
    """Return a function that judges in units on a cluster, with arguments as of `check`."""
    from npattn.cli.cluster import open_cluster
    from npattn.testing.units.blocks import check_in_units

    refuse_beside_cluster(*ALONE)
    calls = {name: value for name, value in typed.items() if value not in (None, "auto")}
    limits_of_unit = {"timeout": limits.timeout, "memory": limits.memory, "folder": str(Path.cwd())}

    def check_on_cluster(implementation: Implementation, **arguments: Any) -> Report:
        for name in ("sweep", "budget", "journal", "processes", "fail_fast"):
            arguments.pop(name)  # they are not given: they are refused beside --cluster
        with open_cluster(where) as (executor, width):
            return check_in_units(
                implementation, executor, width, calls=calls, limits=limits_of_unit, **arguments
            )

    return check_on_cluster


def _write_files(report: Report, typed: dict[str, Any]) -> list[str]:
    """Write the files that were asked for; return a line for each that cannot be written."""
    writers: dict[str, Callable[[Path], object]] = {
        "json": report.to_json,
        "html": report.to_html,
        "script": lambda path: path.write_text(report.script(), "utf-8"),
    }
    unwritten = []
    for name, write in writers.items():
        try:
            if name in typed:
                write(typed[name])
        except OSError as err:
            unwritten.append(f"{typed[name]} was not written: {err.strerror or err}")
    return unwritten
