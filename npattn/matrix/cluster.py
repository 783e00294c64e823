"""Judge units on a cluster of Dask: on this machine, or on all that know one scheduler.

A unit goes to a Dask worker as a line of JSON, and comes back as one; the worker judges it in a
process of its own. Dask does a unit again whose worker was lost. What `judge` runs is known to the
worker by its import path: no function of a target ever reaches the scheduler.
"""

from __future__ import annotations

import contextlib
import queue
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any

from npattn.errors import MissingExtraError, OptionError
from npattn.matrix.processes import judge_in_process
from npattn.matrix.unit import Result, Unit, versions_here

__all__ = ["Cluster", "judge"]

SECONDS = 30
"""Time for a scheduler to answer, and for its first worker to come."""


def judge(text: str) -> str:
    """Judge a unit in a new process of this machine; a Dask worker calls it."""
    return judge_in_process(text)


class Cluster:
    """Executor on a cluster of Dask.

    Parameters
    ----------
    where : str
        "local:N" for N workers on this machine, or the address of a scheduler, tcp://HOST:PORT.

    Raises
    ------
    MissingExtraError
        If the package distributed is not installed.
    OptionError
        If `where` is neither, no scheduler answers, it has no worker, or a worker has other
        versions of npattn or NumPy.
    """

    def __init__(self, where: str) -> None:
        kind, _, number = where.partition(":")
        local = kind == "local"
        if (local and not (number.isdigit() and int(number))) or (not local and "://" not in where):
            raise OptionError(
                f"cluster is {where!r}, must be local:N, or the address of a Dask scheduler "
                "like tcp://HOST:8786"
            )
        try:
            import distributed  # type: ignore[import-not-found, unused-ignore]
        except ImportError as err:
            raise MissingExtraError(
                "a cluster needs Dask's package distributed: pip install 'npattn[cluster]'"
            ) from err
        self.dask: Any = distributed
        self.done: queue.SimpleQueue[tuple[Unit, Any]] = queue.SimpleQueue()
        self.units: dict[str, tuple[Unit, Any]] = {}
        self.cluster: Any = None
        if local:
            self.cluster = self.dask.LocalCluster(
                n_workers=int(number),
                threads_per_worker=1,
                processes=True,
                dashboard_address="127.0.0.1:0",  # None wants 8787, and warns if that is taken
                scheduler_kwargs={"dashboard": False},
                silence_logs=40,
            )
        with contextlib.ExitStack() as unusable:
            unusable.callback(self._close)
            try:
                self.client: Any = self.dask.Client(self.cluster or where, timeout=SECONDS)
                self._check_versions(where)
            except OSError as err:  # TimeoutError is one
                text = f"cluster {where} does not answer, or has no worker: {err}"
                raise OptionError(
                    f"{text}; start its workers, or name another (--cluster)"
                ) from err
            unusable.pop_all()

    def _check_versions(self, where: str) -> None:
        """Refuse a cluster without workers, or whose workers would answer something else."""
        self.client.wait_for_workers(1, timeout=SECONDS)
        for worker, versions in self.client.run(versions_here).items():
            if versions != versions_here():
                raise OptionError(
                    f"worker {worker} of {where} has {versions}, and {versions_here()} is here: "
                    "install the same everywhere"
                )

    @property
    def width(self) -> int:
        """Number of threads of all workers, as of now: some may come later, and some go."""
        threads: dict[str, int] = self.client.nthreads()
        return max(1, sum(threads.values()))

    def submit(self, unit: Unit) -> None:
        future = self.client.submit(judge, unit.to_text(), pure=False)
        self.units[unit.key] = unit, future
        future.add_done_callback(lambda done: self.done.put((unit, done)))

    def wait(self) -> tuple[Unit, Result]:
        unit, future = self.done.get()
        self.units.pop(unit.key)
        try:
            return unit, Result.from_text(future.result())
        except self.dask.KilledWorker as err:  # each time that it was tried
            return unit, Result("crashed", " ".join(str(err).split()))
        except CancelledError:
            raise OptionError(
                "the scheduler was lost; a matrix with a journal goes on with --resume"
            ) from None

    def running(self) -> list[Unit]:
        """Return the units that are not done: Dask alone knows which of them have begun."""
        return [unit for unit, _ in list(self.units.values())]

    def _close(self) -> None:
        if hasattr(self, "client"):
            self.client.cancel([future for _, future in self.units.values()])
            self.client.close()
        if self.cluster is not None:
            self.cluster.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
