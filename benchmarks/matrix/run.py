"""Run a matrix: plan the units, let an executor judge them, and put the results together."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

from benchmarks.journal import Journal
from benchmarks.matrix.plan import Pair, choose_targets, plan_pairs, rows_of
from benchmarks.matrix.result import Matrix, list_rules
from npattn.testing.targets import TARGETS
from npattn.testing.units.blocks import name_rules
from npattn.testing.units.processes import Jobs
from npattn.testing.units.unit import Result, Unit


class Status(NamedTuple):
    """How far a matrix has come: units in work, and numbers of those done and of all."""

    running: tuple[Unit, ...]
    done: int
    total: int


Progress = Callable[[Status], object]


def run_matrix(
    targets: Sequence[str] | None = None,
    *,
    dtypes: Sequence[str] | None = None,
    examples: int = 20,
    seed: int = 0,
    only: Iterable[str] | None = None,
    blocks: int = 1,
    timeout: float | None = None,
    memory: int | None = None,
    limit: float | None = None,
    envs: str | None = None,
    executor: Executor | None = None,
    journal: Journal | None = None,
    progress: Progress | None = None,
) -> Matrix:
    """Judge targets in dtypes by rules.

    Parameters
    ----------
    targets : sequence of str, optional
        Names, beginnings of names, or specs; default: all that are known, of which those that
        cannot run here are rows without results.
    dtypes : sequence of str, optional
        Default: float32, and float64 where a target computes in it.
    examples, seed : int
        As of `npattn.testing.check`.
    only : iterable of str, optional
        Rules, or beginnings of their names.
    blocks : int, default 1
        Parts into which the rules of a target are split, so that several can be asked at once.
    timeout : float, optional
        Seconds a call; default: as of `check`.
    memory : int, optional
        Bytes that a target may use.
    limit : float, optional
        Seconds for one target in one dtype: what is not known by then is "timed out".
    envs : str, optional
        Folder of virtual environments, in which pip installs what known targets need: they are
        made where a unit is judged, and found there again.
    executor : concurrent.futures.Executor, optional
        Where units are judged, each in a process of its own; default: here, one at a time.
    journal : Journal, optional
        Takes each result; results of an earlier run are not asked again.
    progress : callable, optional
        Called with a `Status` whenever that changes, and twice a second.

    Returns
    -------
    Matrix

    Raises
    ------
    OptionError
        If an argument is not legal; before any work.
    MissingExtraError
        If a target that is named cannot run here.
    KeyboardInterrupt
        If it is interrupted; its attribute `matrix` is what is known by then.
    """
    only = None if only is None else list(only)
    rows, names = choose_targets(targets, envs), name_rules(only)
    own = {"seed": seed, "examples": examples, "timeout": timeout, "memory": memory}
    pairs = plan_pairs(
        rows,
        None if only is None else names,
        dtypes=dtypes,
        blocks=blocks,
        limit=limit,
        envs=None if envs is None else os.path.abspath(envs),
        **own,
    )
    if journal is not None:
        journal.begin()
        for pair in pairs:
            keys = [unit.key for unit in (*pair.asked, pair.report)]
            known = {key: journal.results[key] for key in keys if key in journal.results}
            pair.results = {key: Result.from_text(json.dumps(x)) for key, x in known.items()}
    settings: dict[str, Any] = {
        "dtypes": list(dict.fromkeys(pair.dtype for pair in pairs)),
        **own,
        "limit": limit,
        "only": only,
        "blocks": blocks,
    }

    def collect() -> Matrix:
        runs = tuple(pair.run() for pair in pairs)
        return Matrix(settings, list_rules(names, runs), rows_of(rows, runs), runs)

    try:
        with ThreadPoolExecutor(1) as alone, Jobs(executor or alone) as jobs:
            _do_all(pairs, jobs, journal, progress or (lambda _: None))
    except KeyboardInterrupt as err:
        err.matrix = collect()  # type: ignore[attr-defined]
        raise
    return collect()


def _do_all(pairs: Sequence[Pair], jobs: Jobs, journal: Journal | None, progress: Progress) -> None:
    """Do the units of all pairs, and those that follow from their results."""
    owner: dict[str, Pair] = {}

    def submit(pair: Pair, units: Sequence[Unit]) -> None:
        for unit in units:
            owner[unit.key] = pair
            jobs.submit(unit)

    for pair in sorted(pairs, key=_is_quick):  # a slow one that comes last is waited for alone
        submit(pair, pair.begin())
    mine = [pair for pair in pairs if not pair.lacks]
    total = sum(len(pair.asked) + 1 for pair in mine)

    def report_progress() -> None:
        done = sum(len(pair.results) for pair in mine)
        progress(Status(tuple(jobs.running()), done, total))

    with _Repeatedly(report_progress):
        while owner:
            unit, result = jobs.wait()
            pair = owner.pop(unit.key)
            pair.results[unit.key] = result
            if journal is not None:
                journal.note(unit.key, vars(result))
            submit(pair, pair.next())


def _is_quick(pair: Pair) -> bool:
    """Return True unless the target says that its calls take long."""
    target = TARGETS.get(pair.target)
    return target is None or target.timeout is None


class _Repeatedly:
    """Context manager that calls a function twice a second in a thread, and once at its end."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.ended = call, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.ended.wait(0.5):
            self.call()

    def __enter__(self) -> None:
        self.call()
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.call()
