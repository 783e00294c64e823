"""Cells of a matrix: the result of a rule in a run, its symbol, and the worst ratio."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from npattn.testing.report.outcome import OUT_OF_TIME


@dataclass(frozen=True)
class State:
    """A state of a cell."""

    name: str
    symbol: str  # one character, told from the others without colours
    key: str  # one letter, of which the page makes a class
    about: str  # what it means, for a legend


STATES = {
    state.name: state
    for state in (
        State("passed", "✓", "p", "keeps the rule; the number is the largest error / tolerance"),
        State("failed", "✗", "f", "breaks the rule; the number is the error / tolerance"),
        State("failed, not required", "×", "w", "breaks it, at a level that nobody has to keep"),
        State("failed, not promised", "◇", "d", "breaks it, which its documentation says"),
        State("suspect", "?", "s", "within the tolerance, but the errors look like a mistake"),
        State("raised", "!", "x", "raises on what it accepted before"),
        State("crashed", "†", "c", "ends its process"),
        State("timed out", "…", "t", "gives no answer in time"),
        State("refused", "⊘", "r", "raises on what the rule needs, which is legal"),
        State("lacks", "–", "l", "lacks an option or a result that the rule needs"),
        State("not run", "○", "o", "was not run here"),
        State("not asked", "◌", "n", "was not asked within the budget of time"),
        State("silent", "·", "e", "nothing to say: these rules have a cell only where they fail"),
    )
}
"""The states of a cell, by name, in the order of a legend."""

BAD = ("failed", "error", "crashed", "timed out")
"""Statuses of an outcome that count against an implementation."""


@dataclass(frozen=True)
class Cell:
    """The result of one rule in one run."""

    state: State
    # Largest error / tolerance; of the smallest failing problem, if one failed. 0 if there is no
    # number
    ratio: float = 0.0
    outcome: Mapping[str, Any] | None = None  # the outcome in the report; None if it has none

    @property
    def failed(self) -> bool:
        """True if the rule is broken, required or not."""
        return self.outcome is not None and self.outcome["status"] in BAD


def cells_of(run: Mapping[str, Any], rules: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """Return the cells of a run, one for each rule; both are as schema.json describes them."""
    report = run["report"]
    if report is None:
        return [Cell(STATES[run["state"]]) for _ in rules]
    outcomes = {(o["rule"], o["level"]): o for o in report["outcomes"]}
    absent = Cell(STATES["silent" if run["state"] == "done" else run["state"]])
    found = (outcomes.get((rule["name"], rule["level"])) for rule in rules)
    return [
        absent if o is None else Cell(STATES[_state(report, o)], float(o["worst"]), o)
        for o in found
    ]


def _state(report: Mapping[str, Any], outcome: Mapping[str, Any]) -> str:
    status = outcome["status"]
    if status == "not applicable" and outcome["message"] == OUT_OF_TIME:
        return "not asked"
    if status == "not applicable":
        return "refused" if outcome["message"].startswith("refuses") else "lacks"
    if status in ("failed", "error") and not outcome["counts"]:
        promised = outcome["rule"] not in report["not_promised"]
        return "failed, not required" if promised else "failed, not promised"
    return "raised" if status == "error" else str(status)


def compact(ratio: float) -> str:
    """Format a ratio for a narrow cell: .28, 17, 3e5, ∞; "" for 0.

    Examples
    --------
    >>> [compact(x) for x in (0.0, 0.004, 0.284, 0.999, 1.7, 17.3, 999.6, 2.96e5, float("inf"))]
    ['', '.01', '.28', '1', '1.7', '17', '1e3', '3e5', '∞']
    """
    if ratio == 0:
        return ""
    if not math.isfinite(ratio):
        return "∞"
    if ratio < 1:
        return f"{max(ratio, 0.01):.2f}".removeprefix("0").removesuffix(".00")
    if ratio < 999.5:
        return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"
    digits, _, exponent = f"{ratio:.0e}".partition("e")
    return f"{digits}e{int(exponent)}"
