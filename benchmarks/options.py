"""Options --journal and --resume of the commands that judge many implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from benchmarks.journal import Journal
from npattn.cli.flags import given_flags
from npattn.errors import OptionError


def open_journal(
    command: str,  # "matrix", "zoo"
    new: str | None,  # paths of --journal and --resume
    resumed: str | None,
    asked: Mapping[str, Any],  # what a new journal is to remember
    # parameters that may stand beside --resume, since they change nothing of the result
    allowed: Sequence[str],
) -> Journal | None:
    """Return the journal of the command that runs, new or one to go on from; None without one.

    Raises OptionError if another option stands beside --resume, or a file cannot be a journal.
    """
    if resumed is None:
        return None if new is None else Journal.create(command, new, asked)
    if beside := list_flags_beside((*allowed, "resume_path")):
        raise OptionError(f"got {', '.join(beside)} beside --resume: {resumed} has what is asked")
    journal = Journal.resume(command, resumed)
    click.echo(f"goes on with {resumed}: {len(journal.results)} done", err=True)
    return journal


def list_flags_beside(allowed: Sequence[str]) -> list[str]:
    """Return the flags on the command line, without the flags of these parameters."""
    return given_flags(*(n for n in click.get_current_context().params if n not in allowed))
