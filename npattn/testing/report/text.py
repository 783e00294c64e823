"""Report as lines of text: short, the causes first, or with the whole table and every failure."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from npattn.testing.cases.space import LATE
from npattn.testing.report.escape import escape_controls
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.record import Group, Record
from npattn.testing.report.words import (
    alternatives,
    convention_flag,
    failure_lines,
    headline,
    level_line,
    rule_names,
    settings_line,
    value_text,
    verdict,
)

__all__ = ["LINES", "PASSED_LINES", "Line", "lines"]

LINES = 40
"""Lines of a short report of failures."""
PASSED_LINES = 15
"""Lines of a short report that passed."""
ROOM = ((3, 4), (2, 4), (1, 3), (1, 2), (0, 2), (0, 1))
"""Causes shown with a problem, and lines of what is not tested: the first that fits is printed."""
MESSAGE_LINES = 2

GREEN, RED, YELLOW, DIM, BOLD = "green", "bold red", "yellow", "dim", "bold"


class Line(NamedTuple):
    """Line of a report, and the style in which a terminal shows it."""

    text: str = ""
    style: str = ""


def lines(record: Record, width: int = 100, *, verbose: bool = False) -> list[Line]:
    """Return the report as lines.

    Parameters
    ----------
    record : Record
    width : int
        Columns at which prose is wrapped; lines to paste are never broken.
    verbose : bool
        The whole table and every failure, instead of at most `LINES` lines.
    """
    if verbose:
        return _escape(_verbose(record, width))
    limit = PASSED_LINES if record.passed else LINES
    text: list[Line] = []
    for blocks, left_out in ROOM:
        text = _escape(_short(record, width, blocks, left_out))
        if len(text) <= limit:
            break
    return text


def _escape(text: Iterable[Line]) -> list[Line]:
    """Escape controls; a text of several lines becomes several."""
    return [
        Line(part, line.style)
        for line in text
        for part in escape_controls(line.text).splitlines() or [""]
    ]


# --- the short form -------------------------------------------------------------------------------


def _short(record: Record, width: int, blocks: int, left_out: int) -> Iterator[Line]:
    """Yield the short form: `blocks` causes with a problem, `left_out` lines of the untested."""
    yield from _causes(record, width, blocks)
    yield from _head(record)
    for level, outcomes in record.by_level().items():
        for part in _wrap(level_line(record, level, outcomes), width):
            yield Line(part, RED if any(map(record.counts, outcomes)) else "")
    yield from _notes(record)
    yield from _missing(record, width, left_out)
    yield from _end(record)


def _causes(record: Record, width: int, blocks: int) -> Iterator[Line]:
    """Yield the causes, the first `blocks` of them with the smallest problem that shows them."""
    groups = record.groups()
    if not groups:
        return
    yield Line(headline(groups), RED)
    for i, group in enumerate(groups):
        yield from _group(record, group, width, whole=i < blocks)
    yield Line()


def _group(record: Record, group: Group, width: int, *, whole: bool) -> Iterator[Line]:
    """Yield a cause in words, the smallest problem that shows it, and the other rules."""
    cause, shown = group.cause, group.smallest
    if cause is not None and cause.text:
        for part in _wrap(cause.text, width):
            yield Line(part, BOLD)
        if alternatives(cause):
            yield Line(f"  {alternatives(cause)}")
        if cause.passes_when:
            yield Line(f"  {cause.passes_when}")
    if not whole:
        names = rule_names(record, group.outcomes)
        yield from (Line(x) for x in _wrap(f"failed: {names}", width, "  "))
        return
    for text in failure_lines(shown, MESSAGE_LINES, problem=False):
        yield Line(f"  {text}")
    others = [o for o in group.outcomes if o is not shown]
    if others:
        names = rule_names(record, others)
        yield from (Line(x) for x in _wrap(f"also failed: {names}", width, "  "))
    if cause is not None and convention_flag(cause):
        yield Line(f"  passes with {convention_flag(cause)}")


def _head(record: Record) -> Iterator[Line]:
    yield Line(f"npattn check {record.target}", BOLD)
    yield Line(settings_line(record), DIM)
    if "reads" in record.settings:
        yield Line(f"reads {value_text(record.settings['reads'])}", DIM)
    for dtype, model in record.settings.get("behaves as", {}).items():
        yield Line(f"{dtype} behaves as {model}", DIM)
    yield Line()


def _notes(record: Record) -> Iterator[Line]:
    """Yield suspects, which may or may not count, and the notes of outcomes that passed."""
    for outcome in record.outcomes:
        if outcome.status == "passed" and outcome.message:
            yield from (Line(text) for text in failure_lines(outcome))
        if outcome.status == "suspect" and not record.counts(outcome):
            lines = failure_lines(outcome, MESSAGE_LINES, problem=False)
            yield from (Line(text, YELLOW) for text in lines)


def _missing(record: Record, width: int, limit: int) -> Iterator[Line]:
    """Yield what was not tested, and what is refused, in `limit` lines each; all if nothing was."""
    if not record.tested:
        for text in (*record.untested, *record.refused):
            yield Line(f"not tested: {text}", YELLOW)
        return
    if record.untested or record.refused:
        left_out = "; ".join(record.untested) or "what it refuses"
        yield from (Line(x, YELLOW) for x in _wrap(f"not tested: {left_out}", width, limit=limit))
    late = [text for text in record.refused if LATE in text]  # seen whatever the limit
    others = [text for text in record.refused if LATE not in text]
    shown = late + (others if len(others) <= limit else others[: limit - 1])
    for text in shown:
        yield Line(f"  {textwrap.shorten(text, width - 2, placeholder=' …')}", YELLOW)
    if len(record.refused) > len(shown):
        yield Line(f"  and {len(record.refused) - len(shown)} refusals (--verbose: all)", YELLOW)


def _end(record: Record) -> Iterator[Line]:
    """Yield expected failures, the way to a script, and the verdict."""
    failed = [o for o in record.outcomes if record.is_bad(o)]
    reasons = {o.id: record.reason(o) for o in failed}
    yield from (Line(f"expected: {name}: {why}") for name, why in reasons.items() if why)
    for rule in dict.fromkeys(o.rule for o in failed if record.excuse(o) == "not promised"):
        yield Line(f"not promised: {rule}: {record.taken_back[rule]}")
    for name, why in record.stale.items():
        yield Line(f"expected failure {name} {why}: remove it", RED)
    if any(o.script() for o in failed if record.counts(o)):
        yield Line("a script that shows the first failure: --script FILE, or report.script()", DIM)
    if record.passed and record.sensitivity is not None:
        yield Line(str(record.sensitivity), DIM)
    yield Line(verdict(record), GREEN if record.passed else RED)


# --- the long form --------------------------------------------------------------------------------


def _verbose(record: Record, width: int) -> Iterator[Line]:
    """Yield everything: settings, untested parts, the table by level, and every failure."""
    groups = record.groups()
    if any(g.is_explained for g in groups):
        yield Line(headline(groups), RED)
        yield from (Line(g.cause.text, BOLD) for g in groups if g.cause is not None)
        yield Line()
    yield from _head(record)
    if record.untested or record.refused:
        yield Line("not tested", YELLOW)
        yield from (Line(f"  {text}") for text in (*record.untested, *record.refused))
        yield Line()
    yield from _table(record)
    for group in record.groups(required=False):
        yield from _whole_group(group, width)
    notes = (o for o in record.outcomes if o.message and not record.is_bad(o))
    for outcome in notes:
        if outcome.status != "not applicable":
            yield from (Line(), *map(Line, failure_lines(outcome)))
    yield Line()
    yield from _end(record)


def _whole_group(group: Group, width: int) -> Iterator[Line]:
    """Yield a cause, and each failure that it explains in full."""
    if group.cause is not None:
        yield Line()
        yield from (Line(part, BOLD) for part in _wrap(group.cause.text, width))
        if alternatives(group.cause):
            yield Line(f"  {alternatives(group.cause)}")
        if group.cause.passes_when:
            yield Line(f"  {group.cause.passes_when}")
    for outcome in group.outcomes:
        yield from (Line(), *map(Line, failure_lines(outcome)))


def _table(record: Record) -> Iterator[Line]:
    """Yield the table: one verdict for a level, then one row for a rule, one column for a dtype."""
    rows = [("rule", "§", *record.dtypes)]
    levels = record.by_level()
    rows += [row for outcomes in levels.values() for row in _rows(record, outcomes)]
    widths = [max(map(cell_width, column)) for column in zip(*rows, strict=True)]
    yield Line("  " + _row(rows[0], widths), BOLD)
    for level, outcomes in levels.items():
        yield Line(level_line(record, level, outcomes), BOLD)
        yield from (Line("  " + _row(row, widths)) for row in _rows(record, outcomes))
    yield Line("number: largest error / tolerance", DIM)


def _rows(record: Record, outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    rows = []
    for rule in dict.fromkeys(o.rule for o in outcomes):
        row = {o.dtype: o for o in outcomes if o.rule == rule}
        cells = (_cell(row[d]) if d in row else "" for d in record.dtypes)
        rows.append((rule, next(iter(row.values())).semantics, *cells))
    return rows


def _cell(outcome: Outcome) -> str:
    if outcome.status == "not applicable":
        return f"– {outcome.message}"
    finite = 0 < outcome.worst < math.inf
    return outcome.status + (f" {outcome.worst:.2g}" if finite else "")


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (c + " " * (w - cell_width(c)) for c, w in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


def cell_width(text: str) -> int:
    """Return the number of columns that a terminal gives the text."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _wrap(text: str, width: int, indent: str = "", limit: int | None = None) -> list[str]:
    """Break prose into lines of `width` columns, `limit` at most; the rest is left out."""
    wrapper = textwrap.TextWrapper(
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=limit,
        placeholder=" … (--verbose: all)",
    )
    return wrapper.wrap(" ".join(text.split()))
