"""Plan of a matrix: which target is judged in which dtype, and in which units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.matrix.result import Row, Run
from npattn.errors import OptionError
from npattn.profiles import PROFILES
from npattn.testing.check import DTYPES
from npattn.testing.runner.merge import merge_answers
from npattn.testing.targets import TARGETS, Target, spec_of
from npattn.testing.units.blocks import name_rules
from npattn.testing.units.unit import Result, Unit

DEFAULT_DTYPES = ("float32", "float64")
"""The first is asked of every target, the others of those that compute in them."""


@dataclass
class Pair:
    """A target in one dtype, and how far its judging has come.

    Attributes
    ----------
    target, dtype : str
    lacks : str
        Why it cannot run here; "" if it can.
    asked : list of Unit
        Units that ask, and whose answers `report` takes; none if it asks itself.
    report : Unit
    results : dict
        Results by key of a unit.
    """

    target: str
    dtype: str
    lacks: str
    asked: list[Unit]
    report: Unit
    results: dict[str, Result] = field(default_factory=dict)

    def begin(self) -> list[Unit]:
        """Return the units to do first, without those that are done."""
        if self.lacks:
            return []
        return [unit for unit in self.asked if unit.key not in self.results] or self.next()

    def next(self) -> list[Unit]:
        """Return what follows the units done so far: the report, once all answers are there."""
        missing = any(unit.key not in self.results for unit in self.asked)
        if self.lacks or missing or self.report.key in self.results:
            return []
        lost = [self.results[u.key] for u in self.asked if self.results[u.key].state != "done"]
        if lost:  # it would ask all of it again
            self.results[self.report.key] = replace(lost[0], answers=())
            return []
        answers = merge_answers([self.results[unit.key].answers for unit in self.asked])
        return [replace(self.report, answers=answers)]

    def run(self) -> Run:
        """Return the run as a matrix has it."""
        result = self.results.get(self.report.key)
        if result is None:
            return Run(self.target, self.dtype, "not run", self.lacks or "interrupted")
        seconds = sum(one.seconds for one in self.results.values())
        state: Any = result.state
        return Run(self.target, self.dtype, state, result.why, round(seconds, 3), result.report)


def choose_targets(words: Sequence[str] | None, envs: str | None = None) -> list[Target]:
    """Return the targets of these names, beginnings of names, or specs; all for None.

    A target that is named and cannot run here is an error; one of many is a row without results.
    With a folder of environments, what can be installed can run.

    Raises
    ------
    OptionError
        If a word is no target, or what it begins.
    MissingExtraError
        If a target that is named needs a package that is not installed.
    """
    if words is None:
        return list(TARGETS.values())
    chosen: dict[str, Target] = {}
    for word in words:
        begun = [t for name, t in TARGETS.items() if name.startswith(word)]
        if word in TARGETS or not begun:
            begun = [_target_of(word, envs)]
        chosen |= {target.name: target for target in begun}
    if not chosen:
        raise OptionError("targets is empty, must name one or more; npattn list shows them")
    return list(chosen.values())


def _target_of(word: str, envs: str | None) -> Target:
    """Return a known target, or one for a function that npattn does not know, in its own terms."""
    if word in TARGETS and not _lacks(TARGETS[word], envs):
        return TARGETS[word]
    module, _, function = spec_of(word).rpartition(":")  # or an error that says what there is
    return Target(word, module, function, None, (), PROFILES["npattn"], word)


def _lacks(target: Target, envs: str | None) -> str:
    """Return what a target lacks that no environment can give it; "" if nothing."""
    if envs is not None and target.can_be_installed and not target.install:
        return ""
    return target.lacks or ""


def plan_pairs(
    targets: Sequence[Target],
    rules: tuple[str, ...] | None,
    *,
    dtypes: Sequence[str] | None,
    blocks: int,
    **settings: Any,
) -> list[Pair]:
    """Return the pairs of targets and dtypes, each with its units.

    Parameters
    ----------
    targets : sequence of Target
    rules : tuple of str or None
        None for all, as `check` takes it.
    dtypes : sequence of str or None
        None for those of float32 and float64 that a target computes in, or else its own.
    blocks : int
        Parts into which the rules of a pair are split.
    **settings
        seed, examples, timeout, memory, limit, envs of `Unit`.

    Raises
    ------
    OptionError
        If a number or a dtype is not legal.
    """
    for name, number in {"blocks": blocks, "examples": settings.get("examples", 1)}.items():
        if number < 1:
            raise OptionError(f"{name} is {number}, must be 1 or more")
    if unknown := [dtype for dtype in dtypes or () if dtype not in DTYPES]:
        raise OptionError(f"dtypes has {unknown[0]!r}, must be among {', '.join(DTYPES)}")
    settings |= {"folder": str(Path.cwd())}
    pairs = []
    for target in targets:
        for dtype in dtypes or _choose_dtypes(target):
            report = Unit(target=target.name, dtype=dtype, rules=rules, **settings)
            asked = _split(report, blocks)
            lacks = _lacks(target, settings.get("envs"))
            pairs.append(Pair(target.name, dtype, lacks, asked, report))
    return pairs


def _choose_dtypes(target: Target) -> Sequence[str]:
    native = [dtype for dtype in DEFAULT_DTYPES if dtype in target.dtypes]
    return native or target.dtypes or DEFAULT_DTYPES[:1]


def _split(report: Unit, blocks: int) -> list[Unit]:
    """Return units that ask the rules of a report in turn, a block each."""
    names = report.rules or name_rules(None)
    parts = [names[i::blocks] for i in range(blocks)]
    if blocks == 1:
        return []
    return [replace(report, rules=part, asks=True) for part in parts if part]


def rows_of(targets: Sequence[Target], runs: Sequence[Run]) -> tuple[Row, ...]:
    """Return the rows, with the versions that the reports name."""
    versions: dict[str, Mapping[str, str]] = {}
    for run in runs:
        if run.report is not None:
            versions.setdefault(run.target, run.report["settings"]["versions"])
    return tuple(Row.of(target, versions.get(target.name)) for target in targets)
