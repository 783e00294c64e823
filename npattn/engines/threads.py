"""Parallel loops over threads, each with one thread of BLAS.

NumPy leaves Python's lock while it computes, so that threads use all cores. A loop has as many
threads as BLAS would have used: OMP_NUM_THREADS and threadpoolctl set the number for both. Loops
may run at the same time, and inside one another: the first to begin lowers the threads of BLAS, the
last to end restores them.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from queue import SimpleQueue
from typing import Any, TypeVar

ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)  # fmt: skip
"""Environment variables of one thread, for BLAS and its like, which read them when loaded."""

Item = TypeVar("Item")
Space = TypeVar("Space")


class _Blas:
    """The threads of NumPy's matrix products: one, while any loop here runs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[object] = set()
        self.before: list[tuple[Any, int]] = []  # while anything runs: libraries, their threads

    @cached_property
    def libraries(self) -> list[Any]:
        # Imported here because it is slow to load.
        from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

        return list(ThreadpoolController().select(user_api="blas").lib_controllers)

    def counts(self, per_thread: bool) -> list[tuple[Any, int]]:
        """List the libraries of one kind (`_is_per_thread`) with their numbers of threads."""
        found = [x for x in self.libraries if _is_per_thread(x) == per_thread]
        return [(library, library.num_threads or 1) for library in found]

    @property
    def threads(self) -> int:
        with self.lock:
            counts = self.counts(per_thread=True) + (self.before or self.counts(per_thread=False))
        return max([n for _, n in counts], default=os.cpu_count() or 1)

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Keep the calling thread's products in that thread, then restore the libraries."""
        token = object()
        thread_counts: list[tuple[Any, int]] = []
        try:
            with self.lock:
                thread_counts += self.counts(per_thread=True)
                self.before = self.before or self.counts(per_thread=False)
                self.running.add(token)
                _set_threads((library, 1) for library, _ in thread_counts + self.before)
            yield
        finally:
            try:
                self.leave(token, thread_counts)
            except KeyboardInterrupt:  # in the middle of it
                self.leave(token, thread_counts)
                raise

    def leave(self, token: object, thread_counts: list[tuple[Any, int]]) -> None:
        """Restore the settings of the thread and, once no loop runs, those of the process."""
        with self.lock:
            self.running.discard(token)
            _set_threads(thread_counts)
            self.restore()

    def restore(self) -> None:
        if not self.running:
            _set_threads(self.before)
            self.before = []


def _is_per_thread(library: Any) -> bool:
    """Return True for OpenBLAS on OpenMP, in which each thread has a number of its own."""
    return bool(library.internal_api == "openblas" and library.threading_layer == "openmp")


def _set_threads(counts: Any) -> None:
    """Set the threads of libraries, from any thread.

    threadpoolctl (since 3.8) obeys only the thread that was first to set the threads of OpenBLAS,
    as long as that thread lives.
    """
    for library, n in counts:
        release = getattr(library, "clear_controlling_thread", lambda **_: None)
        release(force=True)
        library.set_num_threads(n)
        release()  # whoever restores them next may be another


class _Pool:
    """Threads that wait for jobs, as many as one loop has ever asked for.

    Threads and loops share queues and iterators, whose steps are atomic. After Ctrl-C in the middle
    of a `concurrent.futures.Future` its lock would stay locked, and the next loop would wait.
    """

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.threads = 0

    def submit(self, job: Callable[[], None], times: int) -> None:
        while self.threads < times:
            threading.Thread(target=self._run_jobs, name="npattn", daemon=True).start()
            self.threads += 1
        for _ in range(times):
            self.jobs.put(job)

    def _run_jobs(self) -> None:
        while True:
            self.jobs.get()()  # without a name, which would keep the last job's arrays


_BLAS, _POOL = _Blas(), _Pool()


def _begin_in_child() -> None:
    """Forget, in a forked process, what ran in the parent: the child has none of its threads."""
    _POOL.__init__()  # type: ignore[misc]
    _BLAS.running.clear()
    _BLAS.restore()
    _BLAS.lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_BLAS.lock.acquire,  # else a child might wait for a thread that it does not have
        after_in_parent=_BLAS.lock.release,
        after_in_child=_begin_in_child,
    )


def count() -> int:
    """Return the number of threads that `each` uses."""
    return _BLAS.threads


def one_thread() -> AbstractContextManager[None]:
    """Return a context in which the products of this thread use no other thread."""
    return _BLAS.one_thread()


@contextmanager
def one_thread_in_children() -> Iterator[None]:
    """Give BLAS one thread in processes that are spawned here."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def each(items: Sequence[Item], make_space: Callable[[], Space], work: Callable[..., Any]) -> None:
    """Call work(item, space) for each item, on all threads; each thread has its own space.

    After an exception no further item begins; the exception is raised here.
    """
    if not items:
        return
    helpers = min(count(), len(items)) - 1
    queue, tickets = iter(items), iter(range(helpers))
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def compute() -> None:
        try:
            with _BLAS.one_thread():
                space = make_space()
                for item in queue:
                    work(item, space)
        finally:
            for _ in queue:  # after an exception nobody takes another
                pass

    def help_out() -> None:
        error = None
        if next(tickets, None) is not None:
            try:
                compute()
            except BaseException as err:  # noqa: BLE001  # raised in the thread that asked
                error = err
            ended.put(error)

    try:
        _POOL.submit(help_out, helpers)
        compute()
    finally:
        # A helper that has not begun is not waited for: inside another loop no thread may be free.
        begun = helpers - sum(1 for _ in tickets)
        errors = [ended.get() for _ in range(begun)]
    for error in errors:
        if error is not None:
            raise error
