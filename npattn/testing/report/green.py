"""Limits of a green report: the page docs/green.md, for a terminal and in a page."""

from __future__ import annotations

import re
from typing import NamedTuple

from npattn.testing.report.markup import HERE

LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Limit(NamedTuple):
    """A row of the page: what is not said, how far the check goes, and how to go further."""

    name: str
    reach: str
    wider: str


def read_limits() -> list[Limit]:
    """Return the rows of the table, without their links and code marks."""
    text = LINK.sub(r"\1", (HERE / "green.md").read_text("utf-8")).replace("`", "")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [Limit(*map(str.strip, row)) for row in rows[2:]]
