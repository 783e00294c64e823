"""Expected failures: a file that names rules with reasons, compared with a report."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from npattn.errors import OptionError
from npattn.testing.report.outcome import Outcome
from npattn.testing.report.report import Report

__all__ = ["compare_with_expected", "read_expected"]


def read_expected(path: str | Path) -> dict[str, str]:
    """Read a TOML file of expected failures, ``"rule[dtype]" = "reason"``.

    Raises
    ------
    OptionError
        If it is not TOML, or an entry has no reason.
    """
    try:
        entries = tomllib.loads(Path(path).read_text())
    except tomllib.TOMLDecodeError as err:
        raise OptionError(f'{path} is not TOML ({err}); write "rule[dtype]" = "reason"') from err
    for name, reason in entries.items():
        if not isinstance(reason, str) or not reason.strip():
            raise OptionError(f'{path} has {name} without a reason; write "rule" = "reason"')
    return entries


def compare_with_expected(report: Report, expected: Mapping[str, str]) -> tuple[bool, list[str]]:
    """Compare the failures of a report with the expected ones.

    Returns
    -------
    bool
        True if exactly the expected failures occurred.
    list of str
        Lines that name expected failures, and entries that failed nothing.
    """

    def entries(outcome: Outcome) -> set[str]:
        return {outcome.id, outcome.rule} & set(expected)

    bad = {"failed", "error"} | ({"suspect"} if report.strict else set())
    failed = [outcome for outcome in report.outcomes if outcome.status in bad]
    lines = [
        f"expected: {outcome.id}: {expected[name]}"
        for outcome in failed
        for name in sorted(entries(outcome))
    ]
    stale = sorted(set(expected) - {name for outcome in failed for name in entries(outcome)})
    checked = {name for outcome in report.outcomes for name in (outcome.id, outcome.rule)}
    for name in stale:
        why = "did not fail" if name in checked else "matches no rule that was checked"
        lines.append(f"expected failure {name} {why}: remove it")
    return not stale and all(map(entries, failed)), lines
