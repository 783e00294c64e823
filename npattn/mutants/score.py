"""Score of a suite of tests: which mistakes it finds, by family, and what it misses."""

from __future__ import annotations

import os
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from npattn.conventions import Conventions
from npattn.errors import OptionError
from npattn.mistakes import MISTAKES, Mistake
from npattn.mutants.patch import RIGHT, Patch
from npattn.mutants.runs import (
    NO_COVERAGE,
    SLOWER,
    STARTING,
    STATUSES,
    Run,
    choose_runner,
    covers,
    run_all,
)
from npattn.mutants.witness import Subject, Witness, inspect_function
from npattn.testing.adapters.load import load_callable
from npattn.testing.report.reproducer import write_conventions

TELLING = 10
"""Survivors that are printed with their tests."""
REFUSAL = "npattn.errors."
OF_BACKWARD = ("dv", "dp", "delta", "ds", "dq", "dk", "dbias", "dsinks", "dgate")
HIDING = {"mask", "causal", "window", "bias"}
WORDS = {
    **{name: {name} for name in ("mask", "causal", "window", "bias", "scale", "softcap", "sinks")},
    "gate": {"gate"},
    "dropout": {"dropout_mask"},
    "weights": {"return_weights"},
    "dlse": {"return_lse"},
    "dweights": {"return_weights"},
    "rows that see no key": HIDING,
    "hidden keys": HIDING,
}
"""Atom of `Mistake.where` → options without which all is right."""


@dataclass(frozen=True)
class Score:
    """Score of a suite of tests."""

    spec: str
    command: tuple[str, ...]
    conventions: Conventions
    runs: Mapping[str, Run]  # by mistake; of those that apply
    # by mistake, of the survivors
    witnesses: Mapping[str, Witness] = field(repr=False)
    tried: int  # number of mistakes, those that do not apply included
    seconds: float  # time of a green run
    # number of mistakes that were not run when Ctrl-C ended it, and no survivor was confirmed; None
    # if it was not ended
    not_run: int | None = None

    @property
    def survivors(self) -> list[str]:
        """Mistakes that the tests miss, the most telling of each family first.

        A mistake is telling if it shows on many sampled problems.
        """
        names = sorted(self.witnesses, key=lambda n: -self.witnesses[n].share)
        rank: Counter[str] = Counter()
        order = {}
        for name in names:
            family = MISTAKES[name].family
            order[name] = rank[family], -self.witnesses[name].share
            rank[family] += 1
        return sorted(names, key=lambda n: order[n])

    def count(self, names: Iterable[str]) -> tuple[int, int]:
        """Return how many of these mistakes the tests find, and how many apply."""
        runs = [self.runs[n] for n in names if n in self.runs]
        return sum(run.status != "survived" for run in runs), len(runs)

    @property
    def families(self) -> dict[str, tuple[int, int]]:
        """Family → number found, and number that apply."""
        names: dict[str, list[str]] = {}
        for name in self.runs:
            names.setdefault(MISTAKES[name].family, []).append(name)
        return {family: self.count(of_family) for family, of_family in names.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        found, applicable = self.count(self.runs)
        return {
            "patch": self.spec,
            "command": list(self.command),
            "conventions": write_conventions(self.conventions),
            "found": found,
            "applicable": applicable,
            "tried": self.tried,
            "families": {f: {"found": n, "applicable": m} for f, (n, m) in self.families.items()},
            "mistakes": [
                {
                    "name": name,
                    "family": MISTAKES[name].family,
                    "sentence": MISTAKES[name].sentence,
                    "status": run.status,
                    "seconds": round(run.seconds, 3),
                    **(vars(self.witnesses[name]) if name in self.witnesses else {}),
                }
                for name, run in self.runs.items()
            ],
        }

    def __str__(self) -> str:
        """Return the counts, by family too, and for the first survivors a test that fails."""
        found, applicable = self.count(self.runs)
        statuses = Counter(run.status for run in self.runs.values())
        how = ", ".join(f"{statuses[x]} {x}" for x in STATUSES[1:] if statuses[x])
        others = self.tried - applicable - (self.not_run or 0)
        lines = [
            f"{self.spec} under {' '.join(self.command)}",
            f"found {found} of {applicable} mistakes{how and f' ({how})'}",
        ]
        if self.not_run is not None:
            more = "; some of those that survived may be ones that no test can find"
            lines += [f"interrupted, with {self.not_run} mistakes left{more}"]
        lines += [
            f"{others} others do not apply to its signature and conventions, "
            f"{write_conventions(self.conventions)}; a green run takes {self.seconds:.1f} s",
            "",
        ]
        width = max(map(len, self.families), default=0)
        lines += [f"{f:<{width}}  {n:>3} of {m:>3}" for f, (n, m) in self.families.items()]
        if shown := self.survivors[:TELLING]:
            lines += ["", f"{len(shown)} of {len(self.survivors)} survivors, and tests that fail:"]
        for name in shown:
            witness, mistake = self.witnesses[name], MISTAKES[name]
            often = f"; out of tolerance in {witness.share:.0%} of sampled problems"
            lines += ["", f"{name} ({mistake.family}{often if witness.share else ''})"]
            lines += [textwrap.indent(witness.test, "    ")]
        return "\n".join(lines)


def score(
    spec: str, command: Sequence[str],
    *, conventions: Callable[[Conventions], Conventions] | None = None, layout: str | None = None,
    rename: Mapping[str, str] | None = None, dtype: str = "float32", only: Sequence[str] = (),
    limit: int | None = None, processes: int | None = None, timeout: float | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> Score:  # fmt: skip
    """Run a command of tests with each mistake in the place of a function.

    Parameters
    ----------
    spec : str
        ``module:function``, as the tests import it.
    command : sequence of str
        ``pytest ...`` and ``python ...`` run in forks of this process, any other command in a
        process of its own, which must run pytest.
    conventions : callable, optional
        Changes the conventions that were found out.
    layout : {"BHTD", "BTHD"}, optional
        Default: found out.
    rename : mapping, optional
        Its parameter names → npattn's, as of `Implementation`.
    dtype : str, default "float32"
        Mistakes that are wrong in it are tried.
    only : sequence of str
        Names or families of mistakes; default: all.
    limit : int, optional
        Most mistakes, evenly from all.
    processes : int, optional
        Runs at a time; default: the number of processors.
    timeout : float, optional
        Seconds until a run has timed out; default: ten times the green run, and five.
    progress : callable, optional
        Called with a line for each run.

    Returns
    -------
    Score

    Raises
    ------
    OptionError
        If the tests are not green with the function itself, never call it, or are not green with
        attention that is right in its place; if the function takes what no mistake takes.

    Examples
    --------
    >>> from npattn.mutants.score import score
    >>> score("mine:attention", ["pytest", "test_mine.py"]).families  # doctest: +SKIP
    {'scale': (12, 13), ...}
    """
    if spec.rpartition(":")[0].endswith(".py"):
        raise OptionError(f"--patch is {spec!r}, must be module:function, as the tests import it")
    names = {m.family for m in MISTAKES.values()} | {*MISTAKES}
    if unknown := [x for x in only if x not in names]:
        raise OptionError(f"there is no mistake or family {unknown[0]!r}")
    choose_runner(command)
    load_callable(spec)  # here, so that forks have it
    processes = processes or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(patches: Iterable[Patch], limit: float | None, n: int) -> Iterable[Any]:
            return run_all(patches, command, folder=folder, processes=n, timeout=limit)

        if choose_runner(command) is not None and covers(command):
            progress(f"coverage is left out, with its threshold: {NO_COVERAGE} is added")
        ((_, green),) = run([Patch(spec, None, None, f"{folder}/own")], timeout, 1)
        _check_green(green, f"{spec} itself", command, progress)
        for module in green.record["modules"]:  # once, for all forks
            import_module(module)
        settings: dict[str, Any] = {"layout": layout, "rename": rename, "dtype": dtype}
        settings |= {"beside": tuple(green.record["beside"]), "change": conventions}
        settings |= {"sizes": green.record["sizes"]}
        with ProcessPoolExecutor(1, get_context("fork")) as executor:
            subject = executor.submit(_inspect, spec, settings).result()
        terms = subject.terms
        ((_, right),) = run([Patch(spec, terms, RIGHT, f"{folder}/right")], timeout, 1)
        meant = write_conventions(terms.conventions)
        cure = f"say what it means by --convention or --rename, which now are {meant}"
        _check_green(right, "attention that is right in its place", command, progress, cure)
        seconds = max(green.seconds, right.seconds)
        chosen = [m for n, m in MISTAKES.items() if not only or {n, m.family} & {*only}]
        chosen = chosen[:: max(1, -(-len(chosen) // (limit or len(chosen))))]
        mistakes = [m for m in chosen if applies(m, subject)]
        patches = [Patch(spec, terms, m.name, f"{folder}/{m.name}") for m in mistakes]
        runs = {}
        longest = SLOWER * seconds + STARTING if timeout is None else timeout
        told = spec, tuple(command), terms.conventions
        try:
            for patch, one in run(patches, longest, processes):
                runs[patch.mistake] = one
                progress(f"{len(runs)}/{len(patches)} {patch.mistake}: {one.status}")
        except KeyboardInterrupt:
            return Score(*told, runs, {}, len(chosen), seconds, len(patches) - len(runs))
    survivors = [m.name for m in mistakes if runs[m.name].status == "survived"]
    progress(f"looking for tests of {len(survivors)} survivors")
    found: dict[str, Witness | None] = {}
    with ProcessPoolExecutor(processes, get_context("fork")) as executor:
        parts = [survivors[i::processes] for i in range(processes)]
        for part in executor.map(_find, [subject] * processes, parts):
            found |= part
    witnesses = {n: x for n, x in found.items() if x is not None}
    kept = {m.name: runs[m.name] for m in mistakes if m.name not in found or m.name in witnesses}
    return Score(*told, kept, witnesses, len(chosen), seconds)


def applies(mistake: Mistake, subject: Subject) -> bool:
    """Return False for a mistake that needs what the function does not take or return."""
    signature = subject.terms.signature
    has = {*signature.features, *signature.returns, *(f"return_{n}" for n in subject.terms.beside)}
    backward, places = mistake.where.startswith("backward: "), mistake.where
    words = places.removeprefix("backward: ").split(" and ")
    for atom in words:
        needs = [WORDS[word] for word in atom.split(" or ") if word in WORDS]
        if needs and not set().union(*needs) & has:
            return False
        backward |= atom in ("dlse", "dweights")
    if (backward or mistake.step in OF_BACKWARD) and not subject.gradients:
        return False
    if (mistake.equivalent or mistake.step == "lse") and "return_lse" not in has:
        return False
    everywhere = mistake.dtypes == ("float32",) and mistake.step != "precision"
    return everywhere or subject.space.dtype in mistake.dtypes


def _check_green(
    run: Run, what: str, command: Sequence[str], progress: Callable[[str], object], cure: str = ""
) -> None:
    """Raise OptionError if a run was red, or never called the function."""
    if run.status != "survived":
        progress(run.output)
        words = f"with {what}, {' '.join(command)} {run.status}{cure and f': {cure}'}"
        raise OptionError(f"{words}; {_find_reason(run.output)}" if run.output else words)
    if not run.calls:
        raise OptionError(f"{' '.join(command)} never calls it, in the place where --patch puts it")


def _find_reason(output: str) -> str:
    """Return the last line that says why tests failed; a refusal of npattn says most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [x for x in lines if x.startswith(("E  ", "FAILED", "ERROR", "FAIL ", "Error"))]
    refusals = [x.rpartition(REFUSAL)[2] for x in telling if x.startswith("E") and REFUSAL in x]
    return (refusals or telling or lines or [""])[-1]


def _inspect(spec: str, settings: Mapping[str, Any]) -> Subject:
    """Inspect the function in a process of its own: threads of torch do not survive a fork."""
    return inspect_function(load_callable(spec), spec, **settings)


def _find(subject: Subject, names: Sequence[str]) -> dict[str, Witness | None]:
    return {name: subject.find(MISTAKES[name]) for name in names}
