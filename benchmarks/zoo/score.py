"""Score of the judge: it must find every mutant, and pass every correct implementation.

    python -m benchmarks.zoo          a matrix mutants × rules, the kill rate, false alarms, time

A mutant is killed if one of its killers fails it (or, for the rule "aggregate", suspects it). A
false alarm is any status but "passed" and "not applicable" on a correct implementation.
"""

from __future__ import annotations

import itertools
import json
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.journal import Journal
from benchmarks.zoo.correct import CORRECT
from benchmarks.zoo.mutants import MUTANTS
from npattn.errors import OptionError
from npattn.testing.adapters.base import format_exception_line
from npattn.testing.judging import check
from npattn.testing.report.report import Report

LETTERS = {
    "failed": "F",
    "error": "E",
    "crashed": "C",
    "timed out": "T",
    "suspect": "S",
    "passed": "·",
    "not applicable": " ",
}


@dataclass(frozen=True)
class Row:
    """Statuses of one implementation under every rule."""

    name: str  # the kind is "mutant" or "correct"
    kind: str
    family: str
    statuses: dict[str, str]  # rule → its worst status over the tested dtypes
    killers: tuple[str, ...] = ()  # rules of which one must fail; none for a correct implementation
    alarm: str = ""  # first lines of the false alarms of a correct implementation
    seconds: float = 0.0
    lost: str = ""  # why it was not judged; "" if it was

    @property
    def detected_by(self) -> tuple[str, ...]:
        """Rules that failed, raised an error, or suspect a mistake."""
        return tuple(r for r, s in self.statuses.items() if s not in ("passed", "not applicable"))

    @property
    def right(self) -> bool:
        """True if the judge found the mutant, or passed the correct implementation."""
        if self.kind == "correct":
            return not self.detected_by and not self.lost
        certain = {r for r in self.detected_by if self.statuses[r] == "failed" or r == "aggregate"}
        return bool(certain & set(self.killers))

    def to_dict(self) -> dict[str, Any]:
        """Return the row under the field names of the JSON report."""
        fields = asdict(self)
        return {
            "name": fields["name"],
            "kind": fields["kind"],
            "family": fields["family"],
            "statuses": fields["statuses"],
            "wanted": fields["killers"],
            "told": fields["alarm"],
            "seconds": fields["seconds"],
            "right": self.right,
            "lost": fields["lost"],
        }


@dataclass(frozen=True)
class Zoo:
    """Results of the judge on mutants and correct implementations."""

    rows: tuple[Row, ...]
    seconds: float

    def of_kind(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]

    @property
    def survivors(self) -> list[Row]:
        return [row for row in self.of_kind("mutant") if not row.right and not row.lost]

    @property
    def false_alarms(self) -> list[Row]:
        return [row for row in self.of_kind("correct") if not row.right and not row.lost]

    @property
    def passed(self) -> bool:
        return all(row.right for row in self.rows)

    def __str__(self) -> str:
        rules = list(dict.fromkeys(rule for row in self.rows for rule in row.statuses))
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"{number:3} {rule}" for number, rule in enumerate(rules, 1)]
        for digit in range(len(str(len(rules)))):
            marks = (str(n).rjust(len(str(len(rules))))[digit] for n in range(1, len(rules) + 1))
            lines.append(" " * (width + 2) + "".join(marks))
        for row in self.rows:
            cells = "".join(LETTERS[row.statuses.get(rule, "not applicable")] for rule in rules)
            lines.append(
                f"{row.name:{width}}  {cells}  {'' if row.right else describe_miss(row)}".rstrip()
            )
        legend = ", ".join(
            f"{letter} {status}" for status, letter in LETTERS.items() if letter != " "
        )
        return "\n".join([*lines, "", legend, self.verdict])

    @property
    def verdict(self) -> str:
        mutants, correct = self.of_kind("mutant"), self.of_kind("correct")
        killed, lost = sum(row.right for row in mutants), sum(bool(row.lost) for row in self.rows)
        rate = f" ({100 * killed / len(mutants):.3g} %)" if mutants else ""
        return (
            f"{killed} of {len(mutants)} mutants killed{rate}, {len(self.false_alarms)} false "
            f"alarms on {len(correct)} correct implementations, "
            f"{f'{lost} not judged, ' if lost else ''}{self.seconds:.0f} s"
        )

    def to_json(self, path: str | Path) -> None:
        """Write every row and the verdict."""
        rows = [row.to_dict() for row in self.rows]
        document = {"verdict": self.verdict, "passed": self.passed, "rows": rows}
        Path(path).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def describe_miss(row: Row) -> str:
    if row.lost:
        return f"NOT JUDGED: {row.lost}"
    if row.kind == "correct":
        return f"FALSE ALARM: {row.alarm}"
    return f"SURVIVED: none of {', '.join(row.killers)} failed"


def zoo(
    *,
    only: Iterable[str] = (),  # names, or prefixes of names
    kind: str = "all",  # "all", "mutant", "correct"
    # every rule, or for a mutant its killers, until one of them fails: "all", "killers"
    rules: str = "all",
    examples: int = 200,  # as for `check`
    seed: int = 0,
    executor: Executor | None = None,  # its workers judge; default: this process does
    journal: Journal | None = None,  # takes each row; rows of an earlier run are not judged again
    progress: Callable[[str, int, int], None] | None = None,  # called with ``(name, done, total)``
) -> Zoo:
    """Run the judge on the mutants and the correct implementations.

    Raises OptionError if a name is not in the zoo, or `kind` or `rules` is not one of its values.
    """
    if kind not in ("all", "mutant", "correct"):
        raise OptionError(f"kind is {kind!r}, must be all, mutant or correct")
    if rules not in ("all", "killers"):
        raise OptionError(f"rules is {rules!r}, must be all or killers")
    names = [(k, name) for k, name in select_names(tuple(only)) if kind in (k, "all")]
    start = time.perf_counter()
    tasks = [Task(k, name, rules_of(k, name, rules), examples, seed) for k, name in names]
    rows: dict[str, Row] = {}
    if journal is not None:
        journal.begin()
        known = {t.name: journal.results[t.name] for t in tasks if t.name in journal.results}
        rows |= {name: Row(**row | {"killers": (*row["killers"],)}) for name, row in known.items()}
    with closing(run_tasks([t for t in tasks if t.name not in rows], executor)) as results:
        for row in results:
            rows[row.name] = row
            if journal is not None and not row.lost:  # it is judged again when that goes on
                journal.note(row.name, asdict(row))
            if progress is not None:
                progress(row.name, len(rows), len(tasks))
    return Zoo(tuple(rows[task.name] for task in tasks), time.perf_counter() - start)


def select_names(only: tuple[str, ...]) -> list[tuple[str, str]]:
    correct = [name for name, one in CORRECT.items() if one.runs_here]
    names = [("mutant", name) for name in MUTANTS] + [("correct", name) for name in correct]
    for prefix in only:
        if not any(name.startswith(prefix) for _, name in names):
            raise OptionError(
                f"{prefix!r} is not in the zoo; benchmarks.zoo --list prints the names"
            )
    return [(kind, n) for kind, n in names if not only or n.startswith(only)]


def rules_of(kind: str, name: str, rules: str) -> tuple[str, ...] | None:
    return MUTANTS[name].killed_by if (kind, rules) == ("mutant", "killers") else None


class Task(NamedTuple):
    """One implementation to judge, as it is sent to another process."""

    kind: str  # "mutant" or "correct"
    name: str
    # None for all, or for those that a correct implementation must keep
    rules: tuple[str, ...] | None
    examples: int  # as for `check`
    seed: int


def run_tasks(tasks: Sequence[Task], executor: Executor | None) -> Generator[Row, None, None]:
    """Yield the rows as they come; those that take the longest are begun first."""
    if executor is None:
        yield from map(run_or_lose, tasks)
        return
    # Correct implementations are asked every rule, in several dtypes.
    first = sorted(tasks, key=lambda task: task.kind != "correct")
    rows = {executor.submit(run_or_lose, task): task for task in first}
    try:
        for row in as_completed(rows):
            err = row.exception()
            yield row.result() if err is None else lost_row(rows[row], format_exception_line(err))
    finally:  # an interrupt does not wait for what was not begun
        for row in rows:
            row.cancel()


def run_or_lose(task: Task) -> Row:
    """Judge one implementation in this process; a defect of the judge costs its row alone."""
    try:
        return run_task(task)
    except Exception as err:  # noqa: BLE001  the row names it, and the zoo does not pass
        where = traceback.extract_tb(err.__traceback__)[-1]
        why = format_exception_line(err)
        return lost_row(
            task, f"the judge raised {why} ({Path(where.filename).name}:{where.lineno})"
        )


def lost_row(task: Task, why: str) -> Row:
    """Return the row of an implementation whose judging came to nothing."""
    if task.kind == "correct":
        return Row(task.name, task.kind, "correct", {}, lost=why)
    mutant = MUTANTS[task.name]
    return Row(task.name, task.kind, mutant.family, {}, mutant.killed_by, lost=why)


def run_task(task: Task) -> Row:
    """Judge one implementation in this process."""
    kind, name, rules, examples, seed = task
    start = time.perf_counter()
    if kind == "mutant":
        row = judge_mutant(task, fail_fast=rules is not None)
        if not row.right and rules is not None:  # what came first was no failure of a value
            row = judge_mutant(task)
    else:
        reports = list(reports_of_correct(name, examples, seed))
        bad = [o for r in reports for o in r.outcomes if o.failed or o.status == "suspect"]
        alarm = "; ".join(f"{o.id} {o.message.splitlines()[0]}" for o in bad[:3])
        row = Row(name, kind, "correct", worst_statuses(reports), alarm=alarm)
    return replace(row, seconds=time.perf_counter() - start)


def judge_mutant(task: Task, fail_fast: bool = False) -> Row:
    """Judge a mutant by its rules, or until the first of them fails."""
    mutant = MUTANTS[task.name]
    report = check(
        mutant.forward,
        backward=mutant.backward,
        dtypes=mutant.dtypes,
        rounding=mutant.rounding,
        examples=task.examples,
        seed=task.seed,
        only=task.rules,
        shrink=False,
        diagnosis=False,
        fail_fast=fail_fast,
        progress=False,
    )
    statuses = worst_statuses([report])
    return Row(task.name, task.kind, mutant.family, statuses, mutant.killed_by)


def reports_of_correct(name: str, examples: int, seed: int) -> Iterator[Report]:
    """Judge a correct implementation under its own rounding model, and undeclared."""
    correct = CORRECT[name]
    for rounding in correct.models:
        yield check(
            correct.implementation(),
            conventions=correct.conventions,
            dtypes=correct.dtypes,
            rounding=rounding,
            examples=examples,
            seed=seed,
            sizes=correct.sizes,
            only=correct.rules,
            shrink=False,
            diagnosis=False,
            progress=False,
        )


def worst_statuses(reports: Iterable[Report]) -> dict[str, str]:
    """Return the worst status of each rule, in the order of `LETTERS`."""
    worst: dict[str, str] = {}
    order = list(LETTERS)
    for outcome in itertools.chain.from_iterable(report.outcomes for report in reports):
        previous = worst.get(outcome.rule, "not applicable")
        worst[outcome.rule] = min(previous, outcome.status, key=order.index)
    return worst
