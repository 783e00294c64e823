"""Report as lines of text: short, the causes first, or with the whole table and every failure."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from npattn.testing.cases.space import LATE
from npattn.testing.report import words
from npattn.testing.report.escape import escape_controls
from npattn.testing.report.record import FailureGroup, Record

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
    limit = PASSED_LINES if record.passed else LINES
    short = (_short(record, width, room) for room in ROOM)
    for form in [_verbose(record, width)] if verbose else short:
        text = [  # a text of several lines becomes several
            Line(part, line.style)
            for line in form
            for part in escape_controls(line.text).splitlines() or [""]
        ]
        if len(text) <= limit:
            break
    return text


# --- the short form -------------------------------------------------------------------------------


def _short(record: Record, width: int, room: Room) -> Iterator[Line]:
    """Yield the short form: the causes, each with a failure, the first with the problem too."""
    groups = record.groups()
    yield from [Line(words.headline(groups), RED)] if groups else []
    for i, group in enumerate(groups):
        yield from _group(record, group, width, whole=i < room.blocks, names=room.names)
    yield from [Line()] if groups else []
    yield from _head(record)
    for level, outcomes in record.by_level().items():
        for part in _wrap(words.level_line(record, level, outcomes), width):
            yield Line(part, RED if any(map(record.counts, outcomes)) else "")
    for outcome in record.outcomes:  # suspects may count, and are shown then
        if outcome.status == "passed" and outcome.message:
            yield from map(Line, words.failure_lines(outcome))
        if outcome.status == "suspect" and not record.counts(outcome):
            lines = words.failure_lines(outcome, MESSAGE_LINES, problem=False)
            yield from (Line(text, YELLOW) for text in lines)
    yield from (Line(text, YELLOW) for text in words.power_lines(record))
    yield from _missing(record, width, room)
    yield from _end(record)


def _group(
    record: Record, group: FailureGroup, width: int, *, whole: bool, names: int
) -> Iterator[Line]:
    """Yield a cause in words, a failure that shows it, and the other rules.

    If not `whole`, one line of the failure, and `names` lines of the other rules.
    """
    cause, shown = group.cause, group.smallest
    yield from _cause_lines(group, width)
    others = [o for o in group.outcomes if o is not shown]
    if whole:
        lines = words.failure_lines(shown, MESSAGE_LINES, problem=False)
        yield from (Line(f"  {x}") for x in lines)
    else:
        more = f" and {len(others)} more" if others and not names else ""
        yield Line(f"  {shown.id}{more} {shown.status}: {shown.message.partition(chr(10))[0]}")
    if others and (whole or names):
        text = f"also failed: {words.rule_names(record, others)}"
        yield from (Line(x) for x in _wrap(text, width, "  ", None if whole else names))
    if whole and cause is not None and words.convention_flag(cause):
        yield Line(f"  passes with {words.convention_flag(cause)}")


def _cause_lines(group: FailureGroup, width: int) -> Iterator[Line]:
    """Yield the words of a cause, and when it passes."""
    if group.cause is None:
        return
    yield from (Line(part, BOLD) for part in _wrap(group.cause.text, width))
    if group.contrast:
        yield Line(f"  {group.contrast}")


def _head(record: Record) -> Iterator[Line]:
    yield Line(f"npattn check {record.target}", BOLD)
    yield Line(words.settings_line(record), DIM)
    if "reads" in record.settings:
        yield Line(f"reads {words.value_text(record.settings['reads'])}", DIM)
    yield from (Line(text, DIM) for text in words.behaviour_lines(record))
    yield Line()


def _missing(record: Record, width: int, room: Room) -> Iterator[Line]:
    """Yield what was not tested, the sizes that were, and what is refused.

    If nothing was tested, every reason.
    """
    if not record.tested:
        for text in (*record.untested, *record.refused):
            yield Line(f"not tested: {text}", YELLOW)
        return
    for text in words.coverage_lines(record):
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
    reasons = {o.id: record.expectation(o) for o in failed}
    yield from (Line(f"expected: {name}: {why}") for name, why in reasons.items() if why)
    for rule in dict.fromkeys(o.rule for o in failed if record.excuse(o) == "not promised"):
        yield Line(f"not promised: {rule}: {record.taken_back[rule]}")
    for name, why in record.stale.items():
        yield Line(f"expected failure {name} {why}: remove it", RED)
    if any(o.script() for o in failed if record.counts(o)):
        yield Line("a script that shows the first failure: --script FILE, or report.script()", DIM)
    if text := words.acceptance(record):
        yield Line(text, DIM)
    if record.passed and record.sensitivity is not None:
        yield Line(str(record.sensitivity), DIM)
    yield Line(words.verdict(record), GREEN if record.passed else RED)


# --- the long form --------------------------------------------------------------------------------


def _verbose(record: Record, width: int) -> Iterator[Line]:
    """Yield everything: settings, untested parts, the table by level, and every failure."""
    groups = record.groups()
    if any(g.is_explained for g in groups):
        yield Line(words.headline(groups), RED)
        yield from (Line(g.cause.text, BOLD) for g in groups if g.cause is not None)
        yield Line()
    yield from _head(record)
    if record.untested or record.refused:
        yield Line(words.not_tested(record), YELLOW)
        yield from (Line(f"  {text}") for text in (*record.untested, *record.refused))
        yield Line()
    if record.tested:
        yield from (Line(text) for text in words.coverage_lines(record)[1:])
        yield Line()
    yield from _table(record)
    for group in record.groups(required=False):
        if group.cause is not None:
            yield Line()
            yield from _cause_lines(group, width)
        for outcome in group.outcomes:
            yield from (Line(), *map(Line, words.failure_lines(outcome)))
    for outcome in record.outcomes:
        if outcome.message and not record.is_bad(outcome) and outcome.status != "not applicable":
            yield from (Line(), *map(Line, words.failure_lines(outcome)))
    yield Line()
    yield from (Line(text) for text in words.power_lines(record, verbose=True))
    yield Line()
    yield from _end(record)


def _table(record: Record) -> Iterator[Line]:
    """Yield the table: one verdict for a level, then one row for a rule, one column for a dtype."""
    head, tables = ("rule", "§", *record.dtypes), []
    for level, outcomes in record.by_level().items():
        rows = []
        for row in record.by_rule(outcomes):
            first = next(iter(row.values()))
            cells = (words.cell_text(row.get(dtype)) for dtype in record.dtypes)
            rows.append((first.rule, first.semantics, *cells))
        tables.append((words.level_line(record, level, outcomes), rows))
    columns = zip(head, *(row for _, rows in tables for row in rows), strict=True)
    widths = [max(map(cell_width, column)) for column in columns]

    def join(cells: Sequence[str]) -> str:
        padded = (c + " " * (w - cell_width(c)) for c, w in zip(cells, widths, strict=True))
        return "  " + "  ".join(padded).rstrip()

    yield Line(join(head), BOLD)
    for title, rows in tables:
        yield Line(title, BOLD)
        yield from (Line(join(row)) for row in rows)
    yield Line("number: largest error / tolerance", DIM)


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
