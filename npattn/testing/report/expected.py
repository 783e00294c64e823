"""Expected failures: rules with reasons, from a file or given to a check."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from npattn.errors import OptionError
from npattn.testing.report.outcome import Outcome


def read_expected(path: str | Path) -> dict[str, str]:
    """Read a TOML file of expected failures, ``"rule[dtype]" = "reason"``."""
    try:
        entries = tomllib.loads(Path(path).read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise OptionError(
            f'{path} is not TOML in UTF-8 ({err}); write "rule[dtype]" = "reason"'
        ) from err
    return check_expected(entries, str(path))


def check_expected(expect: Mapping[str, str], source: str = "expect") -> dict[str, str]:
    """Return expected failures, each with its reason; `source` is named in errors."""
    for name, reason in expect.items():
        if not isinstance(reason, str) or not reason.strip():
            raise OptionError(f'{source} has {name} without a reason; write "rule" = "reason"')
    return dict(expect)


def asked_of(
    expected: Mapping[str, str], rules: Iterable[str], outcomes: Iterable[Outcome]
) -> dict[str, str]:
    """Return the expected failures without those of rules that exist and were not asked."""
    left_out = set(rules) - {outcome.rule for outcome in outcomes}
    return {n: reason for n, reason in expected.items() if n.partition("[")[0] not in left_out}
