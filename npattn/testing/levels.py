"""Levels of rules, so that red means something: what must hold, and what is only measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from npattn.errors import OptionError

Level = Literal["values", "edges", "conduct", "non-finite", "degenerate", "reproducible"]

LEVELS: dict[Level, str] = {
    "values": "finite numbers: agreement with the oracle, and relations",
    "edges": "rows that see nothing, −inf, huge offsets, saturated rows; B, T or S of 0",
    "conduct": "inputs unchanged, views, repeatable, order of calls",
    "non-finite": "what NaN and inf in hidden or visible places do",
    "degenerate": "D, E or H of 0, a sink of −inf",
    "reproducible": "the same bits for a row in another call, batch, padding, split or thread",
}
"""Every level, in the order of reports, in a line."""

REQUIRED: tuple[Level, ...] = ("values", "edges", "conduct")
"""Levels that a check requires unless it is told otherwise."""


def check_levels(require: Iterable[str] | str) -> tuple[Level, ...]:
    """Return the levels named, in the order of `LEVELS`; "all" is every one but reproducible."""
    named = {require} if isinstance(require, str) else set(require)
    wrong = sorted(named - {*get_args(Level), "all"})
    if wrong or not named:
        raise OptionError(
            f"require is {wrong[0] if wrong else ()!r}, must be 'all' or levels among "
            f"{', '.join(LEVELS)}"
        )
    if "all" in named:
        named |= set(LEVELS) - {"reproducible"}
    return tuple(level for level in LEVELS if level in named)
