"""Report of a check: one `Outcome` per rule and dtype, as text, JSON and HTML."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from npattn.testing.report.as_json import as_dict
from npattn.testing.report.page import fragment, page
from npattn.testing.report.record import Record
from npattn.testing.report.text import feedback_lines
from npattn.testing.report.text import lines as text_lines
from npattn.testing.report.words import verdict

NARROW = 40
"""Columns below which the width that a terminal gives is none."""
WIDTH = 100


@dataclass(frozen=True, repr=False)
class Report(Record):
    __doc__ = Record.__doc__

    def __repr__(self) -> str:
        """Return the verdict and the first cause, in a line; `str` has the report."""
        first = ""
        for group in self.groups()[:1]:
            text = group.cause.text if group.cause else f"{group.smallest.id} failed"
            first = f"; {text}"
        return " ".join(f"<Report of {self.target}: {verdict(self)}{first}>".split())

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """Return the report as a notebook shows it: the page of `to_html` without its frame."""
        return fragment(self)

    def text(self, *, verbose: bool = False) -> str:
        """Return the report as text: 25 lines at most, 12 if it passed; with `verbose` all."""
        return (
            "\n".join(line.text.rstrip() for line in text_lines(self, WIDTH, verbose=verbose))
            + "\n"
        )

    def print_to(self, console: Console, *, verbose: bool = False) -> None:
        """Print the report: at most 25 lines, 12 if it passed, or with `verbose` everything."""
        if console.width < NARROW:  # some terminals have no width, and nothing would be printed
            console.width = WIDTH
        for line in text_lines(self, console.width, verbose=verbose):
            # Lines that are to be pasted must not be broken.
            console.print(Text(line.text, line.style), soft_wrap=True)

    def feedback(self, lines: int = 12) -> str:
        """Return what failed in words that fit a prompt: cause, pair, matrix and rules."""
        return "\n".join(feedback_lines(self, lines)) + "\n"

    def script(self) -> str:
        """Return a standalone Python file that shows the first failure; "" if nothing failed.

        That is the one with which the report begins, if anything counts against it.
        """
        groups = self.groups() or self.groups(required=False)
        return groups[0].smallest.script() if groups else ""

    def to_json(self, path: str | Path) -> None:
        """Write everything, scripts included, as JSON; schema.json in this folder describes it."""
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        Path(path).write_text(text + "\n", "utf-8")

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `to_json`."""
        return as_dict(self)

    def to_html(self, path: str | Path) -> None:
        """Write the report as a page of one file, which loads nothing."""
        Path(path).write_text(page(self), "utf-8")
