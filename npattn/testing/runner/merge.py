"""Merge answers to the same rules on different problems, as a journal has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from npattn.testing.report.outcome import Outcome
from npattn.testing.runner.journal import answer_of, entry_of

Entry = Mapping[str, Any]


def merge_answers(parts: Iterable[Sequence[Entry]]) -> tuple[dict[str, Any], ...]:
    """Return one entry for each rule and dtype, from the answers of several checks in order.

    Examples add up, and the largest ratio stays. The first failure ends a rule: what was asked
    after it, elsewhere and at the same time, is left out, so that the order alone decides.

    Parameters
    ----------
    parts : iterable of sequences of entries
        Answers of each check, of problems that are not those of the others.
    """
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for entries in parts:
        for entry in entries:
            key = entry["dtype"], entry["answer"]
            merged[key] = _merge(merged[key], entry) if key in merged else dict(entry)
    return tuple(merged.values())


def _merge(before: Entry, entry: Entry) -> dict[str, Any]:
    old, new = answer_of(before), answer_of(entry)
    if not isinstance(old, Outcome) or not isinstance(new, Outcome) or old.failed:
        return dict(before)
    return {**before, **entry, "outcome": entry_of(old.merge(new))}
