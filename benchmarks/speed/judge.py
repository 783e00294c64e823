"""How fast the judge answers: fixed questions, each timed beside its goal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.speed import machine
from npattn.errors import OptionError
from npattn.problem.checks import check_integer

SCHEMA = "npattn times of the judge 1"
SOON = 3.0
"""Seconds after which a wrong implementation should be red."""

JITTED = f"{Path(__file__).with_name('jitted.py')}:attention"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Question:
    """A question to the judge.

    Attributes
    ----------
    name, about : str
    goal : float
        Most seconds, or with `share` the least share of the mutants that are red within three.
    arguments : tuple of str
        Of ``python -m``, with "{jobs}" for the number of processes.
    needs : str or None
        The module without which it cannot be asked, or "tests/" for a checkout.
    share : bool
    usual : bool
        True if it is asked by default. Others take long.
    """

    name: str
    about: str
    goal: float
    arguments: tuple[str, ...] = ()
    needs: str | None = None
    share: bool = False
    usual: bool = True

    @property
    def missing(self) -> str | None:
        """Why it cannot be asked here."""
        if self.needs is None:
            return None
        if self.needs.endswith("/"):
            return None if Path(self.needs).is_dir() else f"needs {self.needs}, a checkout"
        from importlib.util import find_spec

        return None if find_spec(self.needs) else f"needs {self.needs}"


def _check(*arguments: str) -> tuple[str, ...]:
    return ("npattn", "check", *arguments, "-n", "{jobs}")


QUESTIONS = {
    question.name: question
    for question in (
        Question("flash", "default check of numpy.flash", 10, _check("numpy.flash")),
        Question("sdpa", "default check of torch.sdpa", 12, _check("torch.sdpa"), "torch"),
        Question(
            "jax",
            "check of jax.nn with 100 examples",
            300,
            _check("jax.nn", "--examples", "100"),
            "jax",
        ),
        Question("jitted", "default check of a jitted function", 30, _check(JITTED), "jax"),
        Question("first-red", f"mutants red within {SOON:g} s", 0.95, share=True),
        Question(
            "mutants",
            "every mutant by every rule",
            2400,
            ("benchmarks.zoo", "--kind", "mutant", "-j", "{jobs}"),
            usual=False,
        ),
        Question(
            "suite", "the test suite", 360, ("pytest", "-q", "-n", "{jobs}"), "tests/", usual=False
        ),
    )
}


@dataclass(frozen=True)
class Answer:
    """Time of one question.

    Attributes
    ----------
    name : str
    goal : float
        That of the question, when it was asked.
    figure : float or None
        Seconds, or a share of mutants. None: not measured.
    processor : float or None
        Processor seconds of all its processes. None: not measured.
    verdict : {"reached", "missed", "not asked", "no answer"}
    note : str
    """

    name: str
    goal: float
    figure: float | None
    processor: float | None
    verdict: str
    note: str = ""

    @property
    def share(self) -> bool:
        return self.name in QUESTIONS and QUESTIONS[self.name].share


@dataclass(frozen=True)
class Run:
    """Answers that were measured together.

    Attributes
    ----------
    about : dict
        Date, versions, processor, load, number of processes.
    answers : tuple of Answer
    """

    about: dict[str, Any]
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class History:
    """Runs, the latest last.

    Attributes
    ----------
    runs : tuple of Run
    """

    runs: tuple[Run, ...]

    def to_json(self, path: str | Path) -> None:
        """Write all runs to a file."""
        content = {"schema": SCHEMA, "runs": [asdict(run) for run in self.runs]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", "utf-8")

    def table(self, earlier: Run | None = None) -> str:
        """Format the latest run, a line for a question, beside an earlier one."""
        about = self.runs[-1].about
        before, after = about["load"]
        lines = [
            f"benchmarks.speed --judge  {about['date']}  npattn {about['versions']['npattn']}",
            f"{about['cpu']}, {about['cores']} cores, {about['jobs']} processes, "
            f"load {before} before, {after} after",
            "",
            _format("question", "time", "processor", "goal", "", "earlier"),
        ]
        old = {} if earlier is None else {a.name: a for a in earlier.answers}
        lines += [_line(answer, old.get(answer.name)) for answer in self.runs[-1].answers]
        return "\n".join(lines)


def read_history(path: str | Path) -> History:
    """Read runs from a file of `History.to_json`.

    Raises
    ------
    OptionError
        If the file cannot be read, or is of another kind.
    """
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        if content["schema"] != SCHEMA:
            raise KeyError(content["schema"])
        runs = tuple(
            Run(run["about"], tuple(Answer(**answer) for answer in run["answers"]))
            for run in content["runs"]
        )
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise OptionError(
            f"{path} is no file of times of the judge, must be one of "
            "python -m benchmarks.speed --judge --json"
        ) from err
    if not runs:
        raise OptionError(f"{path} has no run")
    return History(runs)


def ask(
    names: Sequence[str] = (),
    *,
    jobs: int | None = None,
    every: int = 1,
    progress: Progress | None = None,
) -> Run:
    """Ask the judge and time its answers, one after another.

    Parameters
    ----------
    names : sequence of str
        Names in `QUESTIONS`. Default: those that take minutes at most.
    jobs : int, optional
        Processes of a check. Default: 2, or the number of cores if that is 1.
    every : int, default 1
        Of the mutants each `every`-th is timed.
    progress : callable, optional
        Called with the name, the number of questions done, and of all.

    Returns
    -------
    Run

    Raises
    ------
    OptionError
        If a name is unknown, or a number not positive.

    Notes
    -----
    Commands run in processes of their own, from the start of Python to its end, in an empty
    folder (the test suite: here). Exit code 1, a red report, is an answer; others are none.
    """
    unknown = [name for name in names if name not in QUESTIONS]
    if unknown:
        raise OptionError(f"{unknown[0]!r} is no question, must be one of {', '.join(QUESTIONS)}")
    jobs = min(2, os.cpu_count() or 1) if jobs is None else check_integer("jobs", jobs)
    every = check_integer("every", every)
    chosen = [QUESTIONS[n] for n in names] or [q for q in QUESTIONS.values() if q.usual]
    load = machine.load()
    answers = []
    for done, question in enumerate(chosen):
        if progress is not None:
            progress(question.name, done, len(chosen))
        answers.append(_answer(question, jobs, every))
    about = machine.description(jobs, (), "not measured")
    about |= {"load": (load, machine.load()), "jobs": jobs, "date": date.today().isoformat()}
    return Run(about, tuple(answers))


def _answer(question: Question, jobs: int, every: int) -> Answer:
    if question.missing is not None:
        return Answer(question.name, question.goal, None, None, "not asked", question.missing)
    if question.share:
        return _time_mutants(question, every)
    arguments = [a.format(jobs=jobs) for a in question.arguments]
    with _folder(question) as folder:
        wall, processor = time.perf_counter(), _children()
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wall, processor = time.perf_counter() - wall, _since(processor)
    if done.returncode not in (0, 1):
        last = (done.stderr.strip().splitlines() or ["nothing on its error stream"])[-1]
        note = f"exit code {done.returncode}: {last}"
        return Answer(question.name, question.goal, None, processor, "no answer", note)
    verdict = "reached" if wall <= question.goal else "missed"
    note = "red" if done.returncode else ""
    return Answer(question.name, question.goal, wall, processor, verdict, note)


@contextmanager
def _folder(question: Question) -> Iterator[Path]:
    if question.needs is not None and question.needs.endswith("/"):
        yield Path.cwd()
        return
    with tempfile.TemporaryDirectory(prefix="npattn-bench-") as folder:
        yield Path(folder)


def _children() -> float | None:
    """Processor seconds of all child processes that have ended; None where none are counted."""
    times = os.times()
    return times.children_user + times.children_system if os.name == "posix" else None


def _since(earlier: float | None) -> float | None:
    now = _children()
    return None if now is None or earlier is None else now - earlier


def _time_mutants(question: Question, every: int) -> Answer:
    from benchmarks.zoo.mutants import MUTANTS

    start = time.process_time()
    seconds = {name: time_to_red(name) for name in list(MUTANTS)[::every]}
    spent = time.process_time() - start
    red = {name: s for name, s in seconds.items() if s is not None}
    soon = sum(s <= SOON for s in red.values()) / len(seconds)
    note = f"{len(seconds)} mutants, {len(seconds) - len(red)} not red"
    if red:
        slowest = max(red, key=lambda name: red[name])
        note += f", median {median(red.values()):.1f} s, slowest {red[slowest]:.1f} s ({slowest})"
    verdict = "reached" if soon >= question.goal else "missed"
    return Answer(question.name, question.goal, soon, spent, verdict, note)


def time_to_red(name: str) -> float | None:
    """Return the processor seconds until a mutant is red; None: it is not.

    With its first failure at any level but reproducible, the probe included, diagnosis and
    shrinking left out. A mutant that only the rule aggregate suspects is not red.
    """
    from benchmarks.zoo.mutants import MUTANTS
    from npattn.testing import check

    mutant = MUTANTS[name]
    start = time.process_time()
    report = check(
        mutant.forward,
        backward=mutant.backward,
        dtypes=mutant.dtypes,
        rounding=mutant.rounding,
        require="all",
        fail_fast=True,
        shrink=False,
        diagnosis=False,
        progress=False,
    )
    spent = time.process_time() - start
    return spent if any(o.failed and report.requires(o) for o in report.outcomes) else None


# --- the table ------------------------------------------------------------------------------------


def _format(name: str, figure: str, processor: str, goal: str, verdict: str, rest: str) -> str:
    return f"{name:36}{figure:>10}{processor:>11}{goal:>10}  {verdict:10}{rest}".rstrip()


def _line(answer: Answer, earlier: Answer | None) -> str:
    about = QUESTIONS[answer.name].about if answer.name in QUESTIONS else answer.name
    compared = ""
    if earlier is not None and earlier.figure and answer.figure:
        ratio = answer.figure / earlier.figure
        compared = f"{_figure(earlier.figure, answer.share)} ({ratio:.2f} times)  "
    return _format(
        about,
        _figure(answer.figure, answer.share),
        _figure(answer.processor, False),
        _figure(answer.goal, answer.share),
        answer.verdict,
        compared + answer.note,
    )


def _figure(value: float | None, share: bool) -> str:
    if value is None:
        return "–"
    return f"{value:.0%}" if share else f"{value:.1f} s"
