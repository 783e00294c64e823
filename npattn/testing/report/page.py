"""Report as a page: one file, the causes on top, failures folded under them, without network.

Or as a fragment of a page, as notebooks show it. `report.html` beside this file is the template.
"""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any

from npattn.testing.report import words
from npattn.testing.report.green import read_limits
from npattn.testing.report.maps import heat_maps
from npattn.testing.report.markup import HERE, document, render
from npattn.testing.report.place import find_place
from npattn.testing.report.record import Record

MAPS = 2
"""Results of a failure that are drawn, the worst first."""
LONGEST = 64_000
"""Characters of a script that the page holds; others are left to --script."""
STYLE, SCRIPT = ((HERE / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
"""Style and script of every page; the script copies what stands behind a button."""

FRAGMENT = "npattn-report"
"""Class of the element to which the style of a fragment is confined."""
# Nested in a rule, a selector holds for what is inside alone. Notebooks colour text and rows.
INSIDE = STYLE.replace(":root", "&").replace("body", "&").replace("main", "&")
FRAGMENT_STYLE = f""".{FRAGMENT} {{ {INSIDE}
table, pre, code {{ color: inherit; }} tr {{ background: none !important; }} }}
"""


def page(record: Record) -> str:
    """Return the whole page."""
    title = f"npattn check {record.target}"
    return document(title, [_body(record, buttons=True)], style=STYLE, script=SCRIPT)


def fragment(record: Record) -> str:
    """Return the page without its frame and its script, in an element with a style of its own."""
    body = _body(record, buttons=False)  # they need the script
    return f'<div class="{FRAGMENT}"><style>{FRAGMENT_STYLE}</style>\n{body}\n</div>\n'


def _describe_run(record: Record) -> str:
    """Return when and where the page was made, with the versions, and the place of the function."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    versions = [f"{n} {x}" for n, x in record.settings.get("versions", {}).items()]
    machine = f"{platform.platform(terse=True)}, {platform.machine()}, {os.cpu_count()} cores"
    place = find_place(record.target)
    source = [f"{place.file}, line {place.line}"] if place is not None else []
    return " · ".join([now, *source, *versions, machine])


def _body(record: Record, **options: Any) -> str:
    """Return the page of a record in HTML: failures, what is excused, and what was not tested."""
    excused = [o for o in record.outcomes if record.excuse(o)]
    suspects = [o for o in record.outcomes if o.status == "suspect" and not record.is_bad(o)]
    notes = [o for o in record.outcomes if o.status == "passed" and o.message]
    expected = [o for o in excused if record.excuse(o) == "expected"]
    behaviour = words.behaviour_lines(record)
    behaviour += [str(record.sensitivity)] if record.passed and record.sensitivity else []
    lists = {
        "Stale expectations": [f"{n} {why}: remove it" for n, why in record.stale.items()],
        "Expected failures": [f"{o.id}: {record.expectation(o)}" for o in expected],
        "Not promised": [f"{rule}: {why}" for rule, why in record.taken_back.items()],
        words.not_tested(record).replace("not", "Not", 1): record.untested,
        "Sizes": words.size_lines(record, verbose=True),
        "Refused": record.refused,
    }
    return render(
        "report.html",
        record=record,
        made=_describe_run(record),
        limits=read_limits() if record.passed else [],
        longest=LONGEST,
        words=words,
        heat_maps=heat_maps,
        maps=MAPS,
        failed={o.level for o in record.outcomes if record.counts(o)},
        others=[*excused, *suspects, *notes],
        lists=lists,
        behaviour=behaviour,
        **options,
    )
