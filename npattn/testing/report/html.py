"""Report as a page: one file, the causes on top, failures folded under them, without network.

Or as a fragment of a page, as notebooks show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from npattn.testing.report.maps import heat_maps
from npattn.testing.report.markup import code_block, document, safe_text
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.page import FRAGMENT, FRAGMENT_STYLE, SCRIPT, STYLE
from npattn.testing.report.record import Group, Record
from npattn.testing.report.words import (
    MUST,
    alternatives,
    convention_flag,
    coverage_lines,
    failure_lines,
    headline,
    level_line,
    settings_line,
    verdict,
    worst_text,
)

__all__ = ["fragment", "page"]

MAPS = 3
"""Results of a failure that are drawn, the worst first."""


COPY = '<button type="button" class="copy">copy</button>'


def page(record: Record) -> str:
    """Return the whole page."""
    return document(_title(record), _body(record), style=STYLE, script=SCRIPT)


def fragment(record: Record) -> str:
    """Return the page without its frame and its script, in an element with a style of its own."""
    body = "\n".join(_body(record)).replace(COPY, "")  # buttons need the script
    return f'<div class="{FRAGMENT}"><style>{FRAGMENT_STYLE}</style>\n{body}\n</div>\n'


def _title(record: Record) -> str:
    return f"npattn check {record.target}"


def _body(record: Record) -> Iterator[str]:
    state = "passed" if record.passed else "failed"
    line = f'<p class="verdict {state}">{safe_text(verdict(record))}</p>'
    yield f"<h1>{safe_text(_title(record))}</h1>{line}"
    yield from _causes(record)
    yield from _levels(record)
    yield from _lists(record)
    yield from _others(record)
    yield f"<footer>{safe_text(settings_line(record))}{_behaviour(record)}</footer>"


def _behaviour(record: Record) -> str:
    models = record.settings.get("behaves as", {})
    lines = [f"{dtype} behaves as {x}" for dtype, x in models.items()]
    lines += [str(record.sensitivity)] if record.passed and record.sensitivity else []
    return "".join(f"<br>{safe_text(line)}" for line in lines)


def _causes(record: Record) -> Iterator[str]:
    groups = record.groups()
    if groups:
        yield f"<h2>{safe_text(headline(groups))}</h2>"
        yield from (_group(record, group, first=i == 0) for i, group in enumerate(groups))


def _group(record: Record, group: Group, *, first: bool = False) -> str:
    """Return a cause, its failures folded under it: the one to read first, then the others."""
    cause = group.cause
    names = ", ".join(o.id for o in group.outcomes)
    parts = [f"<h3>{safe_text(cause.text if cause is not None and cause.text else names)}</h3>"]
    if cause is not None and alternatives(cause):
        parts.append(f"<p>{safe_text(alternatives(cause))}</p>")
    if group.contrast:
        parts.append(f"<p>{safe_text(group.contrast)}</p>")
    flag = "" if cause is None else convention_flag(cause)
    parts += [f"<p>passes with <code>{safe_text(flag)}</code></p>"] if flag else []
    ordered = [group.smallest, *(o for o in group.outcomes if o is not group.smallest)]
    parts += [_failure(o, shown=first and o is group.smallest) for o in ordered]
    return f'<section class="cause">{"".join(parts)}</section>'


def _failure(outcome: Outcome, *, shown: bool = False) -> str:
    """Return one failure, folded: its lines, the maps of the worst results and the script."""
    head, *lines = failure_lines(outcome)
    parts = [f"<p>{safe_text(head)}</p>", code_block("\n".join(line.strip() for line in lines))]
    parts += [
        heat_maps(c.name, c.excerpt) for c in outcome.comparisons[:MAPS] if c.excerpt is not None
    ]
    if outcome.script():
        script = f"<details><summary>script</summary>{COPY}{code_block(outcome.script())}</details>"
        parts.append(script)
    unfolded = " open" if shown else ""
    status = f'<span class="{safe_text(outcome.status)}">{safe_text(outcome.status)}</span>'
    summary = f"<summary><b>{safe_text(outcome.id)}</b> {status}</summary>"
    return f'<details class="failure"{unfolded}>{summary}{"".join(parts)}</details>'


# --- tables and lists -----------------------------------------------------------------------------


def _levels(record: Record) -> Iterator[str]:
    """Yield one line for each level, the rules of each folded under it."""
    yield "<h2>Levels</h2>"
    for level, outcomes in record.by_level().items():
        counts = any(map(record.counts, outcomes))
        line = level_line(record, level, outcomes)
        state = "failed" if counts else ""
        rows = "".join(_rows(record, outcomes))
        dtypes = "".join(f"<th>{safe_text(d)}</th>" for d in record.dtypes)
        head = f"<tr><th>rule</th><th>§</th>{dtypes}</tr>"
        table = f'<div class="scroll"><table>{head}{rows}</table></div>'
        summary = f'<summary class="{state}">{safe_text(line)}</summary>'
        yield f"<details>{summary}{table}</details>"


def _rows(record: Record, outcomes: Sequence[Outcome]) -> Iterator[str]:
    for rule in dict.fromkeys(o.rule for o in outcomes):
        row = {o.dtype: o for o in outcomes if o.rule == rule}
        first = next(iter(row.values()))
        cells = "".join(_cell(row.get(dtype)) for dtype in record.dtypes)
        about = f'<td title="{safe_text(first.about)}">{safe_text(rule)}</td>'
        yield f"<tr>{about}<td>{safe_text(first.semantics)}</td>{cells}</tr>"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "<td></td>"
    if outcome.status == "not applicable":
        return f'<td class="none">– {safe_text(outcome.message)}</td>'
    status = safe_text(outcome.status)
    return f'<td><span class="{status}">{status}</span> {worst_text(outcome)}</td>'


def _lists(record: Record) -> Iterator[str]:
    """Yield what was not tested and what is refused, and expectations."""
    reasons = [
        f"{o.id}: {record.reason(o)}" for o in record.outcomes if record.excuse(o) == "expected"
    ]
    stale = [f"{name} {why}: remove it" for name, why in record.stale.items()]
    promises = [f"{rule}: {why}" for rule, why in record.taken_back.items()]
    lists = {
        "Stale expectations": stale,
        "Expected failures": reasons,
        "Not promised": promises,
        f"Not tested {MUST}": record.untested,
        "Sizes": coverage_lines(record)[1:],
        "Refused": record.refused,
    }
    for title, lines in lists.items():
        if lines:
            items = "".join(f"<li>{safe_text(line)}</li>" for line in lines)
            unfolded = " open" if title == "Stale expectations" else ""
            summary = f"<summary>{title}: {len(lines)}</summary>"
            yield f"<details{unfolded}>{summary}<ul>{items}</ul></details>"


def _others(record: Record) -> Iterator[str]:
    """Yield failures that cost nothing, suspects and notes."""
    left = [o for o in record.outcomes if record.excuse(o)]
    left += [o for o in record.outcomes if o.status == "suspect" and not record.is_bad(o)]
    left += [o for o in record.outcomes if o.status == "passed" and o.message]
    if left:
        yield "<h2>Shown, and not required</h2>"
        yield from map(_failure, left)
