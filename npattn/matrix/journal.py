"""Journal of a matrix or of a zoo: a line of JSON for each unit done, from which it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from npattn.errors import OptionError
from npattn.matrix.unit import Result, versions_here
from npattn.testing.runner.journal import check_is_new, cut_last_line, read_lines

__all__ = ["MatrixJournal", "ZooJournal"]

VERSION = 1


class MatrixJournal:
    """Results of the units that are done, in a file.

    Attributes
    ----------
    path : Path
    question : dict
        What is asked: the arguments of the matrix.
    results : dict of Result
        By key of the unit.
    """

    command = "matrix"
    """The command that writes it, and alone goes on with it."""

    def __init__(self, path: str | os.PathLike[str], question: Mapping[str, Any]) -> None:
        self.path, self.question = Path(path).absolute(), dict(question)
        self.results: dict[str, Result] = {}

    @classmethod
    def create(cls, path: str | os.PathLike[str], question: Mapping[str, Any]) -> Self:
        """Return a new journal; nothing is written before `begin`.

        Raises
        ------
        OptionError
            If the file exists, or its folder does not.
        """
        check_is_new(path)
        return cls(path, question)

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> Self:
        """Go on with the file of a matrix that ended early.

        Raises
        ------
        OptionError
            If it is no journal of a matrix, or of other versions.
        """
        lines = read_lines(Path(path))
        if not lines or lines[0].get(f"{cls.command} journal") != VERSION:
            raise OptionError(
                f"{path} is no journal of npattn {cls.command}: begin a new one (--journal)"
            )
        if lines[0]["versions"] != versions_here():
            raise OptionError(
                f"{path} was begun with {lines[0]['versions']}, and {versions_here()} is here: "
                "begin a new one (--journal)"
            )
        journal = cls(path, lines[0]["question"])
        journal.results = {
            line["unit"]: Result.from_text(json.dumps(line["result"])) for line in lines[1:]
        }
        return journal

    def begin(self) -> None:
        """Write what is asked; in a file that is continued, remove a half line at its end.

        Raises
        ------
        OptionError
            If the file cannot be written.
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

    def note(self, key: str, result: Result) -> None:
        """Write the result of a unit."""
        self._write({"unit": key, "result": vars(result)})

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")


class ZooJournal(MatrixJournal):
    """Rows of the zoo that are done, in a file."""

    command = "zoo"
