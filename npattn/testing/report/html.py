"""Report as a page: one file, the causes on top, failures folded under them, without network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

import numpy as np

from npattn.arrays import Array
from npattn.testing.compare import Comparison, short
from npattn.testing.excerpt import Excerpt
from npattn.testing.report.escape import escape_controls
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.page import SCRIPT, STYLE
from npattn.testing.report.record import Group, Record
from npattn.testing.report.words import (
    alternatives,
    convention_flag,
    failure_lines,
    headline,
    level_line,
    settings_line,
    verdict,
)

__all__ = ["page"]

MAPS = 3
"""Results of a failure that are drawn, the worst first."""


def page(record: Record) -> str:
    """Return the whole page."""
    title = f"npattn check {record.target}"
    state = "passed" if record.passed else "failed"
    body = [
        f'<h1>{_text(title)}</h1><p class="verdict {state}">{_text(verdict(record))}</p>',
        *_causes(record),
        *_levels(record),
        *_lists(record),
        *_others(record),
        f"<footer>{_text(settings_line(record))}{_behaviour(record)}</footer>",
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(title)}</title><style>{STYLE}</style></head><body><main>",
            *body,
            f"</main><script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _text(text: str) -> str:
    return escape(escape_controls(text))


def _behaviour(record: Record) -> str:
    models = record.settings.get("behaves as", {})
    lines = [f"{dtype} behaves as {x}" for dtype, x in models.items()]
    lines += [str(record.sensitivity)] if record.passed and record.sensitivity else []
    return "".join(f"<br>{_text(line)}" for line in lines)


def _causes(record: Record) -> Iterator[str]:
    groups = record.groups()
    if groups:
        yield f"<h2>{_text(headline(groups))}</h2>"
        yield from (_group(record, group, first=i == 0) for i, group in enumerate(groups))


def _group(record: Record, group: Group, *, first: bool = False) -> str:
    """Return a cause, its failures folded under it: the one to read first, then the others."""
    cause = group.cause
    names = ", ".join(o.id for o in group.outcomes)
    parts = [f"<h3>{_text(cause.text if cause is not None and cause.text else names)}</h3>"]
    if cause is not None and alternatives(cause):
        parts.append(f"<p>{_text(alternatives(cause))}</p>")
    if cause is not None and cause.passes_when:
        parts.append(f"<p>{_text(cause.passes_when)}</p>")
    flag = "" if cause is None else convention_flag(cause)
    parts += [f"<p>passes with <code>{_text(flag)}</code></p>"] if flag else []
    ordered = [group.smallest, *(o for o in group.outcomes if o is not group.smallest)]
    parts += [_failure(o, shown=first and o is group.smallest) for o in ordered]
    return f'<section class="cause">{"".join(parts)}</section>'


def _failure(outcome: Outcome, *, shown: bool = False) -> str:
    """Return one failure, folded: its lines, the maps of the worst results and the script."""
    head, *lines = failure_lines(outcome)
    parts = [f"<p>{_text(head)}</p>", _code("\n".join(line.strip() for line in lines))]
    parts += [_maps(c, c.excerpt) for c in outcome.comparisons[:MAPS] if c.excerpt is not None]
    if outcome.script():
        label = '<button type="button" class="copy">copy</button>'
        script = f"<details><summary>script</summary>{label}{_code(outcome.script())}</details>"
        parts.append(script)
    unfolded = " open" if shown else ""
    status = f'<span class="{_text(outcome.status)}">{_text(outcome.status)}</span>'
    summary = f"<summary><b>{_text(outcome.id)}</b> {status}</summary>"
    return f'<details class="failure"{unfolded}>{summary}{"".join(parts)}</details>'


def _code(text: str) -> str:
    return f"<pre><code>{_text(text)}</code></pre>" if text else ""


# --- heat maps ------------------------------------------------------------------------------------


def _maps(comparison: Comparison, excerpt: Excerpt) -> str:
    """Return got, want and error / tolerance as three heat maps of the same elements."""
    rows, columns = excerpt.got.shape
    lead = "".join(f"{i}, " for i in excerpt.lead)
    last = f"{excerpt.row}:{excerpt.row + rows}, {excerpt.column}:{excerpt.column + columns}"
    where = f"{comparison.name}[{lead}{last}]"
    both = np.concatenate([excerpt.got.ravel(), excerpt.want.ravel()])
    top = float(abs(both[np.isfinite(both)]).max(initial=0)) or 1.0
    maps = (
        _map("got", excerpt.got, [_sign_colour(x / top) for x in excerpt.got.flat]),
        _map("want", excerpt.want, [_sign_colour(x / top) for x in excerpt.want.flat]),
        _map("error / tolerance", excerpt.ratio, [_ratio_colour(x) for x in excerpt.ratio.flat]),
    )
    key = "blue below 0, red above; green within the tolerance, black without a number"
    caption = f"<figcaption>{_text(where)}: {key}</figcaption>"
    return f'<figure>{caption}<div class="maps">{"".join(maps)}</div></figure>'


def _map(title: str, values: Array, colours: Iterable[str]) -> str:
    """Return one map as SVG; a cell says its value."""
    rows, columns = values.shape
    cells = "".join(
        f'<rect x="{i % columns}" y="{i // columns}" width="1" height="1" fill="{colour}">'
        f"<title>{short(float(value))}</title></rect>"
        for i, (value, colour) in enumerate(zip(values.flat, colours, strict=True))
    )
    size = f'viewBox="0 0 {columns} {rows}" style="max-width:{max(columns * 14, 72)}px"'
    image = f'<svg {size} role="img" aria-label="{title}">{cells}</svg>'
    return f"<div><small>{title}</small>{image}</div>"


def _sign_colour(share: float) -> str:
    """Return blue for negative, white for 0, red for positive shares of the largest number."""
    if not np.isfinite(share):
        return "#000"
    fade = round(215 * (1 - min(abs(share), 1.0))) + 20
    return f"rgb(235,{fade},{fade})" if share > 0 else f"rgb({fade},{fade},235)"


def _ratio_colour(ratio: float) -> str:
    """Return green within the tolerance, yellow to red beyond it, black for no number."""
    if not np.isfinite(ratio):
        return "#000"
    if ratio <= 1:
        return "#8c8"
    return f"rgb(235,{round(190 / (1 + np.log10(ratio)))},40)"


# --- tables and lists -----------------------------------------------------------------------------


def _levels(record: Record) -> Iterator[str]:
    """Yield one line for each level, the rules of each folded under it."""
    yield "<h2>Levels</h2>"
    for level, outcomes in record.by_level().items():
        counts = any(map(record.counts, outcomes))
        line = level_line(record, level, outcomes)
        state = "failed" if counts else ""
        rows = "".join(_rows(record, outcomes))
        dtypes = "".join(f"<th>{_text(d)}</th>" for d in record.dtypes)
        head = f"<tr><th>rule</th><th>§</th>{dtypes}</tr>"
        table = f'<div class="scroll"><table>{head}{rows}</table></div>'
        summary = f'<summary class="{state}">{_text(line)}</summary>'
        yield f"<details>{summary}{table}</details>"


def _rows(record: Record, outcomes: Sequence[Outcome]) -> Iterator[str]:
    for rule in dict.fromkeys(o.rule for o in outcomes):
        row = {o.dtype: o for o in outcomes if o.rule == rule}
        first = next(iter(row.values()))
        cells = "".join(_cell(row.get(dtype)) for dtype in record.dtypes)
        about = f'<td title="{_text(first.about)}">{_text(rule)}</td>'
        yield f"<tr>{about}<td>{_text(first.semantics)}</td>{cells}</tr>"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "<td></td>"
    if outcome.status == "not applicable":
        return f'<td class="none">– {_text(outcome.message)}</td>'
    ratio = f" {outcome.worst:.2g}" if 0 < outcome.worst < float("inf") else ""
    return f'<td><span class="{_text(outcome.status)}">{_text(outcome.status)}</span>{ratio}</td>'


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
        "Not tested": record.untested,
        "Refused": record.refused,
    }
    for title, lines in lists.items():
        if lines:
            items = "".join(f"<li>{_text(line)}</li>" for line in lines)
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
