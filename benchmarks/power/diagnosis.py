"""Diagnosis of every registered mistake: is the first cause the declared step and place.

    python -m benchmarks.power.diagnosis --examples 20 --only window
    python -m benchmarks.power.diagnosis --every 6 --start 3

Each mistake is checked as a user does it. Its `step` and `where` were written down from the code,
before any diagnosis was run; `where` of the first cause is compared as text, without spaces. A step
is false if it is named, and is another one.
"""

from __future__ import annotations

import time
from collections import Counter
from statistics import median
from typing import Any
from unittest import mock

import click

from npattn.mistakes import MISTAKES, Mistake
from npattn.testing import Cause, Report, check
from npattn.testing.diagnosis import causes
from npattn.testing.diagnosis.causes import diagnose


def explain(mistake: Mistake, examples: int | None) -> tuple[Report, float]:
    """Judge a mistake as a user does; return the report, and the seconds of its explanation."""
    seconds = 0.0

    def time_diagnosis(*args: Any) -> Any:
        nonlocal seconds
        began = time.perf_counter()
        try:
            return diagnose(*args)
        finally:
            seconds += time.perf_counter() - began

    given: dict[str, Any] = {} if examples is None else {"examples": examples}
    with mock.patch.object(causes, "diagnose", time_diagnosis):
        report = check(
            mistake.forward,
            backward=mistake.backward,
            framework="numpy",
            dtypes=mistake.dtypes,
            rounding=mistake.rounding,
            **given,
        )
    return report, seconds


def grade(mistake: Mistake, report: Report) -> str:
    """Grade the first cause of a report in words."""
    if not any(outcome.failed for outcome in report.outcomes):
        return "not found"
    first = report.causes[0] if report.causes else Cause("", ())
    if not first.step:
        return "no step"
    if first.step != mistake.step:
        return "false step"
    is_there = _letters(first.where) == _letters(mistake.where)
    return "right step and place" if is_there else "right step"


def _letters(where: str) -> str:
    return "".join(where.split())


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--examples", type=int, help="Problems per rule, as of npattn check.")
@click.option("--only", default="", help="Mistakes whose name starts with this.")
@click.option("--every", default=1, show_default=True, help="Every n-th of them.")
@click.option("--start", default=0, show_default=True, help="The first of them.")
def main(examples: int | None, only: str, every: int, start: int) -> None:
    counts: Counter[str] = Counter()
    took = []
    for name in [n for n in MISTAKES if n.startswith(only)][start::every]:
        mistake = MISTAKES[name]
        report, seconds = explain(mistake, examples)
        mark = grade(mistake, report)
        counts[mark] += 1
        took.append(seconds)
        first = report.causes[0] if report.causes else Cause("", ())
        print(f"{name:40} {mark:20} {seconds:5.1f} s", flush=True)
        if mark not in ("right step and place", "not found"):
            print(f"    declared {mistake.step}: {mistake.where}")
            print(f"    stated   {first.step}: {first.where} ({first.amount})", flush=True)
    print(_totals(counts))
    if took:
        print(f"seconds of the explanation: median {median(took):.1f}, largest {max(took):.1f}")


def _totals(counts: Counter[str]) -> str:
    found = sum(counts.values()) - counts["not found"]
    placed = counts["right step and place"]
    parts = {
        "right step": placed + counts["right step"],
        "right step and place": placed,
        "false step": counts["false step"],
        "no step": counts["no step"],
    }
    shares = (f"{name} {n} ({n / max(found, 1):.1%})" for name, n in parts.items())
    return f"found {found} of {sum(counts.values())}: {', '.join(shares)}"


if __name__ == "__main__":
    main()
