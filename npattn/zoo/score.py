"""The judge is judged: every mutant must be found, and nothing that is right may be.

    npattn zoo          a matrix mutants × rules, the kill rate, false alarms, time

A mutant is killed where one of the rules that it named beforehand fails it (or, for the rule
"aggregate", suspects it). A false alarm is anything but "passed" on a correct implementation.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.testing.adapters.implementation import Implementation, ImplementationError
from npattn.testing.bounds.rounding import Rounding
from npattn.testing.capabilities import Probe
from npattn.testing.cases.recipe import Recipe
from npattn.testing.cases.strategies import Pools, Space
from npattn.testing.check import check
from npattn.testing.report.report import Report
from npattn.testing.rules import PROPERTIES, Property
from npattn.testing.trial import Trial, Violation
from npattn.zoo.correct import CORRECT
from npattn.zoo.mutants import MUTANTS, Mutant

__all__ = ["Row", "Zoo", "witness", "zoo"]

LETTERS = {"failed": "F", "error": "E", "suspect": "S", "passed": "·", "not applicable": " "}
ENOUGH = 10.0
"""How many times what is allowed a witness is beyond it."""


@dataclass(frozen=True)
class Row:
    """One implementation under every rule.

    Attributes
    ----------
    name, kind, family : str
        The kind is "mutant" or "correct".
    statuses : dict
        Rule → its worst status over the dtypes that were tried.
    wanted : tuple of str
        The rules of which one must fail; none for what is correct.
    told : str
        What was wrong with what is correct.
    seconds : float
    """

    name: str
    kind: str
    family: str
    statuses: dict[str, str]
    wanted: tuple[str, ...] = ()
    told: str = ""
    seconds: float = 0.0

    @property
    def found_by(self) -> tuple[str, ...]:
        """The rules that found something."""
        return tuple(r for r, s in self.statuses.items() if s in ("failed", "error", "suspect"))

    @property
    def right(self) -> bool:
        """Whether the judge did what it should."""
        if self.kind == "correct":
            return not self.found_by
        sure = {r for r in self.found_by if self.statuses[r] == "failed" or r == "aggregate"}
        return bool(sure & set(self.wanted))


@dataclass(frozen=True)
class Zoo:
    """What the judge made of all of them.

    Attributes
    ----------
    rows : tuple of Row
    seconds : float
    """

    rows: tuple[Row, ...]
    seconds: float

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.kind == kind]

    @property
    def survivors(self) -> list[Row]:
        return [row for row in self.of("mutant") if not row.right]

    @property
    def false_alarms(self) -> list[Row]:
        return [row for row in self.of("correct") if not row.right]

    @property
    def passed(self) -> bool:
        return not self.survivors and not self.false_alarms

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
                f"{row.name:{width}}  {cells}  {'' if row.right else _wrong(row)}".rstrip()
            )
        legend = ", ".join(
            f"{letter} {status}" for status, letter in LETTERS.items() if letter != " "
        )
        return "\n".join([*lines, "", legend, self.verdict])

    @property
    def verdict(self) -> str:
        mutants, correct = self.of("mutant"), self.of("correct")
        killed = len(mutants) - len(self.survivors)
        rate = f" ({100 * killed / len(mutants):.3g} %)" if mutants else ""
        return (
            f"{killed} of {len(mutants)} mutants killed{rate}, {len(self.false_alarms)} false "
            f"alarms on {len(correct)} correct implementations, {self.seconds:.0f} s"
        )

    def to_json(self, path: str | Path) -> None:
        """Write every row, and the verdict."""
        rows = [asdict(row) | {"right": row.right} for row in self.rows]
        whole = {"verdict": self.verdict, "passed": self.passed, "rows": rows}
        Path(path).write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def _wrong(row: Row) -> str:
    if row.kind == "correct":
        return f"FALSE ALARM: {row.told}"
    return f"SURVIVED: none of {', '.join(row.wanted)} failed"


def zoo(
    *,
    only: Iterable[str] = (),
    kind: str = "all",
    rules: str = "all",
    examples: int = 100,
    seed: int = 0,
    jobs: int = 1,
    progress: Callable[[str, int, int], None] | None = None,
) -> Zoo:
    """Run the judge over the mutants and the correct implementations.

    Parameters
    ----------
    only : iterable of str, optional
        Names, or beginnings of names.
    kind : {"all", "mutant", "correct"}
    rules : {"all", "killers"}
        Every rule, or for a mutant only those that must find it.
    examples, seed : int
        As for `check`.
    jobs : int, default 1
        Processes.
    progress : callable, optional
        Told ``(name, done, total)``.

    Returns
    -------
    Zoo

    Raises
    ------
    OptionError
        If a name is not in the zoo, or `kind` or `rules` is not legal.
    """
    if kind not in ("all", "mutant", "correct"):
        raise OptionError(f"kind is {kind!r}, must be all, mutant or correct")
    if rules not in ("all", "killers"):
        raise OptionError(f"rules is {rules!r}, must be all or killers")
    names = [(k, name) for k, name in _chosen(tuple(only)) if kind in (k, "all")]
    start = time.perf_counter()
    tasks = [(kind, name, rules, examples, seed) for kind, name in names]
    rows = []
    pool: Any = nullcontext()
    if jobs > 1:
        pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    with pool as executor:
        for number, row in enumerate(_rows(executor, tasks), 1):
            rows.append(row)
            if progress is not None:
                progress(row.name, number, len(tasks))
    return Zoo(tuple(rows), time.perf_counter() - start)


def _chosen(only: tuple[str, ...]) -> list[tuple[str, str]]:
    here = [name for name, one in CORRECT.items() if one.runs_here]
    every = [("mutant", name) for name in MUTANTS] + [("correct", name) for name in here]
    for start in only:
        if not any(name.startswith(start) for _, name in every):
            raise OptionError(f"{start!r} is not in the zoo; npattn zoo --list prints the names")
    return [(kind, n) for kind, n in every if not only or n.startswith(only)]


def _rows(executor: Executor | None, tasks: list[tuple[str, str, str, int, int]]) -> Iterator[Row]:
    """In the order of the tasks."""
    return map(_row, tasks) if executor is None else executor.map(_row, tasks)


def _row(task: tuple[str, str, str, int, int]) -> Row:
    kind, name, rules, examples, seed = task
    start = time.perf_counter()
    if kind == "mutant":
        mutant = MUTANTS[name]
        only = mutant.killed_by if rules == "killers" else None
        reports = [
            check(
                mutant.forward,
                backward=mutant.backward,
                dtypes=mutant.dtypes,
                rounding=mutant.rounding,
                examples=examples,
                seed=seed,
                only=only,
                shrink=False,
            )
        ]
        row = Row(name, kind, mutant.family, _statuses(reports), mutant.killed_by)
    else:
        reports = list(_of_correct(name, examples, seed))
        bad = [o for r in reports for o in r.outcomes if o.failed or o.status == "suspect"]
        told = "; ".join(f"{o.id} {o.message.splitlines()[0]}" for o in bad[:3])
        row = Row(name, kind, "correct", _statuses(reports), told=told)
    return replace(row, seconds=time.perf_counter() - start)


def _of_correct(name: str, examples: int, seed: int) -> Iterator[Report]:
    """As it declares itself, and undeclared."""
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
        )


def _statuses(reports: Iterable[Report]) -> dict[str, str]:
    """The worst status of each rule, in the order of `LETTERS`."""
    worst: dict[str, str] = {}
    order = list(LETTERS)
    for outcome in itertools.chain.from_iterable(report.outcomes for report in reports):
        before = worst.get(outcome.rule, "not applicable")
        worst[outcome.rule] = min(before, outcome.status, key=order.index)
    return worst


def witness(mutant: Mutant, *, seed: int = 0, tries: int = 300) -> tuple[Recipe, float] | None:
    """A drawn problem on which a mutant is beyond ten times what is allowed, and how far it is.

    A rule that compares bits, or finds NaN, is beyond any multiple.
    """
    dtype = mutant.dtypes[0]
    implementation = Implementation(mutant.forward, backward=mutant.backward)
    space = Space(features=implementation.features, dtype=dtype)
    model = mutant.rounding or Rounding.undeclared(dtype)
    model = Rounding.named(model) if isinstance(model, str) else model
    trial = Trial(implementation, Conventions(), model, space)
    for outcome in Probe(trial, []).run():
        if outcome.status == "failed" and outcome.rule in mutant.killed_by:
            return space.base(), math.inf
    for rule, recipe in _in_turn(trial, mutant.killed_by, seed, tries):
        try:
            rule.check(trial, recipe)
        except Violation as err:
            if err.ratio > ENOUGH:
                return recipe, err.ratio
        except ImplementationError:
            continue  # a crash shows nothing
    return None


def _in_turn(
    trial: Trial, names: Iterable[str], seed: int, tries: int
) -> Iterator[tuple[Property, Recipe]]:
    """Each rule that applies with its first recipe, then each with its second."""
    rules = [PROPERTIES[name] for name in names if name in PROPERTIES]
    rules = [rule for rule in rules if rule.unless(trial) is None]
    draws: list[Iterable[Recipe]] = []
    for rule in rules:
        drawn: Iterable[Recipe] = trial.planned(Pools(trial.space, **rule.draw(trial)), seed, tries)
        if rule.recipes is not None:
            drawn = rule.recipes(trial, seed, tries)
        draws.append(itertools.islice(drawn, tries))
    for turn in itertools.zip_longest(*draws):
        yield from ((rule, r) for rule, r in zip(rules, turn, strict=True) if r is not None)
