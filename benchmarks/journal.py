"""Journal of a matrix or of a zoo: a line of JSON for each result, from which it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npattn.errors import OptionError
from npattn.testing.runner.journal import check_is_new, cut_last_line, read_lines
from npattn.testing.units.unit import versions_here

VERSION = 2


class Journal:
    """Results that are known, in a file.

    Attributes
    ----------
    command : str
        The command that writes it, and alone goes on with it: matrix or zoo.
    path : Path
    question : dict
        What is asked: the arguments of the command.
    results : dict
        Fields of a result, by its name.
    """

    def __init__(
        self, command: str, path: str | os.PathLike[str], question: Mapping[str, Any]
    ) -> None:
        self.command, self.path, self.question = command, Path(path).absolute(), dict(question)
        self.results: dict[str, dict[str, Any]] = {}

    @classmethod
    def create(
        cls, command: str, path: str | os.PathLike[str], question: Mapping[str, Any]
    ) -> Journal:
        """Return a new journal; nothing is written before `begin`.

        Raises OptionError if the file exists, or its folder does not.
        """
        check_is_new(path)
        return cls(command, path, question)

    @classmethod
    def resume(cls, command: str, path: str | os.PathLike[str]) -> Journal:
        """Go on with the file of a command that ended early.

        Raises OptionError if it is the journal of another command, or of other versions.
        """
        lines = read_lines(Path(path))
        if not lines or lines[0].get(f"{command} journal") != VERSION:
            raise OptionError(
                f"{path} is no journal of benchmarks.{command}: begin a new one (--journal)"
            )
        if lines[0]["versions"] != versions_here():
            raise OptionError(
                f"{path} was begun with {lines[0]['versions']}, and {versions_here()} is here: "
                "begin a new one (--journal)"
            )
        journal = cls(command, path, lines[0]["question"])
        journal.results = {line["name"]: line["result"] for line in lines[1:]}
        return journal

    def begin(self) -> None:
        """Write what is asked; in a file that is continued, remove a half line at its end.

        Raises OptionError if the file cannot be written.
        """
        if self.path.exists():
            cut_last_line(self.path)
            return
        head = {f"{self.command} journal": VERSION, "versions": versions_here()}
        head["question"] = self.question
        try:
            self._write(head)
        except OSError as err:
            raise OptionError(f"journal {self.path} cannot be written: {err}") from err

    def note(self, name: str, result: Mapping[str, Any]) -> None:
        """Write a result."""
        self._write({"name": name, "result": dict(result)})

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")
