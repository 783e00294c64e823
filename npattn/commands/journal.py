"""Options --journal and --resume of the commands that judge many implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import click

from npattn.errors import OptionError
from npattn.matrix.journal import MatrixJournal

__all__ = ["list_options_beside", "open_journal"]

AnyJournal = TypeVar("AnyJournal", bound=MatrixJournal)


def open_journal(
    kind: type[AnyJournal],
    new: str | None,
    resumed: str | None,
    asked: Mapping[str, Any],
    allowed: Sequence[str],
) -> AnyJournal | None:
    """Return the journal of the command that runs, new or one to go on from; None without one.

    Parameters
    ----------
    kind : type of MatrixJournal
    new, resumed : str or None
        Paths of --journal and --resume.
    asked : mapping
        What a new journal is to remember.
    allowed : sequence of str
        Parameters that may stand beside --resume, since they change nothing of the result.

    Raises
    ------
    OptionError
        If another option stands beside --resume, or a file cannot be a journal.
    """
    if resumed is None:
        return None if new is None else kind.create(new, asked)
    beside = list_options_beside((*allowed, "resume_path"))
    if beside:
        raise OptionError(f"got {', '.join(beside)} beside --resume: {resumed} has what is asked")
    journal = kind.resume(resumed)
    click.echo(f"goes on with {resumed}: {len(journal.results)} done", err=True)
    return journal


def list_options_beside(allowed: Sequence[str]) -> list[str]:
    """Return the options that stand on the command line, but for those of these parameters."""
    context, here = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    beside = (n for n in context.params if context.get_parameter_source(n) == here)
    names = {x.name: x for x in context.command.params}
    given = (names[n] for n in beside if n not in allowed)
    return [x.opts[-1] if isinstance(x, click.Option) else x.human_readable_name for x in given]
