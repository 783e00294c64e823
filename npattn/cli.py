"""Command line: check, worker, fingerprint, diff, list, zoo; others when called."""

from __future__ import annotations

import importlib
import io
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from npattn.conventions import Conventions
from npattn.errors import MissingExtraError, NpattnError, OptionError
from npattn.parsing import (
    interruptible,
    parse_memory,
    parse_seconds,
    parse_seed,
    parse_sizes,
    path_to_write,
)
from npattn.profiles import PROFILES
from npattn.quantization import FORMATS

try:
    import click
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from npattn.commands.diff import diff_command
    from npattn.commands.progress import ProgressBar
    from npattn.testing.adapters.choose import FRAMEWORKS
    from npattn.testing.adapters.implementation import Implementation
    from npattn.testing.check import DTYPES, check
    from npattn.testing.diagnosis.fingerprint import LAYOUTS, fingerprint_first, in_layouts
    from npattn.testing.levels import LEVELS, REQUIRED
    from npattn.testing.report.expected import read_expected
    from npattn.testing.report.report import Report
    from npattn.testing.rules import RULES
    from npattn.testing.runner.journal import Journal
    from npattn.testing.targets import TARGETS, load_implementation, spec_of
    from npattn.testing.targets.environments import choose_python
    from npattn.testing.worker.connect import CHILD, connect
    from npattn.testing.worker.supervisor import Limits
except ImportError as err:
    raise MissingExtraError(
        "the npattn command needs hypothesis, rich and click: pip install 'npattn[check]'"
    ) from err

__all__ = ["cli"]

DEFAULT_TARGET = "numpy.flash"
INTERRUPTED = 130
OUTPUTS = ("verbose", "json_path", "html_path", "script_path")
"""Parameters of `npattn check` that change nothing of what is asked."""
ALONE = (
    *("in_process", "command", "envs", "untrusted", "sweep", "budget", "journal_path"),
    *("resume_path", "fail_fast", "processes"),
)
"""Parameters of `npattn check` that do not go with a cluster."""


class _Commands(click.Group):
    """Commands, of which some are imported when they are called."""

    LATER = {  # noqa: RUF012  it is constant
        "bench": ("npattn.commands.bench", "bench_command"),
        "matrix": ("npattn.commands.matrix", "matrix_command"),
        "plot": ("npattn.commands.plot", "plot_command"),
        "train": ("npattn.commands.train", "train_command"),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.LATER])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.LATER:
            return super().get_command(ctx, cmd_name)
        module, name = self.LATER[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(cls=_Commands)
@click.version_option(package_name="npattn")
def cli() -> None:
    """Judge whether an attention implementation is right."""


cli.add_command(diff_command)


framework_option = click.option(
    "--framework",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", *FRAMEWORKS]),
    help="Framework of its arrays.",
)


def worker_options(command: Any) -> Any:
    """Add the options that say in which process TARGET is called, and within which limits."""
    options = (
        click.option(
            "--in-process", is_flag=True, help="Call TARGET in this process, without a worker."
        ),
        click.option(
            "--worker",
            "command",
            metavar="COMMAND",
            help="Program that speaks docs/protocol.md on its standard input and output; TARGET is "
            "its name in the report.",
        ),
        click.option(
            "--envs",
            metavar="DIR",
            type=click.Path(file_okay=False),
            help="Folder of virtual environments: where a known TARGET needs packages that are not "
            "here, pip installs them there, and the worker runs in it.",
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            help="Seconds a call.  [default: 10; 120 for the first of a shape where it compiles]",
        ),
        click.option(
            "--memory", metavar="SIZE", help="Memory that the worker may use, as 500M or 4G."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@cli.command("check")
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
    "--examples", default=100, show_default=True, type=click.IntRange(1), help="Per rule."
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
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Worker processes.",
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
    "and every gradient must be tested unless --must says otherwise.",
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
    here = click.core.ParameterSource.COMMANDLINE
    beside = [n for n in context.params if context.get_parameter_source(n) == here]
    beside = [n for n in beside if n not in (*OUTPUTS, "resume_path")]
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
            "rename": _renames(renames) or None,
            "quantized": quantized,
        }
        limits = Limits(timeout, parse_memory(memory))
        here = "--in-process" if in_process else "--sweep" if sweep else ""
        given["envs"] = envs
        implementation = _open(target, here, command, limits, untrusted, device, **given)
        conventions = _with_conventions(implementation.conventions, convention_words)
        arguments: dict[str, Any] = {
            "conventions": conventions,
            "must": must.split(",") if must else _gradients(implementation) if untrusted else (),
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
        with ProgressBar() as (bar, advance), interruptible():
            report = judge(implementation, progress=advance, **arguments)
            bar.stop()
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    except KeyboardInterrupt as err:
        if not hasattr(err, "report"):  # nothing was asked yet
            sys.exit(INTERRUPTED)
        report = err.report
    _write_files(report, json_file, html_file, script_file)
    _print_anything()
    console = Console()
    report.print_to(console, verbose=verbose)
    if journal is not None and report.interrupted:
        console.print(f"npattn check --resume {journal.path} goes on", soft_wrap=True)
    if report.tested or report.interrupted:
        sys.exit(_exit_code(report))
    console.print("nothing could be tested")
    sys.exit(2)


def _on_cluster(where: str, limits: Limits, given: dict[str, Any]) -> Callable[..., Report]:
    """Return a function that judges in units on a cluster, with arguments as of `check`."""
    from npattn.matrix.sweep import check_on_cluster  # and with it the matrix

    _refuse_beside_cluster(*ALONE)
    calls = {name: value for name, value in given.items() if value not in (None, "auto")}
    own = {"timeout": limits.timeout, "memory": limits.memory, "folder": str(Path.cwd())}
    return partial(check_on_cluster, where=where, calls=calls, limits=own)


def _refuse_beside_cluster(*parameters: str) -> None:
    """Raise an error if any of them is on the command line."""
    context, here = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    options = {n: param.opts[0] for param in context.command.params for n in [param.name]}
    if beside := [options[n] for n in parameters if context.get_parameter_source(n) == here]:
        names = ", ".join(beside)
        raise OptionError(
            f"got {names} beside --cluster, whose units are judged elsewhere: leave out one of them"
        )


def _write_files(
    report: Report, json_file: Path | None, html_file: Path | None, script_file: Path | None
) -> None:
    """Write the files that were asked for, before anything is printed that nobody may read."""
    if json_file is not None:
        report.to_json(json_file)
    if html_file is not None:
        report.to_html(html_file)
    if script_file is not None:
        script_file.write_text(report.script(), "utf-8")


def _exit_code(report: Report) -> int:
    """Return the exit code of a report on something that was tested."""
    if report.interrupted:
        return INTERRUPTED
    if report.passed:
        return 0
    failed = any(report.counts(outcome) for outcome in report.outcomes)
    return 2 if report.missing and not failed else 1


def _gradients(implementation: Implementation) -> tuple[str, ...]:
    """Return the gradients of what it takes."""
    options = [f"d{name}" for name in ("bias", "sinks", "gate") if name in implementation.features]
    return ("dq", "dk", "dv", *options)


def _open(
    target: str | None,
    here: str,
    command: str | None,
    limits: Limits,
    untrusted: bool,
    device: str | None,
    envs: str | None = None,
    **given: Any,
) -> Implementation:
    """Return the implementation in a worker, or in this process if a flag asks for it `here`."""
    if command is None:
        target = target or DEFAULT_TARGET
    if not here:
        given |= {"device": device, "limits": limits, "untrusted": untrusted}
        given["python"] = None if envs is None else _python_in(envs, target)
        return connect(target, command=command, **given)
    _refuse_limits(limits, command, untrusted, envs, here)
    implementation = load_implementation(target or DEFAULT_TARGET, **given)
    if device is not None:
        implementation.on(device)
    return implementation


def _python_in(envs: str, target: str | None) -> Path | None:
    """Return the Python of a known target's environment, None if this one has what it needs."""
    if target not in TARGETS:
        raise OptionError(f"--envs needs a name that npattn list shows, and TARGET is {target!r}")
    return choose_python(TARGETS[target], Path(envs), lambda line: click.echo(line, err=True))


def _refuse_limits(
    limits: Limits, command: str | None, untrusted: bool, envs: str | None, flag: str
) -> None:
    given = {"--worker": command, "--timeout": limits.timeout, "--memory": limits.memory}
    given |= {"--untrusted": untrusted or None, "--envs": envs}
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise OptionError(f"{' and '.join(named)} need a worker, and {flag} calls TARGET here")


def _print_anything() -> None:
    """Let standard output escape what its encoding lacks, instead of losing the report."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@cli.command("worker")
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


@cli.command("fingerprint")
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
    conventions found, or its process ended; 2: wrong usage, or it is not attention.
    """
    try:
        limits, here = Limits(timeout, parse_memory(memory)), "--in-process" if in_process else ""
        given["rename"] = _renames(renames) or None
        implementation = _open(target, here, command, limits, False, device, **given)
        candidates = in_layouts(implementation) if given["layout"] is None else [implementation]
        found = fingerprint_first(candidates, dtype=dtype, seed=seed)
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    click.echo(str(found))
    sys.exit(0 if found.holds else 1)


@cli.command("list")
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


@cli.command("zoo")
@click.argument("names", nargs=-1)
@click.option(
    "--examples", default=100, show_default=True, type=click.IntRange(1), help="Per rule."
)
@click.option("--seed", default=0, show_default=True, help="Seed of everything random.")
@click.option(
    "-j", "--jobs", default=1, show_default=True, type=click.IntRange(1), help="Processes."
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
@click.option(
    "--cluster",
    metavar="WHERE",
    help="Judge each in a process of its own, on a cluster of Dask: local:N for N workers here, "
    "or the address of a scheduler.",
)
@click.option("--list", "lists", is_flag=True, help="List the zoo and exit.")
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False), help="Write the matrix to this file."
)
def zoo_command(
    names: tuple[str, ...],
    lists: bool,
    json_path: str | None,
    cluster: str | None,
    jobs: int,
    **options: Any,
) -> None:
    """Judge the judge: every mutant must fail, and every correct implementation pass.

    NAMES are names of mutants or correct implementations, or prefixes of them; default: all.
    Exit code 0: all mutants killed, no false alarm; 1: otherwise; 2: wrong usage.
    """
    from npattn.matrix.zoo import run_on_cluster
    from npattn.zoo.correct import CORRECT
    from npattn.zoo.mutants import MUTANTS
    from npattn.zoo.score import zoo

    console = Console()
    if lists:
        table = Table("name", "family", "what is wrong", "source", box=None, pad_edge=False)
        for mutant in MUTANTS.values():
            table.add_row(mutant.name, mutant.family, escape(mutant.sentence), mutant.source)
        for right in CORRECT.values():
            table.add_row(right.name, "correct", escape(right.sentence), "")
        console.print(table)
        return
    options |= {"jobs": jobs}
    try:
        if cluster is not None:
            _refuse_beside_cluster("jobs")
            options |= {"run": partial(run_on_cluster, cluster)}
        with ProgressBar() as (bar, advance):
            score = zoo(only=names, progress=lambda name, *at: advance("zoo", name, *at), **options)
            bar.stop()
    except NpattnError as err:
        raise click.UsageError(str(err)) from err
    console.print(str(score), markup=False, highlight=False, soft_wrap=True)
    if json_path is not None:
        score.to_json(json_path)
    sys.exit(0 if score.passed else 1)


def _renames(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse ("cap=softcap", ...) into {"cap": "softcap"}."""
    renames = {}
    for text in texts:
        theirs, equals, ours = text.partition("=")
        if not theirs or not equals or not ours:
            raise OptionError(f"--rename is {text!r}, must look like THEIRS=OURS: cap=softcap")
        renames[theirs] = ours
    return renames


def _with_conventions(conventions: Conventions, words: tuple[str, ...]) -> Conventions:
    """Replace fields of conventions by ("causal=top_left", "hidden_fill=-1e9", ...)."""
    names = [f.name for f in fields(Conventions)]
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in names:
            raise OptionError(f"--convention is {word!r}, must be NAME=VALUE, {', '.join(names)}")
        number = name in ("hidden_fill", "hidden_add", "lse_empty") and value != "min"
        none = value == "none" and name in ("hidden_fill", "hidden_add", "empty_row_bias")
        try:
            changes[name] = None if none else float(value) if number else value
        except ValueError:
            raise OptionError(f"--convention is {word!r}, must have a number") from None
    return replace(conventions, **changes)
