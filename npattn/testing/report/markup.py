"""HTML of the pages: text and code made safe, and the frame of a page that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from npattn.testing.report.escape import escape_controls

__all__ = ["code_block", "document", "safe_text"]


def safe_text(text: str) -> str:
    """Return a text as HTML: markup and control characters are escaped."""
    return escape(escape_controls(text))


def code_block(text: str) -> str:
    """Return a text as a block of code; "" if it is empty."""
    return f"<pre><code>{safe_text(text)}</code></pre>" if text else ""


def document(title: str, body: Iterable[str], *, style: str, script: str) -> str:
    """Return a whole page of one file: `body` is HTML, in a main element."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{safe_text(title)}</title><style>{style}</style></head><body><main>",
            *body,
            f"</main><script>{script}</script></body></html>\n",
        ]
    )
