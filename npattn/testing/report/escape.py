"""Text of others made printable: control characters and surrogates as escapes."""

from __future__ import annotations

import re

# Controls but line feed, lone surrogates, and marks that break or turn a line.
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""Return the text with controls escaped: a terminal shows ``\x1b[2J`` and obeys nothing.

    Lines stay lines; what an encoding cannot hold, a lone surrogate, is escaped too.
    """
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
