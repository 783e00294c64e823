"""Report as lines of text: short, the causes first, or with the whole table and every failure."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from npattn.testing.cases.space import LATE
from npattn.testing.report.escape import escape_controls
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.record import Group, Record
from npattn.testing.report.words import (
    MUST,
    alternatives,
    convention_flag,
    coverage_lines,
    failure_lines,
    headline,
    level_line,
    rule_names,
    settings_line,
    value_text,
    verdict,
    worst_text,
)

LINES = 40
"""Lines of a short report of failures."""
PASSED_LINES = 25
"""Lines of a short report that passed."""


class Room(NamedTuple):
    """Lines that parts of a short report may take.

    Attributes
    ----------
    blocks : int
        Causes shown with a problem.
    names : int
        Lines that name the other rules of a cause without one.
    refused : int
        Lines of what is refused.
    sizes : int
        Lines of each part of what was tested and what was not.
    """

    blocks: int
    names: int
    refused: int
    sizes: int


ROOM = (
    *(Room(3, 9, 4, 4), Room(2, 9, 4, 4), Room(1, 9, 3, 4), Room(1, 9, 2, 4)),
    *(Room(0, 1, 2, 3), Room(0, 0, 1, 2)),
)
"""The first with which a report fits is printed; else the last."""
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
    for room in ROOM:
        text = _escape(_short(record, width, room))
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


def _short(record: Record, width: int, room: Room) -> Iterator[Line]:
    """Yield the short form."""
    yield from _causes(record, width, room)
    yield from _head(record)
    for level, outcomes in record.by_level().items():
        for part in _wrap(level_line(record, level, outcomes), width):
            yield Line(part, RED if any(map(record.counts, outcomes)) else "")
    yield from _notes(record)
    yield from _missing(record, width, room)
    yield from _end(record)


def _causes(record: Record, width: int, room: Room) -> Iterator[Line]:
    """Yield the causes, each with a failure, the first with the problem too."""
    groups = record.groups()
    if not groups:
        return
    yield Line(headline(groups), RED)
    for i, group in enumerate(groups):
        yield from _group(record, group, width, whole=i < room.blocks, names=room.names)
    yield Line()


def _group(record: Record, group: Group, width: int, *, whole: bool, names: int) -> Iterator[Line]:
    """Yield a cause in words, a failure that shows it, and the other rules.

    If not `whole`, one line of the failure, and `names` lines of the other rules.
    """
    cause, shown = group.cause, group.smallest
    yield from _cause_lines(group, width)
    others = [o for o in group.outcomes if o is not shown]
    if whole:
        yield from (Line(f"  {x}") for x in failure_lines(shown, MESSAGE_LINES, problem=False))
    else:
        more = f" and {len(others)} more" if others and not names else ""
        yield Line(f"  {shown.id}{more} {shown.status}: {shown.message.partition(chr(10))[0]}")
    if others and (whole or names):
        text = f"also failed: {rule_names(record, others)}"
        yield from (Line(x) for x in _wrap(text, width, "  ", None if whole else names))
    if whole and cause is not None and convention_flag(cause):
        yield Line(f"  passes with {convention_flag(cause)}")


def _cause_lines(group: Group, width: int) -> Iterator[Line]:
    """Yield the words of a cause, other mistakes that it may be, and when it passes."""
    if group.cause is None:
        return
    yield from (Line(part, BOLD) for part in _wrap(group.cause.text, width))
    for text in filter(None, (alternatives(group.cause), group.contrast)):
        yield Line(f"  {text}")


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


def _missing(record: Record, width: int, room: Room) -> Iterator[Line]:
    """Yield what was not tested, the sizes that were, and what is refused.

    If nothing was tested, every reason.
    """
    if not record.tested:
        for text in (*record.untested, *record.refused):
            yield Line(f"not tested: {text}", YELLOW)
        return
    for text in coverage_lines(record):
        yield from (Line(part, YELLOW) for part in _wrap(text, width, limit=room.sizes))
    late = [text for text in record.refused if LATE in text]  # seen whatever the limit
    others = [text for text in record.refused if LATE not in text]
    shown = late + (others if len(others) <= room.refused else others[: room.refused - 1])
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
        yield Line(f"not tested {MUST}", YELLOW)
        yield from (Line(f"  {text}") for text in (*record.untested, *record.refused))
        yield Line()
    if record.tested:
        yield from (Line(text) for text in coverage_lines(record)[1:])
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
        yield from _cause_lines(group, width)
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
    return f"{outcome.status} {worst_text(outcome)}".rstrip()


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
