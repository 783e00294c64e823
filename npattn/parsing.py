"""Arguments of the command line: processes, memory, seconds, seeds and files to write."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from npattn.errors import OptionError, optional_import

with optional_import("the npattn command needs", "hypothesis, rich and click", "check"):
    import click

__all__ = ["INTERRUPTED", "interruptible", "parse_memory", "parse_processes", "parse_seconds"]
__all__ += ["parse_seed", "parse_sizes", "path_to_write"]

INTERRUPTED = 130
"""Exit code of a command that an interrupt ended."""
UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}
"""Powers of two, by unit of memory."""
SECONDS = {"s": 1, "m": 60, "h": 3600}


def parse_seed(text: str | None) -> int | None:
    """Parse the seed: a number, or "random" for one of 64 bits."""
    if text == "random":
        return secrets.randbits(64)
    if text is not None and not text.isdigit():
        raise click.BadParameter(f"{text!r} must be a number, or random")
    return None if text is None else int(text)


def parse_processes(text: str) -> int:
    """Parse a number of processes; "auto" is as many as there are cores."""
    if text == "auto":
        own = getattr(os, "sched_getaffinity", None)  # of a container or a batch job
        return len(own(0)) if own is not None else os.cpu_count() or 1
    if not text.isdigit() or not int(text):
        raise click.BadParameter(f"{text!r} must be a number from 1 on, or auto")
    return int(text)


def parse_seconds(text: str | None) -> float | None:
    """Parse "60s", "10m" or "2h" into seconds."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:].lower()
    if unit not in SECONDS or not number.isdigit() or not int(number):
        raise click.BadParameter(f"{text!r} must look like 60s, 10m or 2h")
    return float(int(number) * SECONDS[unit])


def parse_memory(text: str | None) -> int | None:
    """Parse "500M" or "4G" into bytes."""
    if text is None:
        return None
    number, unit = text[:-1], text[-1:].upper()
    if unit not in UNITS or not number.isdigit() or not int(number):
        raise OptionError(f"--memory is {text!r}, must look like 500M or 4G")
    return int(number) << UNITS[unit]


def path_to_write(path: str | None) -> Path | None:
    """Return the absolute path of a file to write: what is judged may change the folder.

    Raises
    ------
    OptionError
        If its folder does not exist.
    """
    if path is None:
        return None
    if not Path(path).absolute().parent.is_dir():
        raise OptionError(f"the folder of {path} does not exist; create it first")
    return Path(path).absolute()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a request to end (SIGTERM) interrupt as Ctrl-C does, so that what is known is told."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def parse_sizes(texts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Parse ("D=64,128", "T=128") into {"D": (64, 128), "T": (128,)}."""
    sizes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        letter, equals, numbers = text.partition("=")
        if letter in sizes:
            raise OptionError(f"--sizes has {letter} twice: put all in one, as in {letter}=64,128")
        try:
            sizes[letter] = tuple(int(n) for n in numbers.split(","))
        except ValueError:
            equals = ""
        if not equals:
            raise OptionError(f"--sizes is {text!r}, must look like D=64,128")
    return sizes
