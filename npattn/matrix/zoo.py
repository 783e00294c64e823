"""Zoo in units: each mutant, and each correct implementation, is judged in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial

from npattn.matrix.cluster import Cluster
from npattn.matrix.journal import ZooJournal
from npattn.matrix.processes import Executor
from npattn.matrix.unit import Result, Unit
from npattn.zoo.score import Row, Run, Task, lost_row

__all__ = ["run_in_units", "run_on_cluster", "run_with_journal"]


def run_in_units(
    begin: Callable[[], Executor], tasks: Sequence[Task]
) -> Generator[Row, None, None]:
    """Judge tasks of the zoo in units.

    Parameters
    ----------
    begin : callable
        Returns an executor; called when the first row is asked for.
    tasks : sequence of Task

    Yields
    ------
    Row
        In the order in which they come.
    """
    units = {unit.key: (unit, task) for task in tasks for unit in [_unit_of(task)]}
    with begin() as executor:
        # Those that are right take the longest: every rule, in several dtypes.
        for unit, _ in sorted(units.values(), key=lambda pair: pair[1].kind != "correct"):
            executor.submit(unit)
        for _ in units:
            unit, result = executor.wait()
            yield _row_of(units[unit.key][1], result)


def run_on_cluster(where: str, tasks: Sequence[Task]) -> Generator[Row, None, None]:
    """Judge tasks of the zoo on a cluster of Dask, as of `Cluster`."""
    return run_in_units(partial(Cluster, where), tasks)


def run_with_journal(
    journal: ZooJournal, run: Run, tasks: Sequence[Task]
) -> Generator[Row, None, None]:
    """Yield the rows that a journal has, then those of `run`, each of which it takes as it comes.

    A row that came to nothing is not written: whoever goes on with the journal judges it again.
    """
    units = {task.name: _unit_of(task).key for task in tasks}
    known = {name: journal.results[key] for name, key in units.items() if key in journal.results}
    journal.begin()
    yield from (_row_of(task, known[task.name]) for task in tasks if task.name in known)
    with closing(run([task for task in tasks if task.name not in known])) as rows:
        for row in rows:
            if not row.lost:
                journal.note(units[row.name], Result("done", report=asdict(row)))
            yield row


def _unit_of(task: Task) -> Unit:
    kind, name, rules, examples, seed = task
    return Unit(kind=kind, target=name, rules=rules, examples=examples, seed=seed)


def _row_of(task: Task, result: Result) -> Row:
    if result.state != "done":
        return lost_row(task, f"{result.state}: {result.why}")
    fields = result.report or {}
    return Row(**{**fields, "killers": tuple(fields["killers"])})
