"""How many threads, and how much memory, there are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["available", "limited"]

MEMINFO = Path("/proc/meminfo")


@contextmanager
def limited(threads: int) -> Iterator[None]:
    """Let BLAS use so many, and with it npattn; JAX, where it is not loaded yet."""
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
    """Bytes of memory that are free for use."""
    if MEMINFO.exists():
        return int(MEMINFO.read_text().split("MemAvailable:")[1].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
