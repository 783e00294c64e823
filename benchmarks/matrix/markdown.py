"""Matrix as a Markdown table: a row for each target and dtype, a column for each level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.matrix.result import Matrix, Row, Run
from npattn.testing.levels import LEVELS
from npattn.testing.report.outcome import OUT_OF_TIME

BAD = ("failed", "error", "crashed", "timed out", "suspect")
MOST = 5
"""Names of failed rules in a row."""


def write_table(matrix: Matrix) -> str:
    """Return the table, ending in a line feed.

    A cell has the numbers of rules that passed, and of those that failed; it is empty if none
    applied.
    """
    levels = [x for x in LEVELS if any(rule.level == x for rule in matrix.rules)]
    head = ["target", "version", "dtype", *levels, "failed"]
    lines = [_line(head), _line(["---"] * len(head))]
    rows = {row.name: row for row in matrix.targets}
    lines += [_line(_cells(run, rows[run.target], levels)) for run in matrix.runs]
    return "\n".join(lines) + "\n"


def _cells(run: Run, row: Row, levels: Sequence[str]) -> list[str]:
    where = "" if run.device == "CPU" else f" {run.device}"
    first = [run.target, row.versions.get(row.project, ""), run.dtype + where]
    if run.report is None:
        return [*first, *[""] * len(levels), f"{run.state}: {run.why}"]
    outcomes: list[Mapping[str, Any]] = run.report["outcomes"]
    failed = [o["rule"] for o in outcomes if o["status"] in BAD]
    names = ", ".join(failed[:MOST]) + (f" and {len(failed) - MOST} more" * (len(failed) > MOST))
    late = sum(o["message"] == OUT_OF_TIME for o in outcomes)
    words = f"{late} rules not asked" if late else ""
    words = f"{run.state}: {run.why}" if run.state != "done" else words
    cells = [_count([o for o in outcomes if o["level"] == level]) for level in levels]
    return [*first, *cells, "; ".join(filter(None, [words, names]))]


def _count(outcomes: Sequence[Mapping[str, Any]]) -> str:
    passed = sum(o["status"] == "passed" for o in outcomes)
    failed = sum(o["status"] in BAD for o in outcomes)
    if not passed + failed:
        return ""
    return f"{passed} ✓, {failed} ✗" if failed else f"{passed} ✓"


def _line(cells: Sequence[str]) -> str:
    plain = (" ".join(cell.replace("|", "\\|").split()) for cell in cells)
    return f"| {' | '.join(plain)} |"
