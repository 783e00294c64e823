"""Options and arguments that say how TARGET is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from npattn.conventions import Conventions
from npattn.errors import NpattnError, OptionError
from npattn.testing.adapters.child import format_line, place_of
from npattn.testing.adapters.frameworks import FRAMEWORKS
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.targets import TARGETS, load_implementation
from npattn.testing.targets.environments import choose_python
from npattn.testing.worker.connect import connect
from npattn.testing.worker.supervisor import Limits

__all__ = [
    "change_conventions",
    "framework_option",
    "open_target",
    "parse_features",
    "parse_renames",
    "refuse_beside_cluster",
    "report_import_errors",
    "worker_options",
]


DEFAULT_TARGET = "numpy.flash"


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


def open_target(
    target: str | None,
    here: str,
    command: str | None,
    limits: Limits,
    untrusted: bool,
    device: str | None,
    envs: str | None = None,
    alone: bool = True,
    **given: Any,
) -> Implementation:
    """Return the implementation in a worker, or in this process if a flag asks for it `here`."""
    if command is None:
        target = target or DEFAULT_TARGET
    if not here:
        given |= {"device": device, "limits": limits, "untrusted": untrusted, "alone": alone}
        given["python"] = None if envs is None else _python_in(envs, target)
        return connect(target, command=command, **given)
    _refuse_limits(limits, command, untrusted, envs, here)
    with report_import_errors():
        implementation = load_implementation(target or DEFAULT_TARGET, **given)
    if device is not None:
        implementation.on(device)
    return implementation


@contextmanager
def report_import_errors() -> Iterator[None]:
    """Report an exception that a module raises when it is imported as wrong usage.

    Raises
    ------
    OptionError
        If it raises.
    """
    try:
        yield
    except NpattnError:
        raise
    except Exception as err:
        place = f" ({where})" if (where := place_of(err)) else ""
        raise OptionError(f"the target cannot be imported: {format_line(err)}{place}") from err


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


def parse_renames(texts: tuple[str, ...]) -> dict[str, str]:
    """Parse ("cap=softcap", ...) into {"cap": "softcap"}."""
    renames = {}
    for text in texts:
        theirs, equals, ours = text.partition("=")
        if not theirs or not equals or not ours:
            raise OptionError(f"--rename is {text!r}, must look like THEIRS=OURS: cap=softcap")
        renames[theirs] = ours
    return renames


def parse_features(text: str | None) -> tuple[str, ...] | None:
    """Parse "mask,causal" into ("mask", "causal"); "" is no option at all."""
    names = None if text is None else (name.strip() for name in text.split(","))
    return None if names is None else tuple(name for name in names if name)


def change_conventions(conventions: Conventions, words: tuple[str, ...]) -> Conventions:
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


def refuse_beside_cluster(*parameters: str) -> None:
    """Raise an error if any of them is on the command line."""
    context, here = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    options = {n: param.opts[0] for param in context.command.params for n in [param.name]}
    if beside := [options[n] for n in parameters if context.get_parameter_source(n) == here]:
        names = ", ".join(beside)
        raise OptionError(
            f"got {names} beside --cluster, whose units are judged elsewhere: leave out one of them"
        )
