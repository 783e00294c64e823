"""Unit of work: a target in one dtype, rules, a seed and a number of examples; all is plain data.

A unit is sent as a line of JSON to whoever judges it, and its result comes back as one. Units that
ask return answers as a journal has them; a unit that reports returns a report, in which answers
that it was given are taken and everything else is asked.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import npattn
from npattn.conventions import Conventions
from npattn.errors import NpattnError, OptionError
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.judging import check
from npattn.testing.report.escape import escape_controls
from npattn.testing.runner.journal import Journal
from npattn.testing.targets import TARGETS, load_implementation
from npattn.testing.targets.environments import choose_python
from npattn.testing.worker.connect import connect
from npattn.testing.worker.supervisor import Limits


def versions_here() -> dict[str, str]:
    """Return the versions on which answers depend, and which all who judge must share."""
    return {"npattn": npattn.__version__, "numpy": np.__version__}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of the judging, as it is sent to another process."""

    target: str  # a known name, or a spec
    dtype: str
    rules: tuple[str, ...] | None = None  # names of rules; None for all
    seed: int = 0  # as of `check`
    examples: int = 20
    asks: bool = False  # return answers, without a report
    answers: tuple[dict[str, Any], ...] = ()  # entries of a journal that are taken as they are
    timeout: float | None = None  # seconds a call
    memory: int | None = None  # bytes of the worker
    limit: float | None = None  # seconds of the whole unit; whoever runs it sees to that
    folder: str = "."  # in which a spec is looked up
    # folder of virtual environments, for known targets that lack a package here
    envs: str | None = None
    # how it is called, as of `npattn.testing.worker.connect.connect`: like, layout, rename, …
    calls: Mapping[str, Any] = field(default_factory=dict)
    # how it is judged, as of `check`: sizes, rounding, budget, and the fields of its conventions.
    # With a sweep the target is called in the process that judges it, whose end costs the unit.
    judges: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of the unit in a journal: what tells it from the others of a matrix."""
        part = [] if not self.asks else [str(self.seed), *(self.rules or ())]
        part += ["sweep"] if self.judges.get("sweep") else []
        return " ".join([self.target, self.dtype, *part])

    def to_text(self) -> str:
        """Return it as a line of JSON, with the versions that it is meant for."""
        return json.dumps({"versions": versions_here(), **vars(self)})

    @classmethod
    def from_text(cls, text: str) -> Unit:
        """Read a unit."""
        content = json.loads(text)
        wanted = content.pop("versions")
        if wanted != versions_here():
            raise OptionError(
                f"a unit is meant for {_list(wanted)}, and {_list(versions_here())} is here: "
                "install the same wherever units are judged"
            )
        rules = None if content["rules"] is None else tuple(content["rules"])
        return cls(**content | {"rules": rules, "answers": tuple(content["answers"])})


@dataclass(frozen=True)
class Result:
    """Result of a unit."""

    state: str  # "done", "not run", "timed out" or "crashed"
    why: str = ""
    seconds: float = 0.0
    report: dict[str, Any] | None = None
    answers: tuple[dict[str, Any], ...] = ()  # of a unit that asks: the last entry of each rule

    def to_text(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps(vars(self), allow_nan=True)  # a ratio of an answer may be infinite

    @classmethod
    def from_text(cls, text: str) -> Result:
        content = json.loads(text)
        return cls(**content | {"answers": tuple(content["answers"])})


class Memory(Journal):
    """Journal without a file: answers from elsewhere go in, and its own come out."""

    def __init__(self, answers: tuple[Mapping[str, Any], ...] = ()) -> None:
        super().__init__("memory")
        self.answers = {(entry["dtype"], entry["answer"]): dict(entry) for entry in answers}
        self.written = dict(self.answers)

    def begin(self, question: Mapping[str, Any]) -> None:
        """Do nothing: who made it knows what is asked."""

    def write(self, entry: Mapping[str, Any]) -> None:
        """Keep the last answer of each rule; steps on the way to it are not kept."""
        if "answer" in entry:
            plain = json.loads(json.dumps(entry, default=str))
            self.written[entry["dtype"], entry["answer"]] = plain


def do_unit(unit: Unit) -> Result:
    """Judge a target in this process; it runs in a worker.

    An interrupt ends it, and gives what is known by then.
    """
    start, journal = time.monotonic(), Memory(unit.answers)
    try:
        result = Result("done", report=_judge(unit, journal))
    except NpattnError as err:
        result = Result("not run", escape_controls(str(err)))
    except KeyboardInterrupt as err:
        report = getattr(err, "report", None)
        result = Result("timed out", report=None if report is None else report.as_dict())
    if unit.asks:
        result = replace(result, report=None, answers=tuple(journal.written.values()))
    return replace(result, seconds=round(time.monotonic() - start, 3))


def _judge(unit: Unit, journal: Journal) -> dict[str, Any]:
    """Return the report on one unit: its rules, dtype, seed and examples, in a dictionary."""
    report = check(
        _load_here(unit) if unit.judges.get("sweep") else _connect(unit),
        dtypes=(unit.dtype,),
        only=unit.rules,
        seed=unit.seed,
        examples=unit.examples,
        diagnosis=not unit.asks,
        journal=None if "budget" in unit.judges else journal,
        progress=False,
        **_read_judges(unit.judges),
    )
    return report.as_dict()


def _connect(unit: Unit) -> Implementation:
    limits, python = Limits(unit.timeout, unit.memory), _choose_python(unit)
    return connect(unit.target, limits=limits, python=python, **unit.calls)


def _load_here(unit: Unit) -> Implementation:
    """Load the target in this process, for a sweep; variables that it needs are set first."""
    if unit.target in TARGETS:
        os.environ.update(TARGETS[unit.target].environment)
    calls = {name: value for name, value in unit.calls.items() if name != "device"}
    implementation = load_implementation(unit.target, **calls)
    if device := unit.calls.get("device"):
        implementation.on(device)
    return implementation


def _choose_python(unit: Unit) -> Path | None:
    """Return the Python of the target's environment, made if need be; None for this one."""
    if unit.envs is None or unit.target not in TARGETS:
        return None
    return choose_python(TARGETS[unit.target], Path(unit.envs))


def _read_judges(judges: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `check`, the conventions as such."""
    conventions = judges.get("conventions")
    read = None if conventions is None else Conventions(**conventions)
    return {**judges, "conventions": read}


def _list(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
