"""Step, place and false words of the first cause of every registered mistake.

    python -m benchmarks.power.words --every 24 --start 5
    python -m benchmarks.power.words --examples 20 --only window

Each mistake is checked as a user does it. Its `step` and `where` were written down from the code,
before any diagnosis was run. A step is false if it is named, and is another one; a place, if it
names other elements than the declared one on more than 2 % of 200 random problems; a condition of
problems, if it passes a problem on which the declared place holds, as often; an amount, if the
wrong numbers that stand beside it in the report are others. What is not said is not false.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any
from unittest import mock

import click
import numpy as np

from benchmarks.power import fresh
from npattn.mistakes import MISTAKES, Mistake
from npattn.testing import Cause, Report, check
from npattn.testing.diagnosis import causes
from npattn.testing.diagnosis.amount import SEEN
from npattn.testing.diagnosis.causes import diagnose

PROBLEMS, ELEMENTS = 200, 400
"""Random problems, and elements of each on which two places are compared."""
ALLOWED = 0.02
"""Share of the problems on which a place may be another."""
NEAR = 0.05
"""Relative distance of a wrong number from what an amount says: readings have two digits."""
OPTIONS = (
    "mask", "causal", "window", "bias", "scale", "softcap", "sinks", "dropout", "gate", "contents",
    "dlse", "dweights", "weights",
)  # fmt: skip
COMPARISONS = {"≥": ">=", "≤": "<=", "≠": "!=", "=": "==", "<": "<", ">": ">"}
Elements = Mapping[str, Any]


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


def problems() -> Iterator[Elements]:
    """Yield random problems: sizes and options as numbers, indices and visible keys as arrays."""
    rng = np.random.default_rng(0)
    for _ in range(PROBLEMS):
        sizes = {x: int(rng.integers(1, 5)) for x in "BKG"}
        sizes |= {x: int(rng.choice([1, 2, 16, 17, *rng.integers(3, 200, 6)])) for x in "TSDE"}
        if rng.random() < 0.3:
            sizes["S"] = sizes["T"]
        if rng.random() < 0.3:
            sizes["E"] = sizes["D"]
        sizes["H"] = sizes["K"] * sizes["G"]
        values: dict[str, Any] = {**sizes}
        values |= {x: bool(rng.random() < 0.5) for x in OPTIONS}
        values |= {x.lower(): rng.integers(0, sizes[x], ELEMENTS) for x in "BHTSDE"}
        beside = values["s"] - values["t"] - sizes["S"] + sizes["T"]
        seen = rng.random(ELEMENTS) < 0.5 if values["mask"] else np.ones(ELEMENTS, bool)
        seen &= (beside <= 0) | (not values["causal"])
        seen &= (abs(beside) <= 3) | (not values["window"])
        empty = (rng.random(ELEMENTS) < 0.2) & values["mask"]
        yield values | {"hidden": ~seen | empty, "empty": empty}


def elements(place: str, values: Elements) -> Any:
    """Return for which elements of a problem a place holds."""
    holds = np.ones(ELEMENTS, bool)
    for condition in place.split(" and "):
        holds &= np.any([_holds(part.strip(), values) for part in condition.split(" or ")], 0)
    return holds


def _holds(text: str, values: Elements) -> Any:
    words = {
        "everywhere": True,
        "hidden keys": values["hidden"],
        "visible keys": ~values["hidden"],
        "rows that see no key": values["empty"],
    }
    if text in words:
        return np.broadcast_to(words[text], ELEMENTS)
    text = re.sub(
        r"^(window)\[.*|^(scale) .*|^(\w+)(?: (?:not )?shared |\.shape).*", r"\1\2\3", text
    )  # some of its values
    sign = next((x for x in COMPARISONS if f" {x} " in text), None)
    if sign is None:
        known = values.get(text.removeprefix("no "), False)
        return np.broadcast_to(known != text.startswith("no "), ELEMENTS)
    code = re.sub(r"⌈(.*?) / (.*?)⌉", r"-(-(\1) // (\2))", text)
    code = code.replace(f" {sign} ", f" {COMPARISONS[sign]} ").replace("−", "-").replace("·", "*")
    return np.broadcast_to(eval(code, {}, dict(values)), ELEMENTS)


def disagreement(stated: str, declared: str, whole: bool = False) -> float:
    """Return the share of random problems on which two places name other elements.

    With `whole`, on which one names any and the other none.
    """
    if stated.startswith("backward: ") != declared.startswith("backward: "):
        return 1.0
    one, other = (x.removeprefix("backward: ") for x in (stated, declared))
    pairs = ((elements(one, p), elements(other, p)) for p in problems())
    return float(np.mean([a.any() != b.any() if whole else (a != b).any() for a, b in pairs]))


def share_excluded(condition: str, declared: str) -> float:
    """Return the share of random problems that a condition passes, and the declared place fails."""
    text, place = condition.removeprefix("fails only where "), declared.removeprefix("backward: ")
    pairs = ((elements(text, p), elements(place, p)) for p in problems())
    return float(np.mean([bool((there & ~told).any()) for told, there in pairs]))


def false_words(mistake: Mistake, cause: Cause) -> list[str]:
    """Return what is false in a cause that names the right step."""
    found = []
    if cause.where == "backward:":  # and no place
        cause = replace(cause, where="")
    of_keys = _keys(cause)
    stated, declared = cause.where + of_keys, mistake.where + of_keys
    of_problems = not re.search(r"\b[bhtsde]\b", cause.where)
    if cause.where and disagreement(stated, declared, of_problems) > ALLOWED:
        found.append(f"place: {cause.where}, is {mistake.where}")
    if cause.passes_when and share_excluded(cause.passes_when + of_keys, declared) > ALLOWED:
        found.append(f"condition: {cause.passes_when}, is {mistake.where}")
    if not _fits(cause):
        found.append(f"amount: {cause.amount}")
    return found


def _keys(cause: Cause) -> str:
    """Return the keys at which alone a wrong mask can show, as a condition."""
    if cause.step != "visible":
        return ""
    if "hidden keys" in cause.amount:
        return " and hidden keys"
    return " and visible keys" if cause.amount in SEEN else ""


def _fits(cause: Cause) -> bool:
    """Return True if the wrong numbers of the reading are what an amount of a number says."""
    reading = cause.reading
    if reading is None or not reading.wrong.any():
        return True
    got, want = reading.got[reading.wrong], reading.want[reading.wrong]
    if cause.amount == "0":
        return not got.any()
    number = re.fullmatch(r"× (-?[\d.e+-]+)", cause.amount.replace("−", "-"))
    if number is None or cause.step != reading.quantity:
        return True
    return bool((abs(got - float(number[1]) * want) <= NEAR * abs(got) + 1e-12).mean() > 0.5)


def grade(mistake: Mistake, cause: Cause) -> tuple[str, list[str]]:
    """Grade a first cause: its mark, and its false words."""
    if cause.step != mistake.step:
        return ("false step" if cause.step else "no step"), []
    false = false_words(mistake, cause)
    of_keys = _keys(cause)
    placed = (
        cause.where not in ("", "backward:")
        and disagreement(cause.where + of_keys, mistake.where + of_keys) <= ALLOWED
    )
    return ("right step and place" if placed else "right step"), false


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option("--examples", type=int, help="Problems per rule, as of npattn check.")
@click.option("--only", default="", help="Mistakes whose name starts with this.")
@click.option("--every", default=1, show_default=True, help="Every n-th of them.")
@click.option("--start", default=0, show_default=True, help="The first of them.")
@click.option("--newer", is_flag=True, help="Those of fresh.py instead of the register.")
def main(examples: int | None, only: str, every: int, start: int, newer: bool) -> None:
    known = fresh.MISTAKES if newer else MISTAKES
    counts: Counter[str] = Counter()
    took, false = [], 0
    for name in [n for n in known if n.startswith(only)][start::every]:
        mistake = known[name]
        report, seconds = explain(mistake, examples)
        if not any(outcome.failed for outcome in report.outcomes):
            print(f"{name:40} not found", flush=True)
            continue
        first = first_cause(report)
        mark, words = grade(mistake, first)
        counts[mark] += 1
        false += bool(words)
        took.append(seconds)
        print(f"{name:40} {mark:20} {seconds:5.1f} s", *words, sep="\n    ", flush=True)
        if mark != "right step and place":
            print(f"    declared {mistake.step}: {mistake.where}")
            print(f"    stated   {first.step}: {first.where} ({first.amount})", flush=True)
    total = sum(counts.values())
    print(", ".join(f"{mark} {n}" for mark, n in counts.most_common()), f"of {total}")
    if took:
        print(f"false words in {false} ({false / total:.0%}); processor time of an explanation: "
              f"median {median(took):.1f} s, largest {max(took):.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
