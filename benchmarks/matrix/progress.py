"""Progress of a matrix on a terminal: what runs, and what is left; nothing elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from benchmarks.matrix.run import Status

MOST = 8
"""Units in work that have a line."""


class ProgressLines:
    """Context manager of a few lines that are drawn anew; call it with a `Status`."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.live = Live(console=self.console, transient=True, auto_refresh=False)
        self.began: dict[str, float] = {}

    def __call__(self, status: Status) -> None:
        if not self.console.is_terminal:
            return
        now = time.monotonic()
        keys = [unit.key for unit in status.running]
        self.began = {key: self.began.get(key, now) for key in keys}
        lines = [f"{now - self.began[key]:6.0f} s  {key}" for key in keys[:MOST]]
        lines += [f"and {len(keys) - MOST} more"] if len(keys) > MOST else []
        left = status.total - status.done - len(keys)
        lines.append(f"{status.done} of {status.total} done, {len(keys)} in work, {left} to come")
        width = self.console.width
        self.live.update(Text("\n".join(line[: width - 1] for line in lines)), refresh=True)

    def __enter__(self) -> ProgressLines:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.live.stop()
