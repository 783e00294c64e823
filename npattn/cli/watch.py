"""npattn check --watch: check again whenever a file that the function has loaded is saved."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click

from npattn.errors import NpattnError, OptionError

POLL_SECONDS = 0.05
"""Time between two looks at the files."""
SETTLE_SECONDS = 0.05
"""Time that a file must stay as it is: an editor may write in parts, or replace it."""
Stamps = Mapping[Path, tuple[int, int] | None]


class Changed(Exception):
    """A file was saved during a check: what is being judged is out of date."""


class Watcher:
    """Files and what they were like when they were last read."""

    def __init__(self) -> None:
        self.stamps: Stamps = {}
        self._looked = 0.0

    def follow(self, files: Iterable[str | Path]) -> None:
        """Watch these files, as they are now."""
        self.stamps = {path: _stamp(path) for path in map(Path, files)}

    def list_changed(self) -> list[Path]:
        """Return the files that are not as they were; one that is missing is being replaced."""
        now = {path: _stamp(path) for path in self.stamps}
        return [p for p, stamp in now.items() if stamp is not None and stamp != self.stamps[p]]

    def interrupt(self, *_: object) -> None:
        """Raise Changed if a file was saved; called often, it looks now and then."""
        if time.monotonic() - self._looked > POLL_SECONDS:
            self._looked = time.monotonic()
            if self.list_changed():
                raise Changed

    def wait(self) -> list[Path]:
        """Return the saved files, once there are any and they have settled."""
        while not (changed := self.list_changed()):
            time.sleep(POLL_SECONDS)
        while True:
            before = {path: _stamp(path) for path in changed}
            time.sleep(SETTLE_SECONDS)
            if before == {path: _stamp(path) for path in changed} and None not in before.values():
                return changed


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return time and size of a file; None if there is none at the moment."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def watch(target: str, check: Callable[[Watcher], int]) -> int:
    """Check, and again after each save, until an interrupt; return the last exit code.

    Parameters
    ----------
    target : str
        ``path/file.py:function`` or ``module:function``.
    check : callable
        Checks once and prints; tells the watcher which files to follow as soon as it knows them,
        lets it interrupt, and returns the exit code.
    """
    file = Path(target.rpartition(":")[0] or target)
    watcher, code, saved = Watcher(), 2, ""
    watcher.follow([file] if file.is_file() else [])
    try:
        while True:
            begun = time.monotonic()
            if sys.stdout.isatty():
                click.clear()
            try:
                code = check(watcher)
                click.echo(
                    f"{saved}{time.monotonic() - begun:.1f} s; waits for a save (Ctrl-C ends)"
                )
            except Changed:
                click.echo("saved during the check: begins anew")
            except NpattnError as err:  # a syntax error, say: it will be mended
                if not watcher.stamps:
                    raise OptionError(f"--watch found no file of {target}: {err}") from err
                code = 2
                click.echo(f"Error: {err}\nwaits for a save (Ctrl-C ends)")
            changed = watcher.wait()
            watcher.follow(watcher.stamps)
            saved = f"{', '.join(path.name for path in changed)} saved; "
    except KeyboardInterrupt:
        return code
