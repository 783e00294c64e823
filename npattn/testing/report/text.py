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

RED_LINES, GREEN_LINES = 25, 12
"""Lines of a short report of failures, and of one without."""


class Room(NamedTuple):
    """Lines that parts of a short report may take."""

    blocks: int  # causes shown with a problem
    names: int  # lines that name the other rules of a cause without one
    refused: int  # lines of what is refused
    # lines of what was not tested, and of the tested sizes; sizes of one line are left out
    untested: int
    sizes: int
    matrix: int  # rows of the first wrong quantity
    groups: int = 99  # causes that are named at all


GREEN_ROOM = (
    *(
        Room(0, 0, 3, 3, 2, 0),
        Room(0, 0, 2, 2, 2, 0),
        Room(0, 0, 0, 2, 2, 0),
        Room(0, 0, 0, 1, 2, 0),
    ),
)
RED_ROOM = (
    *(Room(2, 3, 0, 2, 2, 8), Room(1, 3, 0, 1, 2, 8), Room(1, 2, 0, 1, 1, 4)),
    *(Room(1, 1, 0, 1, 1, 2), Room(0, 1, 0, 1, 1, 4), Room(0, 1, 0, 1, 1, 2)),
    *(Room(0, 0, 0, 1, 1, 2), Room(0, 0, 0, 1, 1, 0)),
    *(Room(0, 0, 0, 1, 1, 0, n) for n in (6, 5, 4, 3)),
)
"""The first with which a report fits is printed; else the last."""
MESSAGE_LINES = 2
CAUSE_LINES = 3
"""Lines of a cause that is not the first."""

GREEN, RED, YELLOW, DIM, BOLD = "green", "bold red", "yellow", "dim", "bold"


class Line(NamedTuple):
    """Line of a report, and the style in which a terminal shows it."""

    text: str = ""
    style: str = ""


def lines(record: Record, width: int = 100, *, verbose: bool = False) -> list[Line]:
    """Return the report as lines.

    Parameters
    ----------
    width : int
        Columns at which prose is wrapped; lines to paste are never broken.
    verbose : bool
        The whole table and every failure, instead of at most `RED_LINES` or `GREEN_LINES`.
    """
    limit = RED_LINES if record.groups() else GREEN_LINES
    first = [Line(words.UNCONFINED, RED)] if record.confined == "no" else []
    if record.few and record.verdict == "no verdict":
        first += [Line(f"no verdict: {'; '.join(record.few)}", YELLOW)]
    rooms = RED_ROOM if record.groups() else GREEN_ROOM
    short = (_short(record, width, room) for room in rooms)
    for form in [_verbose(record, width)] if verbose else short:
        text = first + [  # a text of several lines becomes several
            Line(part, line.style)
            for line in form
            for part in escape_controls(line.text).splitlines() or [""]
        ]
        if len(text) <= limit:
            break
    return text


# --- the short form -------------------------------------------------------------------------------


def _short(record: Record, width: int, room: Room) -> Iterator[Line]:
    """Yield the short form: verdict, causes, what was not judged, counts, sizes, links, verdict."""
    groups = record.groups()
    yield from _prose(words.headline(record), width, _style(record))
    yield from _refusals(record, width, 0 if groups else room.refused)
    for i, group in enumerate(groups[: room.groups]):
        yield from _group(record, group, width, room, i)
    if len(groups) > room.groups:
        more = words.count(len(groups) - room.groups, "more cause")
        yield Line(f"and {more} (--verbose: all)", BOLD)
    yield from [Line()] if groups else []
    yield from _unjudged_lines(record, width, room)
    levels = [text for text, counts in words.level_lines(record) if counts or not groups]
    for text in levels:  # of a red report: the last line counts what else passed or failed
        yield from _prose(text, width, RED if groups else "")
    if record.tested and room.sizes > 1:
        for text in words.size_lines(record):
            yield from _prose(text, width, DIM, limit=room.sizes)
    yield from _head(record, width)
    yield from _end(record)


def _style(record: Record) -> str:
    return GREEN if record.passed else RED


def _prose(text: str, width: int, style: str = "", limit: int | None = None) -> Iterator[Line]:
    """Yield a sentence in lines of the width."""
    yield from (Line(part, style) for part in _wrap(text, width, limit=limit))


def _refusals(record: Record, width: int, most: int) -> Iterator[Line]:
    """Yield what is refused and why: `most` lines, and what was found late whatever the limit."""
    if not record.tested:
        return  # every reason stands below
    late = [text for text in record.refused if LATE in text]
    others = [text for text in record.refused if LATE not in text]
    for text in late + others[:most]:
        yield Line(f"  {textwrap.shorten(text, width - 2, placeholder=' …')}", YELLOW)


def _unjudged_lines(record: Record, width: int, room: Room) -> Iterator[Line]:
    """Yield what is suspect or has no power, and what was not tested."""
    for outcome in record.outcomes:  # suspects may count, and are shown then
        if outcome.status == "passed" and outcome.message:
            yield from map(Line, words.failure_lines(outcome))
        if outcome.status == "suspect" and not record.counts(outcome):
            lines = [*words.failure_lines(outcome, MESSAGE_LINES, problem=False)]
            yield from (Line(text, YELLOW) for text in lines[: 1 if record.groups() else None])
    yield from (Line(text, YELLOW) for text in words.power_lines(record))
    yield from (Line(text) for text in record.sharper)
    if not record.tested:
        for text in (*record.untested, *record.refused):
            yield Line(f"not tested: {text}", YELLOW)
        return
    yield from _prose(words.untested_line(record), width, YELLOW, limit=room.untested)


def _group(
    record: Record, group: FailureGroup, width: int, room: Room, number: int
) -> Iterator[Line]:
    """Yield a cause in words, what was measured of the first, a failure, and the other rules.

    Beyond the blocks that there is room for, one line of the failure and few of other rules.
    """
    cause, shown, in_full = group.cause, group.smallest, number < room.blocks
    yield from _cause_lines(group, width, None if in_full else CAUSE_LINES)
    if number == 0:
        yield from _measurement_lines(record, group, width, room.matrix)
    others = [o for o in group.outcomes if o is not shown]
    lines = list(words.failure_lines(shown, MESSAGE_LINES if in_full else 0, problem=False))
    measured = number == 0 and record.pair is not None  # which has the recipe
    show = lines[: -1 if measured else None] if in_full else lines[:1]
    yield from (Line(f"  {x}") for x in show)
    if others and room.names:
        text = f"also failed: {words.rule_names(record, others)}"
        yield from (Line(x) for x in _wrap(text, width, "  ", room.names))
    elif others:
        yield Line(f"  also failed: {words.count(len(others), 'more rule')} (--verbose: all)")
    if cause is not None and words.convention_flag(cause):
        yield Line(f"  passes with {words.convention_flag(cause)}")


def _measurement_lines(
    record: Record, group: FailureGroup, width: int, rows: int
) -> Iterator[Line]:
    """Yield the pair of the first cause, and rows of its matrix."""
    pair, reading = record.pair, group.reading
    if pair is not None:
        yield Line(f"  {pair.text}")
        yield Line(f"    fails  {pair.failing}")
        if pair.passing:
            yield Line(f"    passes {pair.passing}")
    if reading is not None and rows:
        yield from (Line(f"  {x}") for x in reading.lines(min(width, 80) - 2, rows))


def _cause_lines(group: FailureGroup, width: int, limit: int | None = None) -> Iterator[Line]:
    """Yield the words of a cause, and when it passes."""
    if group.cause is None:
        return
    yield from (Line(part, BOLD) for part in _wrap(group.cause.text, width, limit=limit))
    if group.contrast:
        yield Line(f"  {group.contrast}")


def _head(record: Record, width: int) -> Iterator[Line]:
    """Yield the command with its settings, and how the function rounds."""
    yield from _prose(f"npattn check {record.target}  {words.settings_line(record)}", width, DIM)
    if "reads" in record.settings:
        yield Line(f"reads {words.value_text(record.settings['reads'])}", DIM)
    if not any(map(record.counts, record.outcomes)):
        yield from (Line(text, DIM) for text in words.behaviour_lines(record))


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
    if record.passed:
        yield Line(words.LINK, DIM)
    yield from (Line(text, BOLD) for text in record.way_out)
    if text := words.acceptance(record):
        yield Line(text, DIM)
    if record.passed and record.sensitivity is not None:
        yield Line(str(record.sensitivity), DIM)
    yield Line(words.verdict(record), _style(record))


def feedback_lines(record: Record, most: int) -> list[str]:
    """Return what failed in words that fit a prompt: the cause, the pair, the matrix, the rules.

    Parameters
    ----------
    most : int
        Lines at most; the matrix is cut first, and then what comes last.
    """
    groups = record.groups()
    if not groups:
        return [words.verdict(record)][:most]
    first = groups[0]
    head = [words.headline(record), *(line.text for line in _cause_lines(first, 10_000))]
    tail = [f"failed rules: {words.rule_names(record, (o for g in groups for o in g.outcomes))}"]
    if first.cause is None:
        tail = [first.smallest.message.partition("\n")[0], *tail]
    told: list[str] = []
    for rows in (8, 4, 2, 0):
        told = [*head, *(line.text.strip() for line in _measurement_lines(record, first, 100, 0))]
        if rows and first.reading is not None:
            told += first.reading.lines(100, rows)
        told += tail
        if len(told) <= most:
            break
    return told[:most]


# --- the long form --------------------------------------------------------------------------------


def _verbose(record: Record, width: int) -> Iterator[Line]:
    """Yield everything: causes, untested parts, the table by level, and every failure."""
    yield from _prose(words.headline(record), width, _style(record))
    yield from (Line(g.cause.text, BOLD) for g in record.groups() if g.cause is not None)
    yield Line()
    yield from _head(record, width)
    yield Line()
    if record.untested or record.refused:
        yield Line(words.not_tested(record), YELLOW)
        yield from (Line(f"  {text}") for text in (*record.untested, *record.refused))
        yield Line()
    if record.tested:
        yield from map(Line, words.size_lines(record, verbose=True))
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
