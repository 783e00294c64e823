"""Ask rules in turn, or share them out to processes that each load the implementation.

Rules that sample alike stay together, for they share a memo. Processes are spawned (a
fork of threads may hang), have one thread each, and take the next group when they are done with
one; the largest group comes first. Where the implementation lives in a worker, which alone ends if
it crashes, this process is one of them.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np

from npattn.engines.threads import one_thread, one_thread_in_children
from npattn.errors import OptionError
from npattn.testing.adapters.base import ImplementationError
from npattn.testing.adapters.child import format_exception_line
from npattn.testing.adapters.implementation import Implementation
from npattn.testing.adapters.untrusted import JudgedCalls
from npattn.testing.capabilities import StructureRefusedError
from npattn.testing.runner.rounds import Answers, Judge, Round, round_sizes
from npattn.testing.runner.search import Standing
from npattn.testing.runner.untrusted import ask_tail, plan_turns

ERRORS: dict[str, Any] = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""NumPy's own error state: what a target does to it must not reach the oracle."""


def _renew(implementation: Implementation) -> None:
    if implementation.untrusted is not None:
        implementation.untrusted.renew()


class InProcess:
    """Ask one rule after the other, in this process."""

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, work: Round) -> None:
        while True:
            try:
                return self._ask(work)
            except StructureRefusedError as err:
                work.begin_without(err)

    def _ask(self, work: Round) -> None:
        """Ask all rules, in rounds of more and more examples, until the work is stopped."""
        for count in round_sizes(work.judge.examples):
            for names, anew in () if work.stopped else plan_turns(work, count):
                if anew:
                    _renew(work.judge.trial.implementation)
                work.report_progress(names[0])
                for name, answer in work.judge.answer(names, count, work.standings):
                    work.record(name, answer)
                    work.report_progress(name)
                if work.stopped:
                    break
        work.ask_again()
        ask_tail(work)
        work.report_progress("")

    def finish(self) -> None:
        pass


class Processes:
    """Share rules out to `n` processes, of which this may be one.

    Raises OptionError if they cannot load the implementation: the first time that they are asked.
    """

    def __init__(self, n: int, implementation: Implementation) -> None:
        self.name, self.implementation = implementation.name, implementation
        self.pending: list[tuple[Round, _ProbedJudge, list[_Task]]] = []
        self.before: set[BaseProcess] = set()
        # Who is not trusted begins anew, and is timed, in processes that do nothing else.
        self.takes_part = implementation.is_isolated and implementation.untrusted is None
        self.others = n - self.takes_part
        self.n, self.rounds, self.pickled = n, 0, _pickle(implementation)

    def __enter__(self) -> Processes:
        self.before = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(self.others, context, _begin, (self.pickled,))
        with ExitStack() as unless_begun:  # an interrupt too ends what was started
            unless_begun.callback(self._end)
            with one_thread_in_children():
                self.loading = [self.pool.submit(_load) for _ in range(self.others)]
            unless_begun.pop_all()
        return self

    def _wait_until_loaded(self) -> None:
        """Wait for the processes, which load the implementation while it is probed here."""
        try:
            failure = next(filter(None, [one.result() for one in self.loading]), "")
        except BrokenProcessPool:
            raise OptionError(
                f"processes is {self.n}, must be 1 here: a process that was started to judge "
                f"{self.name} ended at once. A script has to keep what it runs below "
                'if __name__ == "__main__", for each process imports it'
            ) from None
        if failure:
            raise OptionError(_cannot(self.name, failure))
        self.loading.clear()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._end()
        self.pool.shutdown(cancel_futures=True)

    def _end(self) -> None:
        """End the processes without waiting for their work, which may take long."""
        for process in set(multiprocessing.active_children()) - self.before:
            process.terminate()
        self.pool.shutdown(cancel_futures=True)

    def ask(self, work: Round) -> None:
        """Share out the first examples of every rule; `finish` waits for the answers."""
        self._wait_until_loaded()
        self.rounds += 1
        probed = _ProbedJudge.of(work.judge, self.rounds)
        self.pending.append((work, probed, self._share_out(work, probed, 0)))

    def _share_out(self, work: Round, probed: _ProbedJudge, turn: int) -> list[_Task]:
        sizes = round_sizes(work.judge.examples)
        if work.stopped or turn == len(sizes):
            return []
        with one_thread_in_children(), self._catch_crash():
            tasks = []
            for names, anew in plan_turns(work, sizes[turn]):
                asked = names, sizes[turn], work.standings_of(names)
                tasks.append(_Task(self.pool.submit(_answer, probed, *asked, anew), *asked))
            return tasks

    def finish(self) -> None:
        """Wait for all answers; a round whose structure is refused begins anew without it."""
        with self._catch_crash():
            for work, probed, tasks in self.pending:
                while True:
                    try:
                        self._finish(work, probed, tasks)
                        break
                    except StructureRefusedError as err:
                        work.begin_without(err)
                        self.rounds += 1
                        probed = _ProbedJudge.of(work.judge, self.rounds)
                        tasks = self._share_out(work, probed, 0)
        self.pending.clear()

    def _finish(self, work: Round, probed: _ProbedJudge, tasks: list[_Task]) -> None:
        turn = 0
        while tasks:
            self._collect(work, tasks)
            turn += 1
            tasks = self._share_out(work, probed, turn)
        work.ask_again()
        ask_tail(work)

    def _collect(self, work: Round, tasks: Sequence[_Task]) -> None:
        """Record the answers, up to the first that stops the check, in the order of the rules.

        Raises StructureRefusedError: the first in that order, if some rules end with one.
        """
        in_order = bool(work.judge.stops_at)
        pending = list(tasks)
        while pending and not work.stopped and not (in_order and _refusals(tasks)):
            next_ones = pending[:1] if in_order else pending
            done = [task for task in next_ones if task.future.done()]
            if not done and not self._take_one(work, pending):
                wait([task.future for task in next_ones], return_when=FIRST_COMPLETED)
            for task in done[:1]:
                pending.remove(task)
                answers = {} if _refusals([task]) else task.future.result().answers
                for name, answer in answers.items():
                    work.record(name, answer)
                    work.report_progress(name)
        for task in pending:
            task.future.cancel()
        for task in tasks:  # in the order of the rules, whoever was first
            if task.future.done() and not task.future.cancelled() and not _refusals([task]):
                self.implementation.add_given_up(task.future.result().given_up)
                if self.implementation.untrusted is not None:
                    self.implementation.untrusted.add(task.future.result().judged)
        for refusal in () if work.stopped else _refusals(tasks):
            raise refusal

    def _take_one(self, work: Round, tasks: Sequence[_Task]) -> bool:
        """Answer here the next task that no process has begun; return True if there was one."""
        for task in tasks if self.takes_part else ():
            if task.future.cancel():
                task.future = Future()
                try:
                    with one_thread(), work.judge.trial.implementation.framework.one_thread():
                        answers = dict(work.judge.answer(task.names, task.count, task.standings))
                except StructureRefusedError as err:
                    task.future.set_exception(err)
                    return True
                kinds = self.implementation.given_up_kinds
                task.future.set_result(_Answer(answers, kinds, JudgedCalls()))
                return True
        return False

    @contextmanager
    def _catch_crash(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool:
            raise ImplementationError(
                f"{self.name} ended the process in which it was judged (a crash?): with "
                "processes=1 it is seen where"
            ) from None


def _pickle(implementation: Implementation) -> bytes:
    try:
        return pickle.dumps(implementation)
    except (pickle.PicklingError, AttributeError, TypeError) as err:
        raise OptionError(_cannot(implementation.name, format_exception_line(err))) from err


def _cannot(name: str, why: str) -> str:
    return (
        f"f is {name}, which other processes cannot load ({why}), must be a function of a module "
        "that they can import, or be found by its spec, module:function or path/file.py:function "
        "(Implementation(f, spec=...)): else judge with processes=1"
    )


@dataclass(eq=False)
class _Task:
    """Rules that one process answers, and where its answer will be."""

    future: Future[_Answer]
    names: Sequence[str]
    count: int
    standings: Mapping[str, Standing]


def _refusals(tasks: Sequence[_Task]) -> list[StructureRefusedError]:
    """Return the refusals with which tasks ended, in their order."""
    ended = [t.future for t in tasks if t.future.done() and not t.future.cancelled()]
    return [err for f in ended if isinstance(err := f.exception(), StructureRefusedError)]


class _Answer(NamedTuple):
    """Answers of one process, the kinds of problems that it has given up, and what it judged."""

    answers: Answers
    given_up: Mapping[str, str]
    judged: JudgedCalls


class _ProbedJudge(NamedTuple):
    """A round: its number, its judge, and what the probe found of the implementation."""

    number: int
    judge: Judge
    returns: tuple[str, ...]
    gradients_raise: bool

    @classmethod
    def of(cls, judge: Judge, number: int) -> _ProbedJudge:
        f = judge.trial.implementation
        return cls(number, judge, f.returns, f.gradients_raise)


# --- in the processes -----------------------------------------------------------------------------


class _Process:
    """State of one process: the implementation, and a judge per round."""

    pickled = b""
    implementation: Implementation
    judges: dict[int, Judge] = {}  # noqa: RUF012  there is one


def _begin(pickled: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    _Process.pickled = pickled


def _load() -> str:
    """Say why the implementation cannot be loaded; "" if it can."""
    try:
        _Process.implementation = pickle.loads(_Process.pickled)
    except (Exception, SystemExit) as err:  # noqa: BLE001  what it imports may raise anything
        return format_exception_line(err)
    return ""


def _get_implementation() -> Implementation:
    if not hasattr(_Process, "implementation"):  # another process has answered for this one
        _Process.implementation = pickle.loads(_Process.pickled)
    return _Process.implementation


def _answer(
    probed: _ProbedJudge,
    names: Sequence[str],
    count: int,
    standings: Mapping[str, Standing],
    anew: bool,
) -> _Answer:
    """Return answers to some rules from this process, and what its implementation gave up."""
    implementation = _get_implementation()
    if anew:
        _renew(implementation)
    judge = _Process.judges.setdefault(probed.number, probed.judge)
    judge.trial.implementation = implementation
    implementation.returns = probed.returns
    implementation.gradients_raise = probed.gradients_raise
    with implementation.framework.one_thread(), np.errstate(**ERRORS):
        answers = dict(judge.answer(names, count, standings))
    untrusted = implementation.untrusted
    judged = JudgedCalls() if untrusted is None else untrusted.take()
    return _Answer(answers, implementation.given_up_kinds, judged)
