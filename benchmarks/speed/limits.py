"""Limits on threads, and the available memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMINFO = Path("/proc/meminfo")


@contextmanager
def limit_threads(threads: int) -> Iterator[None]:
    """Limit the threads of BLAS, and so of npattn; of JAX, if it is not loaded yet."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(threads)  # XLA reads it when it is loaded
    try:
        with threadpool_limits(threads, user_api="blas"):
            yield
    finally:
        if before is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = before


def available() -> int:
    """Bytes of available memory."""
    if MEMINFO.exists():
        return int(MEMINFO.read_text().split("MemAvailable:")[1].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
