"""Judge cheats, each in a process of its own, and count those that a judge catches."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.zoo.cheats.cheat import Cheat
from benchmarks.zoo.cheats.register import CHEATS, HONEST
from npattn.errors import OptionError

DEFAULT = (sys.executable, "-m", "benchmarks.zoo.cheats.verdict")
"""Command of the default check, without the target."""
TIMEOUT = 600.0
"""Seconds after which a check has no verdict."""


@dataclass(frozen=True)
class Answer:
    """Answer of a judge to one cheat."""

    cheat: Cheat
    exit_code: int | None  # of the last check; None if it took too long
    lines: str = ""  # last lines that it printed

    @property
    def verdict(self) -> str:
        """Return "escaped" for exit code 0, "caught" for 1, "no verdict" for others."""
        if self.exit_code == 0:
            return "escaped"
        return "caught" if self.exit_code == 1 else "no verdict"


def judge(cheat: Cheat, command: Sequence[str] = DEFAULT, *, timeout: float = TIMEOUT) -> Answer:
    """Judge a cheat in a child process, by its exit code, as a continuous integration would.

    Parameters
    ----------
    cheat : Cheat
    command : sequence of str
        Command that judges; the target is appended, and ``--backward`` where it has one.
    timeout : float
        Seconds for each check.

    Returns
    -------
    Answer
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, backward = cheat.write(folder)
        words = [*command, target, *(("--backward", backward) if backward else ())]
        answer = Answer(cheat, None)
        for _ in range(cheat.runs):
            answer = _run(cheat, words, folder, timeout)
        return answer


def _run(cheat: Cheat, words: Sequence[str], folder: Path, timeout: float) -> Answer:
    places = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, places))
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path}
    try:
        done = subprocess.run(
            words,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(cheat, None, f"no end within {timeout:g} s")
    text = done.stdout.decode(errors="replace")
    return Answer(cheat, done.returncode, "\n".join(text.splitlines()[-3:]))


def judge_all(
    names: Iterable[str] = (), command: Sequence[str] = DEFAULT, *, timeout: float = TIMEOUT
) -> Iterator[Answer]:
    """Judge cheats and honest implementations by name or family, all by default, one by one.

    Escapes are judged by a command that has ``--untrusted`` alone: they would do harm here.
    """
    every, wanted = {**CHEATS, **HONEST}, list(names)
    known = {*every, *(one.family for one in every.values())}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise OptionError(f"{unknown[0]!r} is no cheat, must be one of {', '.join(sorted(known))}")
    for one in every.values():
        if one.is_escape and "--untrusted" not in command:
            continue
        if not wanted or one.name in wanted or one.family in wanted:
            yield judge(one, command, timeout=timeout)


def table(answers: Iterable[Answer]) -> str:
    """Format answers as a table in Markdown, a row for each family."""
    families: dict[str, list[Answer]] = {}
    for answer in answers:
        families.setdefault(answer.cheat.family, []).append(answer)
    rows = ["| class | number | caught | no verdict | escaped |", "|---|---|---|---|---|"]
    for family, own in families.items():
        counts = [sum(a.verdict == x for a in own) for x in ("caught", "no verdict")]
        escaped = [
            a.cheat.name + (" (declared)" if a.cheat.declared else "")
            for a in own
            if a.verdict == "escaped"
        ]
        shown = str(len(escaped)) if family == "honest" else ", ".join(escaped)
        rows.append(f"| {family} | {len(own)} | {counts[0]} | {counts[1]} | {shown} |")
    return "\n".join(rows)
