"""Report of a check: one `Outcome` per rule and dtype, as text, JSON and HTML."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npattn.errors import MissingExtraError
from npattn.testing.levels import REQUIRED
from npattn.testing.report.cause import Cause
from npattn.testing.report.outcome import Outcome

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text
except ImportError as err:
    raise MissingExtraError(
        "npattn.testing needs hypothesis, rich and click; npattn itself does not: "
        "pip install 'npattn[check]'"
    ) from err

__all__ = ["Report"]

COLOURS = {"passed": "green", "failed": "bold red", "error": "bold red", "suspect": "yellow"}


@dataclass(frozen=True, repr=False)
class Report:
    """Result of a check.

    Attributes
    ----------
    target : str
    outcomes : tuple of Outcome
    untested : tuple of str
        Untested options, sizes and results, each with the reason.
    settings : dict
        Seed, examples, conventions, rounding, features, versions.
    strict : bool
        A suspect counts as failed.
    require : tuple of str
        Levels and rules that must pass.
    causes : tuple of Cause
        What explains the failures, the one that explains most first.
    refused : tuple of str
        What it does not take (structure, options, combinations, values), a line each.
    expected : mapping
        Expected failures: rule, or ``rule[dtype]`` → reason.
    taken_back : mapping
        Rules that the system of ``like`` does not promise → its documentation that says so.
    """

    target: str
    outcomes: tuple[Outcome, ...]
    untested: tuple[str, ...]
    settings: dict[str, Any]
    strict: bool = False
    require: tuple[str, ...] = REQUIRED
    causes: tuple[Cause, ...] = ()
    refused: tuple[str, ...] = ()
    expected: Mapping[str, str] = field(default_factory=dict)
    taken_back: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if something was tested, and nothing that is required counts against it."""
        return self.tested and not any(self.counts(o) for o in self.outcomes)

    def counts(self, outcome: Outcome) -> bool:
        """Return True if the outcome fails the report: bad, required and not expected."""
        bad = {"failed", "error"} | ({"suspect"} if self.strict else set())
        required = {outcome.level, outcome.rule} & set(self.require)
        if outcome.rule in self.taken_back and outcome.rule not in self.require:
            return False
        expected = {outcome.id, outcome.rule} & set(self.expected)
        return outcome.status in bad and bool(required) and not expected

    @property
    def tested(self) -> bool:
        """True if any problem was accepted."""
        return any(o.status != "not applicable" for o in self.outcomes)

    def __repr__(self) -> str:
        """Return a short form, which an assertion prints; `str` has the whole report."""
        bad = [f"{o.id}: {o.message.splitlines()[0]}" for o in self.outcomes if o.failed]
        return "\n".join([f"<Report of {self.target}: {self._verdict()}>", *bad])

    def __str__(self) -> str:
        text = io.StringIO()
        self.print_to(Console(file=text, width=100, no_color=True, highlight=False))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"

    def print_to(self, console: Console) -> None:
        """Print the untested parts, the table and the failures."""
        for part in self._parts():
            # Lines that are to be pasted must not be broken.
            console.print(part, soft_wrap=isinstance(part, Text))

    def _parts(self) -> list[Any]:
        parts: list[Any] = [Text(f"npattn check {self.target}", style="bold"), self._settings()]
        for dtype, model in self.settings.get("behaves as", {}).items():
            parts.append(Text(f"{dtype} behaves as {model}", "dim"))
        if self.untested or self.refused:
            parts += [Text("\nnot tested", style="bold yellow")]
            parts += [Text(f"  {line}") for line in (*self.untested, *self.refused)]
        parts += [Text(""), self._table(), Text("number: largest error / tolerance", "dim")]
        for outcome in self.outcomes:
            if outcome.message and outcome.status != "not applicable":  # passed: notes
                parts += [Text(""), self._failure(outcome)]
        return [*parts, Text("\n" + self._verdict(), style="bold")]

    def _settings(self) -> Text:
        apart = ("versions", "behaves as")
        return Text(
            "  ".join(f"{k} {v}" for k, v in self.settings.items() if k not in apart), "dim"
        )

    def _table(self) -> Table:
        dtypes = list(dict.fromkeys(o.dtype for o in self.outcomes))
        table = Table("rule", "§", box=None, pad_edge=False, header_style="bold")
        for dtype in dtypes:
            table.add_column(dtype)
        for rule in dict.fromkeys(o.rule for o in self.outcomes):
            row = {o.dtype: o for o in self.outcomes if o.rule == rule}
            cells = [_cell(row[d]) if d in row else "" for d in dtypes]
            table.add_row(rule, next(iter(row.values())).semantics, *cells)
        return table

    def _failure(self, outcome: Outcome) -> Text:
        lines = [
            f"{outcome.id} {outcome.status}: {outcome.about} [semantics {outcome.semantics}]",
            *(f"  {line}" for line in outcome.message.splitlines()),
        ]
        if outcome.recipe:
            lines += [f"  on {outcome.problem!r}", f"  sampled as {outcome.recipe}"]
        return Text("\n".join(lines))

    def _verdict(self) -> str:
        count = {s: sum(o.status == s for o in self.outcomes) for s in COLOURS}
        words = [f"{n} {status}" for status, n in count.items() if n]
        return ("passed" if self.passed else "FAILED") + f": {', '.join(words) or 'nothing tested'}"

    def to_json(self, path: str | Path) -> None:
        """Write everything, scripts included, as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1, default=str) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `to_json`."""
        return {
            "target": self.target,
            "passed": self.passed,
            "untested": list(self.untested),
            "refused": list(self.refused),
            "facts": {k: str(v) for k, v in self.settings.items()},
            "outcomes": [
                {
                    "rule": o.rule,
                    "section": o.semantics,
                    "level": o.level,
                    "dtype": o.dtype,
                    "status": o.status,
                    "worst": o.worst if o.worst < float("inf") else "inf",
                    "examples": o.examples,
                    "message": o.message,
                    "problem": "" if o.problem is None else repr(o.problem),
                    "recipe": o.recipe,
                    "script": o.script(),
                }
                for o in self.outcomes
            ],
        }

    def to_html(self, path: str | Path) -> None:
        """Write the report as a page."""
        console = Console(file=io.StringIO(), record=True, width=110)
        self.print_to(console)
        Path(path).write_text(console.export_html(clear=True))


def _cell(outcome: Outcome) -> str:
    if outcome.status == "not applicable":
        return f"[dim]– {escape(outcome.message)}[/dim]"
    colour = COLOURS[outcome.status]
    tail = f" {outcome.worst:.2g}" if 0 < outcome.worst < float("inf") else ""
    return f"[{colour}]{outcome.status}[/{colour}]{tail}"
