"""The bar that shows how far a command is."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["ProgressBar"]


class ProgressBar:
    """Context manager of a bar on the error stream; gives the bar and a function to advance it."""

    def __init__(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        console = Console(stderr=True)
        away = not console.is_terminal  # where it would print empty lines
        self.bar = Progress(*columns, console=console, transient=True, disable=away)

    def __enter__(self) -> tuple[Progress, Any]:
        self.bar.start()
        task = self.bar.add_task("probing", total=None)

        def advance(dtype: str, rule: str, done: int, total: int) -> None:
            self.bar.update(task, description=f"{dtype} {rule}", completed=done, total=total)

        return self.bar, advance

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
