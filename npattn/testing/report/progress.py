"""The bar that shows how far a check is: on a terminal or in a notebook, and nowhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rich.console import Console

from npattn.errors import OptionError

Progress = Callable[[str, str, int, int], None]  # dtype, rule, done, total
DELAY = 2.0
"""Seconds before the bar comes: what is done by then needs none."""
PAUSE = 0.2
"""Seconds between two pictures of the bar in a notebook, each of which is a message to it."""


def check_progress(progress: Any) -> None:
    """Check that it is a function, True, False or None."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise OptionError(
            f"progress is {progress!r}, must be True, False or a function of "
            "(dtype, rule, done, total)"
        )


class ProgressBar:
    """Context manager of a bar that comes after two seconds, and goes at the end.

    On a terminal it is drawn on the error stream, in a notebook below its cell. Elsewhere, or
    unless `shown`, there is none. With `announces`, what is known before the causes are looked for
    is printed on the error stream, wherever that goes.
    """

    def __init__(self, shown: bool = True, announces: bool = False) -> None:
        console = Console(stderr=True)
        self.announces = announces
        self.in_notebook = console.is_jupyter
        self.shown = shown and (self.in_notebook or console.file.isatty())
        self.bar: Any = _make_bar(console) if self.shown else None
        self.timer = threading.Timer(DELAY, self._show)
        self.timer.daemon = True
        self.picture: Any = None  # what IPython can update
        self.drawn = 0.0

    def __enter__(self) -> ProgressBar:
        if self.shown:
            self.timer.start()
        return self

    def _show(self) -> None:
        if not self.in_notebook:
            self.bar.start()
            return
        # Not by rich's own display, which needs ipywidgets.
        display = import_module("IPython.display").display
        self.picture = display(self.bar.make_tasks_table(self.bar.tasks), display_id=True)

    def advance(self, dtype: str, rule: str, done: int, total: int) -> None:
        """Show what is being asked, and how much of it is done."""
        if self.bar is None:
            return
        description = f"{dtype} {rule}"
        self.bar.update(self.bar.task_ids[0], description=description, completed=done, total=total)
        now = time.monotonic()
        if self.picture is not None and now - self.drawn > PAUSE:
            self.drawn = now
            self.picture.update(self.bar.make_tasks_table(self.bar.tasks))

    def announce(self, text: str) -> None:
        """Print what is known already: what comes next may be interrupted, or run out of memory."""
        if self.announces and self.shown:
            self.bar.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def __exit__(self, *_: object) -> None:
        if self.bar is None:
            return
        self.timer.cancel()
        self.timer.join()  # it may be in the middle of showing it
        if self.bar.live.is_started:  # else it prints an empty line
            self.bar.stop()
        if self.picture is not None:
            self.picture.update({"text/plain": ""}, raw=True)


def _make_bar(console: Console) -> Any:
    """Make the bar of rich, which takes a while to load."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    # What is printed meanwhile goes above the bar, but not if it goes to a file or a pipe.
    to_terminal = sys.stdout is not None and sys.stdout.isatty()
    bar = progress.Progress(*columns, console=console, transient=True, redirect_stdout=to_terminal)
    bar.add_task("probing", total=None)
    return bar
