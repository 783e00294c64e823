"""Diagnosis of every registered mistake: is the first cause the declared step and place.

    python -m benchmarks.power.diagnosis --examples 20 --only window
    python -m benchmarks.power.diagnosis --every 6 --start 3

Each mistake is checked as a user does it. Its `step` and `where` were written down from the code,
before any diagnosis was run; `where` of the first cause is compared by what it holds for, on random
indices, sizes and options. A step is false if it is named, and is another one.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from statistics import median
from typing import Any
from unittest import mock

import click
import numpy as np

from npattn.mistakes import MISTAKES, Mistake
from npattn.testing import Cause, Report, check
from npattn.testing.diagnosis import causes
from npattn.testing.diagnosis.causes import diagnose


def explain(mistake: Mistake, examples: int | None) -> tuple[Report, float]:
    """Judge a mistake as a user does; return the report, and the seconds of its explanation."""
    seconds = 0.0

    def time_diagnosis(*args: Any) -> Any:
        nonlocal seconds
        began = time.process_time()
        try:
            return diagnose(*args)
        finally:
            seconds += time.process_time() - began

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


def first_cause(report: Report) -> Cause:
    """Return the first cause, of rules that are not required if no other failed."""
    return next(iter((*report.causes, *report.other_causes)), Cause("", ()))


def grade(mistake: Mistake, report: Report) -> str:
    """Grade the first cause of a report in words."""
    if not any(outcome.failed for outcome in report.outcomes):
        return "not found"
    first = first_cause(report)
    if not first.step:
        return "no step"
    if first.step != mistake.step:
        return "false step"
    is_there = agree(first.where, mistake.where) >= SAME
    return "right step and place" if is_there else "right step"


SAME = 0.9
"""Share of what either place holds for that both must hold for, to be the same place."""
DRAWS = 20_000
COMPARISONS = {"≥": ">=", "≤": "<=", "≠": "!=", "=": "==", "<": "<", ">": ">"}


def agree(one: str, other: str) -> float:
    """Return for which share of what either place holds for both do."""
    if one.startswith("backward: ") != other.startswith("backward: "):
        return 0.0
    drawn = _draw()
    a, b = (_holds(x.removeprefix("backward: ") or "everywhere", drawn) for x in (one, other))
    return float((a & b).sum() / max((a | b).sum(), 1))


def _draw() -> dict[str, Any]:
    """Draw sizes and indices; sizes are often equal, and often 0, 1 or multiples of 16."""
    rng = np.random.default_rng(0)

    def draw(low: int, high: int) -> np.ndarray:
        x = rng.integers(low, high, DRAWS)
        x = np.where(rng.random(DRAWS) < 0.2, 16 * -(-x // 16), x)
        return np.where(rng.random(DRAWS) < 0.15, rng.integers(0, 2, DRAWS), x)

    sizes = {x: draw(1, 5) for x in "BKG"}
    sizes |= {x: draw(1, 300) for x in "TSDE"}
    for a, b in ("TS", "DE"):
        sizes[a] = np.where(rng.random(DRAWS) < 0.3, sizes[b], sizes[a])
    sizes["H"] = sizes["K"] * sizes["G"]
    return sizes | {x.lower(): rng.integers(0, np.maximum(sizes[x], 1)) for x in "BHTSDE"}


def _holds(place: str, drawn: dict[str, Any]) -> np.ndarray:
    """Evaluate a place; words that are no formula, such as options, hold on random draws."""
    holds = np.ones(DRAWS, bool)
    for atom in place.split(" and "):
        any_of = np.zeros(DRAWS, bool)
        for part in atom.split(" or "):
            any_of |= _atom(part.strip(), drawn)
        holds &= any_of
    return holds


def _atom(text: str, drawn: dict[str, Any]) -> np.ndarray:
    if text == "everywhere":
        return np.ones(DRAWS, bool)
    is_formula = not text.startswith("rows ")
    sign = next((x for x in COMPARISONS if is_formula and f" {x} " in text), None)
    if sign is None:
        word = text.removeprefix("no ")
        is_on = np.random.default_rng([*word.encode()]).random(DRAWS) < 0.5
        return is_on if word == text else ~is_on
    code = re.sub(r"⌈(.*?) / (.*?)⌉", r"-(-(\1) // (\2))", text)
    code = code.replace(f" {sign} ", f" {COMPARISONS[sign]} ").replace("−", "-").replace("·", "*")
    with np.errstate(divide="ignore"):  # sizes of 0
        return np.broadcast_to(eval(code, {"scale": drawn["t"] - drawn["s"]}, drawn), DRAWS)


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
        first = first_cause(report)
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
