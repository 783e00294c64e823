"""Parallel loops over threads, each with one thread of BLAS.

NumPy leaves Python's lock while it computes, so that threads use all cores. As many run as BLAS
would have used: OMP_NUM_THREADS and threadpoolctl say so for both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

__all__ = ["count", "each"]

Item = TypeVar("Item")
Space = TypeVar("Space")


class _Blas:
    """Control the threads of NumPy's matrix products: one, while any loop here runs."""

    def __init__(self) -> None:
        # Imported here because it is slow to load.
        from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

        self.libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self.lock = threading.Lock()
        self.calls = 0
        self.before: list[int] = []

    @property
    def threads(self) -> int:
        with self.lock:
            counts = self.before or [library.num_threads for library in self.libraries]
        return max([n or 1 for n in counts], default=os.cpu_count() or 1)

    def __enter__(self) -> None:
        with self.lock:
            if self.calls == 0:
                self.before = [library.num_threads for library in self.libraries]
                for library in self.libraries:
                    library.set_num_threads(1)
            self.calls += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.calls -= 1
            if self.calls == 0:
                for library, n in zip(self.libraries, self.before, strict=True):
                    library.set_num_threads(n)
                self.before = []


@cache
def _blas() -> _Blas:
    return _Blas()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "npattn")


def _forget() -> None:
    _pool.cache_clear()
    _blas.cache_clear()


# A forked child has none of its parent's threads, and maybe a lock that nobody will release.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def count() -> int:
    """Return the number of threads that `each` uses."""
    return _blas().threads


def each(items: Sequence[Item], make_space: Callable[[], Space], work: Callable[..., Any]) -> None:
    """Call work(item, space) for each item, on all threads, each with its own space.

    After an exception no further item begins; the exception is raised here.
    """
    threads = min(_blas().threads, len(items))
    if not items:
        return
    queue = iter(items)  # next() of a list's iterator is atomic

    def worker() -> None:
        space = make_space()
        try:
            for item in queue:
                work(item, space)
        finally:
            for _ in queue:  # after an exception nobody takes another
                pass

    with _blas():
        if threads == 1:
            worker()
            return
        pool = _pool(threads - 1)
        others = [pool.submit(worker) for _ in range(threads - 1)]
        try:
            worker()
        finally:
            for other in others:
                other.exception()  # waits
        for other in others:
            other.result()
