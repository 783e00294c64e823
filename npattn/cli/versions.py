"""Versions and the machine, as ``npattn --version`` prints them for a report of a bug."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import threadpoolctl  # type: ignore[import-untyped]

import npattn

PACKAGES = {
    "NumPy": "numpy", "SciPy": "scipy", "ml_dtypes": "ml_dtypes", "Hypothesis": "hypothesis",
    "torch": "torch", "triton": "triton", "jax": "jax",
}  # fmt: skip
"""Names to print → distributions."""


def describe_versions() -> str:
    """Return a line for npattn, for Python, for each package, for the BLAS and for the machine.

    Nothing is imported for it besides NumPy: packages are asked for their version alone.
    """
    blas = [
        f"{x['internal_api']} {x['version']} {x.get('architecture', '')} {x['num_threads']} threads"
        for x in threadpoolctl.threadpool_info()
        if x["user_api"] == "blas"
    ]
    lines = [f"npattn {npattn.__version__}", f"Python {platform.python_version()}"]
    lines += [f"{n} {find_version(p) or 'not installed'}" for n, p in PACKAGES.items()]
    lines += [f"BLAS {', '.join(blas) or 'unknown'}"]
    return "\n".join([*lines, f"machine {platform.platform()}, {os.cpu_count()} cores"])


def find_version(distribution: str) -> str:
    """Return the version of a distribution, and "" if none of this name is installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
