"""Open the TARGET of a command: in a worker, or in this process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from npattn.cli.flags import given_flags
from npattn.conventions import Conventions
from npattn.errors import NpattnError, OptionError
from npattn.testing.adapters.child import format_line, place_of
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.judging import OF_IMPLEMENTATION
from npattn.testing.targets import TARGETS, load_implementation
from npattn.testing.targets.environments import choose_python
from npattn.testing.worker.connect import connect
from npattn.testing.worker.connection import Connection
from npattn.testing.worker.supervisor import Limits

DEFAULT_TARGET = "numpy.flash"
OF_WORKER = ("worker", "timeout", "memory", "untrusted", "unconfined", "envs")
"""Settings that need a worker."""


def open_target(
    target: str | None, typed: Mapping[str, Any], spare: Connection | None = None
) -> Implementation:
    """Return the implementation, called in a worker (`spare` waits for it) or, if asked, here."""
    settings = {n: typed[n] for n in OF_IMPLEMENTATION if typed.get(n) is not None}
    command, envs, device = typed.get("worker"), typed.get("envs"), typed.get("device")
    target = target or (DEFAULT_TARGET if command is None else None)
    here = "--in-process" if typed.get("in_process") else "--sweep" if typed.get("sweep") else ""
    if not here:
        return connect(
            target, command=command, device=device,
            limits=Limits(typed.get("timeout"), typed.get("memory")),
            untrusted=bool(typed.get("untrusted")), unconfined=bool(typed.get("unconfined")),
            python=None if envs is None else _python_in(envs, target),
            alone=typed.get("processes", 1) == 1, spare=spare, **settings,
        )  # fmt: skip
    if refused := given_flags(*OF_WORKER):
        raise OptionError(f"{' and '.join(refused)} need a worker, and {here} calls TARGET here")
    with report_import_errors():
        implementation = load_implementation(target or DEFAULT_TARGET, **settings)
    if device is not None:
        implementation.on(device)
    return implementation


@contextmanager
def report_import_errors() -> Iterator[None]:
    """Report an exception that a module raises when it is imported as wrong usage."""
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


def change_conventions(conventions: Conventions, words: Sequence[str]) -> Conventions:
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
