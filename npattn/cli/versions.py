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
    return "\n".join(
        (
            f"npattn {npattn.__version__}",
            f"Python {platform.python_version()}",
            *(f"{name} {_version(package)}" for name, package in PACKAGES.items()),
            f"BLAS {', '.join(blas) or 'unknown'}",
            f"machine {platform.platform()}, {os.cpu_count()} cores",
        )
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
