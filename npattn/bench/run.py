"""The run: who is able to, in rounds, each contestant in its turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from npattn import threads as pool
from npattn.arrays import Array
from npattn.bench import machine
from npattn.bench.cases import CASES, Case, Task, made
from npattn.bench.clock import Clock, turn
from npattn.bench.contestants import CONTESTANTS, Calls, Contestant
from npattn.bench.limits import available, limited
from npattn.bench.memory import REFUSALS, Probe, how, probe, told
from npattn.bench.report import Cell, Report, Times
from npattn.bench.verify import Judge
from npattn.checks import check_integer
from npattn.errors import MissingExtraError, OptionError

__all__ = ["DTYPES", "LENGTHS", "Settings", "bench"]

LENGTHS = tuple(2**n for n in range(7, 15))
DTYPES = ("float32", "float64")
LEAST = 3
"""Rounds without which a median says little."""
FIRST = 1024
"""The longest sequence that is tried without having seen a shorter one."""
START = 30.0
"""Seconds that a process may take to load a framework and compile."""
SHARE = 0.8
"""Of the memory that is available, what is used."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured; checked when made.

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
        In each of which every contestant has a turn.
    seconds : float, default 240
        That one contestant may take at one length. It has fewer rounds where that is short, and is
        skipped where it would have fewer than three.
    memory : int, optional
        Bytes that may be used. Default: 0.8 of what is available.
    threads : int, optional
        Of each contestant. Default: as many as BLAS would use.
    seed : int, default 0
        Everything random comes from it.

    Raises
    ------
    OptionError
    MissingExtraError
        If a contestant is asked for that cannot run here.
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
        put("cases", _known("cases", self.cases, CASES))
        put("dtypes", _known("dtypes", self.dtypes, DTYPES))
        put("lengths", tuple(sorted({check_integer("lengths", T) for T in self.lengths})))
        if not self.lengths:
            raise OptionError("lengths is empty, must have at least one T")
        here = tuple(name for name, c in CONTESTANTS.items() if c.runs_here)
        put("contestants", _known("contestants", self.contestants or here, CONTESTANTS))
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


def _known(name: str, asked: Sequence[str], there: Any) -> tuple[str, ...]:
    """Those asked for, in the order in which they are known."""
    for one in asked:
        if one not in there:
            raise OptionError(f"{name} has {one!r}, must be of {', '.join(there)}")
    if not asked:
        raise OptionError(f"{name} is empty, must be of {', '.join(there)}")
    return tuple(one for one in there if one in asked)


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
        Called with what is done next, how much is done, and of how much.
    save : callable, optional
        Called with what there is so far, after every length and at the end.
    clock : Clock, optional
        What time is read from.
    probing : callable, optional
        Measures memory, as `npattn.bench.memory.probe` does.

    Returns
    -------
    Report
        Of what there is so far where it is interrupted from the keyboard.

    Examples
    --------
    >>> from npattn.bench import Settings, bench
    >>> small = Settings(cases=("plain",), lengths=(7,), contestants=("numpy.naive",), rounds=1)
    >>> report = bench(small)
    >>> [cell.status for cell in report.cells]
    ['ok', 'ok']
    """
    settings = Settings() if settings is None else settings
    assert settings.threads is not None
    cells: list[Cell] = []
    about = machine.description(settings.threads, settings.contestants, how())
    about |= {n: getattr(settings, n) for n in ("seed", "rounds", "seconds", "memory")}

    def report(interrupted: bool) -> Report:
        load = [about["load"], machine.load()]
        found = Report(about | {"load": load, "interrupted": interrupted}, tuple(cells))
        if save is not None:
            save(found)
        return found

    with limited(settings.threads):
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
        """One case at all lengths, from the shortest, which tells what the next will cost."""
        known: dict[str, tuple[int, Probe]] = {}
        if self.settings.lengths[0] > FIRST:
            self.tell(f"{case.name} {dtype} {FIRST}, to estimate")
            for name in self.settings.contestants:
                known[name] = FIRST, self.probe(name, case, dtype, FIRST, {})
        for T in self.settings.lengths:
            found = self.length(case, dtype, T, known)
            self.done += 1
            yield found

    def tell(self, what: str) -> None:
        self.progress(what, self.done, self.total)

    def length(
        self, case: Case, dtype: str, T: int, known: dict[str, tuple[int, Probe]]
    ) -> list[Cell]:
        found: dict[str, Cell] = {}
        able: dict[str, Probe] = {}
        held = 0  # by the inputs of those that are able
        for name in self.settings.contestants:
            self.tell(f"{case.name} {dtype} {T}: memory of {name}")
            cell = Cell(case.name, dtype, T, CONTESTANTS[name])
            why = self.too_much(known.get(name), T, held)
            if why:
                found[name] = cell.said("skipped", why)
                continue
            seen = self.probe(name, case, dtype, T, known)
            if not seen.refused:
                known[name] = T, seen
                held += seen.inputs
                able[name] = seen
                cell = cell.with_memory(seen)
                why = self.too_much((T, seen), T, held - seen.inputs)
            if seen.refused or why:
                able.pop(name, None)
                cell = cell.said("refused" if seen.refused else "skipped", seen.refused or why)
            found[name] = cell
        for name, cell in self.timed(case, dtype, T, found, able).items():
            found[name] = cell
        return list(found.values())

    def probe(
        self, name: str, case: Case, dtype: str, T: int, known: dict[str, tuple[int, Probe]]
    ) -> Probe:
        settings = self.settings
        timeout = START + 2 * settings.seconds
        return self.probing(name, case.name, dtype, T, settings.seed, settings.threads, timeout)

    def too_much(self, before: tuple[int, Probe] | None, T: int, held: int) -> str:
        """Why a contestant is not tried, by what it took before: everything grows as T²."""
        if before is None:
            return ""
        length, seen = before
        if seen.refused:
            return f"T = {length}: {seen.refused}"
        growth = (T / length) ** 2
        least = min(LEAST, self.settings.rounds) * growth * seen.seconds
        if least > self.settings.seconds:
            return f"would take about {least:.0f} s, may take {self.settings.seconds:.0f}"
        assert self.settings.memory is not None
        need = growth * (seen.inputs + max(seen.forward or 0, seen.both or 0)) + held
        if need > self.settings.memory:
            return f"would hold about {need / 2**30:.1f} GiB of {self.settings.memory / 2**30:.1f}"
        return ""

    def timed(
        self, case: Case, dtype: str, T: int, cells: dict[str, Cell], able: dict[str, Probe]
    ) -> dict[str, Cell]:
        """The cells of those that are able, with their results judged and their times."""
        if not able:
            return {}
        task = made(case, T, dtype, self.settings.seed)
        judge = Judge(task, self.settings.seed)
        ready: dict[str, Calls] = {}
        found = {}
        for name in able:
            self.tell(f"{case.name} {dtype} {T}: results of {name}")
            try:
                calls = self.started(CONTESTANTS[name], task)
                results = _results(calls)
            except REFUSALS as err:
                found[name] = cells[name].said("refused", told(err))
                continue
            ready[name] = calls
            wrong = next(filter(None, map(judge.verdict, results)), "")
            found[name] = cells[name].said("wrong" if wrong else "ok", wrong)
        times = self.rounds(f"{case.name} {dtype} {T}", ready, able)
        for name, (forward, both) in times.items():
            found[name] = found[name].with_times(Times.of(forward), Times.of(both))
        return found

    def rounds(
        self, where: str, ready: dict[str, Calls], able: dict[str, Probe]
    ) -> dict[str, tuple[list[float], list[float]]]:
        """Seconds of forward, and of forward and backward, of each."""
        found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ready}
        for turns in range(self.settings.rounds):
            self.tell(f"{where}: round {turns + 1} of {self.settings.rounds}")
            # Each time another one begins, so that nobody always follows the same.
            names = [name for name in ready if turns < self.count(able[name])]
            shift = turns % max(len(names), 1)
            for name in names[shift:] + names[:shift]:
                found[name][0].append(turn(ready[name].forward, self.clock))
                both = ready[name].both
                if both is not None:
                    found[name][1].append(turn(both, self.clock))
        return found

    def started(self, contestant: Contestant, task: Task) -> Calls:
        assert self.settings.threads is not None
        return contestant.start(task, self.settings.threads)

    def count(self, seen: Probe) -> int:
        """As many as there is time for."""
        fit = int(np.clip(self.settings.seconds // max(seen.seconds, 1e-9), LEAST, 2**31))
        return min(self.settings.rounds, fit)


def _results(calls: Calls) -> list[tuple[Array, ...]]:
    """What is computed, alone and with gradients."""
    found = [call() for call in (calls.forward, calls.both) if call is not None]
    return [] if calls.read is None else [calls.read(x) for x in found]
