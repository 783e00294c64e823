"""The run: rounds in which each contestant that can compute has its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.speed import machine
from benchmarks.speed.cases import CASES, Case, Task, make_task
from benchmarks.speed.clock import Clock, turn
from benchmarks.speed.contestants import CONTESTANTS, Calls, Contestant
from benchmarks.speed.limits import available, limit_threads
from benchmarks.speed.memory import REFUSALS, Probe, describe_method, first_line, probe
from benchmarks.speed.report import Cell, Report, Times
from benchmarks.speed.verify import Verifier
from npattn.engines import threads as pool
from npattn.errors import MissingExtraError, OptionError
from npattn.problem.arrays import Array
from npattn.problem.checks import check_integer

LENGTHS = tuple(2**n for n in range(7, 15))
DTYPES = ("float32", "float64")
LEAST = 3
"""Fewest rounds of a meaningful median."""
FIRST = 1024
"""Longest sequence to try before a shorter one."""
START = 30.0
"""Seconds for a process to load a framework and compile."""
SHARE = 0.8
"""Share of the available memory to use."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run, checked when made.

    Parameters
    ----------
    cases : tuple of str
        Names in `CASES`. Default: all.
    lengths : tuple of int
        T, in keys; there are as many queries. Default: 128, 256, … 16384.
    contestants : tuple of str
        Names in `CONTESTANTS`. Default: all that run here.
    dtypes : tuple of str
        Of "float32", "float64". Default: both.
    rounds : int, default 7
        Every contestant has one turn per round.
    seconds : float, default 240
        Limit for one contestant at one length. It has fewer rounds if that is short, and is
        skipped if it would have fewer than three.
    memory : int, optional
        Bytes to use. Default: 0.8 of what is available.
    threads : int, optional
        Threads per contestant. Default: as many as BLAS would use.
    seed : int, default 0
        Everything random comes from it.

    Raises
    ------
    OptionError
        If a name is unknown, or a number out of range.
    MissingExtraError
        If the package of a contestant is not installed.
    """

    cases: tuple[str, ...] = tuple(CASES)
    lengths: tuple[int, ...] = LENGTHS
    contestants: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = DTYPES
    rounds: int = 7
    seconds: float = 240.0
    memory: int | None = None
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        put = self.__dict__.__setitem__
        put("cases", _select("cases", self.cases, CASES))
        put("dtypes", _select("dtypes", self.dtypes, DTYPES))
        put("lengths", tuple(sorted({check_integer("lengths", T) for T in self.lengths})))
        if not self.lengths:
            raise OptionError("lengths is empty, must have at least one T")
        here = tuple(name for name, c in CONTESTANTS.items() if c.runs_here)
        put("contestants", _select("contestants", self.contestants or here, CONTESTANTS))
        for name in self.contestants:
            if name not in here:
                needs = CONTESTANTS[name].needs
                raise MissingExtraError(
                    f"{name} needs {needs}, which is not installed: pip install 'npattn[{needs}]'"
                )
        put("rounds", check_integer("rounds", self.rounds))
        if not self.seconds > 0:
            raise OptionError(f"seconds is {self.seconds}, must be above 0")
        put("seed", check_integer("seed", self.seed, 0))
        free = int(SHARE * available())
        put("memory", free if self.memory is None else check_integer("memory", self.memory))
        threads = pool.count() if self.threads is None else check_integer("threads", self.threads)
        put("threads", threads)


def _select(name: str, names: Sequence[str], known: Any) -> tuple[str, ...]:
    """Return the names in the order of the known ones, after checking them."""
    for one in names:
        if one not in known:
            raise OptionError(f"{name} has {one!r}, must be of {', '.join(known)}")
    if not names:
        raise OptionError(f"{name} is empty, must be of {', '.join(known)}")
    return tuple(one for one in known if one in names)


Progress = Callable[[str, int, int], None]


def bench(
    settings: Settings | None = None,
    *,
    progress: Progress | None = None,
    save: Callable[[Report], None] | None = None,
    clock: Clock | None = None,
    probing: Callable[..., Probe] = probe,
) -> Report:
    """Measure time and memory of every contestant on every case, dtype and length.

    Parameters
    ----------
    settings : Settings, optional
    progress : callable, optional
        Called with the next step, the number of steps done, and the number of all.
    save : callable, optional
        Called with the report so far, after every length and at the end.
    clock : Clock, optional
        Source of the time.
    probing : callable, optional
        Measures memory, as `benchmarks.speed.memory.probe` does.

    Returns
    -------
    Report
        With the cells so far if it is interrupted from the keyboard.

    Examples
    --------
    >>> from benchmarks.speed import Settings, bench
    >>> small = Settings(cases=("plain",), lengths=(7,), contestants=("numpy.naive",), rounds=1)
    >>> report = bench(small)
    >>> [cell.status for cell in report.cells]
    ['ok', 'ok']
    """
    settings = Settings() if settings is None else settings
    assert settings.threads is not None
    cells: list[Cell] = []
    about = machine.description(settings.threads, settings.contestants, describe_method())
    about |= {n: getattr(settings, n) for n in ("seed", "rounds", "seconds", "memory")}

    def report(interrupted: bool) -> Report:
        load = [about["load"], machine.load()]
        result = Report(about | {"load": load, "interrupted": interrupted}, tuple(cells))
        if save is not None:
            save(result)
        return result

    with limit_threads(settings.threads):
        run = _Run(settings, clock or Clock(), probing, progress or _silent)
        try:
            for case in settings.cases:
                for dtype in settings.dtypes:
                    for more in run.ladder(CASES[case], dtype):
                        cells += more
                        report(True)
        except KeyboardInterrupt:
            return report(True)
    return report(False)


def _silent(*_: object) -> None:
    pass


class _Run:
    def __init__(
        self, settings: Settings, clock: Clock, probing: Callable[..., Probe], progress: Progress
    ) -> None:
        self.settings, self.clock, self.probing = settings, clock, probing
        self.progress = progress
        self.done = 0
        self.total = len(settings.cases) * len(settings.dtypes) * len(settings.lengths)

    def ladder(self, case: Case, dtype: str) -> Iterator[list[Cell]]:
        """Measure one case at all lengths, from the shortest, to estimate the cost of the next."""
        known: dict[str, tuple[int, Probe]] = {}
        if self.settings.lengths[0] > FIRST:
            self.report(f"{case.name} {dtype} {FIRST}, to estimate")
            for name in self.settings.contestants:
                known[name] = FIRST, self.probe(name, case, dtype, FIRST, {})
        for T in self.settings.lengths:
            cells = self.length(case, dtype, T, known)
            self.done += 1
            yield cells

    def report(self, step: str) -> None:
        self.progress(step, self.done, self.total)

    def length(
        self, case: Case, dtype: str, T: int, known: dict[str, tuple[int, Probe]]
    ) -> list[Cell]:
        cells: dict[str, Cell] = {}
        able: dict[str, Probe] = {}
        memory = 0  # bytes of the inputs of those that are able
        for name in self.settings.contestants:
            self.report(f"{case.name} {dtype} {T}: memory of {name}")
            cell = Cell(case.name, dtype, T, CONTESTANTS[name])
            why = self.too_much(known.get(name), T, memory)
            if why:
                cells[name] = cell.with_status("skipped", why)
                continue
            result = self.probe(name, case, dtype, T, known)
            if not result.refused:
                known[name] = T, result
                memory += result.inputs
                able[name] = result
                cell = cell.with_memory(result)
                why = self.too_much((T, result), T, memory - result.inputs)
            if result.refused or why:
                able.pop(name, None)
                status = "refused" if result.refused else "skipped"
                cell = cell.with_status(status, result.refused or why)
            cells[name] = cell
        cells |= self.measure(case, dtype, T, cells, able)
        return list(cells.values())

    def probe(
        self, name: str, case: Case, dtype: str, T: int, known: dict[str, tuple[int, Probe]]
    ) -> Probe:
        settings = self.settings
        timeout = START + 2 * settings.seconds
        return self.probing(name, case.name, dtype, T, settings.seed, settings.threads, timeout)

    def too_much(self, before: tuple[int, Probe] | None, T: int, memory: int) -> str:
        """Reason to skip a contestant, by its cost before; everything grows as T²."""
        if before is None:
            return ""
        length, cost = before
        if cost.refused:
            return f"T = {length}: {cost.refused}"
        growth = (T / length) ** 2
        least = min(LEAST, self.settings.rounds) * growth * cost.seconds
        if least > self.settings.seconds:
            return f"would take about {least:.0f} s, may take {self.settings.seconds:.0f}"
        assert self.settings.memory is not None
        need = growth * (cost.inputs + max(cost.forward or 0, cost.both or 0)) + memory
        if need > self.settings.memory:
            return f"would hold about {need / 2**30:.1f} GiB of {self.settings.memory / 2**30:.1f}"
        return ""

    def measure(
        self, case: Case, dtype: str, T: int, cells: dict[str, Cell], able: dict[str, Probe]
    ) -> dict[str, Cell]:
        """Return the cells of those that are able, with verdicts on their results, and times."""
        if not able:
            return {}
        task = make_task(case, T, dtype, self.settings.seed)
        verifier = Verifier(task, self.settings.seed)
        ready: dict[str, Calls] = {}
        measured = {}
        for name in able:
            self.report(f"{case.name} {dtype} {T}: results of {name}")
            try:
                calls = self.start(CONTESTANTS[name], task)
                results = _results(calls)
            except REFUSALS as err:
                measured[name] = cells[name].with_status("refused", first_line(err))
                continue
            ready[name] = calls
            wrong = next(filter(None, map(verifier.verdict, results)), "")
            measured[name] = cells[name].with_status("wrong" if wrong else "ok", wrong)
        times = self.rounds(f"{case.name} {dtype} {T}", ready, able)
        for name, (forward, both) in times.items():
            measured[name] = measured[name].with_times(Times.of(forward), Times.of(both))
        return measured

    def rounds(
        self, where: str, ready: dict[str, Calls], able: dict[str, Probe]
    ) -> dict[str, tuple[list[float], list[float]]]:
        """Measure seconds of forward, and of forward and backward, of each."""
        seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ready}
        for turns in range(self.settings.rounds):
            self.report(f"{where}: round {turns + 1} of {self.settings.rounds}")
            # Another one begins in each round, so that none always follows the same.
            names = [name for name in ready if turns < self.count(able[name])]
            shift = turns % max(len(names), 1)
            for name in names[shift:] + names[:shift]:
                seconds[name][0].append(turn(ready[name].forward, self.clock))
                both = ready[name].both
                if both is not None:
                    seconds[name][1].append(turn(both, self.clock))
        return seconds

    def start(self, contestant: Contestant, task: Task) -> Calls:
        assert self.settings.threads is not None
        return contestant.start(task, self.settings.threads)

    def count(self, cost: Probe) -> int:
        """Number of rounds that fit into the time."""
        fit = int(np.clip(self.settings.seconds // max(cost.seconds, 1e-9), LEAST, 2**31))
        return min(self.settings.rounds, fit)


def _results(calls: Calls) -> list[tuple[Array, ...]]:
    """Compute the results, alone and with gradients."""
    results = [call() for call in (calls.forward, calls.both) if call is not None]
    return [] if calls.read is None else [calls.read(x) for x in results]
