"""Check of one implementation on many problems, in units that many machines can do.

    examples 0 … 199 of the seed, 200 … 399 as examples 0 … 199 of the next seed, and so on

Each block of examples is a unit that asks every rule. Their answers are merged in the order of the
blocks, so that it does not matter who was done first: a rule ends with the first block in which it
fails, and blocks behind one that has failed leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.judging import check, choose_rules
from npattn.testing.levels import LEVELS
from npattn.testing.report.report import Report
from npattn.testing.runner.journal import answer_of
from npattn.testing.runner.merge import merge_answers
from npattn.testing.units.processes import Jobs
from npattn.testing.units.unit import Memory, Result, Unit

EXAMPLES = 200
"""Examples of each rule in a unit: enough to make its start cheap, and few to lose."""
AHEAD = 2
"""Units that are sent out for each that is done at once, so that nobody waits for work."""


@dataclass
class _Blocks:
    """The blocks of one dtype, and what came of them."""

    first: Unit
    total: int
    waiting: dict[int, Result] = field(default_factory=dict)
    """Results of blocks before which another is not done."""
    merged: int = 0
    """Number of blocks, from the first, whose answers are merged."""
    answers: tuple[dict[str, Any], ...] = ()
    missing: list[str] = field(default_factory=list)
    """A line for each block without an answer."""
    failed: dict[str, int] = field(default_factory=dict)
    """Rule → the first block known to fail it."""

    def unit(self, number: int) -> Unit | None:
        """Return a block without the rules that an earlier one failed; None if none is left."""
        rules = self.first.rules or ()
        remaining = tuple(rule for rule in rules if self.failed.get(rule, number) >= number)
        size = min(EXAMPLES, self.total - number * EXAMPLES)
        seed = self.first.seed + number
        return replace(self.first, rules=remaining, seed=seed, examples=size) if remaining else None

    @property
    def count(self) -> int:
        return -(-self.total // EXAMPLES)

    def record(self, number: int, result: Result) -> None:
        """Take the result of a block, and merge those before which none is missing."""
        for entry in result.answers:
            answer = answer_of(entry)
            if getattr(answer, "failed", False):
                name = entry["answer"]
                self.failed[name] = min(number, self.failed.get(name, number))
        self.waiting[number] = result
        while self.merged in self.waiting:
            result = self.waiting.pop(self.merged)
            self.answers = merge_answers([self.answers, result.answers])
            if result.state != "done":
                seed = self.first.seed + self.merged
                words = f"in {self.first.dtype} ({result.state}: {result.why})"
                self.missing.append(f"examples of seed {seed} {words}")
            self.merged += 1


def check_in_units(
    # in a worker of this machine; units start their own by its spec
    implementation: Implementation,
    executor: Executor,
    width: int,  # number of units that it judges at once
    *,
    calls: Mapping[str, Any],  # calls of `Unit`; timeout, memory and folder
    limits: Mapping[str, Any],
    conventions: Conventions,  # as of `check`
    sizes: Mapping[str, Sequence[int]],
    rounding: str | None,
    dtypes: Sequence[str],
    examples: int,
    seed: int,
    only: Sequence[str] | None,  # rules, or prefixes of several
    # called with ("", a line, units done, all units)
    progress: Callable[[str, str, int, int], object],
    **arguments: Any,  # of `check` in this process: require, expect, strict, must, …
) -> Report:
    """Judge an implementation in units, and make the report here.

    Returns
    -------
    Report
        What was lost is among what is missing.
    """
    if implementation.spec is None:
        raise OptionError("a cluster needs a known name, module:function or path/file.py:function")
    rules = name_rules(only)
    judges = {"conventions": vars(conventions), "sizes": sizes, "rounding": rounding}
    limits_of_unit: dict[str, Any] = {
        "target": implementation.spec,
        "rules": rules,
        "seed": seed,
        **limits,
    }
    blocks = [
        _Blocks(
            Unit(dtype=dtype, asks=True, calls=calls, judges=judges, **limits_of_unit), examples
        )
        for dtype in dtypes
    ]
    with Jobs(executor) as jobs:
        _do_all(blocks, jobs, AHEAD * width, progress)
    answers = tuple(entry for one in blocks for entry in one.answers)
    report = check(
        implementation,
        dtypes=dtypes,
        examples=min(examples, EXAMPLES),  # of what is asked again here
        seed=seed,
        only=only,
        conventions=conventions,
        sizes=sizes,
        rounding=rounding,
        journal=Memory(answers),
        progress=False,
        **arguments,
    )
    lost = tuple(line for one in blocks for line in one.missing)
    settings = {**report.settings, "examples": examples}
    return replace(report, settings=settings, missing=(*report.missing, *lost))


def name_rules(only: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names of the rules that `only` names or begins, by level; all for None."""
    chosen = sorted(choose_rules(only), key=lambda rule: list(LEVELS).index(rule.level))
    if not chosen:
        raise OptionError(
            f"only is {', '.join(only or ())}, must name a rule that is asked in units: leave it "
            "out, or name others too; npattn list rules prints them"
        )
    return tuple(rule.rule for rule in chosen)


def _do_all(
    blocks: Sequence[_Blocks],
    jobs: Jobs,
    most: int,
    progress: Callable[[str, str, int, int], object],
) -> None:
    """Do all units, of which at most so many are sent out at any time."""
    order = iter([(one, number) for one in blocks for number in range(one.count)])
    total, done, sent = sum(one.count for one in blocks), 0, {}
    while True:
        for one, number in order:
            unit = one.unit(number)
            if unit is None:
                one.record(number, Result("done"))
                done += 1
                continue
            sent[unit.key] = one, number
            jobs.submit(unit)
            if len(sent) >= most:
                break
        progress("", f"{len(sent)} units in work", done, total)
        if not sent:
            return
        unit, result = jobs.wait()
        one, number = sent.pop(unit.key)
        one.record(number, result)
        done += 1
