"""Run a matrix: plan the units, let an executor judge them, and put the results together."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.journal import Journal
from benchmarks.matrix.device import Budget, name_device
from benchmarks.matrix.plan import Pair, choose_targets, plan_pairs, rows_of
from benchmarks.matrix.result import Matrix, list_rules
from npattn.errors import OptionError
from npattn.testing.report.outcome import OUT_OF_TIME
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
SAVE_SECONDS = 20.0
"""Time between two copies of what is known, which takes a second to write."""


def run_matrix(
    # names, beginnings of names, or specs; default: all that are known, of which those that cannot
    # run here are rows without results
    targets: Sequence[str] | None = None,
    *,
    # default: float32, and float64 where a target computes in it
    dtypes: Sequence[str] | None = None,
    examples: int = 20,  # as of `npattn.testing.check`
    seed: int = 0,
    only: Iterable[str] | None = None,  # rules, or beginnings of their names
    # parts into which the rules of a target are split, so that several can be asked at once
    blocks: int = 1,
    timeout: float | None = None,  # seconds a call; default: as of `check`
    memory: int | None = None,  # bytes that a target may use
    # seconds for one target in one dtype: what is not known by then is "timed out"
    limit: float | None = None,
    # folder of virtual environments, in which pip installs what known targets need: they are made
    # where a unit is judged, and found there again
    envs: str | None = None,
    # Device of the targets' arrays, as "cuda". The default targets and dtypes are then those of
    # `benchmarks.matrix.device`
    device: str | None = None,
    # Seconds after which no more is asked. Each unit has an even share of what is left, and asks
    # the most telling rules first; problems of torch are also sampled on the device
    budget: float | None = None,
    # where units are judged, each in a process of its own; default: here, one at a time
    executor: Executor | None = None,
    processes: int = 1,  # units that the executor judges at once, by which a budget is shared
    # takes each result; results of an earlier run are not asked again
    journal: Journal | None = None,
    # called with a `Status` whenever that changes, and twice a second
    progress: Progress | None = None,
    # called with the matrix so far, after a result and not more often than every 20 seconds
    save: Callable[[Matrix], object] | None = None,
    clock: Callable[[], float] = time.monotonic,  # seconds that a budget is counted in
) -> Matrix:
    """Judge targets in dtypes by rules.

    Raises OptionError if an argument is not legal; before any work. Raises MissingExtraError if a
    target that is named cannot run here. Raises KeyboardInterrupt if it is interrupted; its
    attribute `matrix` is what is known by then.
    """
    if budget is not None and blocks != 1:
        raise OptionError(f"blocks is {blocks}, must be 1 with a budget, which asks for less")
    only = None if only is None else list(only)
    rows, names = choose_targets(targets, envs, device), name_rules(only)
    own = {"seed": seed, "examples": examples, "timeout": timeout, "memory": memory}
    pairs = plan_pairs(
        rows,
        None if only is None else names,
        dtypes=dtypes,
        blocks=blocks,
        device=device,
        sweeps=budget is not None and only is None,
        limit=limit,
        envs=None if envs is None else os.path.abspath(envs),
        **own,
    )
    if journal is not None:
        journal.begin()
        for pair in pairs:
            keys = [unit.key for unit in pair.units]
            known = {key: journal.results[key] for key in keys if key in journal.results}
            pair.results = {key: Result.from_text(json.dumps(x)) for key, x in known.items()}
    settings: dict[str, Any] = {
        "dtypes": list(dict.fromkeys(pair.dtype for pair in pairs)),
        **own,
        "limit": limit,
        "only": only,
        "blocks": blocks,
    }
    if device is not None or budget is not None:
        settings |= {"device": name_device(device)[1], "budget": budget}

    def collect(interrupted: bool = False) -> Matrix:
        runs = tuple(pair.run(interrupted) for pair in pairs)
        return Matrix(settings, list_rules(names, runs), rows_of(rows, runs), runs)

    saved = -math.inf

    def note(unit: Unit, result: Result) -> None:
        nonlocal saved
        if journal is not None:
            journal.note(unit.key, vars(result))
        if save is not None and time.monotonic() - saved > SAVE_SECONDS:
            save(collect())
            saved = time.monotonic()

    limited = None if budget is None else Budget(budget, processes, clock)
    try:
        with ThreadPoolExecutor(1) as alone, Jobs(executor or alone) as jobs:
            _do_all(pairs, jobs, note, progress or (lambda _: None), limited)
    except KeyboardInterrupt as err:
        err.matrix = collect(interrupted=True)  # type: ignore[attr-defined]
        raise
    return collect()


def _do_all(
    pairs: Sequence[Pair],
    jobs: Jobs,
    note: Callable[[Unit, Result], None],
    progress: Progress,
    budget: Budget | None,
) -> None:
    """Do the units of all pairs, and those that follow from their results, within the budget."""
    owner: dict[str, Pair] = {}
    queue = deque(_order(pairs, budget is not None))

    def submit() -> None:
        while queue and (budget is None or len(owner) < budget.processes):
            pair, unit = queue[0]
            if budget is not None:
                seconds = budget.share(len(queue))
                if seconds is None:  # what is left is not asked
                    return queue.clear()
                limit = min(unit.limit or math.inf, budget.left)
                unit = replace(unit, judges={**unit.judges, "budget": seconds}, limit=limit)
            queue.popleft()
            owner[unit.key] = pair
            jobs.submit(unit)
        return None

    submit()
    mine = [pair for pair in pairs if not pair.lacks]
    total = sum(len(pair.units) for pair in mine)

    def report_progress() -> None:
        done = sum(len(pair.results) for pair in mine)
        progress(Status(tuple(jobs.running()), done, total))

    with _Repeatedly(report_progress):
        while owner:
            unit, result = jobs.wait()
            pair = owner.pop(unit.key)
            if budget is not None and not budget.left and result.state == "timed out":
                pair.results[unit.key] = replace(result, state="not asked", why=OUT_OF_TIME)
            else:  # what the end of the budget cut off is no answer, and is asked again
                pair.results[unit.key] = result
                note(unit, result)
            if budget is None:
                queue.extend((pair, unit) for unit in pair.next())
            submit()


def _order(pairs: Sequence[Pair], limited: bool) -> list[tuple[Pair, Unit]]:
    """Return the units to do first, of pairs that can run here.

    In limited time they come by dtype, and sweeps after the rules; otherwise the slow ones first,
    since one that comes last is waited for alone.
    """
    if not limited:
        return [(pair, unit) for pair in sorted(pairs, key=_is_quick) for unit in pair.begin()]
    dtypes = [pair.dtype for pair in pairs]
    able = [(pair, unit) for pair in pairs if not pair.lacks for unit in pair.units]
    left = [(pair, unit) for pair, unit in able if unit.key not in pair.results]
    return sorted(left, key=lambda x: (dtypes.index(x[0].dtype), x[1] is x[0].sweep))


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
