"""Arguments of the command line: names, sizes, processes, memory, seconds, seeds and files."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from npattn.errors import OptionError

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
        raise OptionError(f"--seed is {text!r}, must be a number, or random")
    return None if text is None else int(text)


def parse_processes(text: str) -> int:
    """Parse a number of processes; "auto" is as many as there are cores."""
    if text == "auto":
        affinity = getattr(os, "sched_getaffinity", None)  # of a container or a batch job
        return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    if not text.isdigit() or not int(text):
        raise OptionError(f"--processes is {text!r}, must be a number from 1 on, or auto")
    return int(text)


def _parse_quantity(text: str, units: dict[str, int], flag: str, examples: str) -> tuple[int, int]:
    """Parse "60s" into (60, what units has for "s")."""
    number, unit = text[:-1], text[-1:]
    multiples = {**units, **{name.swapcase(): value for name, value in units.items()}}
    if unit not in multiples or not number.isdigit() or not int(number):
        raise OptionError(f"{flag} is {text!r}, must look like {examples}")
    return int(number), multiples[unit]


def parse_seconds(text: str | None) -> float | None:
    """Parse "60s", "10m" or "2h" into seconds; a number alone is of seconds."""
    if text is None:
        return None
    text = f"{text}s" if text.isdigit() else text
    number, unit = _parse_quantity(text, SECONDS, "--budget", "60s, 10m or 2h")
    return float(number * unit)


def parse_memory(text: str | None) -> int | None:
    """Parse "500M" or "4G" into bytes."""
    if text is None:
        return None
    number, unit = _parse_quantity(text, UNITS, "--memory", "500M or 4G")
    return number << unit


def parse_names(text: str) -> tuple[str, ...]:
    """Parse "mask,causal" into ("mask", "causal"); "" is no name at all."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_pairs(texts: tuple[str, ...], flag: str, form: str) -> dict[str, str]:
    """Parse ("cap=softcap", ...) into {"cap": "softcap"}; form is one in words, for errors."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            raise OptionError(f"{flag} is {text!r}, must look like {form}")
        pairs[key] = value
    return pairs


def parse_values(texts: tuple[str, ...], flag: str) -> dict[str, tuple[Any, ...]]:
    """Parse ("D=16,32", "causal=false,true") into {"D": (16, 32), "causal": (False, True)}."""
    values = {}
    for text in texts:
        name, equals, words = text.partition("=")
        if not name or not equals or not words:
            raise OptionError(f"{flag} is {text!r}, must look like D=16,32 or causal=false,true")
        values[name] = tuple(map(_parse_value, words.split(",")))
    return values


def _parse_value(text: str) -> Any:
    """Parse a number, true, false or none; anything else is a name."""
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text


class Multiples(tuple[int, ...]):
    """Multiples of a number, few of them large: as sizes of a kernel that takes no others."""

    of: int

    def __new__(cls, of: int) -> Multiples:
        most = max(2 * of, 192)
        multiples = super().__new__(
            cls, (of * k for k in (1, 1, 1, 1, 2, 1, 1, 1, 3, 5, 9) if of * k <= most)
        )
        multiples.of = of
        return multiples

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.of,)


def read_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of a letter: integers, one, or multiples as "64x"."""
    found = {}
    for letter, values in sizes.items():
        (text,) = values if isinstance(values, (tuple, list)) and len(values) == 1 else (values,)
        if isinstance(text, str) and not re.fullmatch(r"[1-9]\d*x", text):
            raise OptionError(f"sizes has {letter}={text!r}, must look like (64, 128) or '64x'")
        found[letter] = Multiples(int(text[:-1])) if isinstance(text, str) else values
    return found


def parse_sizes(texts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Parse ("D=64,128", "T=64x") into {"D": (64, 128), "T": multiples of 64}."""
    sizes: dict[str, Any] = {}
    for text in texts:
        letter, equals, numbers = text.partition("=")
        if letter in sizes:
            raise OptionError(f"--sizes has {letter} twice: put all in one, as in {letter}=64,128")
        if not equals or not re.fullmatch(r"\d+x|-?\d+( *, *-?\d+)*", numbers):
            raise OptionError(f"--sizes is {text!r}, must look like D=64,128 or T=64x")
        multiples = numbers.endswith("x")
        sizes[letter] = numbers if multiples else tuple(int(n) for n in numbers.split(","))
    return read_sizes(sizes)


def path_to_write(path: str | None) -> Path | None:
    """Return the absolute path of a file to write: what is judged may change the folder."""
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
