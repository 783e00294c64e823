"""Clusters of Dask, as --cluster names them: all that npattn knows about many machines."""

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from typing import Any

from npattn.errors import MissingExtraError, OptionError
from npattn.testing.units.unit import versions_here

SECONDS = 30
"""Time for a scheduler to answer, and for its first worker to come."""


@contextmanager
def open_cluster(where: str) -> Iterator[tuple[Executor, int]]:
    """Connect to a cluster, and give its executor and its number of threads.

    Dask does a call again whose worker was lost. Calls name a function by its import path, so that
    no function of a target ever reaches the scheduler.
    """
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
    with ExitStack() as stack:
        try:
            client = stack.enter_context(_connect(distributed, int(number) if local else where))
            _check_versions(client, where)
        except OSError as err:  # TimeoutError is one
            text = f"cluster {where} does not answer, or has no worker: {err}"
            raise OptionError(f"{text}; start its workers, or name another (--cluster)") from err
        yield client.get_executor(pure=False), max(1, sum(client.nthreads().values()))


@contextmanager
def _connect(distributed: Any, where: int | str) -> Iterator[Any]:
    """Give a client of a scheduler, or of a new cluster with so many workers, and close it."""
    with ExitStack() as stack:
        if isinstance(where, int):
            cluster = distributed.LocalCluster(
                n_workers=where,
                threads_per_worker=1,
                processes=True,
                dashboard_address="127.0.0.1:0",  # None wants 8787, and warns if that is taken
                scheduler_kwargs={"dashboard": False},
                silence_logs=40,
            )
            stack.callback(cluster.close)
            where = cluster
        client = distributed.Client(where, timeout=SECONDS)
        stack.callback(client.close)
        yield client


def _check_versions(client: Any, where: str) -> None:
    """Refuse a cluster without workers, or whose workers would answer something else."""
    client.wait_for_workers(1, timeout=SECONDS)
    for worker, versions in client.run(versions_here).items():
        if versions != versions_here():
            raise OptionError(
                f"worker {worker} of {where} has {versions}, and {versions_here()} is here: "
                "install the same everywhere"
            )
