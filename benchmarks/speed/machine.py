"""Versions and hardware behind the figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

import npattn
from benchmarks.speed.contestants import CONTESTANTS

CPUINFO = Path("/proc/cpuinfo")


def description(threads: int, contestants: tuple[str, ...], memory: str) -> dict[str, Any]:
    """Describe versions, processor, threads, and the measurement of memory."""
    versions = {"npattn": npattn.__version__, "numpy": np.__version__, "BLAS": _blas()}
    for name in contestants:
        needs = CONTESTANTS[name].needs
        if needs is not None:
            versions[needs] = importlib.metadata.version(needs)
    return {
        "versions": versions | {"Python": platform.python_version()},
        "system": platform.platform(),
        "cpu": cpu(),
        "avx512": _avx512(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_by": memory,
        "load": load(),
    }


def cpu() -> str:
    return _field("model name") or platform.processor() or "unknown"


def load() -> float | None:
    """Load average of the last minute, other processes included."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _blas() -> str:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    libraries = ThreadpoolController().select(user_api="blas").info()
    names = {
        f"{x['internal_api']} {x['version']} {x.get('architecture') or ''}".strip()
        for x in libraries
    }
    return ", ".join(sorted(names)) or "unknown"


def _field(name: str) -> str:
    """Field of /proc/cpuinfo of the first processor."""
    if not CPUINFO.exists():
        return ""
    lines = (line.partition(":") for line in CPUINFO.read_text().splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _avx512() -> bool | None:
    flags = _field("flags")
    return "avx512f" in flags.split() if flags else None
