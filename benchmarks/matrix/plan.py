"""Plan of a matrix: which target is judged in which dtype, and in which units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.matrix import device as on_device
from benchmarks.matrix.result import Row, Run
from npattn.errors import OptionError
from npattn.profiles import PROFILES
from npattn.testing.judging import DTYPES, SWEEPS
from npattn.testing.report.outcome import OUT_OF_TIME
from npattn.testing.runner.merge import merge_answers
from npattn.testing.targets import TARGETS, Target, spec_of
from npattn.testing.units.blocks import name_rules
from npattn.testing.units.unit import Result, Unit

DEFAULT_DTYPES = ("float32", "float64")
"""The first is asked of every target, the others of those that compute in them."""


@dataclass
class Pair:
    """A target in one dtype, and how far its judging has come."""

    target: str
    dtype: str
    lacks: str  # why it cannot run here; "" if it can
    asked: list[Unit]  # units that ask, and whose answers `report` takes; none if it asks itself
    report: Unit
    # unit that samples problems on the device, and adds its outcomes to the report
    sweep: Unit | None = None
    device: str = "CPU"  # name of the device, as a matrix has it
    results: dict[str, Result] = field(default_factory=dict)  # results by key of a unit

    @property
    def units(self) -> list[Unit]:
        """All that it may need."""
        return [*self.asked, self.report, *([] if self.sweep is None else [self.sweep])]

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

    def run(self, interrupted: bool = False) -> Run:
        """Return the run as a matrix has it."""
        about = {"target": self.target, "dtype": self.dtype, "device": self.device}
        result = self.results.get(self.report.key)
        if self.sweep is not None:
            result = _join(result, self.results.get(self.sweep.key))
        if result is None:
            late: Any = ("not run", "interrupted") if interrupted else ("not asked", OUT_OF_TIME)
            state, why = ("not run", self.lacks) if self.lacks else late
            return Run(**about, state=state, why=why)
        seconds = round(sum(one.seconds for one in self.results.values()), 3)
        known: Any = {"state": result.state, "why": result.why, "report": result.report}
        return Run(**about, **known, seconds=seconds)


def _join(result: Result | None, swept: Result | None) -> Result | None:
    """Return the results of the rules and of a sweep as one; a lost process of either is told."""
    joined = _add_sweep(result, swept)
    lost = [x for x in (result, swept) if x is not None and x.state in ("crashed", "timed out")]
    if joined is None or joined.report is None or not lost:
        return joined
    report = {**joined.report, "passed": False}
    return replace(joined, state=lost[0].state, why=lost[0].why, report=report)


def _add_sweep(result: Result | None, swept: Result | None) -> Result | None:
    """Add the outcomes of a sweep to a result, or a line that says why there are none."""
    if result is None or result.report is None:
        return result if swept is None or swept.report is None else swept
    report = dict(result.report)
    known = (swept and swept.report) or {"outcomes": [], "causes": []}
    own = [one for one in known["outcomes"] if one["rule"] in SWEEPS]
    report["outcomes"] = [*report["outcomes"], *own]
    report["causes"] = [*report["causes"], *known["causes"]]
    report["passed"] = report["passed"] and not any(one["counts"] for one in own)
    if swept is None or swept.state != "done":
        why = OUT_OF_TIME if swept is None else f"{swept.state}: {swept.why}"
        report["untested"] = [*report["untested"], f"{' and '.join(SWEEPS)}: {why}"]
    return replace(result, report=report)


def choose_targets(
    words: Sequence[str] | None, envs: str | None = None, device: str | None = None
) -> list[Target]:
    """Return the targets of these names, beginnings of names, or specs; all for None.

    On a device these are the targets of `benchmarks.matrix.device.TARGETS`.

    A target that is named and cannot run here is an error; one of many is a row without results.
    With a folder of environments, what can be installed can run.

    Raises OptionError if a word is no target, or what it begins. Raises MissingExtraError if a
    target that is named needs a package that is not installed.
    """
    if words is None:
        return [TARGETS[name] for name in (TARGETS if device is None else on_device.TARGETS)]
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
    device: str | None = None,
    sweeps: bool = False,
    **settings: Any,
) -> list[Pair]:
    """Return the pairs of targets and dtypes, each with its units.

    Parameters
    ----------
    targets : sequence of Target
    rules : tuple of str or None
        None for all, as `check` takes it.
    dtypes : sequence of str or None
        None for those of float32 and float64 that a target computes in, or else its own; on a
        device for those of `benchmarks.matrix.device.DTYPES`.
    blocks : int
        Parts into which the rules of a pair are split.
    device : str, optional
        Device of the targets' arrays, as of `check`.
    sweeps : bool
        Each pair also has a unit that samples problems on the device.
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
    settings |= {} if device is None else {"calls": {"device": device}}
    name, pairs = on_device.name_device(device)[0], []
    dtypes = on_device.DTYPES if dtypes is None and device is not None else dtypes
    judges = {"sweep": on_device.SWEEP}
    for target in targets:
        for dtype in dict.fromkeys(dtypes or _choose_dtypes(target)):
            report = Unit(target=target.name, dtype=dtype, rules=rules, **settings)
            asked = _split(report, blocks)
            lacks = _lacks(target, settings.get("envs"))
            sweep = replace(report, rules=SWEEPS, judges=judges) if sweeps else None
            pairs.append(Pair(target.name, dtype, lacks, asked, report, sweep, name))
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
