"""Tables in Markdown, put into a page between ``<!-- name -->`` and ``<!-- /name -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its first column is text, the others are too, since cells hold more than numbers."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def put(page: Path, name: str, text: str) -> None:
    """Replace what stands between the markers of that name; both must be there."""
    found = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.S)
    new, count = found.subn(lambda match: f"{match[1]}{text}\n{match[2]}", page.read_text("utf-8"))
    if count != 1:
        raise ValueError(f"{page} has {count} places marked {name}, must have one")
    page.write_text(new, "utf-8")
