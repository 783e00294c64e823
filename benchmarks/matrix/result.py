"""Result of a matrix: rules, targets, and a run for each target and dtype.

schema.json beside this file describes the JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import npattn
from benchmarks.matrix.page import page
from benchmarks.matrix.words import describe_in_words
from npattn.errors import OptionError
from npattn.testing.levels import LEVELS
from npattn.testing.rules import RULES
from npattn.testing.targets import Target

VERSION = 1
"""Version of the format: schema.json has the same."""
State = Literal["done", "not run", "not asked", "crashed", "timed out"]


@dataclass(frozen=True)
class Rule:
    """A column: a rule at one level. `structure` has a column for each level that it speaks of."""

    name: str
    level: str
    section: str
    about: str


@dataclass(frozen=True)
class Row:
    """A target."""

    name: str
    project: str  # the project that wrote it, by the name of its package: targets are grouped by it
    about: str
    # of its packages, by name, as its worker says; empty if it did not run
    versions: Mapping[str, str]
    device: str
    words: str  # what it means, in one line

    @classmethod
    def of(cls, target: Target, versions: Mapping[str, str] | None = None) -> Row:
        """Return the row of a known target; its project has the version of its first package."""
        own = dict(versions or {})
        if target.needs and target.needs[0] in own:
            own.setdefault(target.project, own[target.needs[0]])
        words = describe_in_words(target.profile)
        return cls(target.name, target.project, target.about, own, target.device, words)


@dataclass(frozen=True)
class Run:
    """A target judged in one dtype."""

    target: str
    dtype: str
    # what became of the judging: a target that fails rules, or crashes in some, is done: "done",
    # "not run", "not asked", "crashed", "timed out"
    state: State
    why: str = ""  # reason of another state than "done"
    seconds: float = 0.0
    # `Report.as_dict`, as npattn/testing/report/schema.json describes it
    report: dict[str, Any] | None = None
    # short name of the device that it ran on, as H200; results of earlier versions have none, and
    # ran on a CPU
    device: str = "CPU"


@dataclass(frozen=True)
class Matrix:
    """Result of a matrix."""

    settings: Mapping[str, Any]  # what was asked: dtypes, examples, seed, only, timeout, memory
    rules: tuple[Rule, ...]
    targets: tuple[Row, ...]
    runs: tuple[Run, ...]  # in the order of the targets, then of the dtypes
    # ISO date, in UTC
    made: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    version: str = npattn.__version__  # version of npattn

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON, in its types."""
        return {
            "matrix": VERSION,
            "npattn": self.version,
            "made": self.made,
            "settings": dict(self.settings),
            "rules": [asdict(rule) for rule in self.rules],
            "targets": [{**vars(row), "versions": dict(row.versions)} for row in self.targets],
            "runs": [dict(vars(run)) for run in self.runs],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the matrix to a file."""
        text = json.dumps(self.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        Path(path).write_text(text + "\n", "utf-8")

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the matrix as a page of one file, which loads nothing."""
        Path(path).write_text(page(self.as_dict()), "utf-8")


def read_matrix(path: str | os.PathLike[str]) -> Matrix:
    """Read a matrix from the file that `Matrix.to_json` wrote.

    Raises OptionError if it cannot be read, or is no matrix of this version.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as err:
        raise OptionError(f"{path} cannot be read: {err}") from err
    version = content.get("matrix") if isinstance(content, dict) else None
    if version != VERSION:
        raise OptionError(
            f"{path} is no matrix of version {VERSION}: write it with "
            "python -m benchmarks.matrix --json"
        )
    return Matrix(
        content["settings"],
        tuple(Rule(**rule) for rule in content["rules"]),
        tuple(Row(**row) for row in content["targets"]),
        tuple(Run(**run) for run in content["runs"]),
        content["made"],
        content["npattn"],
    )


def merge_matrices(matrices: Sequence[Matrix]) -> Matrix:
    """Return the matrices of several devices as one, by the settings of the first.

    Raises OptionError if two have a run of the same target, dtype and device.
    """
    rules = list(dict.fromkeys(rule for one in matrices for rule in one.rules))
    rows = {row.name: row for one in reversed(matrices) for row in one.targets}
    names = list(dict.fromkeys(row.name for one in matrices for row in one.targets))
    runs = [run for one in matrices for run in one.runs]
    keys = [(run.target, run.dtype, run.device) for run in runs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise OptionError(f"{' '.join(twice[0])} is in two of the files of --read")
    return replace(
        matrices[0],
        rules=tuple(_by_level(rules)),
        targets=tuple(rows[name] for name in names),
        runs=tuple(sorted(runs, key=lambda run: names.index(run.target))),
    )


def _by_level(rules: Iterable[Rule]) -> list[Rule]:
    levels = list(LEVELS)
    return sorted(rules, key=lambda rule: levels.index(rule.level))  # type: ignore[arg-type]


def list_rules(names: Iterable[str], runs: Sequence[Run]) -> tuple[Rule, ...]:
    """Return the columns, by level: the rules of these names, and what else the reports have."""
    asked = (RULES[name] for name in names)
    rules = [Rule(one.rule, one.level, one.section, one.about) for one in asked]
    reports = (run.report for run in runs if run.report is not None)
    outcomes = (outcome for report in reports for outcome in report["outcomes"])
    known = {(rule.name, rule.level) for rule in rules}
    found = {(o["rule"], o["level"]): o for o in outcomes}
    rules += [
        Rule(name, level, o["semantics"], o["about"])
        for (name, level), o in sorted(found.items())
        if (name, level) not in known
    ]
    return tuple(_by_level(rules))
